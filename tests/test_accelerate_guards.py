# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: a model that is changed afterwards, or that asks for what only PyTorch's calls do."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from accelerated_models import MODELS
from accelerated_models import Up as _Up
from torch import nn
from upconv3d._accelerated import block, run, traced
from upconv3d._accelerated.proof import UnprovableError


def _volume(dtype=torch.float32):
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3)).to(dtype)


class _InPlace(_Up):
    """`y += 1` is seen through every name of the tensor."""

    def forward(self, x):
        y = torch.relu(x)
        kept = y
        y += 1
        y *= 2
        return F.silu(self.norm(self.up(kept))) + kept.mean()


class _Sized(_Up):
    """Numbers are changed by name, not in place."""

    def forward(self, x):
        channels = x.shape[1]
        more = channels
        more += 2
        return self.norm(self.up(x)).reshape(x.shape[0], more, -1) * channels


class _EvalOnly(_Up):
    def forward(self, x):
        if self.training:
            raise ValueError
        return super().forward(x)


class _Loops(_Up):
    def __init__(self):
        super().__init__()
        self.listed = nn.Sequential(nn.Conv3d(8, 8, 1))
        self.nested = nn.ModuleList([nn.ModuleList([nn.Conv3d(8, 8, 1)])])

    def forward(self, x):
        x = self.norm(self.up(x))
        for layer in self.listed:
            x = layer(x)
        for layers in self.nested:
            for layer in layers:
                x = layer(x)
        return x


class _Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.norm = nn.Sequential(nn.ConvTranspose3d(6, 8, 2)), nn.GroupNorm(2, 8)

    def forward(self, x):
        y = self.head(x) if self.head is not None else x
        return F.relu(self.norm(y))


class _Negated(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


def _accelerated(model):
    """model, accelerated, and a copy of what it was."""
    plain = copy.deepcopy(model)
    assert upconv3d.accelerate(model).replaced
    return model, plain


@pytest.mark.parametrize("make", [_InPlace, _Sized])
def test_augmented_assignments(make):
    model, plain = _accelerated(make())
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)


def test_a_forward_that_raises_without_a_word():
    model = _EvalOnly()
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and "cannot trace its forward" in finding.evaluation
    with pytest.raises(ValueError):
        model(_volume())


@pytest.mark.parametrize("container", ["listed", "nested"])
def test_containers_that_grow(container):
    model, plain = _accelerated(_Loops())
    more = nn.Conv3d(8, 3, 1)
    for m in (model, plain):
        (m.listed if container == "listed" else m.nested[0]).append(more)
    if container == "listed":  # the next convolution takes 8 channels
        for m in (model, plain):
            m.nested[0] = nn.ModuleList()
    y = model(_volume())
    assert y.shape[1] == 3
    torch.testing.assert_close(y, plain(_volume()), rtol=1e-4, atol=1e-4)


def test_an_opened_sequential_that_is_exchanged():
    model, plain = _accelerated(_Head())
    for m in (model, plain):
        m.head = _Negated(m.head[0])
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    model.head = None
    assert torch.equal(model(torch.ones(1, 8, 2, 2, 2)), torch.zeros(1, 8, 2, 2, 2))


class _Functional(_Up):
    def forward(self, x):
        return F.silu(self.norm(self.up(x)))


@pytest.mark.parametrize("make", [*MODELS.values(), _Functional])
@pytest.mark.parametrize("precision", [None, "ieee"])
def test_global_hooks_see_the_modules_of_the_model_and_no_others(make, precision):
    model = make().eval()
    seen, x = [], torch.ones(2, 6, 4, 3, 4)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(x)
        expected = [id(module) for module in seen]
        upconv3d.accelerate(model, precision=precision)
        del seen[:]
        model(x)
    finally:
        handle.remove()
    assert [id(module) for module in seen] == expected


def test_global_hooks_see_an_opened_sequential():
    model, _ = _accelerated(_Head())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(_volume())
    finally:
        handle.remove()
    assert model.head in seen and model.head[0] in seen


def _chain(*after):
    return nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2), *after)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm3d(8, affine=True)])
