# SPDX-License-Identifier: Apache-2.0
"""Processes that share the GPU by CUDA's Multi-Process Service, each granted part of its multiprocessors.

Kernels whose blocks wait for each other have to fit the part, and clusters may be refused. The service's
daemon is one of these tests' own, which nothing else uses, and ends with them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 180  # a crowd takes seconds, its process some ten to start; others may be using the GPU
CROWD = Path(__file__).with_name("test_cuda_promises.py")


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
    yield environment
    subprocess.run([CONTROL], input="quit -t 1\n", env=environment, text=True, timeout=60, check=True)


@pytest.fixture
def mps(hopper, daemon):
    return daemon


def start_crowd(environment, plan, percentage) -> subprocess.Popen:
    """test_cuda_promises.py's crowd, in a process of its own."""
    granted = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage), "UPCONV3D_PLAN": plan}
    return subprocess.Popen(
        [sys.executable, str(CROWD), "any-plan"], env=environment | granted, stderr=subprocess.PIPE, text=True
    )


def check_crowds(crowds):
    try:
        for crowd in crowds:
            try:
                _, error = crowd.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                pytest.fail(f"calls under MPS do not end within {SECONDS} s")
            assert crowd.returncode == 0, error
    finally:
        for crowd in crowds:
            crowd.kill()


@pytest.mark.parametrize("plan", ["", "stored"], ids=["chosen", "stored"])
@pytest.mark.parametrize("percentage", [20, 7])
def test_part_of_the_multiprocessors(mps, percentage, plan):
    check_crowds([start_crowd(mps, plan, percentage)])


@pytest.mark.parametrize("percentage", [60, 100])
def test_several_processes(mps, percentage):
    check_crowds([start_crowd(mps, "stored", percentage) for _ in range(3)])
