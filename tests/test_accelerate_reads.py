# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: what forwards read of modules that a container holds, and how they go over these."""

import pytest
import torch
import upconv3d
from accelerated_models import Pair
from accelerated_models import Up as _Up
from torch import nn


@pytest.fixture
def both(monkeypatch):
    x = torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))
    return lambda make: Pair(make, x, monkeypatch.setattr)


class _Upsampled(_Up):
    """Reads of a module in a list what tensors have, too."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList([nn.Upsample(scale_factor=2, mode="nearest")])

    def sized(self, up, x):
        return up(x) if up.mode == "nearest" else x * 2


class _OfLocal(_Upsampled):
    def forward(self, x):
        y = super().forward(x)
        for up in self.ups:
            y = up(y) if up.mode == "nearest" else y * 2
        return y


class _OfItem(_Upsampled):
    def forward(self, x):
        y = super().forward(x)
        return self.ups[0](y) if self.ups[0].mode == "nearest" else y * 2


class _OfArgument(_Upsampled):
    def forward(self, x):
        return self.sized(self.ups[-1], super().forward(x))


class _OfArgumentStatic(_Upsampled):
    @staticmethod
    def sized(up, x):
        return up(x) if up.mode == "nearest" else x * 2

    def forward(self, x):
        return self.sized(self.ups[0], super().forward(x))


class _InComprehension(_Upsampled):
    def forward(self, x):
        y = super().forward(x)
        return y * len([up for up in self.ups if up.mode == "nearest"])


class _OfCall(_Upsampled):
    def last(self):
        return self.ups[0]

    def forward(self, x):
        y = super().forward(x)
        return y * 2 if self.last().mode == "nearest" else y


_READING = [_OfLocal, _OfItem, _OfArgument, _OfArgumentStatic, _InComprehension, _OfCall]


@pytest.mark.parametrize("make", _READING)
def test_attributes_of_held_modules_are_not_read(make, both):
    pair = both(make)
    assert pair.finding.evaluation.endswith("reads mode of a Upsample")
    pair.change(lambda model: setattr(model.ups[0], "mode", "other"))
    if make in (_InComprehension, _OfCall):
        pair.check(0)
    pair.change(lambda model: setattr(model.ups[0], "mode", "nearest"))
    pair.check(0)


class _After(nn.Module):
    """What follows a convolution, in a module that a trace would enter."""

    def __init__(self, number):
        super().__init__()
        self.norm, self.ups = nn.GroupNorm(2, 8), nn.ModuleList([nn.Upsample(scale_factor=2)])
        self.number = number

    def forward(self, x):
        y = self.norm(x)
        for up in self.ups:
            y = up(y) if self.number is not None or up.mode == "nearest" else y
        return y


class _Entering(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.up, self.after = nn.ConvTranspose3d(6, 8, 2, 2), _After(number)

    def forward(self, x):
        return self.after(self.up(x))


def test_modules_that_are_entered_read_themselves_alone(both):
    both(lambda: _Entering(1)).check(1)
    pair = both(lambda: _Entering(None))
    assert pair.finding.evaluation.endswith("_After follows: its forward reads mode of a Upsample")
    pair.check(0)


class _Averaging(nn.Module):
    """Has a method with a name that tensors have, and state."""

    def __init__(self):
        super().__init__()
        self.calls, self.norm, self.sum = 0, nn.GroupNorm(2, 8), None

    def mean(self, x):
        self.calls += 1
        return x * self.calls

    def forward(self, x):
        return x


class _Holding(_Up):
    def __init__(self):
        super().__init__()
        self.held = nn.ModuleList([_Averaging()])


class _CallsMethod(_Holding):
    def forward(self, x):
        y = super().forward(x)
        for held in self.held:
            y = held.mean(y)
        return y


class _Converts(_Holding):
    def forward(self, x):
        y = super().forward(x)
        for held in self.held:
            y = held.double()(y)
        return y


class _AsksForChild(_Holding):
    def forward(self, x):
        y = super().forward(x)
        for held in self.held:
            if held.norm is not None:
                y = y + 1
            y = held(y)
        return y


@pytest.mark.parametrize(
    ("make", "name"), [(_CallsMethod, "mean"), (_Converts, "double"), (_AsksForChild, "norm")]
)
def test_methods_of_held_modules_are_not_called(make, name, both):
    pair = both(make)
    assert pair.finding.evaluation.endswith(f"reads {name} of a _Averaging")
    assert pair.model.held[0].calls == 0 and pair.model.held[0].norm.weight.dtype is torch.float32
    pair.change(lambda model: setattr(model.held[0], "norm", None))
    for _ in range(2):
        pair.check(0)


class _CallsChild(_Holding):
    def forward(self, x):
        y = super().forward(x)
        for held in self.held:
            y = held.norm(held(y))
        return y


def test_children_of_held_modules_are_called_by_name(both):
    pair = both(_CallsChild)
    pair.check(1)
    pair.change(lambda model: setattr(model.held[0], "norm", nn.Tanh()))
    pair.check(1)
    pair.change(lambda model: setattr(model.held[0].norm, "forward", torch.exp))
    pair.check(1)


class _Blocks(nn.Module):
    """Goes over its modules in a way of its own."""

    on = True

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ReLU()])

    def __iter__(self):
        return iter(self.blocks if self.on else [])

    def __len__(self):
        return 2 if self.on else 0

    def __getitem__(self, at):
        return self.blocks[at] if self.on else nn.Identity()


class _Lazy(_Blocks):
    def __iter__(self):
        for block in (nn.Tanh(), nn.ReLU()):
            if self.on:
                yield block


class _Selected(nn.ModuleList):
    on = True

    def __init__(self):
        super().__init__([nn.ReLU(), nn.Tanh()])

    def __iter__(self):
        return super().__iter__() if self.on else iter([])

    def __len__(self):
        return super().__len__() if self.on else 0

    def __getitem__(self, at):
        place = at if self.on else 1
        return list(self._modules.values())[place]


class _Iterated(_Up):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        y = super().forward(x)
        for block in self.blocks:
            y = block(y)
        return y


class _Zipped(_Iterated):
    def forward(self, x):
        y = self.norm(self.up(x))
        for block, more in zip(self.blocks, (1, 2)):  # noqa: B905
            y = block(y) + more
        return y


class _Counted(_Iterated):
    def forward(self, x):
        return self.norm(self.up(x)) * len(self.blocks)


class _Asked(_Iterated):
    def forward(self, x):
        y = self.norm(self.up(x))
        return y * 2 if self.blocks else y


class _Indexed(_Iterated):
    def forward(self, x):
        return self.blocks[0](self.norm(self.up(x)))


@pytest.mark.parametrize("blocks", [_Blocks, _Lazy, _Selected])
@pytest.mark.parametrize("make", [_Iterated, _Zipped, _Counted, _Asked, _Indexed])
def test_containers_with_ways_of_their_own(make, blocks, both):
    pair = both(lambda: make(blocks()))
    assert pair.finding.evaluation.endswith(f"reads on of a {blocks.__name__}")
    pair.change(lambda model: setattr(model.blocks, "on", False))
    pair.check(0)


class _Tuned(nn.ModuleList):
    """A container that adds nothing to how it is gone over."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("make", [_Iterated, _Zipped, _Counted, _Asked, _Indexed])
