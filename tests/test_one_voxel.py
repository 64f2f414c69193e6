# SPDX-License-Identifier: Apache-2.0
"""Inputs of one voxel per sample, whose convolution the library plan asks for as a matrix product."""

from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import (
    ERROR_FACTOR,
    check_exact_relu_conv,
    check_gradients_like_eager,
    check_like_eager,
    integer_block,
    make_block,
    relative_error,
)
from tails import Call, gradients, make_call
from test_norm_act import _check_errors
from upconv3d import _convolution

# (n, c, k, extent, kernel) and the other numbers; of products, every output has one tap
PRODUCTS = {
    "latent_vector": ((3, 20, 16, 1, 4), {}),
    "one_sample": ((1, 24, 8, 1, (2, 3, 4)), {}),
    "unbatched": ((None, 24, 8, 1, 4), {}),
    "stride_that_does_not_matter": ((4, 16, 8, 1, 3), {"stride": (5, 2, 1)}),
    "padding": ((2, 16, 8, 1, 4), {"stride": 2, "padding": 1}),
    "odd_padding": ((2, 16, 8, 1, (3, 4, 5)), {"stride": 2, "padding": 1, "output_padding": (1, 0, 0)}),
    "one_tap": ((5, 16, 8, 1, 3), {"padding": 1}),
    "ragged": ((2, 13, 6, 1, (1, 2, 5)), {}),
}
OTHERS = {
    "outputs_without_a_tap": ((2, 16, 8, 1, 2), {"stride": 4, "output_padding": 2}),
    "output_padding_beyond_padding": ((2, 16, 8, 1, 4), {"stride": 3, "padding": 1, "output_padding": 2}),
    "dilation": ((2, 16, 8, 1, 3), {"dilation": 2}),
    "dilation_and_padding": ((2, 16, 8, 1, (3, 4, 4)), {"dilation": (2, 1, 1), "padding": (2, 0, 0)}),
    "conv_groups": ((2, 16, 8, 1, 4), {"groups": 2}),
    "two_voxels": ((2, 16, 8, (1, 1, 2), 4), {}),
}
SHAPES = PRODUCTS | OTHERS
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _strided(tensor):
    """The same values in neither of the two orders."""
    memory = torch.empty(tensor.numel() * 2 + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1::2].view(tensor.shape).copy_(tensor)


def _last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last_3d)


WEIGHTS = {"NCDHW": lambda weight: weight, "NDHWC": _last, "neither": _strided}
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_weight = pytest.mark.parametrize("weight", WEIGHTS)


def _block(shape, weight, make=make_block, **more):
    sizes, numbers = SHAPES[shape]
    block = make(*sizes, **numbers, **more)
    return replace(block, weight=WEIGHTS[weight](block.weight))


@every_shape
@every_weight
def test_sums_are_exact(device, shape, weight):
    if shape == "one_tap":
        pytest.skip("a group of one value is its norm_bias; test_errors has two channels per group")
    check_exact_relu_conv(_block(shape, weight, integer_block, device=device))


@every_shape
@every_weight
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_errors(device, shape, weight, dtype, bias):
    check_like_eager(_block(shape, weight, device=device, dtype=dtype, bias=bias, num_groups=2))


@pytest.fixture
def products(monkeypatch):
    """The shapes of weights whose gradients were a product's."""
    found = []
    computed = _convolution._product_backward

    def record(grad_c, x, weight, args, mask):
        gradients = computed(grad_c, x, weight, args, mask)
        if gradients is not None:
            found.append(weight.shape)
        return gradients

    monkeypatch.setattr(_convolution, "_product_backward", record)
    return found


@every_shape
@every_weight
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_gradients(device, shape, weight, dtype, bias, products):
    block = _block(shape, weight, device=device, dtype=dtype, bias=bias, num_groups=2)
    if dtype is not torch.float64:  # whose reference would be as exact
        check_gradients_like_eager(block)
    eager, ours = block.requires_grad(), block.requires_grad()
    eager.eager().square().sum().backward()
    ours.ours().square().sum().backward()
    assert ours.weight.grad.stride() == eager.weight.grad.stride()
    if dtype is torch.float64:
        torch.testing.assert_close(ours.weight.grad, eager.weight.grad)
        torch.testing.assert_close(ours.input.grad, eager.input.grad)
    if dtype is torch.float64 and device.type == "cuda":
        return  # autograd records PyTorch's calls
    is_float32_on_cpu = dtype is torch.float32 and device.type == "cpu"
    assert bool(products) == (shape in PRODUCTS and not is_float32_on_cpu)


def test_gradients_of_no_samples(device):
    """Of which no row is multiplied."""
    block = make_block(0, 16, 8, 1, 4, device=device, dtype=torch.bfloat16, bias=False, num_groups=2)
    leaves = block.requires_grad()
    leaves.ours().sum().backward()
    assert leaves.weight.grad.abs().max() == 0 and leaves.input.grad.shape == (0, 16, 1, 1, 1)


@pytest.mark.parametrize("shape", ["latent_vector", "padding"])
def test_gradients_of_each_sample(device, shape):
    """vmap of grad, also where idle taps are filled up."""
    block = _block(shape, "NCDHW", device=device, dtype=torch.float64, bias=False, num_groups=2)
    numbers = {"num_groups": 2, **SHAPES[shape][1]}

    def loss(weight, x):
        return upconv3d.conv_transpose3d_relu_group_norm(x, weight, **numbers).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(block.weight, block.input.unsqueeze(1))
    single = [torch.func.grad(loss)(block.weight, x.unsqueeze(0)) for x in block.input]
    torch.testing.assert_close(found, torch.stack(single))


