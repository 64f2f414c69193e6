# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: state that a forward reads or changes is read and changed at each call."""

import collections
import copy
import enum

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import count_blocks_run
from torch import nn
from upconv3d._accelerated import run


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


def _accelerated(make):
    """A plain model, a copy that is accelerated, and what became of its only convolution."""
    torch.manual_seed(7)
    plain = make().eval()
    model = copy.deepcopy(plain)
    (finding,) = upconv3d.accelerate(model).findings
    return plain, model, finding


def _same(plain, model, x):
    y, expected = model(x), plain(x)
    assert y.dtype is expected.dtype and y.requires_grad == expected.requires_grad
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def _same_state(plain, model):
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], tensor, msg=key)


class _Buffered(_Up):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("number", torch.tensor(1.0))
        self.register_buffer("on", torch.tensor(False))


class _Item(_Buffered):
    def forward(self, x):
        return super().forward(x) * self.number.item()


class _Sized(_Buffered):
    def forward(self, x):
        return super().forward(x) * self.scale.shape[0]


class _OfItsDtype(_Buffered):
    def forward(self, x):
        return super().forward(x.to(self.scale.dtype))


class _Counting(_Buffered):
    def forward(self, x):
        self.number.add_(1)
        return super().forward(x)


class _Averaging(_Buffered):
    def forward(self, x):
        y = super().forward(x)
        self.scale.mul_(0.9).add_(y.detach().mean((0, 2, 3, 4)))
        return y + self.scale.view(1, -1, 1, 1, 1)


class _Switched(_Buffered):
    def forward(self, x):
        y = super().forward(x)
        if self.on:
            y = y + 1
        return y


class _CountingSwitched(_Switched):
    def forward(self, x):
        self.number.add_(1)
        return super().forward(x)


class _OverItsValues(_Buffered):
    def forward(self, x):
        y = super().forward(x)
        for value in self.scale:
            y = y + value
        return y


def _set_values(model):
    model.number.fill_(3)
    model.on.fill_(True)
    model.scale.fill_(2)


def _set_sizes(model):
    model.scale = torch.ones(5)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *((make, _set_values) for make in (_Item, _Counting, _Averaging)),
        *((make, nn.Module.double) for make in (_OfItsDtype, _Counting, _Averaging)),
        (_Sized, _set_sizes),
    ],
)
def test_buffers_are_read_and_changed_at_each_call(make, change):
    plain, model, finding = _accelerated(make)
    assert finding.replaced
    _same_state(plain, model)  # accelerate() changed none
    _same(plain, model, _volume())
    for each in (plain, model):
        change(each)
    x = _volume() if make is _OfItsDtype else _volume().to(plain.up.weight.dtype)
    for _ in range(2):
        _same(plain, model, x)
        _same_state(plain, model)


@pytest.mark.parametrize("make", [_Switched, _CountingSwitched, _OverItsValues])
def test_forwards_that_branch_on_a_buffer_are_left_alone_and_so_is_the_buffer(make):
    plain, model, finding = _accelerated(make)
    assert not finding.replaced and "cannot trace its forward" in finding.evaluation
    assert model.__dict__.keys() == plain.__dict__.keys()
    _same_state(plain, model)
    for each in (plain, model):
        _set_values(each)
    _same(plain, model, _volume())


