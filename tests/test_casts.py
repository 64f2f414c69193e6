# SPDX-License-Identifier: Apache-2.0
"""Autocast's casts of a call's tensors: of the parameters together, and bit by bit what .to() makes."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import upconv3d
from modes import OperatorNames
from oracles import make_block
from test_select_plan import HOPPER
from torch._subclasses.fake_tensor import FakeTensorMode
from upconv3d import _autocast, _in_graphs
from upconv3d._accelerated import block as accelerated_block
from upconv3d._accelerated.chain import find_block
from upconv3d._autocast import cast_tensors


@pytest.fixture
def batches(monkeypatch):
    """What was cast together, a list of tensors per launch."""
    found, copy_all = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: found.append(of) or copy_all(to, of))
    return found


_PERMUTED = torch.randn(6, 4, 3, 2, 2).transpose(0, 1)
_WEIGHTS = {  # and whether empty_like has the strides that .to() has
    "NCDHW": (torch.randn(4, 6, 3, 2, 2), True),
    "NDHWC": (_PERMUTED.contiguous(memory_format=torch.channels_last_3d), True),
    "permuted": (_PERMUTED, False),
    "sliced": (torch.randn(4, 6, 3, 2, 4)[..., ::2], False),
    "sliced and permuted": (torch.randn(6, 4, 3, 2, 4).transpose(0, 1)[..., ::2], False),
    "expanded": (torch.randn(4, 1, 3, 2, 2).expand_as(_PERMUTED), False),
    "float64": (torch.randn(4, 6, 3, 2, 2, dtype=torch.float64), False),
}


@pytest.mark.parametrize("looking", ["nobody", "mode", "autograd"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _WEIGHTS)
def test_bits_and_strides_are_those_of_to(name, low, looking, batches):
    weight, dense = _WEIGHTS[name]
    bias = torch.tensor([torch.nan, torch.inf, -0.0, 3e38, 1e-40, 1.00390625, 1.01171875, -65520.0])
    slopes, gamma = torch.nn.Parameter(torch.tensor([0.25])), torch.ones(6, dtype=low)
    tensors = [torch.randn(1, 4, 3, 3, 3), weight, bias, gamma, None, slopes, torch.randn(1, 6, 5, 4, 4)]
    mode = OperatorNames() if looking == "mode" else contextlib.nullcontext()
    with mode, torch.set_grad_enabled(looking == "autograd"):
        cast = cast_tensors(tensors, low, looking == "autograd")
    assert cast[3] is gamma and cast[4] is None and cast[5].requires_grad == (looking == "autograd")
    for result, tensor in zip(cast, tensors, strict=True):
        if tensor is not None:
            expected = tensor.detach().to(low)
            assert result.dtype is low and result.stride() == expected.stride()
            assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
    together = [weight, bias, slopes] if dense else [bias, slopes]
    expected = [list(map(id, together))] if looking == "nobody" else []
    assert [list(map(id, batch)) for batch in batches] == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_by_one(batches):
    """A single parameter, fake tensors, and what torch.jit.trace records."""
    alone = [torch.ones(2), torch.ones(3), None]
    assert cast_tensors(alone, torch.bfloat16, False)[1].dtype is torch.bfloat16
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(torch.ones(2)) for _ in range(3)]
    assert all(fake.dtype is torch.bfloat16 for fake in cast_tensors(fakes, torch.bfloat16, False))
    ones = (torch.ones(2),) * 3
    traced = torch.jit.trace(
        lambda *tensors: cast_tensors(tensors, torch.bfloat16, False), ones, check_trace=False
    )
    assert torch.equal(traced(*(one * 3 for one in ones))[2], torch.full((2,), 3.0).bfloat16())
    assert not batches


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_block(context, batches):
    block = make_block(2, 8, 8, 4, 3, num_groups=2).requires_grad()
    with torch.autocast("cpu", torch.bfloat16):
        with context():
            y = block.ours()
            assert [len(batch) for batch in batches] == [4]
            with OperatorNames():
                assert torch.equal(block.ours(), y)
        block.ours()
    assert len(batches) == 1


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_precision_is_kept_where_autocast_casts_to_float32(low, monkeypatch):
    """By what the planner is asked, and says, without a GPU."""
    facts, explain, asked = _autocast.block_facts, upconv3d._C.explain, []
    planner = SimpleNamespace(explain=lambda call: asked.append(call) or explain(call | {"device": HOPPER}))
    monkeypatch.setattr(_autocast, "block_facts", lambda *call: facts(*call) | {"device": HOPPER})
    for module in (accelerated_block, _in_graphs):
        monkeypatch.setattr(module, "_C", planner)
        monkeypatch.setattr(module, "autocast_dtype", lambda _: low)
    with FakeTensorMode():
        x = torch.empty(2, 64, 16, 16, 16, device="cuda")
        weight = torch.empty(64, 128, 3, 3, 3, device="cuda")
    tensors = (x, weight, *(None,) * 5)
    numbers = ((1, 1, 1), (1, 1, 1), (0, 0, 0), 1, (1, 1, 1), 8, 1e-5, "ieee")
    is_low = low is not torch.float32
    for recording in (False, True):
        assert _autocast.computes_in_float32(tensors[:5], low, numbers, recording) == is_low
    assert _autocast.graph_without_casts(tensors[:5], low, numbers) == is_low
    _in_graphs.is_left_to_compiler(tensors, (*numbers, "norm_act", "silu", 0.0, False))
    assert {call["precision"] for call in asked} == {"tf32" if is_low else "ieee"}
    asked.clear()
    block = find_block([torch.nn.ConvTranspose3d(64, 128, 3), torch.nn.GroupNorm(8, 128)], 0)
    accelerated_block._plan_is_library(block, x, weight, "ieee", False)
    assert [call["spares_host"] for call in asked] == [is_low]


def test_one_voxel_is_left_to_pytorch_where_it_is_recorded(monkeypatch):
    """By what the planner says of a GPU, without one."""
    facts, explain = accelerated_block.block_facts, upconv3d._C.explain
    monkeypatch.setattr(accelerated_block, "block_facts", lambda *call: facts(*call) | {"device": HOPPER})
    monkeypatch.setattr(accelerated_block, "_C", SimpleNamespace(explain=explain))
    # Dilated, an output has no tap.
    for dilation, left in ((1, {False: False, True: True}), (2, {False: True, True: True})):
        with FakeTensorMode():
            x = torch.empty(4, 64, 1, 1, 1, device="cuda", dtype=torch.float64)
            weight = torch.empty(64, 8, 4, 4, 4, device="cuda", dtype=torch.float64)
        conv = torch.nn.ConvTranspose3d(64, 8, 4, dilation=dilation)
        block = find_block([conv, torch.nn.GroupNorm(8, 8)], 0)
        found = {r: accelerated_block._plan_is_library(block, x, weight, "tf32", r) for r in (False, True)}
        assert found == left, dilation
        # With a bias, a convolution that is returned is PyTorch's.
        returned = block._replace(returns_conv=True)
        assert accelerated_block._plan_is_library(returned, x, weight, "tf32", False)


_CHANNELS_LAST = {"memory_format": torch.channels_last_3d}
_WEIGHTS_OF_A_CALL = {
    "NCDHW": lambda w: w.contiguous(),
    "NDHWC": lambda w: w.contiguous(**_CHANNELS_LAST),
    "permuted": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda w: w.repeat_interleave(2, -1)[..., ::2],
    "unaligned": lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w),
}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _WEIGHTS_OF_A_CALL)
def test_the_operators_casts(name, low, cuda):
    """The same bits as of parameters that are cast before, without gradients and with."""
    generator = torch.Generator().manual_seed(11)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator).to(cuda)

    x = draw(2, 24, 5, 6, 7).to(low)
    vectors = {"bias": draw(40), "norm_weight": draw(41)[1:], "norm_bias": draw(80)[::2]}
    parameters = {"weight": _WEIGHTS_OF_A_CALL[name](draw(24, 40, 3, 3, 3)), **vectors}
    slopes = draw(40)

    def run(parameters, slopes):
        block = upconv3d.conv_transpose3d_norm_act
        # instance_norm's result has x's dtype: nothing is computed in float32 instead.
        return block(x, **parameters, stride=2, norm="instance", activation="prelu", activation_param=slopes)

    expected = run({key: value.to(low) for key, value in parameters.items()}, slopes.to(low))
    with torch.autocast("cuda", low), torch.no_grad():
        y = run(parameters, slopes)
        assert y.dtype is low and torch.equal(y, expected)
    if low is torch.float16:  # with gradients, PyTorch's operators
        return
    leaves = [value.detach().clone().requires_grad_() for value in (*parameters.values(), slopes)]
    lows = [leaf.detach().to(low).requires_grad_() for leaf in leaves]
    with torch.autocast("cuda", low):
        y = run(dict(zip(parameters, leaves, strict=False)), leaves[-1])
    z = run(dict(zip(parameters, lows, strict=False)), lows[-1])
    assert torch.equal(y, z)
    grad = draw(*z.shape).to(low)
    ours = torch.autograd.grad(y, leaves, grad)
    theirs = torch.autograd.grad(z, lows, grad)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32 and torch.equal(mine, other.float())
