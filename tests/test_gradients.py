# SPDX-License-Identifier: Apache-2.0
"""Gradients: the oracles, gradcheck and gradgradcheck, layouts, partial requests."""

import types
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import Block, check_gradients_like_eager, make_block, relative_error
from test_values import OPINFO_COUNT, SHAPES, opinfo_block, shape_block
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from upconv3d import _autograd, _convolution
from upconv3d.functional import triple


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_like_eager(device, shape, dtype, layout):
    block = shape_block(shape, device=device, dtype=dtype)
    check_gradients_like_eager(block.channels_last() if layout == "NDHWC" else block)


@pytest.mark.parametrize("shift", [0, 1, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("recompute", [False, True])
def test_cpu_mean_far_larger_than_the_spread(recompute, layout, dtype, shift):
    """The convolution may be kept in NDHWC, of which PyTorch's group_norm on the CPU loses the variance."""
    block = make_block(2, 16, 32, 12, 3, num_groups=8, stride=2, padding=1, dtype=dtype)
    block = replace(block, bias=torch.full_like(block.bias, shift))
    grad_y = torch.randn_like(block.eager())

    def run(block, call):
        leaves = block.requires_grad()
        tensors = leaves.tensors()
        grads = torch.autograd.grad(call(leaves), list(tensors.values()), grad_y.to(block.input.dtype))
        return dict(zip(tensors, grads, strict=True))

    def ours(block):
        args, kwargs = block.arguments()
        return upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=recompute)

    exact, theirs = run(block.to(torch.float64), Block.eager), run(block, Block.eager)
    for name, grad in run(block.channels_last() if layout == "NDHWC" else block, ours).items():
        limit = 2 * relative_error(theirs[name], exact[name]) + torch.finfo(dtype).eps
        assert relative_error(grad, exact[name]) <= limit, name


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["eager", "recompute", "operator", "func"])
def test_cpu_autocast_errors_like_pytorchs(way, low):
    """PyTorch does not cast the norm's parameters there, nor their gradients, which float16 may overflow."""
    block = make_block(2, 16, 32, 12, 3, num_groups=8, stride=2, padding=1)
    target = torch.randn_like(block.eager()) + 4
    names = tuple(block.tensors())
    scale = 65536.0 if low == torch.float16 else 1.0

    def loss(run, tensors):
        here = replace(block, **dict(zip(names, tensors, strict=True)))
        with torch.autocast("cpu", low, enabled=here.input.dtype == torch.float32):
            y = run(here)
        return (y.to(here.input.dtype) - target).square().mean() * scale

    def ours(here):
        args, kwargs = here.arguments()
        if way == "operator":
            x, w, b, s, p, o, groups, d = args
            numbers = ([s] * 3, [p] * 3, [o] * 3, groups, [d] * 3)
            return torch.ops.upconv3d.conv_transpose3d_relu_group_norm(
                x, w, b, *numbers, *(kwargs[name] for name in kwargs)
            )
        return upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=way == "recompute")

    def run(call, of):
        tensors = list(of.requires_grad().tensors().values())
        if way == "func":
            values = [tensor.detach() for tensor in tensors]
            return torch.func.grad(lambda values: loss(call, values))(values)
        return torch.autograd.grad(loss(call, tensors), tensors)

    exact, theirs = run(Block.eager, block.to(torch.float64)), run(Block.eager, block)
    for name, grad, other, reference in zip(names, run(ours, block), theirs, exact, strict=True):
        assert bool(grad.isfinite().all()) or not bool(other.isfinite().all()), name
        if other.isfinite().all():
            assert relative_error(grad, reference) <= 1.5 * relative_error(other, reference) + 1e-6, name


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_cpu_norm_alone_is_trained(layout):
    """PyTorch's group_norm of channels_last_3d ends the process where its input needs no gradient."""
    block = make_block(2, 16, 32, 12, 3, num_groups=8, stride=2, padding=1)
    block = block.channels_last() if layout == "NDHWC" else block
    norm = {name: getattr(block, name).clone().requires_grad_() for name in ("norm_weight", "norm_bias")}
    y = replace(block, **norm).ours()
    grads = torch.autograd.grad(y, list(norm.values()), torch.ones_like(y))
    xhat = replace(block, norm_weight=None, norm_bias=None).ours()
    torch.testing.assert_close(grads[0], xhat.double().sum((0, 2, 3, 4)).float(), rtol=1e-3, atol=1e-2)
    assert grads[1].unique().tolist() == [y.numel() / 32]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("index", range(OPINFO_COUNT))
def test_opinfo_samples(device, index, which, affine):
    check_gradients_like_eager(opinfo_block(index, which, affine, device))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_requested_precision_holds_in_the_backward(device, precision, setting):
    torch.backends.cudnn.conv.fp32_precision = setting
    check_gradients_like_eager(replace(shape_block("padding", device=device), precision=precision))
    assert torch.backends.cudnn.conv.fp32_precision == setting


