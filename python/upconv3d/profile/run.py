# SPDX-License-Identifier: Apache-2.0
"""The profile of one case: everything that is measured, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import upconv3d

from . import ncu
from .cases import Case, Rates, floor_ms, h200_rates, make_tensors
from .ceilings import Ceilings
from .kernels import KernelRow, kernel_rows
from .measure import medians_ms
from .memory import host_time_us, peak_above_output_bytes
from .peers import (
    Call,
    block_arguments,
    block_call,
    check_errors,
    compiled_peers,
    convolution,
    eager,
    set_precision,
)

TRACED_CALLS = 10
STEPS = ("check", "ceilings", "compile", "time", "kernels", "memory")  # of one case, for the progress bar
NAMES = {"block": "upconv3d", "eager": "eager", "conv": "convolution alone"}


@dataclass
class Measured:
    """One implementation. None where a figure could not be had; the reason is in the profile's notes."""

    name: str
    time_ms: float | None = None
    upconv3d_over_this: float | None = None  # ratio of times; below 1, the block is quicker than this
    useful_tflop_per_s: float | None = None
    share_of_matmul_ceiling: float | None = None
    gb_per_s: float | None = None  # x, w and y once each
    share_of_copy_ceiling: float | None = None
    peak_memory_above_output_bytes: int | None = None
    host_time_us: float | None = None
    error_max: float | None = None
    error_rms: float | None = None


@dataclass
class CaseProfile:
    """All figures of one case; units are in the names."""

    case: Case
    plan: upconv3d.Plan
    ceilings: Rates
    floor_ms: float
    floor_rates: str
    check: str
    implementations: list[Measured]
    kernels: list[KernelRow]
    notes: list[str] = field(default_factory=list)
    counters_missing: bool = False  # --ncu was asked for and gave nothing

    def implementation(self, name: str) -> Measured | None:
        """The one called `name`, if it was measured."""
        return next(
            (one for one in self.implementations if one.name == name and one.time_ms is not None), None
        )

    def flop_per_byte(self) -> float:
        """Useful arithmetic over x, w and y once each."""
        return self.case.shape.useful_flops / minimal_bytes(self.case)

    def to_json(self) -> dict[str, Any]:
        """Plain data for json, ratios by name included."""
        shape, plan = self.case.shape, self.plan
        return {
            "name": shape.name,
            "shape": asdict(shape),
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "layout": self.case.layout,
            "precision": self.case.precision,
            "plan": {
                "algorithm": plan.algorithm,
                "kernel": plan.kernel,
                "reason": plan.reason,
                "stages": list(plan.stages),
                "workspace_bytes": plan.workspace_bytes,
            },
            "useful_flop": shape.useful_flops,
            "minimal_bytes": minimal_bytes(self.case),
            "flop_per_byte": self.flop_per_byte(),
            "matmul_ceiling_tflop_per_s": self.ceilings.flops_per_s / 1e12,
            "copy_ceiling_gb_per_s": self.ceilings.bytes_per_s / 1e9,
            "ceilings_measured_on": self.ceilings.source,
            "floor_ms": self.floor_ms,
            "floor_rates": self.floor_rates,
            "check": self.check,
            "implementations": [asdict(one) for one in self.implementations],
            "kernels": [asdict(row) for row in self.kernels],
            "notes": self.notes,
        }


def minimal_bytes(case: Case) -> int:
    """x, w and y once each."""
    return case.bytes_x + case.bytes_w + case.bytes_y


def prepare(case: Case, device: torch.device) -> tuple[Any, upconv3d.Plan]:
    """The tensors of a case, and the plan that the block runs on them.

    Raises: RuntimeError or ValueError where the block refuses the shape.
    """
    set_precision(case)
    tensors = make_tensors(case, device)
    positional, keywords = block_arguments(tensors, case)
    return tensors, upconv3d.explain(*positional, **keywords)


def implementation_name(name: str) -> str:
    """ "compile:default" as people read it."""
    return NAMES.get(name) or name.replace("compile:", "torch.compile ")


def measured(
    name: str, case: Case, times_ms: dict[str, float], rates: Rates, device: torch.device, call: Call
) -> tuple[Measured, str]:
    """One implementation's figures but its errors, and why one is missing."""
    ms = times_ms[name]
    flops, moved = case.shape.useful_flops / ms * 1e3, minimal_bytes(case) / ms * 1e3
    peak, reason = peak_above_output_bytes(call, device)
    one = Measured(
        implementation_name(name),
        ms,
        times_ms["block"] / ms,
        flops / 1e12,
        flops / rates.flops_per_s,
        moved / 1e9,
        moved / rates.bytes_per_s,
        peak,
        host_time_us(call, device),
    )
    return one, f"memory of {one.name}: {reason}" if reason else ""


def add_ncu(case: Case, device: torch.device, rows: list[KernelRow], notes: list[str]) -> bool:
    """Adds Nsight Compute's counters to the rows; True where it could not, with the reason in the notes."""
    try:
        ncu.add_counters(rows, ncu.run_ncu(case, device))
    except ncu.NcuError as error:
        notes.append(f"Nsight Compute: {error}")
        return True
    return False


def profile_case(
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    *,
    modes: list[str],
    budget_s: float,
    with_ncu: bool,
    step: Callable[[str], None],
) -> CaseProfile:
    """Measures one case; `step` is told the name of each of STEPS as it begins, and "ncu"."""
    step("check")
    t, plan = prepare(case, device)
    block = block_call(t, case)
    found = check_errors(t, case, block, plan.workspace_bytes)
    step("ceilings")
    ceilings.prepare(case)
    rates = ceilings.rates(case)
    step("compile")
    notes: list[str] = []
    peers, failures = compiled_peers(t, case, modes)
    notes += [f"torch.compile {mode}: {failure}" for mode, failure in failures.items()]
    step("time")
    calls: dict[str, Call] = {"block": block, "eager": lambda: eager(t, case.shape), **peers}
    calls["conv"] = lambda: convolution(t, case.shape)
    times_ms = medians_ms(calls, device, budget_s)
    step("kernels")
    rows, reason = kernel_rows(block, device, TRACED_CALLS)
    if reason:
        notes.append(f"kernels: {reason}")
    step("memory")
    implementations = []
    for name, call in calls.items():
        one, reason = measured(name, case, times_ms, rates, device, call)
        implementations.append(one)
        if reason:
            notes.append(reason)
    by_name = {one.name: one for one in implementations}
    by_name["upconv3d"].error_max, by_name["upconv3d"].error_rms = found["err_max"], found["err_rms"]
    by_name["eager"].error_max, by_name["eager"].error_rms = found["eager_err_max"], found["eager_err_rms"]
    implementations += [Measured(implementation_name(f"compile:{mode}")) for mode in failures]
    counters_missing = False
    if with_ncu:
        step("ncu")
        counters_missing = add_ncu(case, device, rows, notes)
    fixed = None
    if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        fixed = h200_rates(case)
    floor_rates = fixed or rates
    return CaseProfile(
        case,
        plan,
        rates,
        floor_ms(case, floor_rates),
        floor_rates.source if fixed else "the ceilings measured in this run",
        found["check"],
        implementations,
        rows,
        notes,
        counters_missing,
    )
