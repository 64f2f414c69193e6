# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: forwards whose arguments have defaults, and traces that are no code."""

import copy
import random
import warnings

import pytest
import torch
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import count_blocks_run
from torch import nn


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


def _with_default(value):
    class Defaulted(_Up):
        def forward(self, x, other=value):
            return self.norm(self.up(x)), other

    return Defaulted().eval()


class _Skipping(_Up):
    def forward(self, x, skips=()):
        y = self.norm(self.up(x))
        for skip in skips:
            y = y + skip
        return y


class _Collecting(_Up):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(len(seen))
        return self.norm(self.up(x)) * len(seen)


CONSTANTS = [
    *(None, True, 3, -2.5, 1j, float("-inf"), 'it\'s "so"\n'),
    *(torch.float64, torch.device("cpu"), torch.channels_last_3d),
]
OTHERS = {
    "a tuple": (1.0, 2.0),
    "a list": [1.0, 2.0],
    "a dict": {"scale": 2.0},
    "a Tensor": torch.ones(1),
    "a Size": torch.Size([2]),
    "a slice": slice(0, 1),
    "a ReLU": nn.ReLU(),
    "nan": float("nan"),
}


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_plain_defaults(value, monkeypatch):
    model = _with_default(value)
    plain = copy.deepcopy(model)
    assert upconv3d.accelerate(model).replaced
    calls = count_blocks_run(monkeypatch.setattr)
    (y, other), (expected, _) = model(_volume()), plain(_volume())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1 and type(other) is type(value) and other == value
    assert model(_volume(), 7)[1] == 7 and len(calls) == 1


@pytest.mark.parametrize("kind", OTHERS)
def test_other_defaults_are_left_alone(kind):
    model = _with_default(OTHERS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced
    assert finding.evaluation.endswith(f"has a default that is no plain number, other: {kind}")
    y, other = model(_volume())
    assert other is OTHERS[kind] and torch.equal(y, model.norm(model.up(_volume())))


@pytest.mark.parametrize("make", [_Skipping, _Collecting])
def test_empty_containers_as_defaults(make):
    model = make().eval()
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and "a default that is no plain number" in finding.evaluation
    assert make.forward.__defaults__[0] in ((), [])  # accelerate() called nothing
    y = model.norm(model.up(_volume()))
    assert torch.equal(model(_volume(), [y]), y + y if make is _Skipping else y * 2)


class _Gated(_Up):
    def gate(self, y, draw=random.random):
        return y * draw()

    def forward(self, x):
        return self.gate(super().forward(x))


class _Noting(_Up):
    @staticmethod
    def note(y, *, seen=[]):  # noqa: B006
        seen.append(len(seen))
        return y * len(seen)

    def forward(self, x):
        return self.note(super().forward(x))


class _AboveNoting(_Collecting):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("make", [_Gated, _Noting, _AboveNoting])
def test_what_a_method_leaves_out_is_made_at_each_call(make):
    model = make().eval()
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and "() has a default that is no plain number: a " in finding.evaluation
    assert not torch.equal(model(_volume()), model(_volume()))


class _Casting(_Up):
    def cast(self, y, dtype=torch.float64, scale=2.0, *, shift=(1, 2)):
        return y.to(dtype) * scale + shift[0]

    def forward(self, x):
        return self.cast(super().forward(x))


def test_plain_numbers_that_a_method_leaves_out():
    model = _Casting().eval()
    plain = copy.deepcopy(model)
    assert upconv3d.accelerate(model).replaced
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", ["def forward(self, x=:\n", "forward = unknown\n"])
def test_a_trace_that_is_no_code_is_a_reason(source, monkeypatch):
    model = _Up().eval()
    plain = copy.deepcopy(model)
    written = torch.fx.Graph.python_code

    def spoiled(graph, *arguments, **options):
        code = written(graph, *arguments, **options)
        code.src = source
        return code

    monkeypatch.setattr(torch.fx.Graph, "python_code", spoiled)
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and "the code of its trace is none: " in finding.evaluation
    assert type(model) is _Up
    assert torch.equal(model(_volume()), plain(_volume()))
