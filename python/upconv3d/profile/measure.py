# SPDX-License-Identifier: Apache-2.0
"""Times, errors, memory and the environment of a run."""

from __future__ import annotations

import datetime
import os
import platform
import random
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import upconv3d

# Four times an H200's L2 would flush it; sixteen times keeps the GPU busy for 0.25 ms, which also hides
# what Python needs to launch the timed call.
FLUSH_BYTES = 1 << 30
ROUNDS = 3  # every implementation is visited this often, so that clocks drifting over seconds meet all alike


def flush_buffer(device: torch.device) -> torch.Tensor | None:
    """What cuda_times_ms reads before each call; None on a CPU, whose caches stay warm."""
    if device.type != "cuda":
        return None
    size = min(FLUSH_BYTES, torch.cuda.get_device_properties(device).total_memory // 8)
    return torch.zeros(size // 4, device=device)


def cuda_times_ms(call: Callable[[], object], repeats: int, flush: torch.Tensor) -> list[float]:
    """GPU times of `repeats` calls in ms.

    Before each, `flush` is read: that evicts what L2 held, and leaves no dirty line behind.
    """
    pairs = []
    for _ in range(repeats):
        torch.sum(flush)
        begin, end = (torch.Event(flush.device, enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(flush.device)
    return [begin.elapsed_time(end) for begin, end in pairs]


def cpu_times_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock times of `repeats` calls in ms."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def medians_ms(
    calls: Mapping[str, Callable[[], object]], device: torch.device, budget_s: float, rounds: int = ROUNDS
) -> dict[str, float]:
    """Median time of each call in ms.

    Calls take turns in `rounds` rounds, each round in another order, the same in every run: what ran before
    leaves a call its caches. Each gets as many repeats as fit into its share of `budget_s` seconds, at least
    three a round.
    """
    flush = flush_buffer(device)

    def run(call: Callable[[], object], repeats: int) -> list[float]:
        return cpu_times_ms(call, repeats) if flush is None else cuda_times_ms(call, repeats, flush)

    repeats: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        run(call, 2)
        begin = time.perf_counter()
        run(call, 2)
        each_s = (time.perf_counter() - begin) / 2
        repeats[name] = max(3, min(50, int(budget_s / len(calls) / rounds / max(each_s, 1e-6))))
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name] += run(calls[name], repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def errors(y: torch.Tensor, y64: torch.Tensor) -> tuple[float, float]:
    """Largest and root-mean-square absolute error of `y` against float64; values are of order one."""
    difference = y.double() - y64
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def poison(size: torch.Size, dtype: torch.dtype, device: torch.device, workspace_bytes: int) -> None:
    """Leaves NaN in the cached blocks that the next output and workspace will come from.

    An element that a kernel fails to write then shows as NaN, not as yesterday's right answer.
    """
    blocks = [torch.full(size, float("nan"), dtype=dtype, device=device)]
    if workspace_bytes > 0:
        blocks.append(torch.full((workspace_bytes,), 0xFF, dtype=torch.uint8, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    blocks.clear()


def _output(command: list[str], cwd: Path | None = None) -> str | None:
    """What `command` prints; None, which the record then shows, where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """The processor's model name, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def git_commit(source: Path) -> str | None:
    """Commit of the checkout that tracks `source`, and whether tracked files differ; None outside one.

    UPCONV3D_COMMIT, where it is set, as it is: a copy without its history is told its commit.
    """
    told = os.environ.get("UPCONV3D_COMMIT")
    if told is not None:
        return told
    # An installed package, or a copy, can lie inside a checkout of something else.
    if not _output(["git", "ls-files", "--error-unmatch", source.name], cwd=source.parent):
        return None
    commit = _output(["git", "rev-parse", "HEAD"], cwd=source.parent)
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=source.parent)
    return f"{commit} with local changes" if commit and changed else commit


def environment(device: torch.device, command: list[str], source: Path) -> dict[str, Any]:
    """What a figure must be quoted with: date, device, driver, versions, commit of `source`, command."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(command),
        "upconv3d": upconv3d.__version__,
        "commit": git_commit(source.resolve()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        query = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "driver": query.splitlines()[0] if query else None,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def environment_line(env: dict[str, Any]) -> str:
    """Date, device and versions, one sentence."""
    device = (
        f"{env['gpu']}, driver {env['driver']}"
        if env.get("gpu")
        else f"{env['cpu']}, {env['threads']} threads"
    )
    parts = [f"{env['date']}", device, f"torch {env['torch']}"]
    if env.get("gpu"):
        parts += [f"CUDA {env['cuda']}", f"cuDNN {env['cudnn']}"]
    parts.append(f"upconv3d {env['upconv3d']}")
    if env.get("commit"):
        commit, _, changes = env["commit"].partition(" ")
        parts.append(f"commit {commit[:12]} {changes}".strip())
    return "; ".join(parts)
