# SPDX-License-Identifier: Apache-2.0
"""An accelerated Sequential that is changed between two calls, and calls that are not like the one before."""

import copy
import gc
import pickle
import threading
import weakref
from functools import partial

import pytest
import torch
import upconv3d
from accelerated_models import Convolution
from torch import nn
from torch.nn.utils import prune
from upconv3d._accelerated import block, remembered

REMEMBERED, LEFT = "_upconv3d_remembered", "_upconv3d_left"


def _volume(seed=3, size=(2, 6, 3, 4, 3)):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _made():
    """MONAI's Convolution, with what comes before and after it: plain, and accelerated and called twice."""
    torch.manual_seed(0)
    up = Convolution("NDA", nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1))
    plain = nn.Sequential(nn.Conv3d(6, 6, 1), *up, nn.Conv3d(8, 4, 1))
    model = copy.deepcopy(plain.eval())
    upconv3d.accelerate(model)
    with torch.no_grad():
        assert torch.equal(model(_volume()), model(_volume()))
    return plain, model


def _gradients(model):
    return torch.autograd.grad(model(_volume()).square().sum(), list(model.parameters()))


@pytest.fixture(params=["ours", "left"])
def left(request, monkeypatch, small_blocks_left):
    """Whether small blocks are left to PyTorch."""
    if request.param == "left":
        monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", small_blocks_left)
    return request.param == "left"


@pytest.fixture
def searches(monkeypatch):
    """A list that grows by one entry where a block is looked for, and by one where it is decided about."""
    found = []
    for name in ("find_block", "run_block"):
        function = getattr(remembered, name)
        monkeypatch.setattr(
            remembered, name, lambda *a, _name=name, _f=function, **k: (found.append(_name), _f(*a, **k))[1]
        )
    return found


def _conv(model):
    return next(m for m in model.modules() if isinstance(m, nn.ConvTranspose3d))


def _norm(model):
    return next(m for m in model.modules() if isinstance(m, nn.InstanceNorm3d))


def _leaky(model):
    return next(m for m in model.modules() if isinstance(m, nn.LeakyReLU))


def _dropout(model):
    return next(m for m in model.modules() if isinstance(m, nn.Dropout))


def _doubled_after(model, module):
    module.register_forward_hook(lambda _, args, y: 2 * y)


def _exchange(model, name, module):
    holder = next(m for m in model.modules() if isinstance(m, nn.Sequential) and name in m._modules)
    holder._modules[name] = module


def _weight_of(model, scale):
    with torch.no_grad():
        _conv(model).weight.mul_(scale)


