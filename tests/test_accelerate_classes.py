# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: the classes that it gives modules, classes that object, and the way back."""

import abc
import copy
import io
import pickle

import pytest
import torch
import upconv3d
from accelerated_models import MODELS
from accelerated_models import Up as _Up
from torch import nn
from upconv3d._accelerated.swap import is_swapped


def _volume():
    return torch.randn(2, 6, 4, 3, 4, generator=torch.Generator().manual_seed(3))


class _Registered(_Up):
    """Classes by name; of each name one."""

    known: dict[str, type] = {}  # noqa: RUF012

    def __init_subclass__(cls, kind="unnamed", **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__name__ in _Registered.known:
            raise ValueError(f"{cls.__name__} is registered twice")
        _Registered.known[cls.__name__] = cls
        cls.kind = kind


class _Known(_Registered, kind="its own"):
    pass


class _Abstract(_Up, abc.ABC):
    @abc.abstractmethod
    def name(self): ...


class _Concrete(_Abstract):
    def name(self):
        return "concrete"


class _Guarded(_Up):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise AttributeError("its class stays")
        super().__setattr__(name, value)


class _Slotted(_Up):
    __slots__ = ("extra",)


class _Final(type):
    def __new__(cls, name, bases, namespace):
        if any(type(base) is _Final for base in bases):
            raise TypeError("a final class")
        return super().__new__(cls, name, bases, namespace)


class _Sealed(_Up, metaclass=_Final):
    pass


class _ByCode(type):
    def mro(cls):
        if any(isinstance(base, _ByCode) for base in cls.__bases__):
            raise TypeError("no subclasses\nof this")
        return super().mro()


class _Stubborn(_Up, metaclass=_ByCode):
    pass


class _Sized(_Up):
    """Made anew, by a copy, with arguments."""

    def __new__(cls, *sizes):
        module = super().__new__(cls)
        object.__setattr__(module, "sizes", sizes)
        return module

    def __init__(self, *sizes):
        super().__init__()

    def __getnewargs__(self):
        return self.sizes


class _SizedByName(_Up):
    def __getnewargs_ex__(self):
        return (), {}


class _AboveItself(_Up):
    def __init__(self):
        super(self.__class__, self).__init__()
        self.name = self.__class__.__name__

    def train(self, mode=True):
        return super(self.__class__, self).train(mode)


class _AboveItsType(_Up):
    @property
    def on(self):
        return super(type(self), self).training


class _Named(_Up):
    """Says super() and __class__ as others do."""

    def __init__(self):
        super(self.__class__, self).__init__()

    def extra_repr(self):
        return f"{type(self).__name__} {self.__class__.__name__} {super().extra_repr()}"

    def type(self, to):
        return super().type(to).train(type(self) is _Named)


def _beside(cls):
    """A model with a module of that class and one that nothing keeps from being accelerated."""
    return nn.Sequential(cls(), nn.Sequential(nn.ConvTranspose3d(8, 4, 2), nn.ReLU()))


@pytest.mark.parametrize("cls", [_Known, _Concrete, _Guarded, _Slotted, _Named])
def test_classes_that_are_particular_about_subclasses(cls):
    registered = dict(_Registered.known)
    model = _beside(cls)
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model)
    assert len(report.replaced) == 2, str(report)
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    assert registered == _Registered.known
    assert getattr(model[0], "kind", "its own") == "its own"
    report.restore()
    assert type(model[0]) is cls


