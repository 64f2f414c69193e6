# SPDX-License-Identifier: Apache-2.0
"""Values: the oracles over hand-picked, PyTorch's own, and randomized shapes."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import RANDOM_CASES, SEED
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    Block,
    alike_blocks,
    check_alike,
    check_exact_relu_conv,
    check_like_eager,
    integer_block,
    make_block,
)
from torch.testing._internal.common_methods_invocations import op_db

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
_OPINFO = next(op for op in op_db if op.name == "nn.functional.conv_transpose3d")
OPINFO_COUNT = len(list(_OPINFO.sample_inputs("cpu", torch.float32)))

# (n, c, k, extent, kernel, numbers); a Hopper GPU takes the SM90 plan for most of them.
SHAPES = {
    "kernelbench-small": (2, 16, 32, 6, 3, {"num_groups": 8, "bias": False}),
    "odd-extents": (3, 24, 40, (3, 5, 7), 3, {"num_groups": 5}),
    "padding": (2, 32, 64, 5, 3, {"num_groups": 2, "padding": 1}),
    "kernel-1": (2, 64, 16, 6, 1, {"num_groups": 4}),
    "monai-unet": (2, 12, 6, 5, 3, {"num_groups": 2, "stride": 2, "padding": 1, "output_padding": 1}),
    "pix2vox": (1, 8, 4, 4, 4, {"num_groups": 4, "stride": 2, "padding": 1}),
    "anisotropic": (2, 6, 8, (2, 6, 5), (1, 2, 2), {"num_groups": 4, "stride": (1, 2, 2)}),
    "dilated": (2, 4, 6, 4, 3, {"num_groups": 3, "dilation": (1, 2, 3)}),
    "one-to-three-channels": (2, 1, 3, (3, 5, 6), 3, {"num_groups": 1}),
    "three-to-twenty-channels": (2, 3, 20, 5, 3, {"num_groups": 5, "padding": 1}),
    "hundred-to-two-channels": (1, 100, 2, 4, 3, {"num_groups": 2, "stride": 2, "padding": 1}),
    "twenty-to-hundred-channels": (2, 20, 100, (3, 4, 5), 2, {"num_groups": 20, "bias": False}),
    "groups-of-16": (2, 32, 64, 4, 3, {"num_groups": 8, "groups": 2}),
    "groups-of-64": (2, 128, 48, 3, 2, {"num_groups": 3, "groups": 2, "padding": 1}),
    "groups-of-5": (2, 20, 32, 4, 3, {"num_groups": 4, "groups": 4, "stride": 2, "padding": 1}),
    "grouped": (2, 8, 12, 4, 3, {"num_groups": 6, "groups": 4}),
    "depthwise": (1, 8, 8, 4, 3, {"num_groups": 8, "groups": 8, "stride": 2, "padding": 1}),
    "kernel-smaller-than-stride": (2, 4, 4, 3, 1, {"num_groups": 2, "stride": 3, "output_padding": 2}),
    "unbatched": (None, 8, 16, 4, 3, {"num_groups": 4}),
    "one-group": (2, 8, 16, 4, 3, {"num_groups": 1}),
    "one-channel": (2, 1, 1, 4, 3, {"num_groups": 1}),
}


def shape_block(name, **overrides) -> Block:
    n, c, k, extent, kernel, numbers = SHAPES[name]
    return make_block(n, c, k, extent, kernel, **numbers, **overrides)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_like_eager(device, shape, dtype, layout):
    block = shape_block(shape, device=device, dtype=dtype)
    check_like_eager(block.channels_last() if layout == "NDHWC" else block)


@pytest.mark.parametrize("shape", ["kernelbench-small", "odd-extents", "padding", "monai-unet"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_requested_precision_holds_whatever_the_setting(device, shape, precision, setting):
    block = replace(shape_block(shape, device=device), precision=precision)
    torch.backends.cudnn.conv.fp32_precision = setting
    check_like_eager(block)
    assert torch.backends.cudnn.conv.fp32_precision == setting


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("beta", [False, True])
def test_optional_tensors(device, bias, gamma, beta):
    block = shape_block("kernelbench-small" if not bias else "padding", device=device)
    if not gamma:
        block = replace(block, norm_weight=None)
    if not beta:
        block = replace(block, norm_bias=None)
    check_like_eager(block)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("which", ["one", "all", "half"])
@pytest.mark.parametrize("index", range(OPINFO_COUNT))
def test_opinfo_samples(device, index, which, affine):
    check_like_eager(opinfo_block(index, which, affine, device))


def opinfo_block(index, which, affine, device, dtype=torch.float32) -> Block:
    """One of PyTorch's samples for conv_transpose3d, with a normalization after it."""
    sample = list(_OPINFO.sample_inputs(device.type, dtype))[index]
    weight, *bias = sample.args
    k = weight.shape[1] * sample.kwargs.get("groups", 1)
    num_groups = {
        "one": 1,
        "all": k,
        "half": max(d for d in range(1, k + 1) if k % d == 0 and (d < k or k == 1)),
    }
    norm = {}
    if affine:
        norm = {name: torch.randn(k, device=device, dtype=dtype) for name in ("norm_weight", "norm_bias")}
    return Block(
        sample.input, weight, *bias, **sample.kwargs, num_groups=num_groups[which], eps=1e-5, **norm
    ).map(torch.Tensor.detach)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 8, 16, 5, 3, {}),
        (2, 8, 8, 4, 3, {"stride": 2, "padding": 1}),
        (1, 16, 24, (3, 4, 9), 2, {}),
        (2, 3, 20, 5, 3, {}),
        (2, 20, 3, 4, 3, {}),
        (2, 16, 32, 4, 3, {"groups": 2}),
    ],
)
def test_relu_conv_is_exact_on_integers(device, dtype, layout, shape):
    *sizes, numbers = shape
    block = integer_block(*sizes, device=device, dtype=dtype, **numbers)
    check_exact_relu_conv(block.channels_last() if layout == "NDHWC" else block)