@pytest.mark.parametrize("order", [1, -1])
def test_a_norm_that_stayed_in_float32(norm, order):
    """PyTorch takes its vectors, on the CPU as on CUDA."""
    model = _chain(*[copy.deepcopy(norm), nn.ReLU()][::order])
    model[0].bfloat16()
    model, plain = _accelerated(model)
    x = _volume(torch.bfloat16)
    assert torch.equal(model(x), plain(x))
    model.bfloat16()
    plain.bfloat16()
    torch.testing.assert_close(model(x), plain(x), rtol=0.1, atol=0.1)


def test_numbers_and_dtypes_that_are_pytorchs_alone():
    model, plain = _accelerated(_chain(nn.GroupNorm(2, 8), nn.ELU()))
    for m in (model, plain):
        m[2].alpha = torch.tensor(0.5)
    assert torch.equal(model(_volume()), plain(_volume()))
    for m in (model, plain):
        m[2].alpha, m[1].eps = 1.0, float("inf")
    assert torch.equal(model(_volume()), plain(_volume()))
    bare, plain = nn.ConvTranspose3d(6, 8, 2, dtype=torch.complex64), None
    model, plain = nn.Sequential(bare), nn.Sequential(copy.deepcopy(bare))
    assert upconv3d.accelerate(model, bare=True).replaced
    x = _volume(torch.complex64)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("after", [(nn.ReLU(), nn.GroupNorm(2, 8)), (nn.GroupNorm(2, 8), nn.SiLU())])