def _function_of(block: Block):
    names = list(block.tensors())

    def function(*tensors):
        return replace(block, **dict(zip(names, tensors, strict=True))).ours()

    return function, tuple(block.requires_grad().tensors().values())


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_groups": 2},
        {"num_groups": 4, "bias": False},
        {"num_groups": 1, "affine": False, "stride": 2, "padding": 1, "output_padding": 1},
        {"num_groups": 2, "groups": 2, "dilation": (1, 2, 1)},
    ],
)
@pytest.mark.parametrize("n", [None, 1, 2])
def test_gradcheck_and_gradgradcheck(device, n, numbers):
    block = make_block(n, 2, 4, 2, 2, device=device, dtype=torch.float64, **numbers)
    function, tensors = _function_of(block)
    # cuDNN's gradients may differ in the last bits from call to call.
    assert gradcheck(function, tensors, nondet_tol=1e-10)
    assert gradgradcheck(function, tensors, nondet_tol=1e-10, fast_mode=True)


@pytest.mark.parametrize(
    "wanted", [["input"], ["weight"], ["bias"], ["norm_weight"], ["norm_bias"], ["input", "norm_bias"]]
)
def test_only_what_is_asked_for(device, wanted):
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # for eager's backward too
    block = shape_block("padding", device=device)
    expected = {}
    for call in ("eager", "ours"):
        tensors = {name: getattr(block, name).detach().clone().requires_grad_() for name in wanted}
        y = getattr(replace(block, **tensors), call)()
        assert y.requires_grad
        y.square().sum().backward()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor.grad, expected.setdefault(name, tensor.grad), rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_layout_of_gradients(device, layout, dtype):
    """Each in the memory format of what it belongs to, whatever the format of grad_y."""
    block = shape_block("kernelbench-small", device=device, dtype=dtype)
    block = block.channels_last() if layout == "NDHWC" else block
    block = block.requires_grad()
    y = block.ours()
    for memory_format in (torch.contiguous_format, torch.channels_last_3d):
        grad_y = torch.randn(y.shape, device=device).to(dtype).contiguous(memory_format=memory_format)
        grads = torch.autograd.grad(y, [block.input, block.weight], grad_y, retain_graph=True)
        for grad, owner in zip(grads, (block.input, block.weight), strict=True):
            assert grad.stride() == owner.stride()


def test_expanded_and_strided_grad_y(device):
    block = shape_block("padding", device=device).requires_grad()
    y = block.ours()
    ones = torch.autograd.grad(
        y, block.weight, torch.ones((), device=device).expand(y.shape), retain_graph=True
    )
    dense = torch.autograd.grad(y, block.weight, torch.ones_like(y), retain_graph=True)
    torch.testing.assert_close(ones, dense)


def test_empty_batch(device):
    block = shape_block("padding", device=device)
    block = replace(block, input=block.input[:0]).requires_grad()
    block.ours().sum().backward()
    assert block.input.grad.shape == block.input.shape
    for name in ("weight", "bias", "norm_weight", "norm_bias"):
        grad = getattr(block, name).grad
        assert grad.shape == getattr(block, name).shape and not grad.any()


def test_empty_batch_twice_differentiable(device):
    block = shape_block("padding", device=device)
    block = replace(block, input=block.input[:0]).requires_grad()
    (grad,) = torch.autograd.grad(block.ours().sum(), block.weight, create_graph=True)
    assert not grad.any()


def test_gradient_penalty_like_eager(device):
    """A second derivative through all five tensors, in float32."""
    block = shape_block("monai-unet", device=device)
    results = []
    for call in ("ours", "eager"):
        leaf = block.requires_grad()
        (grad,) = torch.autograd.grad(getattr(leaf, call)().square().sum(), leaf.input, create_graph=True)
        grad.square().sum().backward()
        results.append([tensor.grad for tensor in leaf.tensors().values()])
    for ours, eager in zip(*results, strict=True):
        scale = float(eager.abs().max())
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_that_are_differentiated_keep_float32s_range(device, dtype):
    """Squares of these activations are beyond float16."""
    block = make_block(2, 8, 16, 6, 3, num_groups=4, device=device, dtype=dtype)
    block = replace(block, input=600 * block.input)
    grad_y = torch.randn_like(block.eager())
    assert float(block.conv().max()) ** 2 > torch.finfo(torch.float16).max

    def run(block, call, create_graph):
        leaves = block.requires_grad()
        tensors = leaves.tensors()
        y = call(leaves)
        grads = torch.autograd.grad(y, list(tensors.values()), grad_y.to(y.dtype), create_graph=create_graph)
        return dict(zip(tensors, (grad.detach() for grad in grads), strict=True))

    exact, eager = run(block.to(torch.float64), Block.eager, False), run(block, Block.eager, False)
    for name, grad in run(block, Block.ours, True).items():
        limit = 2 * relative_error(eager[name], exact[name]) + torch.finfo(dtype).eps
        assert grad.dtype is dtype and relative_error(grad, exact[name]) <= limit, name