def test_subclasses_of_accelerated_classes_are_their_authors():
    model = _Known()
    upconv3d.accelerate(model)
    with pytest.raises(ValueError, match="registered twice"):
        type("_Known", (type(model),), {})


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (_Sealed, "_Sealed has a metaclass, _Final, that takes part in making subclasses"),
        (_Stubborn, "_Stubborn cannot be given a subclass: no subclasses"),
        (_Sized, "_Sized has a __getnewargs__ of its own"),
        (_SizedByName, "_SizedByName has a __getnewargs_ex__ of its own"),
        (_AboveItself, "_AboveItself.train calls super() of whatever class self has"),
        (_AboveItsType, "_AboveItsType.on calls super() of whatever class self has"),
    ],
)
def test_classes_that_have_no_subclasses_are_left_alone(cls, reason):
    model = _beside(cls).train()
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model)
    assert [finding.replaced for finding in report.findings] == [False, True]
    assert report.findings[0].evaluation.endswith(reason)
    assert type(model[0]) is cls
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


def test_a_model_is_changed_as_a_whole_or_not_at_all(monkeypatch):
    model = _beside(_Up)
    types, swapped = [type(module) for module in model.modules()], []
    names = upconv3d.accelerate.__globals__
    swap = names["swap"]

    def fail_at_second(module, *arguments):
        if swapped:
            raise MemoryError
        swapped.append(module)
        swap(module, *arguments)

    monkeypatch.setitem(names, "swap", fail_at_second)
    with pytest.raises(MemoryError):
        upconv3d.accelerate(model)
    assert swapped and types == [type(module) for module in model.modules()]
    monkeypatch.undo()
    assert len(upconv3d.accelerate(model).replaced) == 2


def _saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), _saved_and_loaded]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "copy", "pickle", "load"])
@pytest.mark.parametrize("name", MODELS)
def test_copies_are_restored(name, copied):
    plain = MODELS[name]().eval()
    model = copy.deepcopy(plain)
    replaced = upconv3d.accelerate(model).replaced
    twin = copied(model)
    with pytest.raises(ValueError, match=r"Remedy: upconv3d.restore\(model\) first"):
        upconv3d.accelerate(twin)
    upconv3d.restore(twin)
    assert [type(module) for module in twin.modules()] == [type(module) for module in plain.modules()]
    assert not any(key.startswith("_upconv3d") for module in twin.modules() for key in module.__dict__)
    assert torch.equal(twin(_volume()), plain(_volume()))
    upconv3d.restore(twin)
    again = upconv3d.accelerate(twin)
    assert len(again.replaced) == len(replaced)
    again.restore()
    assert [type(module) for module in twin.modules()] == [type(module) for module in plain.modules()]


def test_slices_are_not_accelerated():
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 2, 1))
    report = upconv3d.accelerate(model)
    part = model[:3]
    assert not is_swapped(part)
    again = upconv3d.accelerate(part)
    assert len(again.replaced) == 1 and is_swapped(part) and is_swapped(model)
    torch.testing.assert_close(part(_volume()), model[:3](_volume()), rtol=1e-4, atol=1e-5)
    again.restore()
    report.restore()
    assert type(part) is type(model) is nn.Sequential


@pytest.mark.parametrize(
    ("bare", "reason"),
    [(False, "was made from an accelerated class"), (True, "has a forward of its own")],
)
def test_modules_with_yet_another_class_run_their_own_forward(bare, reason):
    model = nn.ConvTranspose3d(6, 8, 2) if bare else _Up()
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model, bare=bare)
    assert report.replaced
    model.__class__ = type("OnTop", (type(model),), {})
    assert torch.equal(model(_volume()), plain(_volume()))
    report.restore()
    assert not is_swapped(model) and torch.equal(model(_volume()), plain(_volume()))
    (finding,) = upconv3d.accelerate(model, bare=bare).findings
    assert not finding.replaced and finding.evaluation.endswith(reason)