class _Unregistered(_Up):
    """A tensor in a parameter's place that is none, as some wrappers put there."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._parameters["scale"] = torch.ones(1)

    def forward(self, x):
        return super().forward(x) * self.scale


def test_tensors_that_are_neither_parameters_nor_buffers_are_left_alone():
    plain, model, finding = _accelerated(_Unregistered)
    assert not finding.replaced and "a tensor that a trace would keep" in finding.evaluation
    assert model.__dict__.keys() == plain.__dict__.keys()


class _Private(_Up):
    """Names that the compiler mangles: of an attribute, a method, an argument and a variable."""

    def __init__(self):
        super().__init__()
        self.__gain = 1.0

    def gain(self, value):
        self.__gain = value

    def __scaled(self, y, __more):
        __factor = self.__gain
        return y * __factor + __more

    def forward(self, x):
        return self.__scaled(super().forward(x), [self.__gain for _ in range(2)][1])


class _Inheriting(_Private):
    """A class of another name."""


class _PrivateMethod(_Up):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __note(self, y):
        self.seen.append(y.shape)
        return y

    def forward(self, x):
        return self.__note(super().forward(x))


class _Lender(_Up):
    def gain(self, value):
        self.__gain = value

    def forward(self, x):
        return self.norm(self.up(x)) * self.__gain


class _Borrowing(_Up):
    """Functions that were written in another class."""

    gain, forward = _Lender.gain, _Lender.forward

    def __init__(self):
        super().__init__()
        self.gain(2.0)


class _Misnamed(_Private):
    def forward(self, x):
        return self.norm(self.up(x)) * self.__other

    forward.__qualname__ = "_Elsewhere.forward"


@pytest.mark.parametrize("make", [_Private, _Inheriting, _Borrowing])
def test_private_names_are_the_compilers(make):
    plain, model, finding = _accelerated(make)
    assert finding.replaced
    _same(plain, model, _volume())
    for each in (plain, model):
        each.gain(3.0)
    _same(plain, model, _volume())


def test_private_methods_are_read():
    plain, model, finding = _accelerated(_PrivateMethod)
    assert not finding.replaced and finding.evaluation.endswith("reads self.seen, a list")
    assert not model.seen
    _same(plain, model, _volume())


def test_private_names_of_an_unknown_class_are_left_alone():
    _, _, finding = _accelerated(_Misnamed)
    assert not finding.replaced
    assert finding.evaluation.endswith("_Elsewhere.forward uses __other, another class's")


class _Number(_Up):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("value", [torch.tensor(3.0), nn.Parameter(torch.tensor(3.0)), True, 1])
def test_numbers_that_become_something_else_of_the_same_value(value, monkeypatch):
    """1.0 == True, which said of tensors and modules that they are there."""
    plain, model, finding = _accelerated(_Number)
    assert finding.replaced
    calls = count_blocks_run(monkeypatch.setattr)
    for each in (plain, model):
        each.scale = value
    _same(plain, model, _volume())
    assert not calls


class _Own(float):
    def __mul__(self, other):
        return other

    __rmul__ = __mul__


class _Mode(str, enum.Enum):
    NEAREST = "nearest"


_Pair = collections.namedtuple("_Pair", "first second")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (_Own(2), "_Own"),
        (_Mode.NEAREST, "_Mode"),
        (_Pair(1, 2), "_Pair"),
        ((1, _Own(2)), "tuple"),
        ([1, 2], "list"),
    ],
)
def test_subclasses_of_numbers_are_no_numbers(value, kind):
    def make():
        model = _Number()
        model.scale = value
        return model

    _, _, finding = _accelerated(make)
    assert not finding.replaced and finding.evaluation.endswith(f"reads self.scale, a {kind}")


def test_numpys_numbers_are_no_numbers():
    """The code of a trace would name numpy, which is not there."""
    numpy = pytest.importorskip("numpy")

    def make():
        model = _Number()
        model.scale = numpy.sqrt(0.5)
        return model

    plain, model, finding = _accelerated(make)
    assert not finding.replaced and finding.evaluation.endswith("reads self.scale, a float64")
    _same(plain, model, _volume())


def test_numpys_integers_in_a_convolution(monkeypatch):
    """As MONAI computes them for kernels that differ by axis."""
    numpy = pytest.importorskip("numpy")

    def make():
        padding = tuple(numpy.array([1, 1, 0]))
        conv = nn.ConvTranspose3d(6, 8, (3, 3, 1), (2, 2, 1), padding, padding)
        return nn.Sequential(conv, nn.GroupNorm(2, 8), nn.ReLU())

    plain, model, finding = _accelerated(make)
    calls = count_blocks_run(monkeypatch.setattr)
    _same(plain, model, _volume())
    assert finding.replaced and len(calls) == 1


_TAKEN = [True, 1, "float32", "float64", "int64", "bool", torch.tensor(0.5)]  # names of NumPy's
_NUMBERED = {
    "negative_slope": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8), nn.LeakyReLU()),
    "alpha": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.ELU(), nn.InstanceNorm3d(8)),
    "eps": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8), nn.SiLU()),
    "eps of the block": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.ReLU(), nn.GroupNorm(2, 8)),
}


def _result_or_error(model):
    try:
        return model(_volume())
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("precision", [None, "ieee"])
@pytest.mark.parametrize("value", [*_TAKEN, "none"], ids=str)
@pytest.mark.parametrize("name", _NUMBERED)
def test_numbers_that_pytorchs_modules_take(name, value, precision, monkeypatch):
    """A bool, say, which the family's function refuses; what PyTorch refuses, PyTorch says."""
    monkeypatch.setattr(run, "_checked", set())
    if isinstance(value, str):
        value = None if value == "none" else getattr(pytest.importorskip("numpy"), value)(1)
    plain = _NUMBERED[name]()
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model, precision=precision)
    attribute = name.split()[0]
    # What was checked of 1.0 is known of what equals it.
    for number in (value, 1.0, value):
        for each in (plain, model):
            setattr(next(module for module in each if hasattr(module, attribute)), attribute, number)
        expected = _result_or_error(plain)
        for _ in range(2):
            y = _result_or_error(model)
            if isinstance(expected, str):
                assert y == expected
            else:
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


class _OfSize(_Up):
    def __init__(self):
        super().__init__()
        self.size = torch.Size([2, 3, 2])
        self.mode = ("nearest", 1)

    def forward(self, x):
        return F.interpolate(super().forward(x), size=self.size, mode=self.mode[0])


def test_sizes_and_tuples_are_compared():
    plain, model, finding = _accelerated(_OfSize)
    assert finding.replaced
    _same(plain, model, _volume())
    for each in (plain, model):
        each.size, each.mode = torch.Size([4, 4, 4]), ("trilinear", 1)
    _same(plain, model, _volume())
