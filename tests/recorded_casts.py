# SPDX-License-Identifier: Apache-2.0
"""Calls under autocast that autograd records, and their casts one by one: what test_recorded_casts.py and
test_recorded_casts_seen.py compare."""

import contextlib
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import make_block
from tails import make_call, outputs
from upconv3d import _autocast, _recorded_casts, _tail_call

LOW = torch.bfloat16
CASES = {
    "silu": {"activation": "silu"},
    "prelu": {"activation": "prelu", "norm": "instance"},
    "block": {"order": "act_norm"},  # ALONE's, by another name
    "block-instance": {"order": "act_norm", "norm": "instance"},
    "returned": {"norm": "instance", "return_conv": True},
    "relu-first-returned": {"order": "act_norm", "return_conv": True},
    "skip": {"activation": "prelu", "order": "act_norm", "skip": True},
    "bare": {"norm": None, "activation": "gelu"},
    "bare-relu-skip": {"norm": None, "skip": True, "return_conv": True},
}
ALONE = "the_block"  # conv_transpose3d_relu_group_norm, which has a node of its own


def of_cases(names):
    return pytest.mark.parametrize("case", names)


class _Block:
    """make_block's as a call is written in tails.py."""

    def __init__(self, block):
        self.block, self.tensors = block, block.tensors()

    def leaves(self):
        return _Block(self.block.requires_grad())

    def with_tensors(self, tensors):
        return _Block(replace(self.block, **tensors))

    def ours(self):
        return self.block.ours()

    def eager(self):
        return self.block.eager()


def make(case, device="cpu"):
    if case == ALONE:
        return _Block(make_block(2, 4, 8, 4, 3, num_groups=2, device=device))
    call = make_call(dtype=torch.float32, device=device, **CASES[case])
    if "skip" in call.tensors:
        call.tensors["skip"] = call.tensors["skip"].to(LOW)
    return call


def exchanged(call, **tensors):
    whole = call.tensors | tensors
    return call.with_tensors(whole) if isinstance(call, _Block) else replace(call, tensors=whole)


def forward(call, run="ours"):
    device_type = call.tensors["input"].device.type
    with torch.autocast(device_type, LOW):
        return outputs(getattr(call, run)())


def loss_of(results):
    return sum((r.float().sin() * (1 + i)).sum() for i, r in enumerate(results) if r.requires_grad)


def gradients_of(call, **options):
    leaves = [t for t in call.tensors.values() if t.requires_grad]
    results = forward(call)
    return results, torch.autograd.grad(loss_of(results), leaves, **options)


def watch_casts(monkeypatch):
    """Arguments of the operator that casts, a tuple per call."""
    found, cast = [], _recorded_casts._cast_parameters
    monkeypatch.setattr(_recorded_casts, "_cast_parameters", lambda *a: found.append(a) or cast(*a))
    # Small blocks are not to be computed in float32 instead, nor by PyTorch's calls on the CPU.
    monkeypatch.setattr(_autocast, "casts_cost_gradients", lambda low, _: low is torch.float16)
    for module in (_autocast, _tail_call):
        monkeypatch.setattr(module, "computes_in_float32", lambda *_: False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    return found


@contextlib.contextmanager
def one_by_one():
    """Every cast recorded."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_autocast, _tail_call):
            patch.setattr(module, "casts_leaves", lambda *_: False)
        yield


def check_close(found, expected):
    """Of second derivatives: where a cast is recorded they meet in 16 bit, here at the parameter in 32."""
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any())
            continue
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * float(b.detach().abs().max()))


def check_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert a is None or torch.equal(a, b)


def check_second_derivatives(call):
    leaves, found = list(call.tensors.values()), []
    for run in ("ours", "eager"):
        first = torch.autograd.grad(loss_of(forward(call, run)), leaves, create_graph=True)
        assert all(g.dtype is torch.float32 for g in first)
        ramps = (torch.linspace(-1, 1, g.numel(), device=g.device).view(g.shape) for g in first)
        loss = sum((g * ramp).sum() for g, ramp in zip(first, ramps, strict=True))
        found.append((first, torch.autograd.grad(loss, leaves, allow_unused=True)))
    for ours, theirs in zip(*found, strict=True):
        # Some, as of a bias before a norm, are rounding errors alone.
        most = max(float(b.detach().abs().max()) for b in theirs if b is not None)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0.2, atol=0.02 * most)


def make_module():
    return upconv3d.ConvTranspose3dNormAct(4, 6, 3, num_groups=2, activation="silu")
