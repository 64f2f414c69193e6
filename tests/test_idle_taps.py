# SPDX-License-Identifier: Apache-2.0
"""Kernels whose taps do not all reach an output, which PyTorch's convolution is not asked for.

What UPCONV3D_PLAN asks for is read once per process, so the library plan of a GPU runs in another.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from oracles import (
    check_exact_relu_conv,
    check_gradients_like_eager,
    check_like_eager,
    integer_block,
    make_block,
)

# (n, c, k, extent, kernel) and the other numbers
SHAPES = {
    "one_voxel_deep": ((2, 8, 16, (1, 6, 5), 3), {"padding": 1}),
    "one_voxel_wide": ((2, 8, 16, (4, 6, 1), (4, 5, 3)), {"stride": 2, "padding": (0, 0, 1)}),
    "one_voxel": ((3, 8, 8, (1, 1, 1), 5), {"stride": 2, "padding": 2}),
    "two_of_three_taps": ((2, 8, 8, (1, 6, 5), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "padding_beyond_the_kernel": ((2, 4, 6, (5, 4, 6), 3), {"padding": (4, 1, 1), "stride": (3, 1, 2)}),
    "dilation": ((1, 8, 8, (1, 2, 5), 3), {"padding": (2, 3, 2), "dilation": (2, 3, 2)}),
    "dilation_that_padding_does_not_divide": (
        (1, 8, 8, (2, 5, 5), 4),
        {"padding": (4, 0, 0), "dilation": (3, 1, 1)},
    ),
    "conv_groups": ((2, 16, 8, (1, 6, 5), 3), {"padding": 1, "groups": 4}),
    "no_tap_at_all": ((2, 8, 8, (2, 3, 3), (1, 3, 3)), {"stride": (4, 1, 1), "padding": (2, 1, 1)}),
}
LAYOUTS = {"NCDHW": lambda block: block, "NDHWC": lambda block: block.channels_last()}
every_shape = pytest.mark.parametrize("shape", SHAPES)
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@every_shape
@both_layouts
def test_sums_are_exact(device, shape, layout):
    sizes, numbers = SHAPES[shape]
    check_exact_relu_conv(LAYOUTS[layout](integer_block(*sizes, device=device, **numbers)))


@every_shape
@both_layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors(device, shape, layout, dtype):
    sizes, numbers = SHAPES[shape]
    block = make_block(*sizes, device=device, dtype=dtype, num_groups=2, **numbers)
    check_like_eager(LAYOUTS[layout](block))


@every_shape
@both_layouts
def test_gradients(device, shape, layout):
    """Those of idle taps are 0, though the backward knows of them."""
    sizes, numbers = SHAPES[shape]
    block = make_block(*sizes, device=device, num_groups=2, **numbers)
    check_gradients_like_eager(LAYOUTS[layout](block))


def test_the_convolution_is_asked_for_fewer(device):
    if device.type == "cuda" and os.environ.get("UPCONV3D_PLAN") != "library":
        pytest.skip("of the library plan; test_by_the_library_plan runs it")
    sizes, numbers = SHAPES["one_voxel_deep"]
    block = make_block(*sizes, device=device, num_groups=2, **numbers)
    with torch.profiler.profile(record_shapes=True) as profile:
        block.ours()
    names = ("aten::convolution", "aten::_convolution")
    weights = [event.input_shapes[1] for event in profile.events() if event.name in names]
    assert weights and all(weight == [8, 16, 1, 3, 3] for weight in weights), weights


@pytest.mark.parametrize("offset", [1, 5000])
def test_weights_that_begin_amid_memory(device, offset):
    sizes, numbers = SHAPES["one_voxel_deep"]
    block = make_block(*sizes, device=device, num_groups=2, **numbers)
    memory = torch.full((2 * offset + 2 * block.weight.numel(),), torch.nan, device=device)
    weight = memory[offset:][: block.weight.numel()].view_as(block.weight).copy_(block.weight)
    check_like_eager(replace(block, weight=weight))


def test_weights_of_idle_taps_do_not_matter(device):
    """Not even infinite ones."""
    sizes, numbers = SHAPES["one_voxel_deep"]
    block = make_block(*sizes, device=device, num_groups=2, **numbers)
    weight = block.weight.clone()
    weight[:, :, 0], weight[:, :, 2] = torch.inf, torch.nan
    assert torch.equal(replace(block, weight=weight).ours(), block.ours())


def test_by_the_library_plan(cuda):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"UPCONV3D_PLAN": "library"}
    result = subprocess.run(
        [*command, "-k", "cuda and not by_the_library_plan"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout
