# SPDX-License-Identifier: Apache-2.0
"""Profiles as tables for people, and as JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any

from .kernels import GAPS
from .measure import environment_line
from .ncu import METRICS
from .peers import ERROR_FACTOR
from .run import CaseProfile, Measured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DASH = "-"
LAYOUT_NAMES = {"ncdhw": "NCDHW", "ndhwc": "channels_last_3d"}
# Of METRICS, what the table shows; JSON has all.
COUNTER_TITLES = {
    "tensor_pipe_percent": "tensor pipe %",
    "dram_percent": "DRAM %",
    "l2_hit_percent": "L2 hit %",
}
FOOTNOTE = (
    "Forward, medians. ratio: time of upconv3d divided by this one's, below 1 upconv3d is quicker. FLOP/s: "
    "useful arithmetic, share of the matmul ceiling; GB/s: x, w and y once, share of the copy ceiling. MB: "
    "peak of PyTorch's allocator above the output. error: rms against float64; check: finite, and at most "
    f"{ERROR_FACTOR:g} times eager's."
)


def _text(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def significant(value: float | None, digits: int = 3) -> str:
    """A number without exponent, where three digits say enough: 0.0123, 1.23, 123, 12345."""
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    # Of the rounded number: 99.96 is one of three digits before the point.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def with_share(value: float | None, share: float | None) -> str:
    """ "334 (49%)"."""
    return DASH if value is None or share is None else f"{significant(value)} ({100 * share:.0f}%)"


def kind_of(profile: CaseProfile) -> str:
    """Dtype, and of float32 on a GPU the precision."""
    case = profile.case
    kind = str(case.dtype).removeprefix("torch.")
    if case.precision != "native" and profile.plan.algorithm != "cpu_library":
        kind += f" {case.precision}"
    return kind


def case_title(profile: CaseProfile) -> str:
    """Shape, dtype, precision and layout."""
    case = profile.case
    name = "" if case.shape.source == "command line" else f"{case.shape.name}: "
    return f"{name}{case.shape.describe()}; {kind_of(profile)} {LAYOUT_NAMES[case.layout]}"


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))


def implementation_table(profile: CaseProfile) -> Table:
    """A row per implementation, and the floor; columns without a figure are left out."""
    block = profile.implementation("upconv3d")
    rates = [one.useful_tflop_per_s for one in profile.implementations if one.useful_tflop_per_s is not None]
    unit, scale = ("TFLOP/s", 1) if max(rates) >= 1 else ("GFLOP/s", 1000)
    columns: list[tuple[str, Any]] = [
        ("ms", lambda one: significant(one.time_ms)),
        ("ratio", lambda one: _ratio(one.upconv3d_over_this)),
        (unit, lambda one: with_share(_scaled(one.useful_tflop_per_s, scale), one.share_of_matmul_ceiling)),
        ("GB/s", lambda one: with_share(one.gb_per_s, one.share_of_copy_ceiling)),
        ("MB", lambda one: _peak(one)),
        ("host us", lambda one: significant(one.host_time_us)),
        ("error", lambda one: _text(one.error_rms, ".1e")),
    ]
    table = _table("")
    floor = Measured("floor", profile.floor_ms)
    if block is not None and block.time_ms is not None:
        floor.upconv3d_over_this = block.time_ms / profile.floor_ms
    rows = [*profile.implementations, floor]
    columns = [column for column in columns if any(column[1](one) != DASH for one in rows)]
    table.add_column("forward")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for one in rows:
        table.add_row(_short(one.name), *(show(one) for _, show in columns))
    return table


def _short(name: str) -> str:
    """The name of an implementation as a terminal has room for it."""
    return name.replace("torch.compile", "compile").replace("max-autotune-no-cudagraphs", "max-autotune")


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _ratio(value: float | None) -> str:
    """Two decimals, which a ratio in the thousands does without."""
    return _text(value, ".2f" if value is None or value < 1000 else ".0f")


def _peak(one: Measured) -> str:
    peak = one.peak_memory_above_output_bytes
    return DASH if peak is None else significant(peak / 1e6) if peak else "0"


def kernel_table(profile: CaseProfile) -> Table:
    """A row per kernel or operator, and the gaps."""
    shown = [
        key for key in COUNTER_TITLES if any(row.counters.get(key) is not None for row in profile.kernels)
    ]
    on_gpu = profile.kernels[-1].name == GAPS["cuda"]
    table = _table("Kernels of one call" if on_gpu else "Operators of one call, each without those it calls")
    table.add_column("kernel" if on_gpu else "operator")
    for heading in (
        "launches" if on_gpu else "calls",
        "us",
        "share",
        *(COUNTER_TITLES[key] for key in shown),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in profile.kernels:
        counters = [_text(row.counters.get(key), ".1f") for key in shown]
        launches = f"{row.launches:g}" if row.launches else DASH
        table.add_row(row.name, launches, significant(row.time_us), f"{100 * row.share:.1f}%", *counters)
    return table


def print_case(console: Console, profile: CaseProfile) -> None:
    """Tables, plan, ceilings, check and notes of one case."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    line(case_title(profile), "bold")
    console.print(implementation_table(profile))

    one, other = profile.implementation("upconv3d"), profile.implementation("eager")
    if one is not None and other is not None:
        largest = f"error max {_text(one.error_max, '.1e')} (eager {_text(other.error_max, '.1e')})"
        rms = f"rms {_text(one.error_rms, '.1e')} ({_text(other.error_rms, '.1e')})"
        line(f"check {profile.check}: {largest}, {rms}", "" if profile.check == "ok" else "bold red")
    line(f"plan: {profile.plan.algorithm}; {profile.plan.reason}")
    rates = profile.ceilings
    limits = f"{rates.flops_per_s / 1e12:.4g} TFLOP/s, {rates.bytes_per_s / 1e9:.4g} GB/s"
    line(f"ceilings: {limits} ({rates.source})")
    line(f"floor from {profile.floor_rates}")
    if profile.kernels:
        console.print()
        console.print(kernel_table(profile))
    for note in profile.notes:
        line(f"note: {note}", "yellow")
    console.print()


