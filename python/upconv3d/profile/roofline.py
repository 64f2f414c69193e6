# SPDX-License-Identifier: Apache-2.0
"""The roofline: what the device attains at each arithmetic intensity, and what the implementations attain.

From top to bottom: title, legend, of several cases a strip of their names, plot. Cases of one intensity,
which layouts and precisions of a shape have, stand side by side, and a line leads from each name through the
points of its case. All places are computed in inches, so that no two texts meet. Cases without useful
arithmetic, whose taps all land outside the output, have no place on logarithmic axes, and are left out.
"""

from __future__ import annotations

import io
import math
import textwrap
from typing import TYPE_CHECKING, Any

from .measure import environment_line
from .report import case_title, kind_of, significant
from .run import CaseProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which people with any colour vision tell apart; the marker says the same. A marker
# that covers another is the smaller one.
STYLES = {
    "upconv3d": ("#D55E00", "o", 10.0),
    "eager": ("#56B4E9", "s", 6.8),
    "torch.compile default": ("#009E73", "^", 6.4),
    "torch.compile max-autotune-no-cudagraphs": ("#00543D", "v", 5.8),
    "convolution alone": ("#CC79A7", "D", 4.4),
}
ROOF_COLOUR = "#333333"
ROOF_STYLES = ("-", "--", ":", "-.")
LEADER_COLOUR = "#bbbbbb"

# Inches.
LEFT, RIGHT = 0.95, 0.25  # tick labels down to 0.0001, and the axis's own
PLOT_WIDTH, PLOT_HEIGHT = 8.4, 4.4
TITLE_LINE, LEGEND_LINE, MARGIN = 0.2, 0.19, 0.1
X_AXIS, FOOTER = 0.55, 0.25
LEADER = 0.3  # between names and plot
COLUMN = 0.17  # from one case to the next: a name's height and a marker's width
DPI = 150
TITLE_CHARACTERS = 98  # what PLOT_WIDTH holds
LARGEST_SHIFT = 0.08  # decades, 20%: a point farther from its intensity would be held against a wrong roof
BEYOND = 5.0  # the x axis ends this factor beyond the outermost intensity, or knee of a roof


def labels(profiles: list[CaseProfile]) -> tuple[list[str], str]:
    """What tells each case from the others, of shape, dtype and layout; and what all of them share."""
    shapes = [p.case.shape for p in profiles]
    names = [shape.describe() if shape.source == "command line" else shape.name for shape in shapes]
    parts = [(name, kind_of(p), p.case.layout) for name, p in zip(names, profiles, strict=True)]
    varies = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    differing = [", ".join(part for part, vary in zip(row, varies, strict=True) if vary) for row in parts]
    return differing, ", ".join(part for part, vary in zip(parts[0], varies, strict=True) if not vary)


def _rates(profile: CaseProfile) -> list[float]:
    """TFLOP/s of all implementations that were timed."""
    return [one.useful_tflop_per_s for one in profile.implementations if one.useful_tflop_per_s is not None]


