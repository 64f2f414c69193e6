# SPDX-License-Identifier: Apache-2.0
"""What is around a recorded call: inference mode, default devices, tangents, errors, settings."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import upconv3d
from oracles import make_block
from tails import make_call, outputs
from test_flops import FUNCTIONS, _counted
from torch import nn
from upconv3d import _convolution, _tail_gradients

F32 = torch.float32


def _small(device):
    return make_block(2, 4, 6, (3, 2, 4), 3, num_groups=2, stride=2, device=device).requires_grad()


def _calls(device):
    """Callables of the block, its module, the family and an accelerated model, and what is to be a leaf."""
    block = _small(device)
    family = make_call(activation="silu", dtype=F32, device=device).leaves()
    module = upconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 3, 2).to(device)
    model = nn.Sequential(nn.ConvTranspose3d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU()).to(device)
    upconv3d.accelerate(model)
    return {
        "block": block.ours,
        "recompute": lambda: upconv3d.conv_transpose3d_relu_group_norm(
            block.input, block.weight, num_groups=2, recompute=True
        ),
        "family": family.ours,
        "module": lambda: module(block.input),
        "accelerated": lambda: model(block.input),
    }


NAMES = ("block", "recompute", "family", "module", "accelerated")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_recorded_in_inference_mode(name, device, small_blocks_left):
    """Autograd is off there, even where a model enables gradients inside of it."""
    call = _calls(device)[name]
    expected = call()
    for _ in range(2):
        with torch.inference_mode(), torch.enable_grad():
            y = call()
        assert y.is_inference() and not y.requires_grad
        torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=1e-4)
    assert call().requires_grad


@pytest.mark.parametrize("skip", [False, True])
def test_nothing_is_recorded_in_inference_mode_by_stand_ins(skip, kernels):
    call = make_call(activation="silu", skip=skip, dtype=F32).leaves()
    expected = call.eager()
    with torch.inference_mode(), torch.enable_grad():
        y = call.ours()
    assert "forward" in kernels.calls and not y.requires_grad
    torch.testing.assert_close(y, expected.detach())


@pytest.mark.parametrize("name", NAMES)
def test_default_device(name, device, small_blocks_left):
    """A default device is a mode that fills in factories' devices: nobody who looks at our calls."""
    call = _calls(device)[name]
    node = type(call().grad_fn).__name__
    with torch.device(device):
        assert type(call().grad_fn).__name__ == node
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        assert type(call().grad_fn).__name__ == node
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


