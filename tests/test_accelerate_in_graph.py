# SPDX-License-Identifier: Apache-2.0
"""Accelerated Sequentials under torch.compile: by a recipe that Dynamo takes for constant, few guards."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Convolution
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.torch_version import TorchVersion
from upconv3d._accelerated import in_graph, swap


def _up(*after, **options):
    return nn.Sequential(nn.ConvTranspose3d(6, 8, 3, 2, 1, 1, **options), *after)


CHAINS = {
    "nested": Convolution,
    "nested, activation first": lambda: Convolution("AN", nn.GroupNorm(4, 8), nn.ReLU()),
    "nested, dropout": lambda: Convolution("NDA", nn.GroupNorm(2, 8), nn.PReLU(8)),
    "relu": lambda: _up(nn.GroupNorm(2, 8), nn.Identity(), nn.ReLU(inplace=True)),
    "leaky relu": lambda: _up(nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.2)),
    "elu": lambda: _up(nn.ELU(0.7), nn.GroupNorm(2, 8), bias=False),
    "gelu": lambda: _up(nn.GroupNorm(8, 8, affine=False), nn.GELU("tanh")),
    "norm alone": lambda: _up(nn.GroupNorm(2, 8, eps=0.1)),
    "a convolution behind": lambda: _up(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv3d(8, 3, 1)),
    "one tap": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()),
    "dropout behind": lambda: _up(nn.GroupNorm(2, 8), nn.Dropout(0.0), nn.Sigmoid()),
}


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    """The recipes that were asked for, on a CPU too."""
    found, recipe_of = [], swap.recipe_of
    monkeypatch.setattr(in_graph, "runs_kernels", lambda input: True)
    monkeypatch.setattr(swap, "recipe_of", lambda *a: (found.append(recipe_of(*a)), found[-1])[1])
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def _made(make, device="cpu"):
    torch.manual_seed(3)
    plain = make().to(device)
    for parameter in plain.parameters():
        parameter.data.add_(torch.rand_like(parameter) * 0.1)
    model = copy.deepcopy(plain)
    assert upconv3d.accelerate(model).replaced
    return plain, model


def _volume(device="cpu", dtype=torch.float32, n=2):
    return torch.randn(n, 6, 3, 4, 5, generator=torch.Generator().manual_seed(5)).to(device, dtype)


def _compiled(model, **options):
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


def _gradients(model, x, plain):
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view(y.shape)
    return y, torch.autograd.grad((y * weights).sum(), [x, *plain.parameters()])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHAINS)
def test_values_and_gradients(name, training, device, recipes):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    plain, model = _made(CHAINS[name], device)
    plain.train(training), model.train(training)
    x = _volume(device)
    y, ours = _gradients(_compiled(model), x, model)
    expected, theirs = _gradients(plain, x, plain)
    assert recipes and all(recipe is not None for recipe in recipes)
    assert y.dtype is expected.dtype and y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=3e-4, atol=3e-4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-3 * max(1.0, float(theirs[0].abs().max())))


@pytest.mark.parametrize("name", CHAINS)
def test_autocast(name, cuda, recipes):
    plain, model = _made(CHAINS[name], cuda)
    x = _volume(cuda)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        y, expected = _compiled(model)(x), plain(x)
    assert recipes and all(recipe is not None for recipe in recipes) and y.dtype is expected.dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.1, atol=0.1)


def test_sizes_that_change(device, recipes):
    plain, model = _made(CHAINS["nested"], device)
    compiled = _compiled(model, dynamic=True)
    for n in (2, 3, 5):
        x = _volume(device, n=n)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-2, atol=1e-2)
    assert len(recipes) <= 2


def _guards(model, x):
    def call(x):
        return model(x)

    torch._dynamo.reset()
    _compiled(call)(x)
    (entry,) = _debug_get_cache_entry_list(call.__code__)
    return str(entry.guard_manager).count("\n")


def test_guards_are_hardly_more_than_the_plain_models(recipes, monkeypatch):
    plain, model = _made(CHAINS["nested"])
    few = _guards(model, _volume()) - _guards(plain, _volume())
    assert len(recipes) == 1
    monkeypatch.setattr(swap, "recipe_of", lambda *_: None)
    many = _guards(model, _volume()) - _guards(plain, _volume())
    assert few < 70 < 200 < many


def _exchanged(model):
    model[2] = nn.Sigmoid()


CHANGES = {
    "eps": lambda model: setattr(model[1], "eps", 0.5),
    "slope": lambda model: setattr(model[2], "negative_slope", 0.9),
    "norm groups": lambda model: setattr(model[1], "num_groups", 4),
    "stride": lambda model: setattr(model[0], "stride", (3, 2, 2)),
    "bias": lambda model: setattr(model[0], "bias", None),
    "weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 8, 2, 2, 2))),
    "values": lambda model: model[1].weight.data.mul_(3),
    "one more": lambda model: model.append(nn.Tanh()),
    "one less": lambda model: model.pop(2),
    "another": _exchanged,
    "dtype": lambda model: model.double(),
    "dropout": lambda model: setattr(model[3], "p", 1.0),
    "mode": lambda model: model[4].train(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_since_is_seen(name, recipes):
    after = (nn.GroupNorm(2, 8), nn.LeakyReLU(0.1), nn.Dropout(0.0), nn.Dropout(1.0))
    plain, model = _made(lambda: _up(*after))
    for one in (plain, model):
        one[4].eval()
    compiled = _compiled(model)
    for step in range(2):
        x = _volume(dtype=model[0].weight.dtype)
        torch.testing.assert_close(compiled(x), plain(x), rtol=3e-4, atol=3e-4, msg=f"{name}, step {step}")
        for one in (plain, model):
            CHANGES[name](one)
    x = _volume(dtype=model[0].weight.dtype)
    torch.testing.assert_close(compiled(x), plain(x), rtol=3e-4, atol=3e-4)


def _reordered(model):
    norm = model._modules.pop("1")
    model._modules["1"] = norm


def _replaced(at, module):
    return lambda model: model.__setitem__(at, module())


class _Negative(nn.ReLU):
    def forward(self, input):
        return -super().forward(input)


UNREAD = {  # of modules without attributes, and of their order
    "relu": _replaced(3, nn.Sigmoid),
    "relu, silu": _replaced(3, nn.SiLU),
    "identity": _replaced(2, nn.Tanh),
    "class": lambda model: setattr(model[3], "__class__", _Negative),
    "order": _reordered,
}


@pytest.mark.parametrize("name", UNREAD)
def test_modules_of_which_nothing_is_read_are_seen_too(name, recipes):
    if name == "class" and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("Dynamo of torch 2.11 does not see it of PyTorch's own modules either")
    plain, model = _made(lambda: _up(nn.GroupNorm(2, 8), nn.Identity(), nn.ReLU()))
    compiled, x = _compiled(model), _volume()
    torch.testing.assert_close(compiled(x), plain(x), rtol=3e-4, atol=3e-4)
    for one in (plain, model):
        UNREAD[name](one)
    torch.testing.assert_close(compiled(x), plain(x), rtol=3e-4, atol=3e-4)


def _parametrized():
    return _up(nn.GroupNorm(2, 8), nn.ReLU()).apply(
        lambda m: parametrizations.weight_norm(m) if isinstance(m, nn.ConvTranspose3d) else m
    )


@pytest.mark.parametrize(
    "make",
    [
        _parametrized,
        lambda: _up(nn.BatchNorm3d(8), nn.ReLU()).eval(),
        lambda: _up(nn.ReLU()),
        lambda: nn.Sequential(nn.Conv3d(6, 6, 1), *CHAINS["relu"]()),
        lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 1, 1), nn.GroupNorm(2, 8)),
    ],
    ids=["parametrized", "batch norm", "no norm", "not at first", "large padding"],
)
def test_others_are_decided_as_they_were(make, recipes):
    plain, model = _made(make)
    x = _volume()
    torch.testing.assert_close(_compiled(model)(x), plain(x), rtol=3e-4, atol=3e-4)
    assert all(recipe is None for recipe in recipes)


@pytest.mark.parametrize("norm", [nn.InstanceNorm3d(8), nn.GroupNorm(8, 8)], ids=["instance", "group"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_single_position_is_refused_as_it_is_in_eager_mode(kernel, norm, recipes):
    layers = (nn.ConvTranspose3d(6, 8, kernel, padding=kernel // 2), norm, nn.ReLU())
    plain, model = _made(lambda: nn.Sequential(*layers))
    x = torch.randn(2 if isinstance(norm, nn.InstanceNorm3d) else 1, 6, 1, 1, 1)
    compiled = torch.compile(model, backend="aot_eager")
    for call in (plain, model, compiled):
        with pytest.raises(ValueError, match="more than"):
            call(x)
    x = x.expand(-1, -1, 1, 1, 2)
    torch.testing.assert_close(compiled(x), plain(x), rtol=3e-4, atol=3e-4)
    assert all(recipes)


def test_a_precision_of_its_own_is_followed(recipes):
    plain = _made(CHAINS["relu"])[0]
    model = copy.deepcopy(plain)
    upconv3d.accelerate(model, precision="ieee")
    torch.testing.assert_close(_compiled(model)(_volume()), plain(_volume()), rtol=3e-4, atol=3e-4)
    assert not recipes


TRANSFORMS = {
    "grad of vmap": lambda f: torch.func.grad(
        lambda x: torch.func.vmap(lambda z: f(z))(x.unsqueeze(1)).pow(3).sum()
    ),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(2, 8, 6, 8, 10))[0],
    "vmap of grad": lambda f: (
        lambda x: torch.func.vmap(torch.func.grad(lambda z: f(z).square().sum()))(torch.stack([x, x + 1]))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_of_torch_func(name, recipes):
    plain, model = _made(CHAINS["leaky relu"])
    x, transform = _volume(), TRANSFORMS[name]
    found = _compiled(transform(model))(x)
    torch.testing.assert_close(found, transform(plain)(x), rtol=1e-4, atol=1e-4)
    assert len(recipes) == 1


def test_tangents_are_not_dropped():
    """The operators themselves: what fails while Dynamo is inside of jvp leaves autograd's modes behind."""
    x, weight = _volume(), torch.ones(6, 8, 2, 2, 2)
    geometry = ([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3)

    def block(x):
        op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
        return op(x, weight, None, *geometry, 2, None, None, 1e-5, "ieee")

    def in_graph(x):
        op = torch.ops.upconv3d.conv_transpose3d_norm_act_in_graph.default
        norm, rest = ("norm_act", 2, None, None, 1e-5), ("silu", 0.0, None, None, False, "ieee")
        return op(x, weight, None, *geometry, *norm, *rest)[0]

    def plain(x):
        return nn.functional.silu(nn.functional.group_norm(nn.functional.conv_transpose3d(x, weight), 2))

    for f, g in ((in_graph, plain), (torch.func.vmap(in_graph), torch.func.vmap(plain))):
        primal = torch.stack([x, -x]) if f is not in_graph else x
        for found, right in zip(*(torch.func.jvp(h, (primal,), (primal + 1,)) for h in (f, g)), strict=True):
            torch.testing.assert_close(found, right)
    with pytest.raises(NotImplementedError, match="got an argument with a tangent"):
        torch.func.jvp(block, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got an argument with a tangent"):
        block(forward_ad.make_dual(x, x))
    assert block(x).shape == plain(x).shape