def test_forward_mode(after):
    model, plain = _accelerated(_chain(*after))
    x, tangent = _volume(), _volume() + 1
    for ours, theirs in zip(
        torch.func.jvp(model, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


NUMBERS = {
    "num_groups": lambda m: setattr(m[1], "num_groups", 4),
    "eps": lambda m: setattr(m[1], "eps", 0.5),
    "negative_slope": lambda m: setattr(m[2], "negative_slope", 0.7),
    "padding": lambda m: setattr(m[0], "padding", (1, 1, 1)),
    "a list": lambda m: setattr(m[0], "stride", [2, 2, 2]),
    "one number": lambda m: setattr(m[0], "stride", 3),
    "norm_weight": lambda m: m[1].weight.data.mul_(3),
    "no norm_weight": lambda m: m[1].register_parameter("weight", None),
    "bias": lambda m: m[0].register_parameter("bias", None),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_between_calls(name):
    """What was checked before is remembered by value, not by module."""
    norm = nn.GroupNorm(2, 8)
    norm.weight.data.uniform_(0.5, 2)
    model, plain = _accelerated(_chain(norm, nn.LeakyReLU(0.1)))
    x = _volume()
    before = [model(x), model(x)]
    assert torch.equal(*before)
    NUMBERS[name](model)
    NUMBERS[name](plain)
    y = model(x)
    torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-5)
    assert name == "a list" or y.shape != before[0].shape or not torch.equal(y, before[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_remembered_settings_compute_the_same(name, autocast, monkeypatch):
    """Nothing is known at the first call; at the second all is."""
    monkeypatch.setattr(run, "_checked", set())
    monkeypatch.setattr(run, "FOLDING_DEVICES", frozenset({"cpu", "cuda"}))
    model, plain = _accelerated(MODELS[name]().eval())
    x = torch.randn(2, 6, 4, 3, 4, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first, second, expected = model(x), model(x), plain(x)
    assert torch.equal(first, second) and second.dtype == expected.dtype
    tolerance = 0.1 if autocast else 1e-4
    torch.testing.assert_close(second, expected, rtol=tolerance, atol=tolerance)
    number, functions = len(run._checked), []
    monkeypatch.setattr(run, "checked_arguments", lambda *a, **k: functions.append(a))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(x), first)
    assert not functions and len(run._checked) == number


def test_remembered_settings_still_refuse():
    model = _chain(nn.InstanceNorm3d(8), nn.PReLU(8))
    model[0] = nn.ConvTranspose3d(6, 8, 1)
    upconv3d.accelerate(model)
    with torch.no_grad():
        assert model(_volume()).shape == model(_volume()).shape
        assert any("instance" in settings or 8 in settings for settings in run._checked)
        for refused in (model, nn.Sequential(*model)):
            with pytest.raises(ValueError, match="more than"):
                refused(torch.ones(2, 6, 1, 1, 1))
        model[2] = nn.PReLU(3)
        with pytest.raises(RuntimeError):
            model(_volume())


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(run, "_checked", set())
    monkeypatch.setattr(run, "_MOST_CHECKED", 3)
    model, _ = _accelerated(_chain(nn.GroupNorm(2, 8), nn.LeakyReLU(0.1)))
    for step in range(8):
        model[2].negative_slope = step / 100
        torch.testing.assert_close(
            model(_volume()), model[2](model[1](model[0](_volume()))), rtol=1e-4, atol=1e-5
        )
    assert len(run._checked) == 3


def test_neither_report_nor_trace_keeps_modules():
    model = _Up()
    report = upconv3d.accelerate(model)
    norm = weakref.ref(model.norm)
    model.norm = nn.Identity()
    gc.collect()
    assert norm() is None
    assert pickle.loads(pickle.dumps(report)).findings == report.findings
    copy.deepcopy(report).restore()
    assert type(model) is not _Up
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    report.restore()


class _Stated(nn.Sequential):
    def __getstate__(self):
        return [self.__dict__]

    def __setstate__(self, state):
        self.__dict__.update(state[0])


def test_a_state_of_its_own():
    model, plain = _accelerated(_Stated(nn.ConvTranspose3d(6, 8, 2, 2), nn.GELU()))
    torch.testing.assert_close(copy.deepcopy(model)(_volume()), plain(_volume()))


class _ByName(_Up):
    def forward(self, x):
        return self.norm(self.up(input=x))


def test_a_sample_call_by_name_and_one_that_fails():
    (finding,) = upconv3d.accelerate(_ByName(), sample=(_volume(),)).findings
    assert finding.input_size == (2, 6, 3, 4, 3)
    model = _chain(nn.ReLU())
    with pytest.raises(RuntimeError):
        upconv3d.accelerate(model, sample=(torch.ones(1, 2),))
    assert type(model) is nn.Sequential and not model[0]._forward_pre_hooks
    model[0].bfloat16()
    (finding,) = upconv3d.accelerate(model, sample=(_volume(torch.bfloat16),)).findings
    assert finding.replaced


def test_a_copy_without_source_says_that_it_is_not_accelerated(monkeypatch):
    """As where a pickle is loaded beside another version of the model's source."""
    model = _Up()
    assert len(upconv3d.accelerate(model).replaced) == 1

    def refuse(module):
        raise UnprovableError("its source is gone")

    monkeypatch.setattr(traced, "trace", refuse)
    with pytest.warns(UserWarning, match="its source is gone. It runs its own forward"):
        copied = copy.deepcopy(model)
    x = _volume()
    torch.testing.assert_close(copied(x), model(x))


class _DropoutsInTurn(nn.Module):
    """Another dropout is called between a convolution and its own; forward names its module otherwise."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose3d(6, 4, 2, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.mine = nn.Dropout(0.5)
        self.other = nn.Dropout(0.5)
        self.act = nn.ReLU()

    def forward(this, x, z):  # noqa: N805
        c = this.up(x)
        z = this.other(z)
        return this.act(this.mine(this.norm(c))), z


def test_dropouts_draw_their_numbers_in_turn():
    plain = _DropoutsInTurn()
    model = copy.deepcopy(plain)
    assert upconv3d.accelerate(model).replaced
    x, z = _volume(), torch.randn(2, 3, 4)
    for training in (True, False):
        results = []
        for each in (plain, model):
            torch.manual_seed(3)
            results.append(each.train(training)(x, z))
        torch.testing.assert_close(*results)


class _Counted(nn.Module):
    """A parametrization that counts its evaluations, in a tensor: torch.compile records that, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tensor):
        self.count.add_(1)
        return tensor + 0


class _Scaled(_Up):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.norm(self.up(x)) * self.scale


_EVALUATED = {
    "relu, group norm": lambda: _chain(nn.ReLU(), nn.GroupNorm(2, 8)),
    "group norm, silu": lambda: _chain(nn.GroupNorm(2, 8), nn.SiLU()),
    "instance norm, prelu": lambda: _chain(nn.InstanceNorm3d(8, affine=True), nn.PReLU(8)),
    "batch norm": lambda: _chain(nn.BatchNorm3d(8), nn.ReLU()),
    "forward": _Up,
    "its own": _Scaled,
    "by itself": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2), nn.Tanh()),
}
_CALLED = {
    "eager": lambda model: model,
    "small": lambda model: model,
    "compiled": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "traced": lambda model: torch.jit.trace(model, (_volume(),)),
}


def _count_evaluations(modules):
    """Parametrizes every tensor of the modules; what counts the evaluations of each."""
    counted = []
    for module in list(modules):
        for name in dict(module.named_parameters(recurse=False)):
            counted.append(_Counted())
            nn.utils.parametrize.register_parametrization(module, name, counted[-1])
    return counted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("called", _CALLED)
@pytest.mark.parametrize("every", [False, True], ids=["convolution first", "all afterwards"])
@pytest.mark.parametrize("name", _EVALUATED)
def test_parametrizations_are_evaluated_once_in_a_forward(
    name, every, called, monkeypatch, small_blocks_left
):
    """As often as in the plain model: their states, and random numbers, go on as they would there."""
    torch._dynamo.reset()
    monkeypatch.setattr(run, "FOLDING_DEVICES", frozenset({"cpu", "cuda"}))
    if called == "small":
        monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", small_blocks_left)
    model = _EVALUATED[name]().eval()
    if not every:
        convolutions = (m for m in model.modules() if isinstance(m, nn.ConvTranspose3d))
        counted = _count_evaluations(convolutions)
        before = [each.count.item() for each in counted]
    report = upconv3d.accelerate(model, bare=name == "by itself", sample=(_volume(),))
    assert bool(report.replaced) == (every or name != "by itself")  # parametrized classes have a __deepcopy__
    if every:
        counted = _count_evaluations(model.modules())
    else:
        assert [each.count.item() for each in counted] == [count + 1 for count in before]  # by the sample
    call = _CALLED[called](model)
    for _ in range(3):
        before = [each.count.item() for each in counted]
        call(_volume())
        assert [each.count.item() for each in counted] == [count + 1 for count in before]


@pytest.mark.parametrize("after", [(nn.GroupNorm(2, 8), nn.SiLU()), (nn.ReLU(), nn.GroupNorm(2, 8))])
def test_spectral_norms_state_is_the_plain_models(after):
    model = _chain(*after)
    nn.utils.parametrizations.spectral_norm(model[0])
    model, plain = _accelerated(model)
    for _ in range(3):
        torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_computed_weight_of_another_dtype_is_refused_as_by_pytorch():
    class Wide(nn.Module):
        def forward(self, weight):
            return weight.double()

    model = _chain(nn.GroupNorm(2, 8))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Wide(), unsafe=True)
    for each in _accelerated(model):
        with pytest.raises(RuntimeError):
            each(_volume())


