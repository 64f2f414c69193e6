# SPDX-License-Identifier: Apache-2.0
"""Sizes that a program leaves open: those that change from call to call, and those that only data says."""

import copy

import pytest
import torch
import upconv3d
from torch import nn
from torch.torch_version import TorchVersion
from upconv3d import _geometry
from upconv3d._accelerated import block

Dim = torch.export.Dim
TAILS = {
    "relu, group": lambda: (nn.ReLU(), nn.GroupNorm(2, 8)),
    "group, silu": lambda: (nn.GroupNorm(2, 8), nn.SiLU()),
    "group of one, silu": lambda: (nn.GroupNorm(8, 8), nn.SiLU()),
}


class Chosen(nn.Module):
    """The samples, or the depths, that a mask chooses: how many only the data says."""

    def __init__(self, layers, dim):
        super().__init__()
        self.layers, self.dim = layers, dim

    def forward(self, x, mask):
        return self.layers(x[mask] if self.dim == 0 else x[:, :, mask])


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


HOW = {
    "compiled": lambda model, args: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "exported": lambda model, args: torch.export.export(model, args).module(),
    "exported strictly": lambda model, args: torch.export.export(model, args, strict=True).module(),
}


@pytest.mark.usefixtures("_small_blocks_are_left")
@pytest.mark.parametrize("accelerated", [True, False], ids=["accelerated", "module"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dim", [0, 2], ids=["samples", "depths"])
@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("training", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_data_says(training, name, dim, how, accelerated):
    torch._dynamo.reset()
    plain, ours = _pair(name)
    if not accelerated:
        conv, *tail = plain
        norm, activation = tail if isinstance(tail[1], nn.SiLU) else tail[::-1]
        order = "norm_act" if tail[0] is norm else "act_norm"
        ours = upconv3d.ConvTranspose3dNormAct.from_modules(conv, norm, activation, order=order)
    x = torch.randn(5, 4, 5, 3, 4, requires_grad=training)
    mask = torch.tensor([True, False, True, True, False])
    with torch.set_grad_enabled(training):
        expected = Chosen(plain, dim)(x, mask)
        try:
            y = HOW[how](Chosen(ours, dim), (x, mask))(x, mask)
        except Exception:
            # From 2.14 on its group_norm asks whether there are positions.
            if "2.13" <= TorchVersion(torch.__version__) < "2.14":
                raise
            try:
                HOW[how](Chosen(plain, dim), (x, mask))(x, mask)
            except Exception:
                pytest.skip("PyTorch's own operators need to know")
            raise
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if training:
        ours, theirs = (torch.autograd.grad(value.square().sum(), x)[0] for value in (y, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_formats_of_sizes_that_only_data_says():
    formats = []

    def keep(x):
        formats.append(_geometry.memory_format_of(x))
        return x + 1

    for memory_format in (torch.contiguous_format, torch.channels_last_3d):
        for axis in (0, 2, 3, 4):
            torch._dynamo.reset()
            x = torch.randn(3, 4, 5, 6, 7).contiguous(memory_format=memory_format)
            torch._dynamo.decorators.mark_unbacked(x, axis)
            formats.clear()
            torch.compile(keep, fullgraph=True, backend="eager")(x)
            assert formats == [memory_format], (memory_format, axis)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TAILS)
def test_traces_under_autocast(name):
    """There, sizes are tensors."""
    plain, ours = _pair(name)
    x = torch.randn(2, 4, 5, 6, 7).contiguous(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        traced, expected = (torch.jit.trace(model, (x,), check_trace=False) for model in (ours, plain))
        torch.testing.assert_close(traced(x), expected(x), rtol=2e-2, atol=2e-2)