def test_containers_of_torch_and_their_subclasses(make, both):
    pair = both(lambda: make(_Tuned([nn.ReLU(), nn.Tanh()])))
    pair.check(1)
    pair.change(lambda model: model.blocks.append(nn.Sigmoid()))
    pair.check(0)


class _ByName(_Up):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sequential(nn.ReLU())})])

    def forward(self, x):
        y = super().forward(x)
        shapes = [y.shape]
        for level, shape in zip(self.levels, shapes, strict=True):
            for _, block in level.items():
                y = block(y).reshape(shape)
            for blocks in [level["b"], *self.levels[:1]]:
                y = y * len(blocks)
        return y


def test_containers_in_containers(both):
    pair = both(_ByName)
    pair.check(1)
    pair.change(lambda model: model.levels[0].update({"c": nn.Sigmoid()}))
    pair.check(0)


class _Forwarding(_Up):
    """Finds names in a way of its own, after torch's."""

    def __getattr__(self, name):
        return super().__getattr__(name)

    def named_parameters(self, *arguments, **options):
        assert self.training in (True, False)
        return super().named_parameters(*arguments, **options)


class _Answering(_Up):
    def __init__(self):
        super().__init__()
        self.on = True

    def __getattr__(self, name):
        return super().__getattr__(name) if name != "shift" else 1.0 if self.on else 2.0

    def forward(self, x):
        return super().forward(x) * self.shift


def test_names_that_a_class_finds_itself(both):
    both(_Forwarding).check(1)
    pair = both(_Answering)
    assert not pair.finding.replaced
    pair.change(lambda model: setattr(model, "on", False))
    pair.check(0)


def test_modules_are_read_as_before_afterwards():
    for make in (_Up, _OfItem):
        upconv3d.accelerate(make())
        assert "__getattribute__" not in nn.Module.__dict__


def test_anothers_way_of_reading_modules_stays(monkeypatch):
    seen = []

    def read(module, name):
        seen.append(name)
        return object.__getattribute__(module, name)

    monkeypatch.setattr(nn.Module, "__getattribute__", read, raising=False)
    model = _Up()
    seen.clear()
    assert upconv3d.accelerate(model).replaced and "forward" in seen
    assert nn.Module.__dict__["__getattribute__"] is read