def _said_of(module, x):
    """The result, or the words that refuse it: PyTorch's group_norm has some from torch 2.14 on."""
    try:
        return module(x)
    except RuntimeError as refusal:
        return str(refusal)


@pytest.mark.parametrize("after", [(nn.ReLU(), nn.GroupNorm(2, 8)), (nn.GroupNorm(2, 8), nn.SiLU())])
def test_outputs_without_values(after):
    """Of each extent: which inputs leave nothing depends on the padding alone."""
    make = nn.Sequential(nn.ConvTranspose3d(6, 8, 2, padding=(1, 0, 1)), *after)
    model, plain = _accelerated(make)
    torch.testing.assert_close(model(_volume()), plain(_volume()), rtol=1e-4, atol=1e-5)
    for padding, extent in (((1, 0, 1), (1, 2, 3)), ((1, 0, 1), (3, 2, 1)), ((1, 1, 1), (1, 1, 1))):
        x = torch.ones(2, 6, *extent)
        model[0].padding = plain[0].padding = padding
        found, expected = _said_of(model, x), _said_of(plain, x)
        if isinstance(expected, str):
            assert found == expected == "Expected HxW to be greater than 0, got 0"
        else:
            assert found.shape == expected.shape and found.numel() == 0
    for each in (model, plain):
        each[0].padding = (2, 2, 2)
        with pytest.raises(RuntimeError):
            each(x)
