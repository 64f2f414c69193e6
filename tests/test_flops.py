# SPDX-License-Identifier: Apache-2.0
"""torch.utils.flop_counter: as many of a block as of PyTorch's three calls."""

import pytest
import torch
import upconv3d
from oracles import make_block
from torch.utils.flop_counter import FlopCounterMode

FUNCTIONS = {
    "block": upconv3d.conv_transpose3d_relu_group_norm,
    "family": upconv3d.conv_transpose3d_norm_act,
}


def _counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("n", [None, 2])
@pytest.mark.parametrize("wanted", [(), ("input",), ("weight",), ("input", "weight", "bias")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_as_pytorchs(device, name, wanted, n, kernel):
    block = make_block(n, 4, 6, (3, 2, 4), kernel, groups=2, num_groups=2, stride=2, device=device)
    for leaf in wanted:
        block.tensors()[leaf].requires_grad_()
    arguments, settings = block.arguments()

    def ours():
        return FUNCTIONS[name](*arguments, **settings)

    def step(forward):
        y = forward()
        if wanted:
            y.sin().sum().backward()

    assert _counted(lambda: step(ours)) == _counted(lambda: step(block.eager)) > 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_by_their_names(device, name):
    """They keep nothing, so that the backward computes the convolution again."""
    block = make_block(2, 4, 6, 3, 3, num_groups=2, device=device).requires_grad()
    t, numbers = block.tensors(), ([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3)
    leading = (t["input"], t["weight"], t["bias"], *numbers)
    ops = torch.ops.upconv3d
    call = {
        "block": lambda: ops.conv_transpose3d_relu_group_norm(*leading, 2, None, None, 1e-5, "ieee"),
        "family": lambda: ops.conv_transpose3d_norm_act(
            *(*leading, "act_norm", 2, None, None, 1e-5, "silu", 0.0, None, None, False, "ieee")
        )[0],
    }[name]
    forward = 2 * 2 * 3**3 * 4 * 6 * 3**3
    with torch.no_grad():
        assert _counted(call) == forward
    assert _counted(lambda: call().sin().sum().backward()) == 4 * forward


def test_recomputed(device):
    block = make_block(2, 4, 6, 3, 3, num_groups=2, device=device).requires_grad()
    arguments, settings = block.arguments()

    def step(recompute):
        y = FUNCTIONS["block"](*arguments, **settings, recompute=recompute)
        y.sin().sum().backward()

    assert 3 * _counted(lambda: step(True)) == 4 * _counted(lambda: step(False))
