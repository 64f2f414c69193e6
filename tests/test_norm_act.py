# SPDX-License-Identifier: Apache-2.0
"""conv_transpose3d_norm_act against PyTorch's own calls: values, gradients, formats, autocast, errors."""

import math
from dataclasses import replace

import numpy
import pytest
import torch
import upconv3d
from oracles import ERROR_FACTOR, relative_error
from tails import ACTIVATIONS, COMBINATIONS, KINKED, NORMS, gradients, make_call, outputs


def _ours(call):
    return call.ours()


def _eager(call):
    return call.eager()


def _text(value):
    return str(value)


@pytest.mark.parametrize("return_conv", [False, True], ids=["y", "y-and-conv"])
@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize(("order", "norm", "activation"), COMBINATIONS)
def test_values_and_gradients_in_float64(device, order, norm, activation, skip, return_conv):
    call = make_call(
        order=order, norm=norm, activation=activation, skip=skip, return_conv=return_conv, device=device
    )
    results, grads = gradients(call, _ours)
    expected, expected_grads = gradients(call, _eager)
    for result, other in zip(results, expected, strict=True):
        assert result.shape == other.shape and result.dtype == other.dtype
        torch.testing.assert_close(result, other, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-8, atol=1e-9, msg=name)


VARIANTS = {
    "unbatched": {"n": None, "skip": True, "return_conv": True},
    "no-bias": {"bias": False},
    "no-affine": {"affine": False, "norm": "instance"},
    "one-slope": {"activation": "prelu", "one_slope": True},
    "convolution-groups": {"groups": 2, "activation": "prelu"},
    "one-sample": {"n": 1, "norm": "instance", "order": "act_norm"},
    "stride-is-kernel": {"kernel": 2, "stride": 2, "padding": 0},
    "no-samples": {"n": 0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(device, variant):
    call = make_call(device=device, **VARIANTS[variant])
    results, grads = gradients(call, _ours)
    expected, expected_grads = gradients(call, _eager)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-8, atol=1e-9, msg=name)


def _check_errors(call, precision=None):
    """Values and gradients of low precision: at most twice PyTorch's own error against float64."""
    dtype = call.tensors["input"].dtype
    before = torch.backends.cudnn.conv.fp32_precision
    if precision is not None:
        torch.backends.cudnn.conv.fp32_precision = precision
    results, grads = gradients(call, _ours)
    eager, eager_grads = gradients(call, _eager)
    torch.backends.cudnn.conv.fp32_precision = before
    exact, exact_grads = gradients(call.to(torch.float64), _eager)
    eps = 2.0**-10 if precision == "tf32" and call.tensors["input"].is_cuda else torch.finfo(dtype).eps
    for result, other, reference in zip(results, eager, exact, strict=True):
        assert result.dtype == other.dtype and result.shape == other.shape
        limit = max(ERROR_FACTOR * relative_error(other, reference), 4 * eps)
        assert relative_error(result, reference) <= limit
    # Where rounding decides on which side of the kink an element lies, its whole gradient is the error.
    floor = eps**0.5 if call.activation in KINKED else 8 * eps
    for name, grad in grads.items():
        limit = max(ERROR_FACTOR * relative_error(eager_grads[name], exact_grads[name]), floor)
        assert relative_error(grad, exact_grads[name]) <= limit, name


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, "ieee"),
        (torch.float32, "tf32"),
        (torch.bfloat16, None),
        (torch.float16, None),
    ],
    ids=_text,
)
@pytest.mark.parametrize(("order", "norm", "activation"), COMBINATIONS)
def test_errors_at_most_twice_pytorchs(device, order, norm, activation, dtype, precision, layout):
    if device.type == "cpu" and (layout == "NDHWC" or precision == "tf32"):
        pytest.skip("PyTorch's own operators run on the CPU; one layout and precision will do")
    call = make_call(
        n=2,
        c=32,
        k=48,
        extent=(5, 6, 7),
        order=order,
        norm=norm,
        activation=activation,
        num_groups=4,
        device=device,
        dtype=dtype,
        precision=precision,
    )
    _check_errors(call.channels_last("input", "weight") if layout == "NDHWC" else call, precision)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_text)