CHANGES = {
    "a hook on the convolution": lambda m: _doubled_after(m, _conv(m)),
    "a hook on the norm": lambda m: _doubled_after(m, _norm(m)),
    "a hook on the activation": lambda m: _doubled_after(m, _leaky(m)),
    "a hook on the Sequential inside": lambda m: _doubled_after(m, m[2]),
    "a forward of the activation's own": lambda m: setattr(_leaky(m), "forward", torch.tanh),
    "another slope": lambda m: setattr(_leaky(m), "negative_slope", 0.7),
    "another eps": lambda m: setattr(_norm(m), "eps", 0.5),
    "another stride": lambda m: setattr(_conv(m), "stride", (3, 2, 2)),
    "no output padding": lambda m: setattr(_conv(m), "output_padding", (0, 0, 0)),
    "the weight in place": lambda m: _weight_of(m, 3),
    "another weight": lambda m: setattr(_conv(m), "weight", nn.Parameter(0.5 * _conv(m).weight.detach())),
    "no bias": lambda m: setattr(_conv(m), "bias", None),
    "another norm weight": lambda m: setattr(_norm(m), "weight", nn.Parameter(torch.arange(8.0))),
    "another activation": lambda m: _exchange(m, "A", nn.SiLU()),
    "another norm": lambda m: _exchange(m, "N", nn.GroupNorm(2, 8)),
    "no norm": lambda m: _exchange(m, "N", nn.Identity()),
    "another class": lambda m: setattr(_leaky(m), "__class__", nn.Identity),
    "another last layer": lambda m: _exchange(m, "3", nn.Identity()),
    "one layer more": lambda m: m.append(nn.Tanh()),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(_conv(m)),
    "pruning": lambda m: prune.l1_unstructured(_conv(m), "weight", 0.5),
    "training": lambda m: m.train(),
    "double": lambda m: m.double(),
    "a weight's data": lambda m: setattr(_conv(m).weight, "data", torch.ones(6, 8, 5, 5, 5)),
    "a norm that counts": lambda m: _exchange(m, "N", nn.InstanceNorm3d(8, track_running_stats=True)),
    "channels last": lambda m: m.to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_computes_what_the_plain_one_does(name, left):
    plain, model = _made()
    for one in (plain, model):
        torch.manual_seed(1)  # of spectral_norm's first vectors
        CHANGES[name](one)
    x = _volume(4)
    x = x.double() if name == "double" else x
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


class _Changing(nn.Conv3d):
    """Changes the model that it stands in at its next call."""

    change = None

    def forward(self, x):
        if self.change is not None:
            self.change()
            self.change = None
        return super().forward(x)


# What a Sequential calls is decided before its first child runs.
_OF_CONTAINERS = {"another activation", "another norm", "no norm", "another last layer", "one layer more"}
_OF_CONTAINERS |= {"a hook on the Sequential inside"}


@pytest.mark.parametrize("called", [0, 2])
@pytest.mark.parametrize("name", sorted(CHANGES.keys() - _OF_CONTAINERS - {"double", "channels last"}))
def test_a_child_that_changes_those_behind_it(name, called, left):
    """Each is called as it is when its turn comes."""
    plain, model = _made()
    for one in (plain, model):
        one[0].__class__ = _Changing
        for _ in range(called):
            one(_volume())
        one[0].change = partial(CHANGES[name], one)
    with torch.no_grad():
        for _ in range(2):
            results = []
            for one in (plain, model):
                torch.manual_seed(1)
                results.append(one(_volume()))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [nn.Dropout, nn.InstanceNorm3d, nn.LeakyReLU])
def test_a_class_that_is_given_another_forward_runs_it(cls, left, monkeypatch):
    plain, model = _made()
    monkeypatch.setattr(cls, "forward", lambda self, x: 2 * x)
    with torch.no_grad():
        torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


def test_attributes_that_are_computed_are_asked_at_every_call(left):
    class Scheduled(nn.Dropout):
        rate = 0.0
        p = property(lambda self: Scheduled.rate, lambda self, value: None)

    plain, model = _made()
    for one in (plain, model):
        _exchange(one, "D", Scheduled())
        one.train()
    for Scheduled.rate in (0.0, 0.0, 0.5):
        results = []
        for one in (plain, model):
            torch.manual_seed(2)
            results.append(one(_volume()))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_statistics_that_a_norm_keeps_without_saying_so_are_updated(left):
    norm = nn.InstanceNorm3d(8, track_running_stats=True)
    norm.track_running_stats = False
    plain = nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2), norm, nn.ReLU())
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    for _ in range(2):
        torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    assert plain[1].running_mean.abs().sum() > 0
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_an_active_dropout_is_active(p, left):
    plain, model = _made()
    for one in (plain, model):
        _dropout(one).p = p
        _dropout(one).train()
    results = []
    for one in (plain, model):
        torch.manual_seed(2)
        results.append(one(_volume()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_an_unchanged_model_is_searched_and_decided_about_once(left, searches):
    _, model = _made()
    x = _volume()
    with torch.no_grad():
        for _ in range(3):
            model(x)
        assert searches == ["find_block", "run_block"]
        model(_volume(size=(1, 6, 4, 4, 4)))
        assert searches == ["find_block", "run_block", "run_block"]
        model(x)
    decided = ["find_block", *["run_block"] * 3]
    assert searches == decided
    model(x)  # with gradients, which are no matter where PyTorch computes them
    decided += ["run_block"] * (not left)
    assert searches == decided
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)
    decided += ["run_block"]
    assert searches == decided
    _leaky(model).negative_slope = 0.3
    for _ in range(2):  # what stands before the block has run when that is seen
        model(x)
    assert searches == [*decided, "find_block", "run_block"]


def test_calls_that_differ_are_told_apart(left):
    plain, model = _made()
    low = torch.autocast("cpu", torch.bfloat16)
    for _ in range(2):
        for seed, size in ((1, (2, 6, 3, 4, 3)), (2, (1, 6, 3, 4, 5)), (3, (6, 3, 4, 3))):
            torch.testing.assert_close(
                model(_volume(seed, size)), plain(_volume(seed, size)), rtol=1e-4, atol=1e-5
            )
        with torch.no_grad(), low:
            y, expected = model(_volume()), plain(_volume())
        assert y.dtype is expected.dtype
        torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
        with pytest.raises(RuntimeError):
            model(_volume().double())
        ours, theirs = (_gradients(one) for one in (model, plain))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_half_of_a_model_that_was_called_in_float32_is_refused_as_by_pytorch(left):
    plain, model = _made()
    for one in (plain, model):
        one.bfloat16()
        with pytest.raises(RuntimeError):
            one(_volume())
    x = _volume().bfloat16()
    torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)


