# SPDX-License-Identifier: Apache-2.0
"""Accelerated Sequentials whose blocks are all left to PyTorch: then their own class's forward runs."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Convolution
from torch import nn
from upconv3d._accelerated import block, swap

LEFT = "_upconv3d_left"
SMALL, LARGE = (2, 6, 3, 4, 3), (2, 6, 5, 6, 5)


def _volume(size=SMALL):
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


def _one_block():
    up = Convolution("NDA", nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1))
    return nn.Sequential(nn.Conv3d(6, 6, 1), *up, nn.Conv3d(8, 4, 1))


def _two_blocks():
    first = (nn.ConvTranspose3d(6, 8, 2, 2), nn.GroupNorm(2, 8), nn.PReLU())
    return nn.Sequential(*first, nn.ConvTranspose3d(8, 4, 1), nn.ReLU(), nn.InstanceNorm3d(4))


def _nested():
    """Both Sequentials are accelerated, each for a convolution of its own."""
    inner = nn.Sequential(nn.ConvTranspose3d(8, 4, 1), nn.GroupNorm(2, 4), nn.SiLU())
    return nn.Sequential(
        nn.ConvTranspose3d(6, 8, 2, 2), nn.InstanceNorm3d(8), nn.ReLU(), inner, nn.Identity()
    )


@pytest.fixture(params=[_one_block, _two_blocks, _nested])
def models(request, monkeypatch):
    """A plain model and it accelerated, of whose blocks SMALL's are left to PyTorch and LARGE's are not."""
    monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", 2**13)
    torch.manual_seed(0)
    plain = request.param().eval()
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    return plain, model


@pytest.fixture
def asked(monkeypatch):
    """A list that gets each Sequential that does not just run its own class's forward."""
    found, run = [], swap._run_and_remember

    def counted(*arguments):
        found.append(arguments[0])
        return run(*arguments)

    monkeypatch.setattr(swap, "_run_and_remember", counted)
    return found


def _same(model, plain, x):
    y, expected = model(x), plain(x)
    assert y.dtype is expected.dtype
    bar = 0.05 if y.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, expected, rtol=bar, atol=bar)


def test_calls_that_are_alike_ask_nothing(models, asked):
    plain, model = models
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            for _ in range(2):
                assert torch.equal(model(_volume()), plain(_volume()))
    assert asked.count(model) == 1


def test_other_sizes_and_back(models, asked):
    plain, model = models
    for times, size in enumerate((SMALL, LARGE, LARGE, SMALL, SMALL)):
        _same(model, plain, _volume(size))
        assert (LEFT in model.__dict__) == (size == SMALL), times
    assert asked.count(model) == 4


def test_other_kinds_of_calls_are_decided_about_anew(models, asked):
    plain, model = models
    x = _volume()
    low = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad():
        for times in range(1, 3):
            _same(model, plain, x)
            with low:
                _same(model, plain, x)
            _same(model, plain, x.contiguous(memory_format=torch.channels_last_3d))
            assert asked.count(model) == 3 * times
    with pytest.raises(RuntimeError):
        model(x.double())
    for one in (model, plain):
        one.double()
    _same(model, plain, x.double())


def test_what_is_changed_since_is_as_in_the_plain_model(models):
    plain, model = models
    x = _volume()

    def both(change):
        changed = [change(one) for one in (plain, model)]
        for _ in range(2):
            _same(model, plain, x)
        return changed

    def conv(one):
        return next(m for m in one.modules() if isinstance(m, nn.ConvTranspose3d))

    both(lambda one: None)
    handles = both(lambda one: conv(one).register_forward_hook(lambda _, args, y: 2 * y))
    for handle in handles:
        handle.remove()
    both(lambda one: one.register_forward_pre_hook(lambda _, args: (args[0] + 1,)))
    both(lambda one: one.train())
    both(lambda one: one.__setitem__(len(one) - 1, nn.Tanh()))
    both(lambda one: one.append(nn.Sigmoid()))
    both(lambda one: one.eval())
    both(lambda one: setattr(conv(one).weight, "data", 2 * conv(one).weight.data))
    torch.manual_seed(1)
    both(lambda one: (torch.manual_seed(1), nn.utils.parametrizations.weight_norm(conv(one))))


def test_hooks_of_all_modules_see_each(models):
    _, model = models
    for _ in range(2):
        model(_volume())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(module))
    try:
        model(_volume())
    finally:
        handle.remove()
    assert seen == [*(m for child in model for m in (*_inner(child), child)), model]


def _inner(module):
    return [m for child in module.children() for m in (*_inner(child), child)]


def test_a_block_whose_hook_is_gone_is_decided_about_again(models, asked):
    _, model = models
    conv = next(m for m in model.modules() if isinstance(m, nn.ConvTranspose3d))
    handle = conv.register_forward_hook(lambda *_: None)
    for _ in range(2):
        model(_volume(LARGE))
    assert asked.count(model) == 2 and LEFT not in model.__dict__
    handle.remove()
    model(_volume())
    assert LEFT in model.__dict__


def test_traced_calls_are_decided_about_by_themselves(models, monkeypatch):
    _, model = models
    for _ in range(2):
        model(_volume())
    chains, run_chain = [], swap.run_chain
    monkeypatch.setattr(swap, "run_chain", lambda *a: (chains.append(a), run_chain(*a))[1])
    with torch.no_grad():
        traced = torch.jit.trace(model, _volume(), check_trace=False)
        assert len(chains) == 1
        torch.testing.assert_close(traced(_volume()), model(_volume()), rtol=1e-4, atol=1e-5)


def test_scripts_and_restored_models(models):
    plain, model = models
    for _ in range(2):
        model(_volume())
    torch.testing.assert_close(torch.jit.script(model)(_volume()), plain(_volume()))
    upconv3d.restore(model)
    assert LEFT not in model.__dict__
    upconv3d.accelerate(model, precision="ieee")  # told so, it leaves no block
    for _ in range(2):
        _same(model, plain, _volume())
    assert LEFT not in model.__dict__


def test_a_slice_is_a_plain_sequential(models):
    plain, model = models
    for _ in range(2):
        model(_volume())
    assert torch.equal(model[:2](_volume()), plain[:2](_volume()))


def test_replicas_run_their_own_modules(models):
    """As DataParallel's, which share what is in __dict__."""
    plain, model = models
    model(_volume())
    replica = model._replicate_for_data_parallel()
    for key, child in model._modules.items():
        replica._modules[key] = copy.deepcopy(child)
    with torch.no_grad():
        for parameter in replica[-1].parameters():
            parameter.mul_(2)
        next(m for m in replica.modules() if isinstance(m, nn.ConvTranspose3d)).weight.mul_(-2)
        expected = nn.Sequential(*replica._modules.values())(_volume())
        torch.testing.assert_close(replica(_volume()), expected)
        assert torch.equal(model(_volume()), plain(_volume()))