VECTORS = ("bias", "norm_bias", "norm_weight")


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("vector", VECTORS)
def test_vectors_of_inference_mode(vector, by_name, device):
    """PyTorch's calls save a bias nowhere, and an instance norm's weight as a copy."""
    call = make_call(norm="instance", activation="silu", dtype=F32, device=device).leaves()
    expected = call.ours()
    with torch.inference_mode():
        value = call.tensors[vector].detach().clone()
    leaves = [tensor for name, tensor in call.tensors.items() if name != vector]
    seed = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, seed)
    given = replace(call, tensors=call.tensors | {vector: value})
    if by_name:
        y = torch.ops.upconv3d.conv_transpose3d_norm_act(*given.operator_arguments())[0]
    else:
        y = given.ours()
    assert value.is_inference()
    for gradient, other in zip(torch.autograd.grad(y, leaves, seed), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def _tangents(results, leaves):
    """Of gradients, where a result's gradient has a tangent, and what they are by linearity."""
    seeds = [torch.randn_like(result) for result in results]
    tangents = [torch.randn_like(result) for result in results]
    expected = torch.autograd.grad(results, leaves, tangents, retain_graph=True, allow_unused=True)
    with fwAD.dual_level():
        duals = [fwAD.make_dual(seed, tangent) for seed, tangent in zip(seeds, tangents, strict=True)]
        gradients = torch.autograd.grad(results, leaves, duals, allow_unused=True)
        found = [None if g is None else fwAD.unpack_dual(g).tangent for g in gradients]
    assert not any(g is not None and g.requires_grad for g in gradients)
    return found, expected


def _check_tangents(results, leaves):
    for tangent, wanted in zip(*_tangents(results, leaves), strict=True):
        assert (tangent is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(tangent, wanted, rtol=1e-3, atol=1e-3)


def test_tangents_of_a_blocks_gradient(device):
    block = _small(device)
    _check_tangents([block.ours()], list(block.tensors().values()))


FAMILY = {
    "relu": {"norm": None, "activation": "relu"},
    "gelu-conv": {"norm": None, "activation": "gelu", "return_conv": True},
    "alone": {"norm": None, "activation": None},
    "prelu-skip": {"norm": None, "activation": "prelu", "skip": True},
}


def _check_tangents_of_the_family(name, **options):
    call = make_call(**FAMILY[name], dtype=F32, **options).leaves()
    _check_tangents(list(outputs(call.ours())), list(call.tensors.values()))


@pytest.mark.parametrize("name", FAMILY)
def test_tangents_of_the_familys_gradient(name, device):
    _check_tangents_of_the_family(name, device=device)


@pytest.mark.parametrize("name", FAMILY)
def test_tangents_of_the_familys_gradient_by_stand_ins(name, kernels):
    _check_tangents_of_the_family(name)


@pytest.mark.parametrize("retains", [False, True])
def test_a_backward_after_one_that_failed(retains, keeping_kernels, monkeypatch):
    """What the first has overwritten is not read for what a forward kept."""
    call = make_call(activation="silu", dtype=F32).leaves()
    leaves = list(call.tensors.values())
    y = call.ours()
    seed = torch.randn_like(y)
    expected = torch.autograd.grad(call.eager(), leaves, seed)

    def fails(*_):
        raise torch.OutOfMemoryError("no room for a gradient")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(_tail_gradients, "convolution_backward", fails)
        torch.autograd.grad(y, leaves, seed, retain_graph=retains)
    assert keeping_kernels.consumed == [not retains]
    if retains:
        for gradient, wanted in zip(torch.autograd.grad(y, leaves, seed), expected, strict=True):
            torch.testing.assert_close(gradient, wanted)
    else:
        with pytest.raises(RuntimeError, match=r"after one that ended in an error.*run the forward again"):
            torch.autograd.grad(y, leaves, seed)


def _contiguous(tensor):
    return tensor.contiguous()


def test_formats_that_hooks_lose_by_stand_ins(keeping_kernels, monkeypatch):
    """The backward's plan, which says what was kept, is chosen by the operands' formats."""
    call, last = make_call(c=8, k=6, activation="silu", dtype=F32).leaves(), torch.channels_last_3d
    for name in ("input", "weight"):
        call.tensors[name] = call.tensors[name].detach().contiguous(memory_format=last).requires_grad_()
    seen, backward = [], _tail_gradients._numbered_tail_backward

    def look(*arguments):
        seen.append(arguments)
        return backward(*arguments)

    monkeypatch.setattr(_tail_gradients, "_numbered_tail_backward", look)
    with torch.autograd.graph.saved_tensors_hooks(_contiguous, _contiguous):
        y = call.ours()
    seed = torch.randn_like(y)
    gradients = torch.autograd.grad(y, list(call.tensors.values()), seed)
    (arguments,) = seen
    assert all(arguments[i].is_contiguous(memory_format=last) for i in (1, 2))
    expected = torch.autograd.grad(call.eager(), list(call.tensors.values()), seed)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


# By plans that keep one thing in one memory format and another in the other; of the first, in as many bytes.
FORMATS = {
    "as many bytes": ((1, 32, 4, 2, 2), {"num_groups": 4}, F32),
    "more bytes": ((2, 64, 20, 16, 3), {"padding": 1, "num_groups": 4}, F32),
    "the convolution": ((2, 16, 8, 32, 1), {"num_groups": 8}, torch.bfloat16),
}


@pytest.mark.parametrize("to_last", [False, True])
@pytest.mark.parametrize("op", ["block", "family"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_hooks_lose(name, op, to_last, cuda):
    sizes, numbers, dtype = FORMATS[name]
    formats = [torch.channels_last_3d, torch.contiguous_format]
    given, hooked = reversed(formats) if to_last else formats
    block = make_block(*sizes, **numbers, device=cuda, dtype=dtype, precision="tf32")
    leaves = {
        key: tensor.detach().contiguous(memory_format=given) if tensor.dim() == 5 else tensor
        for key, tensor in block.tensors().items()
    }
    block = replace(block, **{key: leaf.detach().requires_grad_() for key, leaf in leaves.items()})
    arguments, settings = block.arguments()
    run, tensors = FUNCTIONS[op], list(block.tensors().values())
    if op == "family":
        settings = settings | {"activation": "silu"}
    y = run(*arguments, **settings)
    seed = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, seed)

    def pack(tensor):
        return tensor.contiguous(memory_format=hooked) if tensor.dim() == 5 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(*arguments, **settings)
    for gradient, wanted in zip(torch.autograd.grad(y, tensors, seed), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flops_of_a_backward_alone(name, device):
    block = _small(device)
    arguments, settings = block.arguments()
    y, expected = FUNCTIONS[name](*arguments, **settings), block.eager()
    seed = torch.randn_like(y)
    assert _counted(lambda: y.backward(seed)) == _counted(lambda: expected.backward(seed)) > 0


# conv_precision, in a process of its own for every state of PyTorch's settings, as some cannot be set again.
_SETTINGS = """
import itertools, os, torch
from upconv3d._convolution import conv_precision
get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
LEVELS = ("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "matmul")
class Operand:
    is_cuda, dtype = True, torch.float32
def states():
    # As they are, and as they become where a user sets what others follow.
    seen = [[get(*level) for level in LEVELS]]
    for of, value in itertools.product(LEVELS[:2], ("ieee", "tf32", "none")):
        put(*of, value)
        seen.append([get(*level) for level in LEVELS])
    return seen
def in_child(run):
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, repr(run()).encode())
        os._exit(0)
    os.wait()
    return os.read(reads, 1 << 16)
def checked(values, precision):
    for level, value in zip(LEVELS, values):
        if value:
            put(*level, value)
    if precision:
        with conv_precision(Operand, precision):
            inside = get("cuda", "conv")
        assert (inside == "tf32") == (precision == "tf32"), (values, precision, inside)
    return states()
for values in itertools.product((None, "none", "ieee", "tf32"), repeat=3):
    plain = in_child(lambda: checked(values, None))
    assert len(plain) > 100
    for precision in ("ieee", "tf32"):
        assert in_child(lambda: checked(values, precision)) == plain, (values, precision)
print("ok")
"""


def test_precision_is_put_back_where_it_was():
    """Of a setting that follows another one, too: it goes on following it."""
    done = subprocess.run([sys.executable, "-c", _SETTINGS], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["ok"], done.stdout + done.stderr


def test_precisions_of_two_threads():
    """The second one waits, so that neither takes the other's setting for the user's."""

    class Operand:
        is_cuda, dtype = True, torch.float32

    conv = torch.backends.cudnn.conv
    before, other = conv.fp32_precision, "ieee" if conv.fp32_precision == "tf32" else "tf32"
    entered, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with _convolution.conv_precision(Operand, other):
            entered.set()
            leave.wait(30)
            seen.append(conv.fp32_precision)

    def second(precision):
        with _convolution.conv_precision(Operand, precision):
            seen.append(conv.fp32_precision)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert entered.wait(30)
    threads += [threading.Thread(target=second, args=(p,)) for p in (before, other)]
    for thread in threads[1:]:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # it waits
    leave.set()
    for thread in threads:
        thread.join(30)
    assert seen[0] == other and sorted(seen[1:]) == sorted([before, other])
    assert conv.fp32_precision == before