def random_block(generator: random.Random, device) -> Block:
    """Small shapes of every kind, half of them within the SM90 plan's reach."""
    dense = generator.random() < 0.5
    groups = generator.choice([1, 1, 2] if dense else [1, 1, 2, 3])
    unit = 8 if dense else 1
    c = groups * unit * generator.randint(1, 3)
    k = groups * unit * generator.randint(1, 4)
    numbers = {"num_groups": generator.choice([d for d in range(1, k + 1) if k % d == 0])}
    kernel = [generator.randint(1, 4) for _ in range(3)]
    extent = [generator.randint(2, 6) for _ in range(3)]
    if not dense:
        numbers["stride"] = tuple(generator.randint(1, 3) for _ in range(3))
        numbers["dilation"] = tuple(generator.randint(1, 2) for _ in range(3))
        limits = zip(numbers["stride"], numbers["dilation"], strict=True)
        numbers["output_padding"] = tuple(generator.randrange(max(pair)) for pair in limits)
    # Keeps the output's extent at 2 or more: (extent-1)*stride >= 1, and padding takes less than the kernel.
    dilation = numbers.get("dilation", (1, 1, 1))
    numbers["padding"] = tuple(
        generator.randint(0, (dilation[axis] * (kernel[axis] - 1)) // 2) for axis in range(3)
    )
    torch.manual_seed(generator.randrange(2**31))
    block = make_block(
        generator.choice([None, 1, 2, 3]),
        c,
        k,
        extent,
        kernel,
        groups=groups,
        bias=generator.random() < 0.5,
        affine=generator.random() < 0.7,
        dtype=generator.choice([torch.float32, torch.bfloat16, torch.float16]),
        device=device,
        **numbers,
    )
    block = replace(block, precision=generator.choice(["ieee", "tf32"]))
    return block.channels_last() if generator.random() < 0.5 else block


@pytest.mark.parametrize("case", range(RANDOM_CASES))
def test_random_shapes(device, case):
    """Half within the SM90 plan's reach, half anywhere."""
    print(f"repeat with UPCONV3D_SEED={SEED}")  # pytest shows it where the case fails
    block = random_block(random.Random(f"{SEED}-{case}"), device)
    # A few hundred values, most of them equal, share one rounding error instead of averaging many.
    check_like_eager(block, floor_factor=8 if block.input.dtype == torch.float32 else 2)


@given(
    mean=st.floats(-1e3, 1e3),
    scale=st.floats(1e-3, 1e3),
    num_groups=st.sampled_from([1, 2, 4, 8]),
    eps=st.floats(1e-8, 1e-2),
)
def test_scales_and_shifts_of_the_activation(mean, scale, num_groups, eps):
    torch.manual_seed(5)
    block = make_block(2, 4, 8, 3, 2, num_groups=num_groups)
    check_like_eager(
        replace(block, input=block.input * scale, bias=block.bias + mean, eps=eps), floor_factor=8
    )


def test_large_mean_keeps_the_variance(device):
    """bias 1e4 in float32: E[x^2] - E[x]^2 would lose everything."""
    block = shape_block("kernelbench-small", device=device)
    block = replace(block, bias=torch.full((32,), 1e4, device=device))
    reference = block.to(torch.float64).eager()
    y = block.ours()
    assert (
        float((y.double() - reference).abs().max()) < 0.02
    )  # 1e4 has a spacing of 1e-3; activations vary by 1
    check_like_eager(block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_constant_volumes(device, dtype, layout):
    for block in alike_blocks(device, dtype):
        check_alike(block.channels_last() if layout == "NDHWC" else block)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["input", "weight", "bias", "norm_weight", "norm_bias"])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_nan_and_inf_flow_as_in_pytorch(device, value, where, layout):
    block = shape_block("padding", device=device)
    getattr(block, where).view(-1)[3] = value
    block = block.channels_last() if layout == "NDHWC" else block
    y, y_eager = block.ours(), block.eager()
    finite = y_eager.isfinite()
    assert torch.equal(y.isfinite(), finite)
    # An infinite norm_weight: PyTorch computes a*scale + (shift - mean*scale), which is inf - inf, NaN,
    # throughout; (a - mean)*scale + shift keeps the infinities.
    if where != "norm_weight":
        torch.testing.assert_close(y[~finite], y_eager[~finite], equal_nan=True)
    torch.testing.assert_close(y[finite], y_eager[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("shape", ["groups-of-16", "groups-of-64", "groups-of-5", "grouped"])
def test_nan_stays_in_its_group(device, shape, layout, dtype):
    """Groups of the normalization lie within those of the convolution, so that nothing else may carry it."""
    block = shape_block(shape, device=device, dtype=dtype)
    groups, c, k = block.groups, block.input.shape[1], block.weight.shape[1]
    block = replace(block, num_groups=2 * groups if k % 2 == 0 else groups)
    if device.type == "cuda" and block.plan().algorithm == "cuda_library":
        pytest.skip("cuDNN joins groups of few channels, whose NaN then meets the others' zeros")
    poisoned = block.input.clone()
    poisoned[:, -(c // groups) :] = float("nan")
    both = [block, replace(block, input=poisoned)]
    y, y_poisoned = (b.channels_last().ours() if layout == "NDHWC" else b.ours() for b in both)
    assert bool(y_poisoned[:, -k:].isnan().all())
    torch.testing.assert_close(y_poisoned[:, :-k], y[:, :-k], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_repeat_bit_for_bit(device, dtype):
    torch.backends.cudnn.deterministic = (
        True  # float64 takes the library plan, whose convolution is PyTorch's
    )
    block = shape_block("monai-unet" if device.type == "cpu" else "padding", device=device, dtype=dtype)
    first = block.ours()
    assert all(torch.equal(block.ours(), first) for _ in range(3))


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("num_groups", [1, 3, 12])
def test_threads_share_the_work_without_changing_it(layout, num_groups):
    """Ours splits ReLU + GroupNorm in a fixed way; float64, for there PyTorch's convolution does too."""
    block = make_block(2, 8, 12, 9, 3, num_groups=num_groups, dtype=torch.float64)
    block = block.channels_last() if layout == "NDHWC" else block
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(block.ours())
            check_like_eager(block.to(torch.float32))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_inputs_are_not_changed(device):
    block = shape_block("padding", device=device)
    before = {name: tensor.clone() for name, tensor in block.tensors().items()}
    block.ours()
    assert all(torch.equal(before[name], tensor) for name, tensor in block.tensors().items())