def test_second_backward_under_autocast(device):
    """Whose operators are those that PyTorch's nodes call: on CUDA it casts their convolutions, too."""
    block = _block("latent_vector", "NCDHW", device=device, dtype=torch.float32, bias=False, num_groups=2)

    def second(block, call, autocast=True):
        leaves = block.requires_grad()
        (grad,) = torch.autograd.grad(call(leaves).square().sum(), leaves.weight, create_graph=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            grad.square().sum().backward()
        return leaves.input.grad

    exact = second(block.to(torch.float64), type(block).eager, autocast=False)
    ours, eager = second(block, type(block).ours), second(block, type(block).eager)
    limit = max(ERROR_FACTOR * relative_error(eager, exact), 2.0**-9 if device.type == "cuda" else 1e-5)
    assert relative_error(ours, exact) <= limit


@pytest.mark.parametrize("weight", ["NCDHW", "NDHWC"])
def test_result_lies_as_pytorch_returns_it(device, weight):
    block = _block("latent_vector", weight, device=device, num_groups=2)
    assert block.ours().stride() == block.conv().stride()
    last = replace(block, input=block.input.to(memory_format=torch.channels_last_3d))
    assert last.ours().stride() == last.conv().stride()
    check_like_eager(last)


@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plan(shape, dtype, cuda):
    plan = _block(shape, "NCDHW", device=cuda, dtype=dtype, num_groups=2).plan()
    assert plan.algorithm == "cuda_library" and "one voxel per sample" in plan.reason, plan


# "dilation_and_padding" is a product where idle taps are left out, as the plan does.
@pytest.mark.parametrize("shape", sorted(OTHERS.keys() - {"dilation_and_padding"}))
def test_plan_of_others(shape, cuda):
    assert "one voxel per sample" not in _block(shape, "NCDHW", device=cuda, num_groups=2).plan().reason


def test_the_library_is_asked_for_a_product(device):
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    block = _block("padding", "NCDHW", device=device, dtype=dtype, num_groups=2)
    with torch.profiler.profile(record_shapes=True) as profile:
        block.ours()
    sizes = {event.name: event.input_shapes for event in profile.events()}
    if device.type == "cpu":
        assert sizes["aten::mm"][:2] == [[2, 16], [16, 64]]
    else:
        assert sizes["aten::_convolution"][:2] == [[2, 16, 1, 1, 1], [16, 64, 1, 1, 1]]


TAILS = {
    "no_norm": {"norm": None, "activation": "silu"},
    "no_norm_relu": {"norm": None},
    "norm_act": {"activation": "leaky_relu"},
    "skip": {"skip": True},
    "return_conv": {"return_conv": True},
    "act_norm_return_conv": {"order": "act_norm", "return_conv": True},
}


def _call(tail, weight, device, dtype) -> Call:
    named = dict(TAILS[tail])
    skip = named.pop("skip", False)
    call = make_call(3, 20, 16, (1, 1, 1), 4, padding=0, device=device, dtype=dtype, skip=skip, **named)
    return replace(call, tensors=call.tensors | {"weight": WEIGHTS[weight](call.tensors["weight"])})


@pytest.mark.parametrize("tail", TAILS)
@every_weight
def test_family_in_float64(device, tail, weight):
    call = _call(tail, weight, device, torch.float64)
    ours, eager = gradients(call, Call.ours), gradients(call, Call.eager)
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("tail", TAILS)
@every_weight
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_family(device, tail, weight, dtype):
    _check_errors(_call(tail, weight, device, dtype), "ieee")


def test_training_gives_the_bits_of_inference():
    """On the CPU: cuDNN's kernels are deterministic ones in inference alone."""
    block = _block("latent_vector", "NCDHW", dtype=torch.bfloat16, bias=False, num_groups=2)
    assert torch.equal(block.ours(), block.requires_grad().ours().detach())


def test_explain_says_so(cuda):
    block = _block("latent_vector", "NDHWC", device=cuda, dtype=torch.bfloat16, num_groups=2)
    plan = upconv3d.explain(block.input, block.weight, block.bias, num_groups=2)
    assert plan.algorithm == "cuda_library" and "one voxel per sample" in str(plan)


def test_accelerate_takes_it_without_gradients(cuda, small_blocks_left, monkeypatch):
    monkeypatch.setattr("upconv3d._accelerated.block.SMALL_BLOCK_VALUES", small_blocks_left)
    modules = (torch.nn.ConvTranspose3d(64, 32, 4), torch.nn.ReLU(), torch.nn.GroupNorm(8, 32))
    model = torch.nn.Sequential(*modules).to(cuda)
    x = torch.randn(2, 64, 1, 1, 1, device=cuda)
    expected = model(x)
    report = upconv3d.accelerate(model, sample=(x,))
    assert [finding.plan for finding in report.findings] == ["cuda_library"]
    assert type(model(x).grad_fn).__name__ == "NativeGroupNormBackward0"
    with torch.no_grad():
        y = model(x)
    # Either may multiply in TF32.
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
