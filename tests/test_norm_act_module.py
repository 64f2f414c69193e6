# SPDX-License-Identifier: Apache-2.0
"""ConvTranspose3dNormAct: parameters, seeds, state dicts, from_modules, copies, output_size."""

import copy
import pickle

import pytest
import torch
from torch import nn
from upconv3d import ConvTranspose3dNormAct

NORMS = {
    "group": lambda: nn.GroupNorm(2, 8),
    "group-plain": lambda: nn.GroupNorm(2, 8, eps=1e-3, affine=False),
    "instance": lambda: nn.InstanceNorm3d(8),
    "instance-affine": lambda: nn.InstanceNorm3d(8, eps=1e-3, affine=True),
    "none": lambda: None,
}
ACTIVATIONS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.3),
    "elu": lambda: nn.ELU(0.6),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "prelu": nn.PReLU,
    "prelu-8": lambda: nn.PReLU(8),
    "none": lambda: None,
}


def _modules(norm="group", activation="silu", **numbers):
    torch.manual_seed(3)
    modules = [nn.ConvTranspose3d(4, 8, 3, **numbers), NORMS[norm](), ACTIVATIONS[activation]()]
    with torch.no_grad():
        for module in modules[1:]:
            for parameter in () if module is None else module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return modules


def _apply(modules, order, x):
    conv, norm, activation = modules
    for module in (conv, norm, activation) if order == "norm_act" else (conv, activation, norm):
        x = x if module is None else module(x)
    return x


@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_from_modules_like_the_modules(device, norm, activation, order):
    modules = [None if m is None else m.to(device).double() for m in _modules(norm, activation, stride=2)]
    block = ConvTranspose3dNormAct.from_modules(*modules, order=order)
    x = torch.randn(2, 4, 3, 3, 3, device=device, dtype=torch.float64)
    y, expected = block(x), _apply(modules, order, x)
    torch.testing.assert_close(y, expected)
    for module in modules:
        assert module is None or module in list(block.modules())
    parameters = list(block.parameters())
    grads = torch.autograd.grad(y.square().sum(), parameters)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), parameters))


@pytest.mark.parametrize(
    ("norm", "activation"), [("group", "prelu"), ("instance", "elu"), (None, "relu"), ("group", None)]
)
def test_same_seed_same_values_and_keys(norm, activation):
    block_norm = {"group": lambda: nn.GroupNorm(2, 8), "instance": lambda: nn.InstanceNorm3d(8, affine=True)}
    torch.manual_seed(3)
    parts = {"conv_transpose": nn.ConvTranspose3d(4, 8, 3, bias=False)}
    if norm:
        parts["norm"] = block_norm[norm]()
    if activation:
        parts["activation"] = {"prelu": nn.PReLU, "elu": nn.ELU, "relu": nn.ReLU}[activation]()
    expected = {f"{name}.{key}": v for name, part in parts.items() for key, v in part.state_dict().items()}
    torch.manual_seed(3)
    block = ConvTranspose3dNormAct(
        4, 8, 3, bias=False, norm=norm, num_groups=2 if norm == "group" else None, activation=activation
    )
    state = block.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    block.load_state_dict(expected)


def test_constructor_arguments():
    block = ConvTranspose3dNormAct(
        4, 8, 3, 2, 1, 1, 2, False, 1, order="act_norm", num_groups=4, eps=1e-6, affine=False,
        activation="leaky_relu", activation_param=0.2, return_conv=True, precision="tf32",
        dtype=torch.float64,
    )  # fmt: skip
    conv = block.conv_transpose
    assert (conv.stride, conv.padding, conv.output_padding, conv.groups) == ((2,) * 3, (1,) * 3, (1,) * 3, 2)
    assert conv.bias is None and conv.weight.dtype == torch.float64 and conv.dilation == (1, 1, 1)
    assert (block.norm.num_groups, block.norm.eps, block.norm.weight) == (4, 1e-6, None)
    assert block.activation.negative_slope == 0.2
    for text in ("order='act_norm'", "return_conv=True", "precision='tf32'", "LeakyReLU", "GroupNorm(4, 8"):
        assert text in repr(block)
    assert len(block(torch.randn(2, 4, 3, 3, 3, dtype=torch.float64))) == 2
    assert ConvTranspose3dNormAct(4, 8, 3, norm=None, activation="prelu").activation.weight.tolist() == [0.25]