def test_a_shallow_copy_has_its_own_parameters(left):
    """As DataParallel's replicas."""
    _, model = _made()
    replica = model._replicate_for_data_parallel()
    for key, child in model._modules.items():
        replica._modules[key] = copy.deepcopy(child)
    with torch.no_grad():
        _conv(replica).weight.mul_(-2)
        expected = nn.Sequential(*replica._modules.values())(_volume())
        torch.testing.assert_close(replica(_volume()), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(_volume()), expected)


def test_copies_and_restored_models_remember_nothing(left):
    _, model = _made()
    assert REMEMBERED in model.__dict__ and (LEFT in model.__dict__) == left
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not {REMEMBERED, LEFT} & copied.__dict__.keys()
        with torch.no_grad():
            assert torch.equal(copied(_volume()), model(_volume()))
    upconv3d.restore(model)
    assert not {REMEMBERED, LEFT} & model.__dict__.keys()


def test_temporary_parameters_are_not_kept(left):
    _, model = _made()
    swapped = {name: p.detach().clone().requires_grad_() * 1 for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, swapped, (_volume(),))
    gone = weakref.ref(swapped["1.weight"])
    del swapped, y
    gc.collect()
    assert gone() is None


def test_threads_do_not_mix_up_their_calls(left):
    plain, model = _made()
    sizes = [(2, 6, 3, 4, 3), (1, 6, 4, 4, 4), (3, 6, 2, 3, 5)]
    expected = [plain(_volume(5, size)) for size in sizes]
    wrong = []

    def work(index):
        for _ in range(30):
            y = model(_volume(5, sizes[index]))
            if not torch.allclose(y, expected[index], rtol=1e-4, atol=1e-5):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_norm_of_single_values_is_refused_as_by_pytorch(left):
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 1), nn.InstanceNorm3d(8), nn.PReLU())
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model)
    for _ in range(2):
        model(_volume())
        for one in (plain, model):
            with pytest.raises(ValueError, match="more than"):
                one(torch.ones(2, 6, 1, 1, 1))


def test_autocast_precision_and_captured_graphs(left, cuda):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ConvTranspose3d(64, 64, 2, 2), nn.InstanceNorm3d(64), nn.PReLU()).to(cuda)
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model)
    x = torch.randn(1, 64, 4, 4, 4, device=cuda)
    expected = plain.double()(x.double()).float()
    plain.float()
    conv = torch.backends.cudnn.conv
    kept = conv.fp32_precision
    try:
        with torch.no_grad():
            for low, precision in ((False, "ieee"), (True, "tf32"), (False, "tf32"), (False, "ieee")):
                conv.fp32_precision = precision
                with torch.autocast("cuda", torch.bfloat16, enabled=low):
                    y, theirs = model(x), plain(x)
                assert y.dtype is theirs.dtype
                bar = 0.1 if low else 1e-2 if precision == "tf32" else 1e-4
                torch.testing.assert_close(y.float(), expected, rtol=bar, atol=bar)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
            graph.replay()
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    finally:
        conv.fp32_precision = kept


def test_who_watches_functions_sees_the_norms(left):
    _, model = _made()
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watching():
        model(_volume())
    assert seen.count("instance_norm") == left


def test_eager_calls_between_compiled_ones_compile_nothing(left):
    torch._dynamo.reset()
    _, model = _made()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(_volume()), model(_volume()), rtol=1e-4, atol=1e-5)
            for name in (REMEMBERED, LEFT):
                model.__dict__.pop(name, None)
            compiled(_volume())
    assert len(graphs) == 1
