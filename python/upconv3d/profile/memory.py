# SPDX-License-Identifier: Apache-2.0
"""What a call allocates, and what it costs the host to enqueue."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .trace import traced

# Calls enqueued before one wait: below the 1024 launches that a CUDA stream holds before it blocks the host,
# for any call of up to 50 kernels.
ENQUEUED_CALLS = 20
ENQUEUE_ROUNDS = 5


def running_peak(events: list[dict[str, Any]]) -> int | None:
    """Largest sum of allocations minus releases of CPU memory, in bytes, over the events of a trace.

    None where the trace has no such event.
    """
    found = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
    if not found:
        return None
    changes = [int(e["args"]["Bytes"]) for e in sorted(found, key=lambda e: float(e["ts"]))]
    return max(itertools.accumulate(changes))


def peak_above_output_bytes(call: Callable[[], Tensor], device: torch.device) -> tuple[int | None, str]:
    """Peak of PyTorch's allocator in one warm call, less the result, in bytes; or None, and the reason."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        y = call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before - y.untyped_storage().nbytes(), ""
    kept: list[Tensor] = []  # the result must outlive the trace, as a caller's would
    events = traced(lambda: kept.append(call()), device, memory=True)
    peak = running_peak(events)
    if peak is None:
        return None, "the profiler recorded no allocations"
    return peak - kept[0].untyped_storage().nbytes(), ""


def host_time_us(call: Callable[[], Tensor], device: torch.device) -> float | None:
    """Median wall-clock time of enqueueing one call while the GPU lags behind, in us; None on a CPU."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(ENQUEUE_ROUNDS):
        torch.cuda.synchronize(device)
        for _ in range(ENQUEUED_CALLS):
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize(device)
    return statistics.median(times)
