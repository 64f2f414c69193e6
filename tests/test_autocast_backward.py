# SPDX-License-Identifier: Apache-2.0
"""Backwards that run inside of autocast compute what they do outside of it, as PyTorch's nodes do."""

import contextlib

import pytest
import torch
import upconv3d
from oracles import make_block
from tails import make_call

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def _convolutions_are_cast():
    """aten::convolution by autocast on the CPU too, as on CUDA."""
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def convolution(x, weight, bias, *numbers):
        with torch._C._ExcludeDispatchKeyGuard(cpu):
            cast = (None if tensor is None else tensor.to(LOW) for tensor in (x, weight, bias))
            return torch.ops.aten.convolution.default(*cast, *numbers)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("convolution", convolution, "AutocastCPU")
        yield


def _gradients(forward, device_type, inside, create_graph):
    """Of the leaves that forward() returns with its result."""
    y, leaves = forward()
    loss = y.sin().sum()
    with torch.autocast(device_type, LOW) if inside else contextlib.nullcontext():
        return torch.autograd.grad(loss, leaves, create_graph=create_graph)


def _check(forward, device_type, create_graph):
    inside, outside = (_gradients(forward, device_type, within, create_graph) for within in (True, False))
    for gradient, expected in zip(inside, outside, strict=True):
        assert gradient.dtype is torch.float32 and torch.equal(gradient, expected)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_block(device, create_graph, recompute):
    block = make_block(2, 4, 8, 4, 3, num_groups=2, device=device)
    torch.backends.cudnn.deterministic = True

    def forward():
        leaf = block.requires_grad()
        positional, named = leaf.arguments()
        y = upconv3d.conv_transpose3d_relu_group_norm(*positional, **named, recompute=recompute)
        return y, list(leaf.tensors().values())

    _check(forward, device.type, create_graph)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("norm", ["group", "instance"])
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("by_name", [False, True], ids=["function", "operator"])
def test_the_family(kernels, by_name, order, norm, create_graph):
    call = make_call(dtype=torch.float32, activation="prelu", norm=norm, order=order)

    def forward():
        leaf = call.leaves()
        arguments = leaf.operator_arguments
        y = torch.ops.upconv3d.conv_transpose3d_norm_act(*arguments())[0] if by_name else leaf.ours()
        return y, list(leaf.tensors.values())

    _check(forward, "cpu", create_graph)


def test_torch_func():
    block = make_block(2, 4, 8, 4, 3, num_groups=2)

    def loss(weight):
        return upconv3d.conv_transpose3d_relu_group_norm(block.input, weight, num_groups=2).sin().sum()

    def pulled_back(inside):
        value, pull = torch.func.vjp(loss, block.weight)
        with torch.autocast("cpu", LOW, enabled=inside):
            return pull(torch.ones_like(value))[0]

    assert torch.equal(pulled_back(True), pulled_back(False))