def moved_apart(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """`places`, each moved as little as gives them `gap` from one another, between `low` and `high`.

    In the order of the arguments; equal places keep theirs.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    # Less i gaps, places must not decrease: the means of the runs that do (pool adjacent violators).
    runs: list[tuple[float, int]] = []  # mean and length
    for i, index in enumerate(order):
        mean, length = places[index] - i * gap, 1
        while runs and runs[-1][0] > mean:
            other, more = runs.pop()
            mean, length = (mean * length + other * more) / (length + more), length + more
        runs.append((mean, length))
    last = high - gap * (len(places) - 1)
    means = [max(low, min(last, mean)) for mean, length in runs for _ in range(length)]
    moved = {index: mean + i * gap for i, (index, mean) in enumerate(zip(order, means, strict=True))}
    return [moved[index] for index in range(len(places))]


def _columns(intensities: list[float], gap: float) -> list[float]:
    """Where the points of each case stand: apart by `gap` decades, or by what LARGEST_SHIFT leaves of it."""
    places = [math.log10(intensity) for intensity in intensities]
    while True:
        moved = moved_apart(places, gap, -math.inf, math.inf)
        if max(abs(a - b) for a, b in zip(moved, places, strict=True)) <= LARGEST_SHIFT:
            return [10**place for place in moved]
        gap *= 0.9


def _draw_roofs(axes: Axes, profiles: list[CaseProfile], low: float, high: float) -> list[Line2D]:
    """One roof for each pair of ceilings, highest first."""
    roofs = {(p.ceilings.flops_per_s, p.ceilings.bytes_per_s, p.ceilings.source) for p in profiles}
    lines = []
    for index, (flops, bandwidth, source) in enumerate(sorted(roofs, reverse=True)):
        x = sorted({low, min(max(flops / bandwidth, low), high), high})
        y = [min(flops, i * bandwidth) / 1e12 for i in x]
        style = ROOF_STYLES[index % len(ROOF_STYLES)]
        matmul, copy = source.split("; ")
        label = (
            f"{significant(flops / 1e12)} TFLOP/s ({matmul}), {significant(bandwidth / 1e9)} GB/s ({copy})"
        )
        lines += axes.plot(x, y, style, color=ROOF_COLOUR, linewidth=1.6, zorder=2, label=label)
    return lines


def _draw_points(axes: Axes, profiles: list[CaseProfile], columns: list[float]) -> list[Line2D]:
    """A point per implementation and case, and a bar where the floor lies; one of each for the legend."""
    shown: dict[str, Line2D] = {}

    def draw_point(name: str, x: float, rate: float, ms: float, **style: Any) -> None:
        figures = f": {significant(ms)} ms, {significant(rate)} TFLOP/s" if len(profiles) == 1 else ""
        (line,) = axes.plot(x, rate, linestyle="none", label=name + figures, **style)
        shown.setdefault(name, line)

    for profile, x in zip(profiles, columns, strict=True):
        for one in profile.implementations:
            if one.useful_tflop_per_s is None or one.time_ms is None:
                continue
            colour, marker, size = STYLES[one.name]
            style = {"color": colour, "marker": marker, "markersize": size, "zorder": 14 - size}
            style |= {"markeredgecolor": "white", "markeredgewidth": 0.6}
            draw_point(one.name, x, one.useful_tflop_per_s, one.time_ms, **style)
        floor = profile.case.shape.useful_flops / profile.floor_ms / 1e9
        size = 22 if len(profiles) == 1 else 72 * COLUMN
        style = {"color": ROOF_COLOUR, "marker": "_", "markersize": size, "zorder": 3}
        draw_point("floor of the block", x, floor, profile.floor_ms, markeredgewidth=2.5, **style)
    return [shown[name] for name in (*STYLES, "floor of the block") if name in shown]


def _draw_names(strip: Axes, names: list[str], columns: list[float], gap: float) -> float:
    """Upright names, `gap` decades apart, a line from each to its column below; their height in inches."""
    low, high = (math.log10(end) for end in strip.get_xlim())
    logarithms = [math.log10(x) for x in columns]
    places = [10**place for place in moved_apart(logarithms, gap, low + gap / 2, high - gap / 2)]
    transform = strip.get_xaxis_transform()
    texts = [
        strip.annotate(
            name,
            (place, 0.0),
            xycoords=transform,
            xytext=(0, 72 * LEADER + 2),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=7.5,
        )
        for name, place in zip(names, places, strict=True)
    ]
    height = max(text.get_window_extent().height for text in texts) / DPI + LEADER + MARGIN
    for x, place in zip(columns, places, strict=True):
        ends = [0, 0.8 * LEADER / height, LEADER / height]
        strip.plot([x, place, place], ends, transform=transform, color=LEADER_COLOUR, linewidth=0.7)
    strip.set_axis_off()
    return height


def _place(figure: Figure, heights: list[tuple[Axes | None, float]]) -> None:
    """Stacks axes and empty space (None) from the bottom up, each of its height in inches."""
    width, total = figure.get_figwidth(), sum(height for _, height in heights)
    figure.set_size_inches(width, total)
    bottom = 0.0
    for axes, height in heights:
        if axes is not None:
            box = (LEFT / width, bottom / total, 1 - (LEFT + RIGHT) / width, height / total)
            axes.set_position(box)
        bottom += height


def draw(env: dict[str, Any], profiles: list[CaseProfile]) -> bytes:
    """The picture, as the content of a PNG file.

    Raises: ValueError where no case has useful arithmetic.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    profiles = [profile for profile in profiles if profile.case.shape.useful_flops > 0]
    if not profiles:
        raise ValueError("a roofline takes a case with useful arithmetic; got none")
    several = len(profiles) > 1
    plot_width = max(PLOT_WIDTH, COLUMN * (len(profiles) + 1))
    figure = Figure(figsize=(LEFT + plot_width + RIGHT, PLOT_HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [profile.flop_per_byte() for profile in profiles]
    knees = [p.ceilings.flops_per_s / p.ceilings.bytes_per_s for p in profiles]
    low, high = min([*intensities, *knees]) / BEYOND, max([*intensities, *knees]) * BEYOND
    gap = COLUMN * math.log10(high / low) / plot_width
    columns = _columns(intensities, gap)
    rates = [rate for profile in profiles for rate in _rates(profile)]
    top = max([*rates, *(p.ceilings.flops_per_s / 1e12 for p in profiles)])
    axes.set_xlim(low, high)
    axes.set_ylim(min(min(rates) / 2, top / 30), top * 2)  # a decade and a half at least
    roofs = _draw_roofs(axes, profiles, low, high)
    points = _draw_points(axes, profiles, columns)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.grid(True, which="minor", color="#f0f0f0", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel("useful arithmetic over x, w and y once each, FLOP/byte")
    axes.set_ylabel("useful arithmetic, TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    title = case_title(profiles[0])
    strips: list[tuple[Axes | None, float]] = []
    if several:
        names, shared = labels(profiles)
        title = f"upconv3d, {len(profiles)} cases{' of ' if shared else ''}{shared}"
        if any(abs(x / intensity - 1) > 1e-3 for x, intensity in zip(columns, intensities, strict=True)):
            title += "; those of one intensity side by side, at most 20% beside it"
        for x in columns:
            axes.axvline(x, color=LEADER_COLOUR, linewidth=0.7, zorder=1)
        strip = figure.add_subplot(sharex=axes)
        strips = [(strip, _draw_names(strip, names, columns, gap))]
    title = "\n".join(textwrap.wrap(title, TITLE_CHARACTERS))
    point_lines = math.ceil(len(points) / 2)
    legend_height = LEGEND_LINE * (point_lines + len(roofs)) + MARGIN
    title_height = TITLE_LINE * (title.count("\n") + 1) + MARGIN
    _place(
        figure,
        [(None, FOOTER + X_AXIS), (axes, PLOT_HEIGHT), *strips, (None, legend_height + title_height)],
    )
    width, total = figure.get_size_inches()
    left, legend_top = LEFT / width, 1 - title_height / total
    legends = [(points, 2, legend_top), (roofs, 1, legend_top - LEGEND_LINE * point_lines / total)]
    for handles, count, place in legends:
        figure.legend(
            handles=handles,
            ncols=count,
            loc="upper left",
            bbox_to_anchor=(left, place),
            borderaxespad=0,
            borderpad=0,
            labelspacing=0.35,
            handlelength=2.4,
            fontsize=8.5,
            frameon=False,
        )
    figure.text(left, 1 - MARGIN / total, title, fontsize=10, va="top")
    figure.text(0.5, MARGIN / total, environment_line(env), fontsize=7, color="#666666", ha="center")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