def test_constructor_refuses():
    good = {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "num_groups": 2}
    for wrong, match in (
        ({"order": "act"}, "order must be one of"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"activation": "mish"}, "activation must be one of"),
        ({"num_groups": None}, "num_groups, at least 1"),
        ({"num_groups": 0}, "num_groups, at least 1"),
        ({"norm": "instance"}, "num_groups=2 with norm='instance'"),
        ({"num_groups": 3}, "num_groups|num_channels"),
        ({"activation_param": 0.1}, "has no parameter"),
        ({"activation": None, "activation_param": 0.1}, "has no parameter"),
        ({"precision": "fp16"}, "precision"),
    ):
        with pytest.raises(ValueError, match=match):
            ConvTranspose3dNormAct(**(good | wrong))
    with pytest.raises(TypeError, match=r"num_groups must be an integer; got num_groups=2\.0"):
        ConvTranspose3dNormAct(**(good | {"num_groups": 2.0}))
    for activation in ("leaky_relu", "elu"):
        for given, refusal, match in (
            ("x", TypeError, "must be a number; got str. Remedy"),
            (float("inf"), ValueError, "must be finite; got activation_param=inf. Remedy"),
        ):
            with pytest.raises(refusal, match=match):
                ConvTranspose3dNormAct(**good, activation=activation, activation_param=given)
    for given in ("x", torch.ones(8)):
        with pytest.raises(
            TypeError, match=r"'prelu' must be a number.* Remedy: .*from_modules for one per channel"
        ):
            ConvTranspose3dNormAct(**good, activation="prelu", activation_param=given)


def test_from_modules_refuses():
    conv, norm, activation = _modules()

    class Own(nn.SiLU):
        def forward(self, x):
            return super().forward(x) + 1

    make = ConvTranspose3dNormAct.from_modules
    with pytest.raises(TypeError, match=r"conv_transpose must be .*ConvTranspose3d; got Conv3d\. Remedy: "):
        make(nn.Conv3d(4, 8, 3), norm, activation)
    with pytest.raises(TypeError, match=r"norm must be one of .*InstanceNorm3d; got BatchNorm3d"):
        make(conv, nn.BatchNorm3d(8), activation)
    with pytest.raises(TypeError, match=r"activation must be one of .*; got Mish"):
        make(conv, norm, nn.Mish())
    with pytest.raises(TypeError, match=r"activation is a Own whose forward is not .* Remedy: "):
        make(conv, norm, Own())
    with pytest.raises(TypeError, match="uninitialized"):
        make(nn.LazyConvTranspose3d(8, 3), norm, activation)
    with pytest.raises(ValueError, match="track_running_stats=True"):
        make(conv, nn.InstanceNorm3d(8, track_running_stats=True), activation)
    with pytest.raises(ValueError, match=r"out_channels=8 and 6 of GroupNorm\. Remedy: "):
        make(conv, nn.GroupNorm(2, 6), activation)
    with pytest.raises(ValueError, match="precision"):
        make(conv, norm, activation, precision="fp16")
    with pytest.raises(ValueError, match="order"):
        make(conv, norm, activation, order="norm")
    with pytest.raises(TypeError, match="conv_transpose has forward hooks"):
        make(nn.utils.spectral_norm(nn.ConvTranspose3d(4, 8, 3)), norm, activation)
    activation.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="activation has forward hooks"):
        make(conv, norm, activation)
    conv.padding_mode = "reflect"
    with pytest.raises(ValueError, match=r"padding_mode='reflect'\. Remedy: "):
        make(conv, norm)