@pytest.mark.parametrize("k", [64, 20])
@pytest.mark.parametrize(
    ("norm", "activation", "return_conv"),
    [
        (None, "relu", False),
        ("group", "silu", False),
        ("instance", "leaky_relu", False),
        ("group", "relu", True),
    ],
)
def test_inference_of_64_phases(hopper, norm, activation, return_conv, k, dtype, layout):
    """Several launches of the SM90 plan, with what follows them: errors at most twice PyTorch's."""
    call = make_call(
        n=2,
        c=64,
        k=k,
        extent=(3, 4, 5),
        stride=4,
        norm=norm,
        activation=activation,
        return_conv=return_conv,
        num_groups=4,
        device=hopper,
        dtype=dtype,
    )
    if layout == "NDHWC":
        call = call.channels_last("input", "weight")
    floor = 4 * torch.finfo(dtype).eps
    exact = outputs(_eager(call.to(torch.float64)))
    for result, other, reference in zip(outputs(_ours(call)), outputs(_eager(call)), exact, strict=True):
        limit = max(ERROR_FACTOR * relative_error(other, reference), floor)
        assert relative_error(result, reference) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_text)
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_errors_with_skip_and_convolution(cuda, activation, norm, order, dtype):
    call = make_call(
        n=2,
        c=32,
        k=48,
        extent=(5, 6, 7),
        order=order,
        norm=norm,
        activation=activation,
        num_groups=4,
        skip=True,
        return_conv=True,
        device=cuda,
        dtype=dtype,
    )
    _check_errors(call.channels_last("input", "weight", "skip"), "ieee")


@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("w_last", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=_text)
def test_memory_formats(device, dtype, norm, activation, x_last, w_last):
    names = [name for name, last in (("input", x_last), ("weight", w_last)) if last]
    call = make_call(
        c=8,
        k=16,
        extent=(4, 4, 4),
        norm=norm,
        activation=activation,
        return_conv=True,
        device=device,
        dtype=dtype,
    )
    call = call.channels_last(*names)
    for result, other in zip(call.ours(), call.eager(), strict=True):
        assert result.shape == other.shape
        expected = torch.channels_last_3d if names else torch.contiguous_format
        assert result.is_contiguous(memory_format=expected)


@pytest.mark.parametrize("shift", [0, 1, 10, 100])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("norm", ["group", "instance"])
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("by_name", [False, True])
def test_cpu_mean_far_larger_than_the_spread(by_name, order, norm, layout, shift):
    """PyTorch's group_norm of channels_last_3d on the CPU loses the variance then; ours gets contiguous."""
    numbers = {"order": order, "norm": norm, "activation": "silu", "num_groups": 8, "dtype": torch.float32}
    call = make_call(n=1, c=16, k=32, extent=(8, 8, 8), stride=2, **numbers)
    call.tensors["bias"].fill_(shift)
    exact, exact_grads = gradients(call.to(torch.float64), _eager)
    theirs, their_grads = gradients(call, _eager)

    def named(c):
        return torch.ops.upconv3d.conv_transpose3d_norm_act(*c.operator_arguments())[:1]

    ours, grads = gradients(
        call.channels_last("input", "weight") if layout == "NDHWC" else call, named if by_name else _ours
    )
    assert relative_error(ours[0], exact[0]) <= 2 * relative_error(theirs[0], exact[0]) + 1e-7
    for name, grad in grads.items():
        if name == "bias":  # nothing but rounding where the norm takes every shift away
            continue
        limit = 2 * relative_error(their_grads[name], exact_grads[name]) + 1e-6
        assert relative_error(grad, exact_grads[name]) <= limit, name


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "silu", "gelu", "prelu", None])
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("norm", ["group", None])
def test_result_may_be_changed_in_place(device, norm, order, activation):
    """As y += skip, where PyTorch's three calls let a caller do so."""

    def run(call, attribute):
        leaves = call.leaves()
        y = getattr(leaves, attribute)()
        y += 1
        y.square().sum().backward()
        return {name: tensor.grad for name, tensor in leaves.tensors.items()}

    call = make_call(norm=norm, order=order, activation=activation, skip=True, device=device)
    expected = run(call, "eager")
    for name, grad in run(call, "ours").items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_returned_convolution_is_before_the_skip(device):
    call = make_call(skip=True, return_conv=True, device=device)
    _, conv = call.ours()
    t = call.tensors
    expected = torch.nn.functional.conv_transpose3d(t["input"], t["weight"], t["bias"], **call.numbers)
    torch.testing.assert_close(conv, expected)