class _ScaledUp(_Up):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class _Halved(nn.Module):
    def forward(self, tensor):
        return tensor / 2


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_parametrizations_put_on_accelerated_modules(name):
    """They make a subclass of the accelerated class, which copies share."""
    model = nn.ConvTranspose3d(6, 8, 2) if name == "weight" else _ScaledUp()
    cls, plain = type(model), copy.deepcopy(model)
    report = upconv3d.accelerate(model, bare=True)
    for each in (model, plain):
        nn.utils.parametrize.register_parametrization(each, name, _Halved())
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    upconv3d.restore(twin)
    assert not is_swapped(twin) and is_swapped(model) and is_swapped(other)
    report.restore()
    for each in (model, twin):
        assert type(each).__bases__ == type(plain).__bases__ == (cls,)
        assert torch.equal(each(_volume()), plain(_volume()))
        nn.utils.parametrize.register_parametrization(each, name, _Halved())
        nn.utils.parametrize.remove_parametrizations(each, name)
        assert type(each) is cls and torch.equal(getattr(each, name), getattr(plain, name) / 2)
    nn.utils.parametrize.remove_parametrizations(other, name)
    torch.testing.assert_close(other(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    upconv3d.restore(other)
    assert type(other) is cls


class _Optional(nn.Sequential):
    """Calls its children in a way of its own."""

    def forward(self, x):
        y = self.norm(self.up(x))
        return y if self.act is None else self.act(y)


def _optional():
    model = _Optional()
    for name, child in (("up", nn.ConvTranspose3d(6, 8, 2, 2)), ("norm", nn.GroupNorm(2, 8)), ("act", None)):
        model.add_module(name, child)
    return model


class _NotCalled(_Up):
    """Has a Sequential with nothing in a child's place, which is never called."""

    def __init__(self, *children):
        super().__init__()
        self.rest = nn.Sequential(*children)


_WITHOUT = {
    "behind a norm": lambda: (nn.ConvTranspose3d(8, 4, 2), nn.GroupNorm(2, 4), None),
    "between": lambda: (nn.ConvTranspose3d(8, 4, 2), None, nn.ReLU()),
    "behind one that is open": lambda: (nn.Sequential(nn.ConvTranspose3d(8, 4, 2)), None, nn.ReLU()),
}


@pytest.mark.parametrize("name", _WITHOUT)
def test_sequentials_that_cannot_be_called_are_left_alone(name):
    model = _NotCalled(*_WITHOUT[name]()).eval()
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model)
    assert [finding.replaced for finding in report.findings] == [True, False]
    assert "is None, which its forward would call" in report.findings[1].evaluation
    assert type(model.rest) is nn.Sequential
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


def test_what_stands_beside_such_a_sequential_is_accelerated():
    block = nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2), nn.ReLU())
    model = nn.Sequential(nn.ConvTranspose3d(6, 6, 1), nn.ReLU(), nn.Sequential(block, None), _optional())
    report = upconv3d.accelerate(model)
    assert [finding.container for finding in report.findings] == ["", "2.0", "3"]
    torch.testing.assert_close(
        model[3](_volume()), model[3].norm(model[3].up(_volume())), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("precision", [None, "ieee"])
def test_a_child_that_was_taken_away_cannot_be_called(precision):
    """As in the plain Sequential."""
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 2, 1))
    upconv3d.accelerate(model, precision=precision)
    model(_volume())
    model._modules["3"] = None
    with pytest.raises(TypeError, match=r"got None for '3'. Remedy: "):
        model(_volume())


@pytest.mark.parametrize("value", [3, nn.Sequential, None])
def test_models_that_are_none(value):
    for function in (upconv3d.accelerate, upconv3d.restore):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got .* Remedy:"):
            function(value)


@pytest.mark.parametrize("sample", [torch.randn(1, 6, 4, 4, 4), {"input": _volume()}, "x", 3])
def test_samples_that_are_no_arguments(sample):
    """A tensor could be unpacked along its batch, a dictionary into its keys."""
    model, called = nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.ReLU()), []
    model.register_forward_pre_hook(lambda *_: called.append(True))
    with pytest.raises(TypeError, match=rf"got {type(sample).__name__}\. Remedy: sample=\(x,\)"):
        upconv3d.accelerate(model, sample=sample)
    assert not called and type(model) is nn.Sequential