def _counting():
    """Statistics that it goes on updating, whatever it says."""
    norm = nn.InstanceNorm3d(8, track_running_stats=True)
    norm.track_running_stats = False
    return norm


def test_statistics_that_a_norm_keeps_without_saying_so_are_refused():
    conv, _, activation = _modules()
    with pytest.raises(
        ValueError, match=r"an InstanceNorm3d with running statistics in its buffers\. Remedy: "
    ):
        ConvTranspose3dNormAct.from_modules(conv, _counting(), activation)


@pytest.mark.parametrize(
    ("norm", "refusal", "match"),
    [
        (nn.BatchNorm3d(8), TypeError, r"norm must be one of .*InstanceNorm3d; got BatchNorm3d\. Remedy"),
        (nn.InstanceNorm3d(8, track_running_stats=True), ValueError, r"track_running_stats=True\. Remedy"),
        (_counting(), ValueError, r"running statistics in its buffers\. Remedy"),
    ],
    ids=["batch norm", "running statistics", "running statistics kept"],
)
def test_a_norm_that_was_exchanged_is_known_or_refused(norm, refusal, match):
    conv, group, activation = _modules()
    block = ConvTranspose3dNormAct.from_modules(conv, group, activation)
    x = torch.randn(2, 4, 3, 3, 3)
    block.norm = norm.eval()
    with pytest.raises(refusal, match=match):
        block(x)
    block.norm = nn.InstanceNorm3d(8)
    torch.testing.assert_close(block(x), activation(block.norm(conv(x))), rtol=1e-4, atol=1e-4)


def test_an_activation_that_was_exchanged_is_known_or_refused():
    block = ConvTranspose3dNormAct.from_modules(*_modules())
    x = torch.randn(2, 4, 3, 3, 3)
    block.activation = nn.Hardswish()
    with pytest.raises(TypeError, match=r"activation must be one of .*; got Hardswish\. Remedy"):
        block(x)
    block.activation = type("Own", (nn.ELU,), {})(0.5)
    torch.testing.assert_close(
        block(x), nn.functional.elu(block.norm(block.conv_transpose(x)), 0.5), rtol=1e-4, atol=1e-4
    )


def test_parametrized_weights_are_read_at_each_call():
    conv, norm, activation = _modules(activation="prelu-8")
    nn.utils.parametrizations.weight_norm(conv)
    nn.utils.parametrizations.weight_norm(activation, dim=0)
    block = ConvTranspose3dNormAct.from_modules(conv, norm, activation)
    x = torch.randn(1, 4, 2, 2, 2)
    y = block(x)
    torch.testing.assert_close(y, activation(norm(conv(x))))
    y.sum().backward()
    assert conv.parametrizations.weight.original0.grad is not None
    assert activation.parametrizations.weight.original1.grad is not None


def test_copies():
    block = ConvTranspose3dNormAct(4, 8, 3, norm="instance", activation="prelu", precision="ieee")
    x = torch.randn(1, 4, 2, 2, 2)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(twin(x), block(x)) and twin.precision == "ieee"
        assert twin.conv_transpose.weight is not block.conv_transpose.weight


@pytest.mark.parametrize("output_size", [[6, 6, 6], [5, 6, 5], (2, 8, 6, 5, 6)])
def test_output_size_and_skip(output_size):
    conv, norm, activation = _modules(stride=2, padding=1)
    block = ConvTranspose3dNormAct.from_modules(conv, norm, activation)
    x = torch.randn(2, 4, 3, 3, 3)
    c = conv(x, list(output_size))
    torch.testing.assert_close(block(x, output_size), activation(norm(c)))
    skip = torch.randn_like(c)
    torch.testing.assert_close(block(x, output_size, skip), activation(norm(c + skip)))
    with pytest.raises(ValueError, match="output size"):
        block(x, [60, 6, 6])


