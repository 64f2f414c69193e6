# SPDX-License-Identifier: Apache-2.0
"""Where the time of one call goes: a row per kernel on a GPU, per operator on a CPU, and one for the gaps."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from .measure import flush_buffer
from .trace import traced

FORWARD = "upconv3d_profile_forward"  # the range around each call in the trace
GAPS = {"cuda": "(gaps between kernels)", "cpu": "(outside the operators)"}
NAME_LENGTH = 60
# Names of kernels that say nothing: what they run is a template argument.
WRAPPERS = {"device_kernel", "Kernel", "Kernel2", "kernel"}
WRAPPERS |= {
    "elementwise_kernel",
    "vectorized_elementwise_kernel",
    "unrolled_elementwise_kernel",
    "reduce_kernel",
}
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class KernelRow:
    """One kernel's part of a call: medians over the traced calls."""

    name: str  # shortened
    full_name: str
    launches: float  # per call
    time_us: float  # of all its launches in one call; of one beside another, what comes behind that one
    share: float  # of the call, gaps included
    counters: dict[str, float | None] = field(default_factory=dict)  # from Nsight Compute


def _without_brackets(text: str, opening: str, closing: str) -> str:
    """`text` without what stands between matching brackets, or to the end after an unmatched one."""
    kept, depth = [], 0
    for letter in text:
        depth += letter == opening
        if depth == 0:
            kept.append(letter)
        depth -= letter == closing and depth > 0
    return "".join(kept)


def shorten(name: str) -> str:
    """A demangled kernel name without return type, namespaces, template and call arguments.

    "void upconv3d::(anonymous namespace)::pack_weight<float, 2>(Args)" becomes "pack_weight". A wrapper
    keeps the first name among its template arguments: "device_kernel<GemmUniversal>".
    """
    if name.startswith(("Memcpy", "Memset")):
        return name
    text = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = _without_brackets(text, "(", ")")
    base = _without_brackets(text, "<", ">").split("::")[-1].split()
    short = base[-1] if base else name
    if short in WRAPPERS and "<" in text:
        inner = re.search(r"[<,]\s*([A-Za-z_][\w:]*)", text)
        short = f"{short}<{inner[1].rstrip(':').split('::')[-1]}>" if inner else short
    if len(short) > NAME_LENGTH:
        short = f"{short[: NAME_LENGTH // 2]}...{short[-NAME_LENGTH // 3 :]}"
    return short


def _ranges(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Begin and end of each marked call on the host, in us, in order."""
    marked = [e for e in events if e["name"] == FORWARD and e.get("cat") == "user_annotation"]
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in marked)


def gpu_calls(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """GPU work of each marked call in order of start: what was launched inside the call's range."""
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in LAUNCH_CATEGORIES and "correlation" in e.get("args", {})
    }
    ranges = _ranges(events)
    calls: list[list[dict[str, Any]]] = [[] for _ in ranges]
    for event in sorted(events, key=lambda e: float(e["ts"])):
        if event.get("cat") not in GPU_CATEGORIES:
            continue
        ts = launched.get(event["args"].get("correlation"))
        if ts is not None:
            for index, (begin, end) in enumerate(ranges):
                if begin <= ts <= end:
                    calls[index].append(event)
    return calls


def gpu_times(call: list[dict[str, Any]]) -> tuple[dict[str, list[float]], float]:
    """us of each launch by full kernel name, and us between first start and last end with nothing running.

    Of a launch that begins beside the one before, only what it takes beyond that one's end.
    """
    times: dict[str, list[float]] = defaultdict(list)
    idle, busy_until = 0.0, float(call[0]["ts"])
    for event in call:
        begin, duration = float(event["ts"]), float(event["dur"])
        end = begin + duration
        times[event["name"]].append(max(0.0, end - max(begin, busy_until)))
        idle += max(0.0, begin - busy_until)
        busy_until = max(busy_until, end)
    return dict(times), idle


def cpu_times(events: list[dict[str, Any]]) -> tuple[dict[str, list[float]], float]:
    """us of each operator without those it calls, by name, and us of the range outside all operators."""
    ((first, last),) = _ranges(events)
    times: dict[str, list[float]] = defaultdict(list)
    inside = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and first <= float(e["ts"]) <= last),
        key=lambda e: (float(e["ts"]), -float(e["dur"])),
    )
    stack: list[tuple[str, int, float]] = []  # open operators: name, place in times[name], end
    outside = last - first
    for event in inside:
        begin, duration = float(event["ts"]), float(event["dur"])
        while stack and stack[-1][2] <= begin:
            stack.pop()
        if stack:
            name, place, _ = stack[-1]
            times[name][place] -= duration
        else:
            outside -= duration
        times[event["name"]].append(duration)
        stack.append((event["name"], len(times[event["name"]]) - 1, begin + duration))
    return dict(times), max(0.0, outside)


def rows_of(calls: list[tuple[dict[str, list[float]], float]], device_type: str) -> list[KernelRow]:
    """Medians over calls, the longest first, the gaps last."""
    gaps = GAPS[device_type]
    named = shorten if device_type == "cuda" else str
    names = dict.fromkeys(name for times, _ in calls for name in times)
    sums = {name: [sum(times.get(name, [])) for times, _ in calls] for name in names}
    launches = {name: statistics.median(len(times.get(name, [])) for times, _ in calls) for name in names}
    medians = {name: statistics.median(values) for name, values in sums.items()}
    idle = statistics.median(gap for _, gap in calls)
    total = sum(medians.values()) + idle
    rows = [
        KernelRow(named(name), name, launches[name], medians[name], medians[name] / total) for name in names
    ]
    rows.sort(key=lambda row: -row.time_us)
    seen: dict[str, int] = defaultdict(int)
    for row in rows:  # instances of one template stay apart
        seen[row.name] += 1
        if seen[row.name] > 1:
            row.name += f" #{seen[row.name]}"
    return [*rows, KernelRow(gaps, gaps, 0, idle, idle / total)]


def kernel_rows(
    call: Callable[[], Tensor], device: torch.device, repeats: int
) -> tuple[list[KernelRow], str]:
    """Rows of one call, from `repeats` traced calls, L2 flushed as in the timing; or none, and the reason."""
    flush = flush_buffer(device)

    def marked() -> None:
        if flush is not None:
            torch.sum(flush)
        with record_function(FORWARD):
            call()

    marked()
    if device.type == "cuda":

        def all_marked() -> None:
            for _ in range(repeats):
                marked()

        calls = [c for c in gpu_calls(traced(all_marked, device)) if c]
        if not calls:
            return [], (
                "torch.profiler recorded no kernels: CUPTI is missing, or another profiler holds it. "
                "Remedy: run outside of other profilers, with a CUDA build of torch."
            )
        return rows_of([gpu_times(c) for c in calls], "cuda"), ""
    return rows_of([cpu_times(traced(marked, device)) for _ in range(repeats)], "cpu"), ""