def test_norm_bias_alone(device):
    """PyTorch's own CPU operator refuses a gradient of the bias where there is no weight."""
    block = shape_block("padding", device=device).requires_grad()
    apart = replace(block, norm_weight=None)
    leaves = [apart.input, apart.weight, apart.bias, apart.norm_bias]
    once, again = (
        torch.autograd.grad(apart.ours().sin().sum(), leaves, create_graph=kept) for kept in (False, True)
    )
    for gradient, expected in zip(once, again, strict=True):
        torch.testing.assert_close(gradient, expected.detach(), rtol=1e-3, atol=1e-3)


def test_bias_of_inference_mode(device):
    """PyTorch's convolution saves no bias, and takes such a one."""
    block = shape_block("padding", device=device).requires_grad()
    with torch.inference_mode():
        bias = block.bias.detach().clone()
    y = replace(block, bias=bias).ours()
    expected = replace(block, bias=block.bias.detach()).ours()
    assert bias.is_inference() and torch.equal(y, expected)
    for gradient, wanted in zip(
        *(torch.autograd.grad(of.sin().sum(), [block.input, block.weight]) for of in (y, expected)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted)


def test_no_graph_without_grad(device):
    block = shape_block("padding", device=device).requires_grad()
    with torch.no_grad():
        assert not block.ours().requires_grad
    with torch.inference_mode():
        assert block.ours().is_inference()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    """dtypes and values of the three calls: 16-bit convolution, float32 result on CUDA, float32 gradients."""
    block = shape_block("kernelbench-small", device=device)
    results = []
    for call in ("eager", "ours"):
        leaf = block.requires_grad()
        with torch.autocast(device.type, dtype=low):
            mixed = replace(leaf, input=leaf.input.to(low))
            y = getattr(mixed, call)()
        assert y.dtype == (torch.float32 if device.type == "cuda" else low)
        y.float().square().sum().backward()
        assert leaf.weight.grad.dtype == torch.float32
        results.append((y.float(), leaf.weight.grad))
    for ours, eager in zip(*reversed(results), strict=True):
        assert float((ours - eager).detach().norm() / eager.detach().norm()) < 8 * torch.finfo(low).eps


def test_autocast_leaves_float64_alone(device):
    torch.backends.cudnn.deterministic = True  # the library plan's convolution is PyTorch's
    block = shape_block("kernelbench-small", device=device, dtype=torch.float64)
    expected = block.ours()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(block.ours(), expected)


def test_module_trains(device):
    """A few steps of SGD take the same path as PyTorch's modules."""
    torch.manual_seed(0)
    conv = torch.nn.ConvTranspose3d(4, 8, 3, device=device)
    norm = torch.nn.GroupNorm(2, 8, device=device)
    block = upconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, device=device, precision="ieee")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    block.conv_transpose.load_state_dict(conv.state_dict())
    x = torch.randn(2, 4, 3, 3, 3, device=device)
    target = torch.randn(2, 8, 5, 5, 5, device=device)
    eager = torch.nn.Sequential(conv, torch.nn.ReLU(), norm)
    losses = []
    for model in (block, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        history = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_gradients_under_vmap_and_torch_function(device):
    """requires_grad does not show there, and the shortcut past autograd must not be taken."""
    block = shape_block("kernelbench-small", device=device, dtype=torch.float64)
    torch.backends.cudnn.deterministic = True
    xs = torch.stack([block.input, block.input * 0.5]).requires_grad_()
    torch.func.vmap(lambda x: replace(block, input=x).ours())(xs).square().sum().backward()
    apart = xs.detach().clone().requires_grad_()
    sum(replace(block, input=x).ours().square().sum() for x in apart).backward()
    torch.testing.assert_close(xs.grad, apart.grad)

    scale = torch.ones((), device=device, dtype=torch.float64, requires_grad=True)

    class Scaled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return (
                result * scale if isinstance(result, torch.Tensor) and result.is_floating_point() else result
            )

    with Scaled():
        y = block.ours()
    assert y.requires_grad


@pytest.mark.parametrize("wanted", [(False, True), (True, False), (False, False)], ids=str)
def test_unwanted_gradients_of_channels_last(device, wanted):
    """Of the operator that graphs of torch.compile call, as in a first layer or behind a frozen weight."""
    block = shape_block("padding", device=device).channels_last()
    stride = [block.stride] * 3 if isinstance(block.stride, int) else list(block.stride)
    padding = [block.padding] * 3 if isinstance(block.padding, int) else list(block.padding)
    convolution = (stride, padding, [0] * 3, block.groups, [1] * 3, block.num_groups)
    norm = (block.norm_weight, block.eps, block.precision)
    op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_backward
    grad_y = torch.randn_like(block.ours())
    arguments = (grad_y, block.input, block.weight, block.bias, *convolution, *norm)
    some, full = op(*arguments, [*wanted, True, True, True]), op(*arguments, [True] * 5)
    for index, gradient in enumerate(some):
        if index < 2 and not wanted[index]:
            assert gradient.numel() == 0
        else:
            torch.testing.assert_close(gradient, full[index], rtol=1e-3, atol=1e-3)


def test_empty_tensors_of_the_fused_backward_are_no_gradients(monkeypatch):
    """What its operator returns for a gradient that is not wanted: on the CPU by a stand-in."""
    block = shape_block("padding").channels_last()
    empty, vector = torch.empty(0), torch.ones(block.weight.shape[1])
    returned = (empty, torch.ones_like(block.weight), vector, vector, vector, empty)
    stand_in = types.SimpleNamespace(default=lambda *_: returned)
    monkeypatch.setattr(torch.ops.upconv3d, "fused_backward", stand_in, raising=False)  # a CPU build has none
    args = _convolution.BlockArguments([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, 1, 1e-5, "ieee")
    tensors = (block.input, block.input, block.weight, block.bias, block.norm_weight)
    mask = (False, True, True, True, False)
    gradients = _autograd._fused_backward(*tensors, args, mask, empty, False, None)
    assert [gradient is None for gradient in gradients] == [True, False, False, False, True]


class _Settings(TorchDispatchMode):
    """PyTorch's precision of float32 convolutions at every convolution_backward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(torch.backends.cudnn.conv.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", ["ieee", "tf32"])
@pytest.mark.parametrize("setting", ["ieee", "tf32", "none"])
def test_convolution_backward_has_the_precision_that_was_asked_for(asked, setting, monkeypatch):
    monkeypatch.setattr(_convolution, "precision_matters", lambda tensor: True)  # as of float32 on CUDA
    torch.backends.cudnn.conv.fp32_precision = setting
    before = torch.backends.cudnn.conv.fp32_precision
    x, weight, grad_c = torch.randn(1, 2, 2, 2, 2), torch.randn(2, 3, 1, 1, 1), torch.randn(1, 3, 2, 2, 2)
    args = _convolution.BlockArguments([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, 1, 1e-5, asked)
    with _Settings() as settings:
        found = _convolution.convolution_backward(grad_c, x, weight, args, (True, True, False))
    assert [(seen == "tf32") for seen in settings.seen] == [asked == "tf32"]
    assert torch.backends.cudnn.conv.fp32_precision == before
    torch.testing.assert_close(found[0], torch.conv3d(grad_c, weight), rtol=1e-4, atol=1e-5)
    assert found[2] is None


def test_of_nothing_relu_lets_nothing_through(device):
    """Where the convolution is 0, as PyTorch has it; once more differentiable, too."""
    block = shape_block("padding", device=device, dtype=torch.float64)
    block = replace(block, weight=torch.zeros_like(block.weight), bias=None)
    for kept in (False, True):
        leaves = block.requires_grad()
        (gradient,) = torch.autograd.grad(leaves.ours().sin().sum(), leaves.weight, create_graph=kept)
        assert not gradient.any()


def _by_name(block):
    (x, weight, bias, *numbers), kwargs = block.arguments()
    stride, padding, output_padding, groups, dilation = numbers
    lists = [triple(value, "") for value in (stride, padding, output_padding)]
    convolution = (x, weight, bias, *lists, groups, triple(dilation, ""))
    *others, precision = kwargs.values()
    return torch.ops.upconv3d.conv_transpose3d_relu_group_norm(*convolution, *others, precision or "ieee")


@pytest.mark.parametrize("wanted", ["norm_weight", "norm_bias"])
def test_one_vector_of_the_operator(device, wanted):
    block = shape_block("padding", device=device)
    vectors = {name: getattr(block, name).clone() for name in ("norm_weight", "norm_bias")}
    vectors[wanted].requires_grad_()
    leaves = replace(block, **vectors)
    (gradient,) = torch.autograd.grad(_by_name(leaves).sin().sum(), vectors[wanted])
    (expected,) = torch.autograd.grad(leaves.eager().sin().sum(), vectors[wanted])
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def test_operator_under_autocast_on_the_cpu():
    block = shape_block("padding", device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert _by_name(block).dtype is block.eager().dtype is torch.bfloat16
