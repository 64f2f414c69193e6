# SPDX-License-Identifier: Apache-2.0
"""The backward pass of the SM90 plan: values, bits, memory, and what may be asked of it.

`pytest -s` shows the figures.
"""

import os
from dataclasses import replace

import pytest
import torch
import upconv3d
from conftest import SEED
from oracles import Block, check_gradients_like_eager, make_block, peak_memory_bytes, relative_error
from test_random_problems import random_problem

KINDS = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
}
# (n, c, k, extent, kernel) and the other numbers
SHAPES = {
    "headline_small": ((2, 64, 128, (6, 10, 9), 3), {"num_groups": 8}),
    "decoder": (
        (1, 128, 64, (5, 6, 7), 3),
        {"num_groups": 8, "stride": 2, "padding": 1, "output_padding": 1},
    ),
    "kernel_is_stride": ((2, 64, 48, 6, 2), {"num_groups": 16, "stride": 2}),
    "anisotropic": ((2, 32, 24, (4, 9, 8), (1, 2, 2)), {"num_groups": 3, "stride": (1, 2, 2), "bias": False}),
    "patch": ((3, 96, 40, 4, 4), {"num_groups": 5, "stride": 2, "padding": 1}),
    "odd_channels": ((2, 20, 35, 7, 3), {"num_groups": 7, "padding": 1}),
    "padding": ((2, 64, 64, 8, 3), {"num_groups": 64, "padding": 2}),
    "dilation": ((1, 64, 64, 7, 3), {"num_groups": 1, "dilation": (2, 1, 3), "padding": 1}),
    "stride3": ((1, 64, 64, 4, 3), {"num_groups": 4, "stride": 3, "affine": False}),
    "conv_groups": ((2, 128, 128, 6, 3), {"num_groups": 8, "groups": 2}),
}
RANDOM_PROBLEMS = int(os.environ.get("UPCONV3D_GRADIENT_PROBLEMS", "150"))
BATCHES = 5

every_kind = pytest.mark.parametrize("kind", KINDS)
both_layouts = pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])


def kind_block(shape: str, kind: str, layout: str, device) -> Block:
    sizes, numbers = SHAPES[shape]
    dtype, precision = KINDS[kind]
    block = replace(make_block(*sizes, device=device, dtype=dtype, **numbers), precision=precision)
    return block.channels_last() if layout == "NDHWC" else block


def gradients(block: Block, grad_y: torch.Tensor, **keywords) -> dict[str, torch.Tensor]:
    """Gradients of all tensors of the block."""
    leaves = block.requires_grad()
    args, kwargs = leaves.arguments()
    y = upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, **keywords)
    y.backward(grad_y)
    return {name: tensor.grad for name, tensor in leaves.tensors().items()}


def training_plan(block: Block) -> upconv3d.Plan:
    args, kwargs = block.arguments()
    return upconv3d.explain(*args, **kwargs, training=True)


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", SHAPES)
def test_like_eager(hopper, shape, layout, kind):
    block = kind_block(shape, kind, layout, hopper)
    assert training_plan(block).keeps_activation, training_plan(block)
    check_gradients_like_eager(block)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_problems(hopper, batch):
    for index in range(batch, RANDOM_PROBLEMS, BATCHES):
        text, block = random_problem(index, hopper)
        try:
            check_gradients_like_eager(block)
        except AssertionError as error:
            raise AssertionError(f"UPCONV3D_SEED={SEED}, problem {index}: {text}") from error


@every_kind
@both_layouts
def test_same_bits_and_recompute(hopper, layout, kind):
    block = kind_block("headline_small", kind, layout, hopper)
    grad_y = torch.randn_like(block.ours())
    first = gradients(block, grad_y)
    for again in (gradients(block, grad_y), gradients(block, grad_y, recompute=True)):
        for name, gradient in first.items():
            assert torch.equal(gradient, again[name]), name
    # In inference such a small block may be the library plan's, or held, whose moments are other tiles'.
    args, kwargs = block.requires_grad().arguments()
    results = [
        upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=recompute)
        for recompute in (False, True)
    ]
    assert torch.equal(results[1], block.ours() if block.plan().held else results[0])


