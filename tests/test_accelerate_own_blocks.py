# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate of models with this package's own modules, and these made of accelerated modules."""

import copy

import pytest
import torch
import upconv3d
from torch import nn
from upconv3d._accelerated.swap import is_swapped


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


MODELS = {
    "norm and activation": lambda: upconv3d.ConvTranspose3dNormAct(6, 8, 2, num_groups=2),
    "instance norm": lambda: upconv3d.ConvTranspose3dNormAct(6, 8, 2, norm="instance"),
    "the block": lambda: upconv3d.ConvTranspose3dReLUGroupNorm(6, 8, 2, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_of_ours_run_their_own_call(name):
    plain = nn.Sequential(MODELS[name](), nn.Conv3d(8, 8, 1), nn.GroupNorm(2, 8))
    model = copy.deepcopy(plain)
    report = upconv3d.accelerate(model, norms=True, bare=True)
    assert report.norms == ("2",) and is_swapped(model[2])
    (finding,) = report.findings
    assert not finding.replaced and finding.evaluation.endswith("calls our kernels with what it holds")
    assert not any(map(is_swapped, model[0].modules()))
    torch.testing.assert_close(model(_volume()), plain(_volume()))


class _Calls(upconv3d.ConvTranspose3dNormAct):
    """Calls what it holds."""

    def forward(self, x):
        return self.norm(self.conv_transpose(x))


def test_a_forward_in_the_place_of_ours_is_read():
    plain = _Calls(6, 8, 2, num_groups=2)
    model = copy.deepcopy(plain)
    (finding,) = upconv3d.accelerate(model, norms=True, bare=True).findings
    assert finding.replaced
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("restored", [False, True])
def test_modules_of_ours_take_accelerated_ones(restored):
    conv, norm = nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8)
    expected = norm(torch.relu(conv(_volume())))
    model = nn.Sequential(conv, nn.Softplus(), norm)
    report = upconv3d.accelerate(model, norms=True, bare=True)
    assert is_swapped(conv) and is_swapped(norm)
    block = upconv3d.ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)
    family = upconv3d.ConvTranspose3dNormAct.from_modules(conv, norm, nn.ReLU(), order="act_norm")
    if restored:
        report.restore()
    for made in (block, family):
        torch.testing.assert_close(made(_volume()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(2, 8), lambda: nn.ConvTranspose3d(6, 8, 2)])
def test_a_class_with_a_forward_on_top_of_an_accelerated_one_is_refused(make):
    module = make()
    upconv3d.accelerate(module, norms=True, bare=True)
    module.__class__ = type("OnTop", (type(module),), {"forward": lambda self, x: x})
    modules = [nn.ConvTranspose3d(6, 8, 2), module]
    if not isinstance(module, nn.GroupNorm):
        modules = [module, nn.GroupNorm(2, 8)]
    for cls in (upconv3d.ConvTranspose3dReLUGroupNorm, upconv3d.ConvTranspose3dNormAct):
        with pytest.raises(TypeError, match="OnTop whose forward is not that of"):
            cls.from_modules(*modules)
