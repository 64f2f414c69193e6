# SPDX-License-Identifier: Apache-2.0
"""Blocks of accelerated Sequentials that our kernels compute, at calls that are like earlier ones.

Kernels' stand-ins let what Python does around these run on the CPU too.
"""

import copy

import pytest
import torch
import upconv3d
from torch import nn
from torch.autograd import forward_ad
from upconv3d._accelerated import remembered, run

AFTER = {
    "norm, prelu": lambda: (nn.InstanceNorm3d(8, affine=True), nn.PReLU(8)),
    "relu, norm": lambda: (nn.ReLU(), nn.GroupNorm(2, 8)),
    "silu": lambda: (nn.SiLU(),),
}


@pytest.fixture
def decided(monkeypatch):
    """A list that grows by one entry per call that is run by a decision about an earlier one."""
    found, run_decided = [], remembered.run_decided
    monkeypatch.setattr(run, "_checked", set())
    monkeypatch.setattr(remembered, "run_decided", lambda *a: (found.append(a), run_decided(*a))[1])
    return found


def _models(after):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ConvTranspose3d(6, 8, 3, 2), *AFTER[after]())
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    return plain, model


def _volume(seed=3):
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(seed))


def _gradients(model, x):
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return y, torch.autograd.grad((y * weights.to(y.dtype)).sum(), parameters)


def _same(model, plain, x, bar=1e-4):
    (y, ours), (expected, theirs) = _gradients(model, x), _gradients(plain, x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=bar, atol=bar)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=bar, atol=bar * max(1.0, float(theirs[0].abs().max())))


@pytest.mark.parametrize("after", AFTER)
def test_values_and_gradients(after, kernels, decided):
    plain, model = _models(after)
    for seed in range(4):
        _same(model, plain, _volume(seed))
    assert len(decided) == 2
    # The first call of ReLU before a group norm is conv_transpose3d_relu_group_norm's.
    backward = {"norm, prelu": 4, "relu, norm": 3, "silu": 4}[after]
    # Without a norm a backward begins with the convolution, whatever plans keep.
    assert kernels.calls.count("backward") == backward * (kernels.keeps or after == "silu")
    with torch.no_grad():
        for seed in range(3):
            torch.testing.assert_close(model(_volume(seed)), plain(_volume(seed)), rtol=1e-4, atol=1e-4)
    assert len(decided) == 4
    assert kernels.calls[-1] == "forward"


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("after", ["norm, prelu", "relu, norm"])
def test_autocast(after, low, kernels, decided):
    plain, model = _models(after)
    for recorded in (True, False):
        with torch.autocast("cpu", low), torch.set_grad_enabled(recorded):
            for seed in range(4):
                if recorded:
                    _same(model, plain, _volume(seed), 0.1)
                else:
                    torch.testing.assert_close(model(_volume(seed)), plain(_volume(seed)), rtol=0.1, atol=0.1)
    assert len(decided) == 2 + 3
    # Gradients that are recorded in float16 are PyTorch's operators' to compute.
    assert ("for_training" in kernels.calls) == (low is torch.bfloat16)


def test_parameters_that_are_frozen(kernels):
    plain, model = _models("norm, prelu")
    for frozen in (False, True, False):
        for one in (plain, model):
            one.requires_grad_(not frozen)
        kernels.calls.clear()
        for seed in range(3):
            if frozen:
                torch.testing.assert_close(model(_volume(seed)), plain(_volume(seed)), rtol=1e-4, atol=1e-4)
            else:
                _same(model, plain, _volume(seed))
        asked = "forward" if frozen else "for_training"
        assert kernels.calls[0] == asked and kernels.calls.count(asked) >= 3


@pytest.mark.parametrize("after", AFTER)
def test_who_else_differentiates(after, kernels):
    plain, model = _models(after)
    x = _volume()
    for _ in range(3):
        model(x)
    grads = [torch.func.grad(lambda x, one=one: one(x).square().sum())(x) for one in (model, plain)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    several = torch.stack([x, x + 1])
    batches = [torch.func.vmap(one)(several) for one in (model, plain)]
    torch.testing.assert_close(*batches, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(one(dual)).tangent for one in (model, plain)]
    torch.testing.assert_close(*tangents, rtol=1e-3, atol=1e-3)


def test_a_decided_call_that_is_refused_says_why(kernels):
    _, model = _models("norm, prelu")
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            for _ in range(3):
                model(_volume())
            kept, model[0].bias.data = model[0].bias.data, torch.ones(5)
            with pytest.raises(RuntimeError, match=r"^upconv3d: .*bias"):
                model(_volume())
            model[0].bias.data = kept


def test_other_data_of_parameters(kernels):
    """The same objects with other values, sizes and dtypes."""
    plain, model = _models("norm, prelu")
    for _ in range(3):
        _same(model, plain, _volume())
    slopes = torch.full((1,), 0.3)
    kernel = torch.randn(6, 8, 2, 2, 2)
    for change in (
        lambda one: setattr(one[2].weight, "data", slopes.clone()),
        lambda one: setattr(one[0].weight, "data", kernel.clone()),
        lambda one: one.double(),
    ):
        for one in (plain, model):
            change(one)
        x = _volume().to(plain[0].weight.dtype)
        for _ in range(3):
            _same(model, plain, x)
    for one in (plain, model):
        one[1].weight.data = one[1].weight.data.float()
        with pytest.raises(RuntimeError):
            one(_volume().double())