@every_kind
@both_layouts
def test_gradients_lie_as_what_they_belong_to(hopper, layout, kind):
    block = kind_block("decoder", kind, layout, hopper)
    y = block.ours()
    dense = torch.randn_like(y)
    expected = gradients(block, dense)
    for name, tensor in block.tensors().items():
        assert expected[name].stride() == tensor.stride(), name
    other = torch.channels_last_3d if layout == "NCDHW" else torch.contiguous_format
    padded = torch.zeros(*y.shape[:-1], y.shape[-1] + 3, device=hopper, dtype=y.dtype)
    padded[..., : y.shape[-1]] = dense
    for grad_y in (dense.contiguous(memory_format=other), padded[..., : y.shape[-1]]):
        for name, gradient in gradients(block, grad_y).items():
            assert relative_error(gradient, expected[name].double()) <= 1e-2, name
    constant = torch.ones((), device=hopper, dtype=y.dtype).expand_as(y)
    own = torch.contiguous_format if layout == "NCDHW" else torch.channels_last_3d
    repeated = gradients(block, constant.contiguous(memory_format=own))
    for name, gradient in gradients(block, constant).items():
        assert torch.equal(gradient, repeated[name]), name


@every_kind
@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e4])
def test_tiny_and_huge_gradients(hopper, scale, kind):
    """Gradients are linear in grad_y: a power of two in comes out again, where the dtype can hold it."""
    block = kind_block("headline_small", kind, "NDHWC", hopper)
    factor = 2.0 ** round(torch.tensor(scale).log2().item())
    if kind == "float16" and scale != 1e4:
        pytest.skip("float16 holds no such gradients, PyTorch's neither")
    grad_y = torch.randn_like(block.ours()) * 2.0**-10
    expected = gradients(block, grad_y)
    for name, gradient in gradients(block, grad_y * factor).items():
        assert torch.isfinite(gradient).all(), name
        assert relative_error(gradient.double() / factor, expected[name].double()) <= 1e-3, name


@both_layouts
@pytest.mark.parametrize("k", [128, 40, 136])
def test_uneven_gradients(hopper, monkeypatch, k, layout):
    """Samples and channels whose gradients are 2^20 apart: float32's accuracy still, over each tensor."""
    block = make_block(3, 64, k, (6, 10, 9), 3, num_groups=8, device=hopper, dtype=torch.float32)
    block = replace(block, precision="ieee")
    block = block.channels_last() if layout == "NDHWC" else block
    y = block.ours()
    sizes = 2.0 ** torch.randint(-10, 11, (3, k, 1, 1, 1), device=hopper)
    grad_y = torch.randn_like(y) * sizes
    wide = block.to(torch.float64).requires_grad()
    conv = wide.conv().detach()
    # Gates that rounding decides would be most of the error.
    grad_y = torch.where(conv.abs() < 1e-4 * conv.std(), 0.0, grad_y)
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    eager = block.requires_grad()
    eager.eager().backward(grad_y)
    wide.eager().backward(grad_y.double())
    for name, gradient in gradients(block, grad_y).items():
        right = getattr(wide, name).grad
        error, eager_error = (relative_error(g, right) for g in (gradient, getattr(eager, name).grad))
        assert error <= max(2 * eager_error, 2.0**-21), f"{name}: {error:.2e}, eager {eager_error:.2e}"


@every_kind
def test_nan_spreads_as_far_as_eagers(hopper, kind):
    """A NaN in grad_y reaches every gradient of its norm group, and no other sample's grad_x."""
    block = kind_block("headline_small", kind, "NDHWC", hopper)
    grad_y = torch.randn_like(block.ours())
    grad_y[0, 3, 2, 1, 4] = float("nan")
    found = gradients(block, grad_y)
    assert found["input"][0].isnan().any() and not found["input"][1].isnan().any()
    assert found["norm_bias"].isnan().nonzero().flatten().tolist() == [3]


