# SPDX-License-Identifier: Apache-2.0
"""The roofline: what the device attains at each arithmetic intensity, and what the implementations attain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import environment_line
from .report import case_title, significant
from .run import CaseProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart; the marker says the same.
STYLES = {
    "upconv3d": ("#D55E00", "o", 80),
    "eager": ("#56B4E9", "s", 45),
    "torch.compile default": ("#009E73", "^", 50),
    "torch.compile max-autotune-no-cudagraphs": ("#00543D", "v", 50),
    "convolution alone": ("#CC79A7", "D", 42),
}
ROOF_COLOUR = "#333333"
ROOF_STYLES = ("-", "--", ":", "-.")


def _draw_roofs(axes: Axes, profiles: list[CaseProfile], low: float, high: float) -> None:
    """One roof for each pair of ceilings, labelled on its flat part."""
    roofs = dict.fromkeys(
        (p.ceilings.flops_per_s, p.ceilings.bytes_per_s, p.ceilings.source) for p in profiles
    )
    for index, (flops, bandwidth, source) in enumerate(roofs):
        knee = flops / bandwidth
        x = sorted({low, min(max(knee, low), high), high})
        y = [min(flops, i * bandwidth) / 1e12 for i in x]
        axes.plot(x, y, ROOF_STYLES[index % len(ROOF_STYLES)], color=ROOF_COLOUR, linewidth=1.6, zorder=2)
        axes.annotate(
            f"{significant(flops / 1e12)} TFLOP/s ({source.split('; ')[0]})",
            (high, flops / 1e12),
            xytext=(-4, 5),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=ROOF_COLOUR,
        )
    flops, bandwidth, source = max(roofs)
    start, height = low * 1.3, low * 1.3 * bandwidth / 1e12
    axes.text(
        start,
        height * 1.12,
        f"{significant(bandwidth / 1e9)} GB/s ({source.split('; ')[1]})",
        rotation=math.degrees(math.atan2(1.12 * height, start)),  # of the slope in data coordinates
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8.5,
        color=ROOF_COLOUR,
    )


def _legend_text(profiles: list[CaseProfile], name: str, rate: float, ms: float) -> str:
    """The name, with its figures where there is one case alone."""
    if len(profiles) > 1:
        return name
    return f"{name}: {significant(ms)} ms, {significant(rate)} TFLOP/s"


def _draw_points(axes: Axes, profiles: list[CaseProfile]) -> None:
    """A point per implementation and case, and a bar where the floor lies."""
    named: set[str] = set()

    def label(name: str, rate: float, ms: float) -> str | None:
        if name in named:
            return None
        named.add(name)
        return _legend_text(profiles, name, rate, ms)

    for profile in profiles:
        x = profile.flop_per_byte()
        floor = profile.case.shape.useful_flops / profile.floor_ms / 1e9
        axes.plot(
            x,
            floor,
            "_",
            color=ROOF_COLOUR,
            markersize=22,
            markeredgewidth=3,
            zorder=3,
            label=label("floor of the block", floor, profile.floor_ms),
        )
        for one in profile.implementations:
            if one.useful_tflop_per_s is None or one.time_ms is None:
                continue
            colour, marker, size = STYLES[one.name]
            axes.scatter(
                x,
                one.useful_tflop_per_s,
                s=size,
                color=colour,
                marker=marker,
                edgecolors="white",
                linewidths=0.7,
                zorder=5 if one.name == "upconv3d" else 4,
                label=label(one.name, one.useful_tflop_per_s, one.time_ms),
            )


def _rates(profile: CaseProfile) -> list[float]:
    """TFLOP/s of all implementations that were timed."""
    return [one.useful_tflop_per_s for one in profile.implementations if one.useful_tflop_per_s is not None]


def _label_cases(axes: Axes, profiles: list[CaseProfile]) -> None:
    """Name, dtype and layout below the lowest point of each case, upright, as cases can be many.

    Cases of one intensity, which a shape in several layouts has, share a label.
    """
    texts: dict[float, list[str]] = defaultdict(list)
    lowest: dict[float, float] = {}
    for profile in profiles:
        case, x = profile.case, profile.flop_per_byte()
        kind = str(case.dtype).removeprefix("torch.")
        texts[x].append(f"{case.shape.name}, {kind}")
        lowest[x] = min([lowest.get(x, math.inf), *_rates(profile)])
    for x, names in texts.items():
        axes.annotate(
            "\n".join(dict.fromkeys(names)),
            (x, lowest[x]),
            xytext=(0, -9),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="top",
            fontsize=7.5,
        )


def draw(path: Path, env: dict[str, Any], profiles: list[CaseProfile]) -> None:
    """Writes the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9.6, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    intensities = [profile.flop_per_byte() for profile in profiles]
    knees = [p.ceilings.flops_per_s / p.ceilings.bytes_per_s for p in profiles]
    low, high = min([*intensities, *knees]) / 6, max([*intensities, *knees]) * 6
    top = max(p.ceilings.flops_per_s for p in profiles) / 1e12
    bottom = min(rate for profile in profiles for rate in _rates(profile))
    axes.set_xlim(low, high)
    # A decade and a half at least; below the points room for the legend, or for upright names.
    axes.set_ylim(min(bottom / (6 if len(profiles) == 1 else 14), top / 50), top * 2)
    _draw_roofs(axes, profiles, low, high)
    _draw_points(axes, profiles)
    if len(profiles) == 1:
        axes.set_title(case_title(profiles[0]), fontsize=10, loc="left")
    else:
        _label_cases(axes, profiles)
        axes.set_title(f"upconv3d, {len(profiles)} cases", fontsize=10, loc="left")
    axes.legend(loc="lower right", fontsize=8.5, framealpha=0.9)
    axes.set_xlabel("useful arithmetic over x, w and y once each, FLOP/byte")
    axes.set_ylabel("useful arithmetic, TFLOP/s")
    plain: Callable[[float, Any], str] = lambda value, _: f"{value:g}"  # noqa: E731
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(plain))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.grid(True, which="minor", color="#f0f0f0", linewidth=0.5)
    axes.set_axisbelow(True)
    figure.supxlabel(environment_line(env), fontsize=7, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
