# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: Sequentials in other modules, called as PyTorch calls them."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import cna
from torch import nn
from upconv3d._accelerated.swap import is_swapped


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


def _nested():
    return nn.Sequential(cna(), nn.Sequential(nn.ConvTranspose3d(8, 8, 2), nn.ReLU()), nn.Conv3d(8, 8, 1))


def _deep():
    """One block that is accelerated by itself, in a Sequential that has another."""
    return nn.Sequential(nn.Identity(), cna(), nn.ConvTranspose3d(8, 8, 2), nn.ReLU())


class _Opened(nn.Module):
    """A forward that completes what a Sequential begins."""

    def __init__(self):
        super().__init__()
        self.ups = nn.Sequential(*cna(), nn.ConvTranspose3d(8, 8, 2))
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        return self.norm(self.ups(x))


def _inner(model):
    return (
        model.ups if isinstance(model, _Opened) else model[1] if type(model[0]) is nn.Identity else model[0]
    )


def _set_forward(module):
    module.forward = lambda x: torch.ones(2, 8, 2, 2, 2)


def _put_on_top(**methods):
    def change(module):
        module.__class__ = type("OnTop", (type(module),), methods)

    return change


CHANGES = {
    "a forward of the instance": _set_forward,
    "a class with a forward": _put_on_top(forward=lambda self, x: torch.ones(2, 8, 2, 2, 2)),
    "a class with a call": _put_on_top(__call__=lambda self, x: torch.ones(2, 8, 2, 2, 2)),
    "a class with a call's inside": _put_on_top(_call_impl=lambda self, x: torch.ones(2, 8, 2, 2, 2)),
    "a class that goes over some": _put_on_top(__iter__=lambda self: iter(list(self._modules.values())[:1])),
    "a class without anything": _put_on_top(),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [_nested, _deep, _Opened])
def test_changed_sequentials_are_called_as_they_are(make, name, called):
    plain = make().eval()
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    assert is_swapped(_inner(model))
    if called:
        model(_volume())
        model(_volume())
    for each in (plain, model):
        CHANGES[name](_inner(each))
        if make is not _Opened:
            each.append(nn.Identity())  # nothing is left to PyTorch as before
    for _ in range(2):
        torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("precision", [None, "ieee"])
@pytest.mark.parametrize("make", [cna, _nested, _deep, _Opened])
def test_sequentials_that_are_given_another_forward_run_it(make, precision, called, monkeypatch):
    plain = make().eval()
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model, precision=precision)
    if called:
        model(_volume())
        model(_volume())

    def forward(self, input):
        for module in self:
            input = module(input) + 1
        return input

    monkeypatch.setattr(nn.Sequential, "forward", forward)
    for _ in range(2):
        torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


class _Counting(nn.ReLU):
    def _call_impl(self, *args, **kwargs):
        return super()._call_impl(*args, **kwargs) * 0 + 5


class _CallsCounting(_Up):
    def __init__(self):
        super().__init__()
        self.act = _Counting()

    def forward(self, x):
        return self.act(self.up(x))


@pytest.mark.parametrize(
    "make", [_CallsCounting, lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2), _Counting())]
)
def test_calls_of_a_class_of_its_own(make):
    model = make()
    upconv3d.accelerate(model, precision="ieee")
    assert (model(_volume()) == 5).all()


def test_dropout_of_lines_refuses_volumes():
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.Dropout1d(), nn.GroupNorm(2, 8), nn.ReLU()).eval()
    upconv3d.accelerate(model, precision="ieee")
    with pytest.raises(RuntimeError, match="dropout1d"):
        model(_volume())


def test_graphs_run_the_forward_that_sequentials_were_given(monkeypatch):
    plain = _nested().eval()
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, input: self[0](input) + 1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    monkeypatch.undo()
    torch.testing.assert_close(compiled(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("stride", [(2,), [2]])
def test_stride_of_one_element(stride):
    """PyTorch's modules keep it, and its operators take it for each axis."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 2, stride=stride), nn.GroupNorm(2, 8), nn.LeakyReLU())
    expected = model(_volume())
    upconv3d.accelerate(model)
    torch.testing.assert_close(model(_volume()), expected)
