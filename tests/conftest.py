# SPDX-License-Identifier: Apache-2.0
"""Devices, the seed of randomized cases, and hypothesis' profile."""

import os
import secrets

import pytest
import torch
from hypothesis import settings

# PyTorch's samples need this module, whose import freezes torch.backends; the tests set it as users do.
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    import torch.testing._internal.common_utils

# The shapes are so small that threads would only wait for one another; test_values.py has a case for them.
torch.set_num_threads(1)

SEED = int(os.environ.get("UPCONV3D_SEED", secrets.randbelow(2**31)))
RANDOM_CASES = int(os.environ.get("UPCONV3D_RANDOM_CASES", "24"))
PROMISE_CASES = int(os.environ.get("UPCONV3D_CASES", "60"))  # random shapes of test_cuda_promises.py

settings.register_profile("upconv3d", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("upconv3d")


def pytest_report_header(config):
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    versions = f"torch {torch.__version__}, {cuda}"
    cases = f"UPCONV3D_RANDOM_CASES={RANDOM_CASES} UPCONV3D_CASES={PROMISE_CASES}"
    return f"upconv3d: UPCONV3D_SEED={SEED} {cases}, {versions}"


def pytest_sessionstart(session):
    """The seed under -q too, which shows no header: a process that aborts says nothing later."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.option.verbose < 0:
        reporter.write_line(pytest_report_header(session.config))


def _need_cuda(name):
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    _need_cuda(request.param)
    return torch.device(request.param)


@pytest.fixture
def cuda():
    _need_cuda("cuda")
    return torch.device("cuda")


@pytest.fixture
def hopper(cuda):
    """A CUDA device of compute capability 9.0, in a build that has kernels for it."""
    import upconv3d

    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if not any(kernel["compiled"] and kernel["arch"] == 90 for kernel in upconv3d.build_config()["kernels"]):
        pytest.skip("needs a build with the SM90 kernels")
    return cuda


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from one seed and leaves PyTorch's precision and cuDNN settings as they were."""
    torch.manual_seed(1234)
    precision = torch.backends.cudnn.conv.fp32_precision
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    if torch.backends.cudnn.conv.fp32_precision != precision:
        # The profile sets the older one, which is kept beside it; torch.export asks whether they agree.
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.conv.fp32_precision = precision
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


@pytest.fixture(autouse=True)
def small_blocks_left(monkeypatch):
    """The limit up to which accelerated models leave a block to PyTorch; in tests it is 0.

    Else nothing small would be computed as the blocks of large models are.
    """
    from upconv3d._accelerated import block, norms

    limit = block.SMALL_BLOCK_VALUES
    for module in (block, norms):
        monkeypatch.setattr(module, "SMALL_BLOCK_VALUES", 0)
    return limit


def _stand_in(keeps, monkeypatch):
    from stand_ins import Kernels, install

    stand_in = Kernels(keeps)
    install(stand_in, monkeypatch)
    return stand_in


@pytest.fixture(params=[True, False], ids=["kept", "nothing-kept"])
def kernels(request, monkeypatch):
    """Calls on the CPU treated as those on CUDA are, by kernels that keep something for a backward or not."""
    return _stand_in(request.param, monkeypatch)


@pytest.fixture
def keeping_kernels(monkeypatch):
    """The same by kernels that keep something."""
    return _stand_in(True, monkeypatch)


@pytest.fixture
def casts(monkeypatch):
    """Arguments of the operator that casts parameters of recorded calls under autocast, a tuple per call."""
    from recorded_casts import watch_casts

    return watch_casts(monkeypatch)


@pytest.fixture(autouse=True)
def _own_small_blocks(monkeypatch):
    """Blocks without a norm train by upconv3d's kernels, however small, as those of the tests are.

    test_without_norm.py has what becomes of small ones else.
    """
    from upconv3d import _tail_call

    monkeypatch.setattr(_tail_call, "SMALL_BLOCK_VALUES", 0)
