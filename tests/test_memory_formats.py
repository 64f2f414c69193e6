# SPDX-License-Identifier: Apache-2.0
"""Sizes, strides and memory formats of results; inputs of any strides."""

from dataclasses import replace

import pytest
import torch
from oracles import check_gradients_like_eager, check_like_eager, make_block
from tails import make_call, outputs
from test_values import shape_block
from upconv3d import _tail_call


def _dense_strides(sizes, memory_format):
    return torch.empty(sizes, memory_format=memory_format).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("x_last", [False, True])
@pytest.mark.parametrize("w_last", [False, True])
def test_channels_last_in_channels_last_out(device, n, x_last, w_last, dtype):
    block = make_block(n, 8, 16, 4, 3, num_groups=4, device=device, dtype=dtype)
    both = block.channels_last()
    block = replace(
        block, input=both.input if x_last else block.input, weight=both.weight if w_last else block.weight
    )
    y, y_eager = block.ours(), block.eager()
    expected = torch.channels_last_3d if x_last or w_last else torch.contiguous_format
    assert y.stride() == _dense_strides(y.shape, expected)
    # PyTorch drops the format where its CPU convolution does (float64, small float32); it never adds it.
    if not (x_last or w_last) or y_eager.is_contiguous(memory_format=torch.channels_last_3d):
        assert y.stride() == y_eager.stride()


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("small", [0, 2**22])
@pytest.mark.parametrize("norm", ["group", "instance", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("which", [(), ("input",), ("weight",), ("input", "weight")], ids=str)
def test_channels_last_through_the_family(device, which, dtype, norm, small, cudnn, monkeypatch):
    """Whoever computes it, with gradients recorded and without; small: blocks that are PyTorch's calls."""
    monkeypatch.setattr(_tail_call, "SMALL_BLOCK_VALUES", small)
    options = {"norm": norm, "device": device, "dtype": dtype}
    call = make_call(**options, return_conv=True).channels_last(*which)
    expected = torch.channels_last_3d if which else torch.contiguous_format
    groups = {"bias": False, "groups": 2}
    with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
        for one in (call, make_call(**options, activation="gelu", **groups).channels_last(*which)):
            for recorded in (one, one.leaves()):
                for y in outputs(recorded.ours()):
                    assert y.stride() == _dense_strides(y.shape, expected), type(y.grad_fn).__name__


def test_memory_format_rule_is_pytorchs():
    """_geometry's rule against PyTorch's own Python rendering of Tensor.suggest_memory_format."""
    from torch._prims_common import suggest_memory_format
    from upconv3d._geometry import suggests_channels_last_3d

    for sizes in (
        [2, 3, 4, 5, 6],
        [1, 3, 1, 1, 1],
        [2, 1, 4, 4, 4],
        [1, 1, 1, 1, 1],
        [4, 1, 1, 1, 1],
        [1, 8, 4, 1, 4],
        [0, 4, 3, 3, 3],
    ):
        for memory_format in (torch.contiguous_format, torch.channels_last_3d):
            tensor = torch.empty(sizes).contiguous(memory_format=memory_format)
            for view in (
                tensor,
                tensor.transpose(0, 1),
                tensor.transpose(1, 4),
                tensor[..., ::2],
                tensor[:, :1],
            ):
                theirs = suggest_memory_format(view) == torch.channels_last_3d
                assert suggests_channels_last_3d(view) == theirs, (view.shape, view.stride())


VIEWS = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "depth-innermost": lambda t: t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
    "every-second": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[:, :, :, :, :1].expand(t.shape),
    "channel-sliced": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["input", "weight"])
def test_any_strides(device, which, view, layout, dtype):
    block = shape_block("padding", device=device, dtype=dtype)
    block = block.channels_last() if layout == "NDHWC" else block
    block = replace(block, **{which: VIEWS[view](getattr(block, which))})
    check_like_eager(block)


def test_strided_vectors(device):
    block = shape_block("padding", device=device)
    views = {}
    for name in ("bias", "norm_weight", "norm_bias"):
        vector = getattr(block, name)
        views[name] = torch.stack([vector, -vector], dim=1)[:, 0]
    strided = replace(block, **views)
    assert torch.equal(strided.ours(), block.ours())


def test_unbatched_is_a_batch_of_one(device):
    block = shape_block("unbatched", device=device)
    for case in (block, block.channels_last()):
        y = case.ours()
        whole = replace(case, input=case.input.unsqueeze(0)).ours()
        assert y.dim() == 4 and torch.equal(y, whole[0]) and y.stride() == whole[0].stride()


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_one_of_a_batch(device, layout, index):
    """Its memory begins amid the batch's."""
    block = shape_block("unbatched", device=device)
    batch = torch.randn(4, *block.input.shape, device=device)
    if layout == "NDHWC":
        batch = batch.contiguous(memory_format=torch.channels_last_3d)
    one = replace(block, input=batch[index])
    check_like_eager(one)
    check_gradients_like_eager(one)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_empty_batch(device, layout, dtype):
    block = shape_block("padding", device=device, dtype=dtype)
    block = replace(block, input=block.input[:0])
    block = block.channels_last() if layout == "NDHWC" else block
    y, y_eager = block.ours(), block.eager()
    assert y.shape == y_eager.shape and y.dtype == dtype


def test_result_is_a_tensor_of_its_own(device):
    """Two calls never share memory, and a later call does not change an earlier result."""
    block = shape_block("padding", device=device)
    first = block.ours()
    kept = first.clone()
    second = replace(block, input=block.input + 1).ours()
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
