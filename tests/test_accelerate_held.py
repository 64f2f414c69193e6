# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: forwards that ask which of two values is which, and that go over parameters."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Pair
from accelerated_models import Up as _Up
from torch import nn


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def both(monkeypatch):
    return lambda make: Pair(make, _volume(), monkeypatch.setattr)


class _Same(_Up):
    def forward(self, x, z):
        y = super().forward(x)
        return y if z is x else y + z.mean()


class _SameInTheEnd(_Up):
    def forward(self, x):
        y = x.relu()
        return super().forward(x) * (2 if None is not y is not x else 1)


class _Absent(_Up):
    def forward(self, x, scale=None, twice=True):
        y = super().forward(x)
        if twice is True:
            y = y * 2
        return y if scale is None else y * scale


def test_identity_of_arguments_is_no_traces():
    plain = _Same().eval()
    model = copy.deepcopy(plain)
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and finding.evaluation.endswith("asks whether z is x")
    x = _volume()
    assert torch.equal(model(x, x), plain(x, x)) and torch.equal(model(x, x + 1), plain(x, x + 1))


def test_identity_in_a_chain_of_comparisons(both):
    pair = both(_SameInTheEnd)
    assert pair.finding.evaluation.endswith("asks whether None is not y is not x")
    pair.check(0)


def test_identity_with_constants_is_known(both):
    both(_Absent).check(1)


class _Listed(_Up):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.full((1,), 2.0), torch.full((1,), 3.0)])

    def forward(self, x):
        y = super().forward(x)
        for scale in self.scales:
            y = y * scale
        return y * self.scales[-1]


class _Named(_Up):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({"b": torch.full((1,), 2.0), "a": torch.full((1,), 3.0)})

    def forward(self, x):
        y = super().forward(x)
        for name in self.scales:
            y = y * self.scales[name] + 1
        return y


class _Nested(_Up):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([nn.ParameterList([torch.full((1,), 2.0)])])

    def forward(self, x):
        y = super().forward(x)
        for level in self.levels:
            for scale in level:
                y = y * scale
        return y


def _of(model):
    return model.levels[0] if isinstance(model, _Nested) else model.scales


def _grow(model):
    parameters = _of(model)
    more = nn.Parameter(torch.full((1,), 5.0))
    if isinstance(parameters, nn.ParameterDict):
        parameters["more"] = more
    else:
        parameters.append(more)


def _reorder(model):
    first = model.scales.pop("a")
    model.scales["a"] = first


def _put_another(model):
    parameters = _of(model)
    key = "b" if isinstance(parameters, nn.ParameterDict) else 0
    parameters[key] = nn.Parameter(torch.full((1,), 9.0))


def _put_a_number(model):
    """Containers of parameters hold anything."""
    parameters = _of(model)
    if isinstance(parameters, nn.ParameterDict):
        parameters["more"] = 5.0
    else:
        parameters.append(5.0)


@pytest.mark.parametrize("make", [_Listed, _Named, _Nested])
@pytest.mark.parametrize("change", [_grow, _put_a_number])
def test_containers_of_parameters_that_grow(make, change, both):
    pair = both(make)
    pair.check(1)
    pair.change(_put_another)  # which is read at each call
    pair.check(1)
    pair.change(change)
    pair.check(0)


def test_parameters_in_another_order(both):
    pair = both(_Named)
    pair.change(_reorder)
    pair.check(0)


def test_fewer_parameters(both):
    pair = both(_Named)
    pair.change(lambda model: model.scales.pop("b"))
    pair.check(0)
    pair = both(_Nested)
    pair.change(lambda model: model.levels.__setitem__(0, nn.ParameterList()))
    pair.check(0)


@pytest.mark.parametrize("make", [_Listed, _Named, _Nested])
def test_containers_of_more_than_parameters_are_left_alone(make, both):
    def with_a_number():
        model = make()
        _put_a_number(model)
        return model

    pair = both(with_a_number)
    name = "levels" if make is _Nested else "scales"
    assert pair.finding.evaluation.endswith(f"reads self.{name}, which holds more than parameters")
    pair.check(0)


@pytest.mark.parametrize("make", [_Listed, _Named, _Nested])
def test_containers_of_parameters_in_graphs(make, both):
    torch._dynamo.reset()
    pair = both(make)
    compiled = torch.compile(pair.model, fullgraph=True, backend="aot_eager")
    for change in (lambda model: None, _grow):
        pair.change(change)
        torch.testing.assert_close(compiled(_volume()), pair.plain(_volume()), rtol=1e-4, atol=1e-5)