def test_arguments_are_left_as_they_are(device):
    """Some activations run in place, on what nobody else sees."""
    for activation in ACTIVATIONS:
        for norm in NORMS:
            call = make_call(norm=norm, activation=activation, skip=True, return_conv=True, device=device)
            before = {name: tensor.clone() for name, tensor in call.tensors.items()}
            first = [y.clone() for y in call.ours()]
            for name, tensor in before.items():
                assert torch.equal(tensor, call.tensors[name])
            torch.testing.assert_close(first, list(call.ours()))


def test_relu_then_group_norm_is_the_block(device):
    """One path: the same operator, and so the same bits."""
    call = make_call(order="act_norm", device=device, dtype=torch.float32)
    t = call.tensors
    block = upconv3d.conv_transpose3d_relu_group_norm(
        t["input"],
        t["weight"],
        t["bias"],
        call.numbers["stride"],
        call.numbers["padding"],
        num_groups=2,
        norm_weight=t["norm_weight"],
        norm_bias=t["norm_bias"],
        precision="ieee",
    )
    assert torch.equal(call.ours(), block)
    named = {name: value for name, value in call.keywords().items() if value is not None}
    with torch.profiler.profile() as profile:
        upconv3d.conv_transpose3d_norm_act(t["input"], t["weight"], t["bias"], **named)
    assert "upconv3d::conv_transpose3d_relu_group_norm" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
def test_gradcheck_and_double_backward(device, order, norm):
    call = make_call(
        n=1,
        c=2,
        k=4,
        extent=(2, 2, 2),
        order=order,
        norm=norm,
        activation="silu",
        skip=True,
        return_conv=True,
        device=device,
    ).leaves()
    names = list(call.tensors)

    def function(*tensors):
        return replace(call, tensors=dict(zip(names, tensors, strict=True))).ours()

    tensors = tuple(call.tensors.values())
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("skip_dtype", [None, torch.float32, torch.bfloat16], ids=_text)
@pytest.mark.parametrize(("order", "norm", "activation"), COMBINATIONS)
def test_autocast(device, order, norm, activation, skip_dtype):
    call = make_call(
        order=order,
        norm=norm,
        activation=activation,
        skip=skip_dtype is not None,
        return_conv=True,
        device=device,
        dtype=torch.float32,
        precision=None,
    )
    if skip_dtype is not None:
        call.tensors["skip"] = call.tensors["skip"].to(skip_dtype)
    with torch.autocast(device.type, torch.bfloat16):
        results, grads = gradients(call, _ours)
        expected, expected_grads = gradients(call, _eager)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype
        assert relative_error(result, other.double()) < 0.03
    for name, grad in grads.items():
        assert grad.dtype == call.tensors[name].dtype
        # Between two roundings to bfloat16, some elements lie on different sides of a kink.
        limit = 0.25 if activation in KINKED else 0.06
        assert relative_error(grad, expected_grads[name].double()) < limit, name


def test_skip_of_another_dtype_promotes(device):
    call = make_call(norm=None, skip=True, device=device, dtype=torch.bfloat16)
    call.tensors["skip"] = call.tensors["skip"].float()
    y, eager = call.ours(), call.eager()
    assert y.dtype == eager.dtype == torch.float32
    torch.testing.assert_close(y, eager, rtol=0.02, atol=0.02)


