# SPDX-License-Identifier: Apache-2.0
"""The SM80 plan, asked for by UPCONV3D_PLAN. That is read once per process, so the cases run in another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import upconv3d
from oracles import check_exact_relu_conv, check_like_eager, integer_block, make_block

# Numbers of make_block: samples, C, K, extent, kernel; and what differs from a plain block.
SHAPES = {
    "plain": ((2, 64, 128, 6, 3), {}),
    "tails": ((3, 72, 136, (5, 4, 7), 3), {"padding": 1}),
    "few-channels": ((2, 8, 8, (3, 5, 9), (1, 3, 5)), {"padding": (0, 1, 2)}),
    "stride-2": ((2, 32, 64, (5, 6, 7), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "kernel-is-stride": ((1, 64, 64, 8, 2), {"stride": 2}),
    "stride-3-dilated": (
        (2, 16, 24, 4, 3),
        {"stride": (3, 1, 2), "dilation": (1, 2, 3), "padding": (0, 2, 1)},
    ),
    "one-sample": ((1, 128, 128, 12, 3), {"padding": 1}),
    "bare": ((2, 16, 40, 6, 2), {"bias": False, "affine": False}),
    "unbatched": ((None, 24, 48, (4, 6, 5), 3), {}),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sm80_cases(device):
    """Run by the child: every shape, dtype, precision and layout against float64 and PyTorch."""
    for name, (sizes, numbers) in SHAPES.items():
        for dtype in DTYPES:
            for precision in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
                torch.manual_seed(1234)
                block = make_block(
                    *sizes, num_groups=4, device=device, dtype=dtype, precision=precision, **numbers
                )
                for case in (block, block.channels_last()):
                    plan = case.plan()
                    assert plan.algorithm == "sm80_implicit_gemm", plan
                    assert plan.kernel.startswith("conv_transpose_relu_moments_sm80_"), plan
                    check_like_eager(case)
                    assert torch.equal(case.ours(), case.ours()), f"{name} {dtype} differs from run to run"


def sm80_exact(device):
    """Run by the child: small integers are exact."""
    for dtype in DTYPES:
        block = integer_block(3, 16, 136, 12, 2, device=device, dtype=dtype)
        for case in (block, block.channels_last()):
            check_exact_relu_conv(case)


def sm80_hostile(device):
    """Run by the child: NaN in one sample stays there, also across the borders of strided phases."""
    for numbers in ({"padding": 1}, {"padding": 1, "stride": 2, "output_padding": 1}):
        block = make_block(
            3, 16, 24, (3, 4, 5), 3, num_groups=3, device=device, dtype=torch.bfloat16, **numbers
        )
        expected = block.ours()
        block.input[1] = torch.nan
        y = block.ours()
        assert torch.equal(y[0], expected[0]) and torch.equal(y[2], expected[2])
        assert bool(y[1].isnan().all())


def _run_child(code, plan="sm80"):
    paths = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"UPCONV3D_PLAN": plan, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.fixture
def ampere(cuda):
    """A CUDA device of compute capability 8.0 or later, in a build with the SM80 kernels."""
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    if not any(kernel["compiled"] and kernel["arch"] == 80 for kernel in upconv3d.build_config()["kernels"]):
        pytest.skip("needs a build with the SM80 kernels")
    return cuda


@pytest.mark.parametrize("cases", ["sm80_cases", "sm80_exact", "sm80_hostile"])
def test_forced_sm80_plan(ampere, cases):
    result = _run_child(f"import test_sm80; test_sm80.{cases}('cuda')")
    assert result.returncode == 0, result.stdout + result.stderr


def test_forced_library_plan(cuda):
    code = (
        "from oracles import make_block, check_like_eager\n"
        "block = make_block(2, 16, 16, 4, 3, num_groups=2, device='cuda')\n"
        "assert block.plan().algorithm == 'cuda_library', block.plan()\n"
        "assert 'UPCONV3D_PLAN=library' in block.plan().reason\n"
        "check_like_eager(block)"
    )
    result = _run_child(code, plan="library")
    assert result.returncode == 0, result.stdout + result.stderr


def test_forced_plan_that_cannot_run(ampere):
    code = "from oracles import make_block\nmake_block(2, 16, 12, 4, 3, num_groups=2, device='cuda').ours()"
    result = _run_child(code)
    assert result.returncode != 0
    assert "RuntimeError: upconv3d: the plan that UPCONV3D_PLAN names" in result.stderr
    assert "got sm80, but output channels 12" in result.stderr and "Unset UPCONV3D_PLAN" in result.stderr


def test_the_variable_concerns_cuda_alone():
    code = (
        "from oracles import make_block\n"
        "assert make_block(2, 16, 16, 4, 3, num_groups=2).plan().algorithm == 'cpu_library'"
    )
    result = _run_child(code)
    assert result.returncode == 0, result.stdout + result.stderr