def test_unbatched_input():
    """One sample without a batch; torch.nn's group norm and PReLU would take its channels for samples."""
    block = ConvTranspose3dNormAct.from_modules(*_modules(activation="prelu-8"))
    x = torch.randn(4, 2, 3, 4)
    torch.testing.assert_close(block(x), block(x.unsqueeze(0)).squeeze(0))


def test_hooks_of_the_block_run_and_those_inside_do_not():
    block = ConvTranspose3dNormAct(4, 8, 3, num_groups=2)
    called = []
    block.register_forward_hook(lambda *_: called.append("block"))
    block.activation.register_forward_hook(lambda *_: called.append("activation"))
    block(torch.randn(1, 4, 2, 2, 2))
    assert called == ["block"]


def test_a_skip_of_another_kind_is_refused_at_each_call():
    block = ConvTranspose3dNormAct(4, 6, 3, num_groups=2)
    x = torch.randn(2, 4, 3, 3, 3)
    block(x, skip=torch.zeros(2, 6, 5, 5, 5))
    for _ in range(2):
        with pytest.raises(TypeError, match="skip must be a tensor"):
            block(x, skip="a")


class _Sevens(nn.ReLU):
    def forward(self, input):
        return torch.full_like(input, 7)


class _Fives(nn.GroupNorm):
    def forward(self, input):
        return torch.full_like(input, 5)


class _Threes(nn.ConvTranspose3d):
    def forward(self, input, output_size=None):
        return torch.full_like(super().forward(input, output_size), 3)


@pytest.mark.parametrize("name", ["activation", "norm", "conv_transpose"])
def test_exchanged_modules_with_forwards_of_their_own(name):
    """What the block would not run is refused when it is put there later, too."""
    block = ConvTranspose3dNormAct(4, 6, 3, num_groups=2)
    x = torch.randn(2, 4, 3, 3, 3)
    block(x)
    others = {"activation": _Sevens(), "norm": _Fives(2, 6), "conv_transpose": _Threes(4, 6, 3)}
    setattr(block, name, others[name])
    with pytest.raises(TypeError, match=f"{name} is a .* whose forward is not that of torch.nn"):
        block(x)
    known = {
        "activation": nn.SiLU(),
        "norm": nn.InstanceNorm3d(6),
        "conv_transpose": nn.ConvTranspose3d(4, 6, 3),
    }
    setattr(block, name, known[name])
    assert block(x).shape == (2, 6, 5, 5, 5)


def test_what_from_modules_and_the_constructor_pass_on():
    assert not ConvTranspose3dNormAct.from_modules(nn.ConvTranspose3d(4, 8, 2).eval()).training
    norm = ConvTranspose3dNormAct(4, 8, 2, norm="instance", affine=False, eps=1e-3).norm
    assert norm.eps == 1e-3 and norm.weight is None


def test_calls_that_differ_in_what_a_module_remembers():
    """Numbers that were checked before, of other tensors."""
    x, skip = torch.randn(2, 4, 3, 3, 3), torch.randn(2, 8, 4, 4, 4)
    bare = ConvTranspose3dNormAct(4, 8, 2, norm=None, activation=None, return_conv=True)
    for summand in (None, skip, None):
        y, conv = bare(x, skip=summand)
        torch.testing.assert_close(y, conv if summand is None else conv + summand)
    for channels in (8, 6):
        block = ConvTranspose3dNormAct(4, channels, 2, norm="instance", activation="silu")
        for _ in range(2):
            expected = nn.functional.silu(block.norm(block.conv_transpose(x)))
            torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)
    pointwise = ConvTranspose3dNormAct(4, 8, 1, norm="instance")
    pointwise(x)
    with pytest.raises(ValueError, match="more than one value"):
        pointwise(x[:1, :, :1, :1, :1])
    with pytest.raises(NotImplementedError, match=r"input\.dtype=torch\.int64"):
        pointwise(x.long())
