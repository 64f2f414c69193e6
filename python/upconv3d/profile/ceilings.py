# SPDX-License-Identifier: Apache-2.0
"""What this device was seen to do in this run: matmul rates and copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .cases import CACHE_SHARE, Case, Rates, products

MATMUL_EXTENT = 8192  # on a GPU: large enough that launches and the last wave do not show
MATMUL_EXTENT_FLOAT64 = 4096  # where 8192 would take seconds on most GPUs
MATMUL_EXTENT_CPU = (
    1024  # a few ms on two cores, and 12 MB of operands: the caches' rate, which is the ceiling
)
COPY_BYTES_GPU = 1 << 30  # per buffer, far beyond any L2
COPY_BYTES_CPU = 256 << 20  # per buffer, and at least CACHES_PER_COPY times the last-level cache
CACHES_PER_COPY = 4


@dataclass(frozen=True)
class Rate:
    """A measured rate in 1/s: floating-point operations or bytes."""

    per_s: float
    of: str  # what was measured, for people


def _time_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Time of one call in s, from at least three calls and about `budget_s` seconds of them.

    The median on a GPU, whose first calls run above the clock that its power limit allows; the least on a
    CPU, which other programs share and can only slow down.
    """

    def once() -> float:
        if device.type == "cuda":
            begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return 1e-3 * float(begin.elapsed_time(end))
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    for _ in range(2):
        once()
    times = [once() for _ in range(3)]
    deadline = time.perf_counter() + budget_s - sum(times)
    while time.perf_counter() < deadline:
        times.append(once())
    return statistics.median(times) if device.type == "cuda" else min(times)


def matmul_rate(dtype: torch.dtype, tf32: bool, device: torch.device, budget_s: float) -> Rate:
    """A square matmul on random data."""
    extent = MATMUL_EXTENT_CPU
    if device.type == "cuda":
        extent = MATMUL_EXTENT_FLOAT64 if dtype is torch.float64 else MATMUL_EXTENT
    a = torch.rand(extent, extent, device=device).to(dtype)
    b = torch.rand(extent, extent, device=device).to(dtype)
    out = torch.empty_like(a)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    seconds = _time_s(lambda: torch.mm(a, b, out=out), device, budget_s)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    name = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    return Rate(2 * extent**3 / seconds, f"{name} matmul, {extent}^3")


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:])
        if unit is not None and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes)


def copy_rate(device: torch.device, budget_s: float) -> Rate:
    """A copy between two buffers beyond the last-level cache; bytes read and bytes written."""
    if device.type == "cuda":
        size = min(COPY_BYTES_GPU, torch.cuda.get_device_properties(device).total_memory // 8)
    else:
        size = max(COPY_BYTES_CPU, CACHES_PER_COPY * cache_bytes(device))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _time_s(lambda: target.copy_(source), device, budget_s)
    return Rate(2 * size / seconds, f"copy of {size >> 20} MiB")


class Ceilings:
    """Rates of one device, each measured once, when a case first needs it."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device = device
        self.budget_s = budget_s
        self._matmuls: dict[tuple[torch.dtype, bool], Rate] = {}
        self._copy: Rate | None = None

    def matmul(self, dtype: torch.dtype, tf32: bool = False) -> Rate:
        """FLOP/s of a matmul."""
        key = (dtype, tf32)
        if key not in self._matmuls:
            self._matmuls[key] = matmul_rate(dtype, tf32, self.device, self.budget_s)
        return self._matmuls[key]

    def copy(self) -> Rate:
        """Bytes/s of a copy."""
        if self._copy is None:
            self._copy = copy_rate(self.device, self.budget_s)
        return self._copy

    def measured(self) -> dict[str, float]:
        """All rates measured so far, TFLOP/s and GB/s, by what was measured."""
        found = {f"{rate.of}, TFLOP/s": rate.per_s / 1e12 for rate in self._matmuls.values()}
        if self._copy is not None:
            found[f"{self._copy.of}, GB/s"] = self._copy.per_s / 1e9
        return found

    def prepare(self, case: Case) -> None:
        """Measures what `case` needs, and for float32 on a GPU the rates to compare it with."""
        self.copy()
        if self.device.type == "cuda" and case.dtype is torch.float32:
            self.matmul(torch.float32)
            self.matmul(torch.float32, tf32=True)
        self.rates(case)

    def rates(self, case: Case) -> Rates:
        """The measured rates that bound one case.

        On a GPU float32 is bounded by the float16 rate, which carries TF32's accuracy in one product and
        float32's in three. On a CPU 16-bit types may be computed in float32, where that is quicker.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu and case.dtype is torch.float32:
            best = self.matmul(torch.float16)
            count = products(case)
        else:
            dtypes = {case.dtype} if on_gpu or case.dtype is torch.float64 else {case.dtype, torch.float32}
            best = max((self.matmul(dtype) for dtype in dtypes), key=lambda rate: rate.per_s)
            count = 1
        source = best.of if count == 1 else f"{best.of}, divided by {count} products"
        return Rates(
            best.per_s / count,
            self.copy().per_s,
            CACHE_SHARE * cache_bytes(self.device),
            f"{source}; {self.copy().of}",
        )
