# SPDX-License-Identifier: Apache-2.0
"""Sizes that a program leaves open."""

import copy

import pytest
import torch
import upconv3d
from torch import nn
from upconv3d._accelerated import block

Dim = torch.export.Dim
TAILS = {
    "relu, group": lambda: (nn.ReLU(), nn.GroupNorm(2, 8)),
    "group, silu": lambda: (nn.GroupNorm(2, 8), nn.SiLU()),
}


def _pair(name):
    """A model and the same accelerated."""
    plain = nn.Sequential(nn.ConvTranspose3d(4, 8, 3, 2, 1, 1), *TAILS[name]())
    ours = copy.deepcopy(plain)
    upconv3d.accelerate(ours)
    return plain, ours


@pytest.fixture
def _small_blocks_are_left(monkeypatch, small_blocks_left):
    """As they are outside of these tests."""
    monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", small_blocks_left)


SIZES = {
    "batch": {0: Dim("batch")},
    "volume": {2: Dim("depth"), 3: Dim("height"), 4: Dim("width")},
    "automatic": {0: Dim.AUTO, 2: Dim.AUTO, 4: Dim.AUTO},
}


@pytest.mark.usefixtures("_small_blocks_are_left")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["relu, group", "group, silu"])
def test_programs_are_for_small_and_large_sizes(name, sizes, strict, small_blocks_left):
    plain, ours = _pair(name)
    with torch.no_grad():
        program = torch.export.export(
            ours, (torch.randn(2, 4, 5, 6, 7),), dynamic_shapes=(SIZES[sizes],), strict=strict
        ).module()
        large = (2, 4, 48, 25, 30) if sizes == "volume" else (320, 4, 5, 6, 7)
        for size in ((2, 4, 5, 6, 7), large):
            x = torch.randn(size)
            torch.testing.assert_close(program(x), plain(x), rtol=1e-4, atol=1e-4)
    assert x.numel() * 16 > small_blocks_left
