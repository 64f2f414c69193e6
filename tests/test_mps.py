# SPDX-License-Identifier: Apache-2.0
"""Processes that share the GPU by CUDA's Multi-Process Service, each granted part of its multiprocessors.

Kernels whose blocks wait for each other have to fit the part, and clusters may be refused. The service's
daemon is one of these tests' own, which nothing else uses, and ends with them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 180  # a crowd takes seconds, its process some ten to start; others may be using the GPU
PROMISES = Path(__file__).with_name("test_cuda_promises.py")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """The environment of processes that the daemon serves."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"needs {CONTROL}, which CUDA's driver brings")
    directory = tmp_path_factory.mktemp("mps")  # short: the daemon's sockets lie there
    environment = os.environ | {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory),
        "CUDA_MPS_LOG_DIRECTORY": str(directory),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    started = subprocess.run([CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=30)
    if started.returncode != 0:
        pytest.skip(f"{CONTROL} -d: status {started.returncode}; {started.stdout}{started.stderr}")
    # The daemon numbers its devices anew, from 0: clients do not have those that CUDA_VISIBLE_DEVICES named.
    yield environment | {"CUDA_VISIBLE_DEVICES": "0"}
    subprocess.run([CONTROL], input="quit -t 1\n", env=environment, text=True, timeout=60, check=True)


@pytest.fixture
def mps(hopper, daemon):
    return daemon


def check_processes(environment, what, plan, percentage, processes):
    """What test_cuda_promises.py is asked for, in processes of their own that run at the same time."""
    granted = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage), "UPCONV3D_PLAN": plan}
    with contextlib.ExitStack() as ends:
        started = []
        for _ in range(processes):
            output, errors = (ends.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, str(PROMISES), what, "any-plan"]
            process = subprocess.Popen(command, env=environment | granted, stdout=output, stderr=errors)
            ends.callback(process.wait)
            ends.callback(process.kill)
            started.append((process, output, errors))
        for process, output, errors in started:
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                pytest.fail(f"calls under MPS do not end within {SECONDS} s")
            errors.seek(0)
            assert status == 0, errors.read()
            output.seek(0)
            # Without the service's daemon CUDA would grant all of them, and say nothing.
            all_of_them = torch.cuda.get_device_properties(0).multi_processor_count
            multiprocessors = int(output.read())
            assert multiprocessors == all_of_them if percentage == 100 else multiprocessors < all_of_them


@pytest.mark.parametrize("plan", ["", "stored"], ids=["chosen", "stored"])
@pytest.mark.parametrize("percentage", [20, 7])
def test_part_of_the_multiprocessors(mps, percentage, plan):
    check_processes(mps, "crowd", plan, percentage, processes=1)


@pytest.mark.parametrize("percentage", [60, 100])
def test_several_processes(mps, percentage):
    check_processes(mps, "crowd", "stored", percentage, processes=3)


@pytest.mark.parametrize("percentage", [20, 7])
def test_graphs_of_part_of_the_multiprocessors(mps, percentage):
    """Capturing a launch that does not fit the part, or whose clusters are refused, takes what calls take."""
    check_processes(mps, "capture", "stored", percentage, processes=1)