def test_only_wanted_gradients(device):
    call = make_call(skip=True, device=device)
    call.tensors["weight"].requires_grad_()
    y = call.ours()
    (grad,) = torch.autograd.grad(y.square().sum(), call.tensors["weight"])
    (expected,) = torch.autograd.grad(call.eager().square().sum(), call.tensors["weight"])
    torch.testing.assert_close(grad, expected)


def test_precision_holds_in_the_backward(cuda):
    """Also where PyTorch's setting says otherwise while the backward runs."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    call = make_call(n=2, c=64, k=64, extent=(6, 6, 6), device=cuda, dtype=torch.float32, skip=True)
    call = replace(call, activation="silu")
    _, grads = gradients(call, _ours)
    _, exact = gradients(call.to(torch.float64), _eager)
    for name, grad in grads.items():
        assert relative_error(grad, exact[name]) < 2e-5, name


def test_integers_of_any_kind():
    call = make_call(stride=1, padding=0)
    numbers = {"stride": numpy.int64(1), "padding": [numpy.int32(0)] * 3}
    assert torch.equal(replace(call, numbers=numbers).ours(), call.ours())


def test_eps_is_of_no_consequence_without_a_norm(device):
    call = make_call(norm=None, device=device)
    t = call.tensors
    y = upconv3d.conv_transpose3d_norm_act(
        t["input"], t["weight"], t["bias"], **(call.keywords() | {"eps": math.nan})
    )
    # cuDNN's float64 convolution sums in another order from run to run.
    torch.testing.assert_close(y, call.ours())


def test_defaults_are_those_of_torch_nn():
    for activation, module in (("leaky_relu", torch.nn.LeakyReLU()), ("elu", torch.nn.ELU())):
        call = make_call(activation=None, norm=None)
        t = call.tensors
        y = upconv3d.conv_transpose3d_norm_act(
            t["input"], t["weight"], t["bias"], **call.numbers, norm=None, activation=activation
        )
        torch.testing.assert_close(y, module(call.ours()))


@pytest.mark.parametrize("affine", [False, True])
def test_empty_batch_of_a_group_per_channel(device, affine):
    call = make_call(n=0, k=4, num_groups=4, activation="silu", affine=affine, device=device).leaves()
    y = call.ours()
    assert y.shape == call.eager().shape
    y.sum().backward()
    for name, tensor in call.tensors.items():
        assert tensor.grad.shape == tensor.shape and not tensor.grad.any(), name


def test_norm_bias_alone_is_trained(device):
    """Backwards of PyTorch's norms fail without a gradient but norm_bias's: group_norm's on the CPU,
    instance_norm's on CUDA."""
    x, w, h = (torch.randn(sizes, device=device) for sizes in ((2, 4, 3, 3, 3), (4, 8, 2, 2, 2), (8,)))
    h.requires_grad_()
    y = upconv3d.conv_transpose3d_norm_act(x, w, stride=2, norm="instance", norm_bias=h, precision="ieee")
    conv = torch.nn.functional.conv_transpose3d(x.double(), w.double(), stride=2)
    expected = torch.relu(torch.nn.functional.instance_norm(conv) + h.view(1, -1, 1, 1, 1))
    (grad,) = torch.autograd.grad(y.sum(), h)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), h)[0])


def test_one_slope_without_an_axis(device):
    """F.prelu takes it, too."""
    call = make_call(activation="prelu", one_slope=True, device=device)
    whole = call.ours()
    call.tensors["slopes"] = call.tensors["slopes"].reshape(())
    # float64's convolution on CUDA has other last bits each time.
    torch.testing.assert_close(call.ours(), whole)


def test_nothing_after_the_convolution():
    """y is the convolution then, and no copy of it is made."""
    call = make_call(norm=None, activation=None, return_conv=True)
    y, conv = call.ours()
    assert y is conv
    assert outputs(call.eager())[0].shape == y.shape