def print_summary(console: Console, env: dict[str, Any], profiles: list[CaseProfile]) -> None:
    """One line per case where there are several, and what the columns mean."""
    if len(profiles) > 1:
        table = _table("All cases")
        table.add_column("case")
        for heading in ("ms", "x floor", "x eager", "x compile", "x convolution", "check"):
            table.add_column(heading, justify="right", no_wrap=True)
        for profile in profiles:
            row = flat(profile)
            ratios = [
                _text(row[f"ratio_to_{name}"], ".2f") for name in ("floor", "eager", "compile", "convolution")
            ]
            table.add_row(case_title(profile), significant(row["time_ms"]), *ratios, profile.check)
        console.print(table)
    console.print(FOOTNOTE, highlight=False)
    console.print(environment_line(env), highlight=False, markup=False)


def flat(profile: CaseProfile) -> dict[str, Any]:
    """One row of the CSV: the block's figures, its ratios and each peer's time."""
    data = profile.to_json()
    row = {key: data[key] for key in ("name", "dtype", "layout", "precision")}
    row |= {
        "shape": profile.case.shape.describe(),
        "plan": profile.plan.algorithm,
        "kernel": profile.plan.kernel,
    }
    block = profile.implementations[0]
    row |= {key: value for key, value in vars(block).items() if key not in ("name", "upconv3d_over_this")}
    times = {one.name: one.time_ms for one in profile.implementations}
    compiled = [ms for name, ms in times.items() if name.startswith("torch.compile") and ms is not None]
    peers = {
        "floor": profile.floor_ms,
        "eager": times["eager"],
        "compile": min(compiled, default=None),
        "compile_default": times.get("torch.compile default"),
        "compile_max_autotune": times.get("torch.compile max-autotune-no-cudagraphs"),
        "convolution": times["convolution alone"],
    }
    for name, ms in peers.items():
        row[f"{name}_ms"] = ms
        row[f"ratio_to_{name}"] = None if ms is None or block.time_ms is None else block.time_ms / ms
    eager = profile.implementation("eager")
    row["eager_error_max"] = None if eager is None else eager.error_max
    row["eager_error_rms"] = None if eager is None else eager.error_rms
    for key in ("useful_flop", "minimal_bytes", "matmul_ceiling_tflop_per_s", "copy_ceiling_gb_per_s"):
        row[key] = data[key]
    return row | {"floor_rates": profile.floor_rates, "check": profile.check}


def to_json(env: dict[str, Any], ceilings: dict[str, float], profiles: list[CaseProfile]) -> dict[str, Any]:
    """The whole run; ratios by name beside each case's tables."""
    cases = []
    for profile in profiles:
        ratios = {key: value for key, value in flat(profile).items() if key.startswith("ratio_to_")}
        cases.append(profile.to_json() | ratios)
    return {"environment": env, "ceilings": ceilings, "ncu_metrics": METRICS, "cases": cases}


def to_csv(profiles: list[CaseProfile]) -> str:
    """One line per case; an empty cell where a figure could not be had."""
    rows = [flat(profile) for profile in profiles]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
