# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of each kernel, from Nsight Compute run on a process of its own.

ncu replays every kernel for its counters with caches flushed before each replay, so these percentages are of
kernels that start cold, one at a time; times come from the rest of the profile. Clocks are left as they are.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch

from .cases import Case
from .kernels import KernelRow, shorten

# ncu's metrics by the name under which they are reported. Busy cycles of the tensor pipe include wgmma; gmma
# counts wgmma instructions issued.
METRICS = {
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "wgmma_issue_percent": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "duration_ns": "gpu__time_duration.sum",
}
# Where NVIDIA's installers put it, and the pattern of the program there.
STANDARD_FOLDERS: tuple[tuple[str, str], ...] = (
    ("/usr/local/cuda/bin", "ncu"),
    ("/opt/nvidia/nsight-compute", "*/ncu"),
)
TIMEOUT_S = 240
PERMISSION = (
    "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM). Remedy: run as root, start "
    "the container with --cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0; "
    "see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


WGMMA_CAPABILITY = (9, 0)  # the only one whose ncu knows gmma metrics; an unknown metric can end ncu


class NcuError(Exception):
    """Why there are no counters, and what to do about it."""


def find_ncu() -> Path:
    """Nsight Compute's program, from PATH, the CUDA folder or its own installation folder.

    Raises: NcuError where there is none.
    """
    on_path = shutil.which("ncu")
    if on_path is not None:
        return Path(on_path)
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [Path(home) / "bin" / "ncu" for home in homes]
    for folder, pattern in STANDARD_FOLDERS:
        candidates += sorted(Path(folder).glob(pattern), reverse=True)  # of several releases, the latest
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise NcuError(
        "ncu was not found on PATH, in $CUDA_HOME/bin or in NVIDIA's standard folders. "
        "Remedy: install Nsight Compute, or put its folder on PATH."
    )


def _number(text: str) -> float | None:
    """A value as ncu prints it, with thousands separators; None for "n/a" and its relatives."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse_csv(text: str) -> list[tuple[str, dict[str, float | None]]]:
    """Kernel name and counters (keys of METRICS) of each launch, in order of launch.

    `text` is what `ncu --csv --print-units base` prints: lines of messages, a header, and one row per launch
    and metric. Columns are found by name, because releases add some.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return []
    keys = {metric: key for key, metric in METRICS.items()}
    names: dict[str, str] = {}
    counters: dict[str, dict[str, float | None]] = defaultdict(dict)
    for row in csv.DictReader(line for line in lines[first:] if line.startswith('"')):
        launch, metric = row["ID"], row.get("Metric Name")
        if metric in keys and row.get("Metric Value") is not None:
            names[launch] = row["Kernel Name"]
            counters[launch][keys[metric]] = _number(row["Metric Value"])
    return [(names[launch], counters[launch]) for launch in sorted(names, key=int)]


def why_it_failed(text: str, status: int) -> str:
    """What ncu's messages mean, with the remedy where it is known."""
    if "ERR_NVGPUCTRPERM" in text:
        return PERMISSION
    messages = [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    last = messages[-1] if messages else next(iter(reversed(text.strip().splitlines())), "it printed nothing")
    return f"ncu ended with status {status} and no counters: {last}"


def case_to_json(case: Case, device: torch.device) -> str:
    """What ncu_target needs to run the case."""
    dtype = str(case.dtype).removeprefix("torch.")
    return json.dumps(
        {
            "shape": asdict(case.shape),
            "dtype": dtype,
            "layout": case.layout,
            "precision": case.precision,
            "device": str(device),
        }
    )


def metrics_for(device: torch.device) -> list[str]:
    """ncu's names of the counters that the device has."""
    has_wgmma = torch.cuda.get_device_capability(device) == WGMMA_CAPABILITY
    return [metric for key, metric in METRICS.items() if has_wgmma or key != "wgmma_issue_percent"]


def run_ncu(case: Case, device: torch.device) -> list[tuple[str, dict[str, float | None]]]:
    """Counters of each launch of one call of the block.

    Raises: NcuError where ncu is missing, refuses or finds nothing.
    """
    if device.type != "cuda":
        raise NcuError(f"ncu measures CUDA kernels; got --device {device}. Remedy: leave out --ncu.")
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = ["--csv", "--print-units", "base", "--log-file", str(log), "--profile-from-start", "off"]
        options += [
            "--clock-control",
            "none",
            "--target-processes",
            "all",
            "--metrics",
            ",".join(metrics_for(device)),
        ]
        target = [sys.executable, "-m", "upconv3d.profile.ncu_target", case_to_json(case, device)]
        process = subprocess.Popen(
            [str(ncu), *options, *target],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # ncu, and the process that it measures
            process.communicate()
            raise NcuError(f"ncu did not end within {TIMEOUT_S} s. Remedy: a smaller shape.") from error
        text = log.read_text(errors="replace") if log.exists() else ""
    launches = parse_csv(text)
    if not launches:
        raise NcuError(why_it_failed(text + "\n" + printed, process.returncode))
    return launches


def add_counters(rows: list[KernelRow], launches: list[tuple[str, dict[str, float | None]]]) -> None:
    """Writes the mean over its launches into each row of the same kernel.

    ncu and CUPTI print a kernel's arguments differently, so names are compared without them; kernels of one
    name share their launches' mean.
    """
    by_name: dict[str, list[dict[str, float | None]]] = defaultdict(list)
    for name, counters in launches:
        by_name[shorten(name)].append(counters)
    for row in rows:
        found = by_name.get(shorten(row.full_name), [])
        for key in METRICS:
            values = [value for counters in found if (value := counters.get(key)) is not None]
            if found:
                row.counters[key] = sum(values) / len(values) if values else None
