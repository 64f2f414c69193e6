# SPDX-License-Identifier: Apache-2.0
"""One traced run of torch.profiler, as the events of a Chrome trace."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def traced(run: Callable[[], object], device: torch.device, *, memory: bool = False) -> list[dict[str, Any]]:
    """The complete ("X") and instant events while `run` runs; times `ts` and `dur` in us.

    The exported trace, because the profiler's Python objects leave out what connects a kernel to its launch.
    """
    # torch 2.13 prints its tracepoints on stderr, at level 5; what fails shows as events that are missing.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=memory) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") in ("X", "i")]
