# SPDX-License-Identifier: Apache-2.0
"""Calls are prepared once per kind, and recorded by a node of the function's own.

So nothing of a call may be mixed up with another's, and who watches PyTorch's operators must see this one.
"""

import threading
from dataclasses import replace

import pytest
import torch
import upconv3d
from modes import OperatorNames
from oracles import check_like_eager, make_block
from test_values import shape_block
from torch import nn
from torch.utils.checkpoint import checkpoint

OP_NAME = "upconv3d::conv_transpose3d_relu_group_norm"


def test_every_argument_tells_calls_apart(device):
    """Blocks that differ in one argument each, in turns: every one gets its own result each time."""
    base = make_block(2, 8, 8, 4, 3, num_groups=2, device=device)
    both = base.channels_last()
    odd = base.input.transpose(-1, -2).contiguous().transpose(-1, -2)
    unaligned = torch.empty(base.input.numel() + 1, device=device)[1:].view_as(base.input).copy_(base.input)
    variants = [
        base,
        replace(base, eps=1.0),
        replace(base, num_groups=4),
        replace(base, padding=1),
        replace(base, padding=(1, 0, 0)),
        replace(base, padding=(0, 0, 1)),
        replace(base, stride=2),
        replace(base, stride=2, output_padding=1),
        replace(base, dilation=2),
        replace(base, bias=None),
        replace(base, norm_weight=None),
        replace(base, norm_bias=None),
        replace(base, bias=base.bias.repeat_interleave(2)[::2]),
        replace(base, input=base.input[:1]),
        replace(base, input=base.input[0]),
        replace(base, input=base.input[:, :, 1:]),
        replace(base, input=odd),
        replace(base, input=unaligned),
        replace(base, input=both.input),
        replace(base, weight=both.weight),
        both,
        replace(base, precision="tf32"),
        base.to(torch.float64),
        base.to(torch.bfloat16),
        base.to(torch.float16),
    ]
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    for _ in range(2):
        for block in variants:
            check_like_eager(block)
            y = block.ours() if block.input.dim() == 5 else block.ours().unsqueeze(0)
            channels_last = block.plan().problem["y_layout"] == "NDHWC"
            assert y.is_contiguous(
                memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format
            )


def test_a_broken_rule_is_reported_every_time():
    block = shape_block("padding")
    block.ours()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="bias must have one value per output channel"):
            replace(block, bias=block.bias[:-1]).ours()
        with pytest.raises(ValueError, match="precision"):
            replace(block, precision="half").ours()
        block.ours()


def test_more_kinds_of_calls_than_are_remembered():
    block = shape_block("padding")
    block = replace(block, input=block.input[:0])
    for index in range(2500):
        y = replace(block, eps=1e-5 * (1 + index)).ours()
        assert y.shape == (0, 64, 5, 5, 5)
    check_like_eager(shape_block("padding"))


def test_calls_from_several_threads(device):
    names = ("padding", "odd-extents", "monai-unet", "unbatched", "grouped")
    blocks = [shape_block(name, device=device) for name in names]
    expected = [block.ours() for block in blocks]
    differing, done = [], []

    def call(first):
        for turn in range(40):
            index = (first + turn) % len(blocks)
            # An eps of its own per thread and turn, so that some calls are new while others look them up.
            replace(blocks[index], eps=1e-5 + 1e-9 * (1000 * first + turn)).ours()
            # cuDNN may differ in the last bits from call to call; another block's result differs in shape.
            if not torch.allclose(blocks[index].ours(), expected[index], rtol=1e-3, atol=1e-3):
                differing.append((first, turn))
        done.append(first)

    threads = [threading.Thread(target=call, args=(first,)) for first in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing and len(done) == len(threads)


def test_plan_is_printed_while_asked(capfd, monkeypatch):
    """Also for a call that was met before, and no longer when the variable is gone."""
    block = shape_block("padding")
    block.ours()
    assert "plan:" not in capfd.readouterr().err
    monkeypatch.setenv("UPCONV3D_PRINT_PLAN", "1")
    for _ in range(2):
        block.ours()
        assert capfd.readouterr().err.count("plan: cpu_library") == 1
    monkeypatch.setenv("UPCONV3D_PRINT_PLAN", "0")
    block.ours()
    assert "plan:" not in capfd.readouterr().err


def public_name(requires_grad):
    """The operator of a call that keeps something for its backward has a name of its own."""
    return f"{OP_NAME}_for_training" if requires_grad else OP_NAME


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dispatch_modes_see_the_operator(requires_grad):
    block = shape_block("padding")
    block = block.requires_grad() if requires_grad else block
    with OperatorNames() as seen:
        y = block.ours()
    assert seen.names.count(public_name(requires_grad)) == 1
    assert y.requires_grad == requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
def test_profiler_sees_the_operator(requires_grad):
    block = shape_block("padding")
    block = block.requires_grad() if requires_grad else block
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        block.ours()
    assert public_name(requires_grad) in {event.name for event in profiler.events()}


def test_both_ways_into_autograd_agree(device):
    """The function's own node, and what the operator records when it is called as such."""
    block = shape_block("padding", device=device)
    grads = []
    for call in ("function", "operator"):
        leaf = block.requires_grad()
        if call == "function":
            y = leaf.ours()
        else:
            ones, zeros = (1, 1, 1), (0, 0, 0)
            y = torch.ops.upconv3d.conv_transpose3d_relu_group_norm(
                leaf.input, leaf.weight, leaf.bias, ones, ones, zeros, 1, ones, leaf.num_groups,
                leaf.norm_weight, leaf.norm_bias, leaf.eps, leaf.precision
            )  # fmt: skip
        assert y.grad_fn is not None and y.is_leaf is False
        y.square().sum().backward()
        grads.append([tensor.grad for tensor in leaf.tensors().values()])
    # On a GPU the operator computes y as inference does, maybe by another plan than where gradients are
    # recorded.
    tolerance = 1e-5 if device.type == "cpu" else 3e-4
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    block = shape_block("padding").requires_grad()
    block.ours().square().sum().backward()
    again = block.requires_grad()
    y = checkpoint(lambda x: replace(again, input=x).ours(), again.input, use_reentrant=use_reentrant)
    y.square().sum().backward()
    for name, tensor in block.tensors().items():
        torch.testing.assert_close(getattr(again, name).grad, tensor.grad)


def test_backward_twice_needs_retain_graph():
    block = shape_block("padding").requires_grad()
    y = block.ours().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_input_changed_in_place_before_the_backward():
    block = shape_block("padding").requires_grad()
    x = block.input * 1
    y = replace(block, input=x).ours()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class _Zero(nn.Module):
    def forward(self, tensor):
        return torch.zeros_like(tensor)


def test_weights_that_are_no_parameters():
    """functional_call swaps parameters for one call; a parametrization computes what the parameter was."""
    module = upconv3d.ConvTranspose3dReLUGroupNorm(8, 8, 3, 2, precision="ieee")
    x = torch.randn(1, 8, 3, 3, 3)
    before = module(x)
    doubled = {name: 2 * tensor.detach() for name, tensor in module.named_parameters()}
    y = torch.func.functional_call(module, doubled, (x,))
    assert not torch.equal(y, before) and torch.equal(module(x), before)
    nn.utils.parametrize.register_parametrization(module.group_norm, "weight", _Zero())
    y = module(x)
    torch.testing.assert_close(y, module.group_norm.bias.view(1, -1, 1, 1, 1).expand_as(y))