@every_kind
def test_small_activations_beside_large_ones(hopper, kind):
    """Outliers in the input must not close ReLU's gate of what is small beside them."""
    block = kind_block("headline_small", kind, "NCDHW", hopper)
    outliers = torch.rand(block.input.shape, device=hopper) < 0.002
    block = replace(block, input=torch.where(outliers, block.input * 1e4, block.input))
    grad_y = torch.randn_like(block.ours())
    ours = gradients(block, grad_y)
    eager, wide = block.requires_grad(), block.to(torch.float64).requires_grad()
    eager.eager().backward(grad_y)
    wide.eager().backward(grad_y.double())
    for name in ("input", "weight", "bias"):
        right = getattr(wide, name).grad
        error, eager_error = (relative_error(g, right) for g in (ours[name], getattr(eager, name).grad))
        assert error <= max(2 * eager_error, 2e-2), f"{name}: {error:.2e}, eager {eager_error:.2e}"


@every_kind
@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "norm_weight", "norm_bias"])
def test_only_what_is_asked_for(hopper, wanted, kind):
    block = kind_block("headline_small", kind, "NCDHW", hopper)
    grad_y = torch.randn_like(block.ours())
    expected = gradients(block, grad_y)[wanted]
    alone = replace(block, **{wanted: getattr(block, wanted).detach().requires_grad_()})
    (gradient,) = torch.autograd.grad(alone.ours(), getattr(alone, wanted), grad_y)
    assert torch.equal(gradient, expected)


@every_kind
def test_cuda_graph_of_a_training_step(hopper, kind):
    block = kind_block("decoder", kind, "NDHWC", hopper).requires_grad()
    grad_y = torch.randn_like(block.ours())
    tensors = list(block.tensors().values())

    def step():
        return torch.autograd.grad(block.ours(), tensors, grad_y)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for gradient in captured:
        gradient.fill_(float("nan"))
    graph.replay()
    for gradient, right in zip(captured, expected, strict=True):
        assert torch.equal(gradient, right)


@every_kind
@both_layouts
def test_peak_memory(hopper, layout, kind):
    """Forward and backward, gradients included: at most 0.7 of what eager needs."""
    dtype, precision = KINDS[kind]
    block = make_block(4, 64, 128, 32, 3, num_groups=8, device=hopper, dtype=dtype)
    block = replace(block, precision=precision)
    block = (block.channels_last() if layout == "NDHWC" else block).requires_grad()
    grad_y = torch.randn_like(block.ours())
    tensors = list(block.tensors().values())

    ours, eager = (
        peak_memory_bytes(lambda run=run: torch.autograd.grad(run(), tensors, grad_y))
        for run in (block.ours, block.eager)
    )
    print(f"{kind} {layout}: {ours / 2**20:.0f} MiB, eager {eager / 2**20:.0f} MiB, {ours / eager:.2f}")
    assert ours <= 0.7 * eager


@every_kind
def test_kept_graph(hopper, kind):
    """A backward that keeps the graph leaves what the next one reads; the last one may overwrite it."""
    block = kind_block("headline_small", kind, "NDHWC", hopper).requires_grad()
    tensors = list(block.tensors().values())
    y = block.ours()
    grad_y = torch.randn_like(y)
    first, second, last = (
        torch.autograd.grad(y, tensors, grad_y, retain_graph=retain) for retain in (True, True, False)
    )
    for gradients_of_one in zip(first, second, last, strict=True):
        assert torch.equal(gradients_of_one[0], gradients_of_one[1])
        assert torch.equal(gradients_of_one[0], gradients_of_one[2])


@both_layouts
def test_what_the_forward_kept_must_fit(hopper, layout):
    block = kind_block("headline_small", "bfloat16", layout, hopper)
    args, kwargs = block.arguments()
    numbers = [[v] * 3 if isinstance(v, int) else list(v) for v in (args[3], args[4], args[5], args[7])]
    stride, padding, output_padding, dilation = numbers
    with pytest.raises(RuntimeError, match="what the forward kept must be of the same call"):
        torch.ops.upconv3d.fused_backward(
            torch.randn_like(block.ours()),
            *args[:3],
            stride,
            padding,
            output_padding,
            1,
            dilation,
            kwargs["num_groups"],
            kwargs["norm_weight"],
            kwargs["eps"],
            kwargs["precision"],
            torch.empty(256, dtype=torch.uint8, device=hopper),
            31,
            False,
        )
