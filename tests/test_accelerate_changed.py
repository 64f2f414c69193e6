# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: what a traced forward reads, changed between two calls in ways that look alike."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Up as _Up


def _x(dtype=torch.float32):
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3)).to(dtype)


class _Posts(_Up):
    def post(self, y):
        return y * 2

    def forward(self, x):
        return self.post(super().forward(x))


@pytest.mark.parametrize("traced", [False, True])
def test_methods_of_the_instance(traced):
    """One that is put in the place of the class's afterwards is called, and the trace again without it."""
    model = _Posts()
    plain = copy.deepcopy(model)
    assert upconv3d.accelerate(model).replaced
    if traced:
        torch.testing.assert_close(model(_x()), plain(_x()))
    model.post = plain.post = lambda y: y * 5
    torch.testing.assert_close(model(_x()), plain(_x()))
    del model.post, plain.post
    torch.testing.assert_close(model(_x()), plain(_x()))
    upconv3d.restore(model)
    assert type(model) is _Posts


def _closing(max):
    """A model whose forward calls what a function around it named like a builtin."""

    class Closing(_Up):
        def forward(self, x):
            return super().forward(x) * max()

    return Closing()


def test_names_of_a_function_around_it():
    factor = [1.0]
    model = _closing(lambda: factor[0])
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model)
    assert not report.replaced and "uses max, of a function around it" in str(report)
    factor[0] = 3.0
    assert torch.equal(model(_x()), plain(_x()))


class _Divides(_Up):
    def __init__(self):
        super().__init__()
        self.by, self.axes, self.channels = 0.0, (2,), (0,)

    def forward(self, x):
        return self.norm(self.up(x)) / self.by


class _Sums(_Divides):
    def forward(self, x):
        return self.norm(self.up(x)).sum(self.axes)


class _Indexes(_Divides):
    def forward(self, x):
        return self.norm(self.up(x))[self.channels]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(_Divides, "by", -0.0), (_Sums, "axes", (2.0,)), (_Indexes, "channels", (False,))],
)
def test_numbers_that_are_equal_and_not_the_same(make, name, value):
    model = make()
    plain = copy.deepcopy(model)
    assert upconv3d.accelerate(model).replaced
    torch.testing.assert_close(model(_x()), plain(_x()), equal_nan=True)
    results = []
    for each in (plain, model):
        setattr(each, name, value)
        try:
            results.append(each(_x()))
        except TypeError as error:
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results, equal_nan=True)
