# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: torch.jit.script of accelerated models, which it leaves as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import cna
from torch import Tensor, nn
from upconv3d._accelerated.swap import is_swapped


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


def _scaled(y: Tensor, by: float) -> Tensor:
    return y * by


class _WithNames(_Up):
    """Functions and an annotation that only this file has, and a method."""

    by: float

    def __init__(self):
        super().__init__()
        self.by = 2.0

    def again(self, y: Tensor) -> Tensor:
        return _scaled(y, self.by)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.relu(self.norm(self.up(x))))


def _of_a_function():
    """A class that reads a function around it, as TorchScript can."""

    def shifted(y: Tensor) -> Tensor:
        return y + 1

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = cna()

        def forward(self, x: Tensor) -> Tensor:
            return shifted(self.block(x))

    return nn.Sequential(nn.Conv3d(6, 6, 1), Inner())


def _bare():
    return nn.Sequential(nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.Softplus(), nn.GroupNorm(2, 8)))


MODELS = {
    "a forward": lambda: nn.Sequential(nn.Conv3d(6, 6, 1), _WithNames()),
    "the model itself": _WithNames,
    "a Sequential": lambda: nn.Sequential(nn.Identity(), cna(), nn.Sequential(cna()[0], nn.SiLU())[1]),
    "names of a function around it": _of_a_function,
    "bare, and a norm": _bare,
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_stay_where_they_are(name):
    plain = MODELS[name]().eval()
    model = copy.deepcopy(plain)
    report = upconv3d.accelerate(model, bare=True, norms=True)
    assert report.replaced
    held = [(name, module, type(module)) for name, module in model.named_modules()]
    swapped = sum(map(is_swapped, model.modules()))
    scripted = torch.jit.script(model)
    assert held == [(name, module, type(module)) for name, module in model.named_modules()]
    assert sum(map(is_swapped, model.modules())) == swapped > 0
    expected = plain(_volume())
    torch.testing.assert_close(scripted(_volume()), expected)
    torch.testing.assert_close(model(_volume()), expected, rtol=1e-4, atol=1e-5)
    upconv3d.restore(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


def test_what_cannot_be_scripted_stays_accelerated():
    class Refused(_Up):
        def forward(self, x):
            return self.norm(self.up(x)), {len: x}

    model = nn.Sequential(cna(), Refused())
    upconv3d.accelerate(model)
    held = [(module, type(module)) for module in model.modules()]
    with pytest.raises(Exception, match=r"Refused|len"):
        torch.jit.script(model)
    assert held == [(module, type(module)) for module in model.modules()]
