# SPDX-License-Identifier: Apache-2.0
"""The module: parameters, seeds, state dicts, from_modules, copies, output_size."""

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
import upconv3d
from oracles import relative_error
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from upconv3d import ConvTranspose3dNormAct, ConvTranspose3dReLUGroupNorm

KERNELBENCH = Path(__file__).parent.parent / "perf" / "kernelbench" / "level2_61.py"


def _pair(seed=3, **kwargs):
    torch.manual_seed(seed)
    conv = nn.ConvTranspose3d(4, 8, 3, **{k: v for k, v in kwargs.items() if k in ("bias", "stride")})
    return conv, nn.GroupNorm(2, 8, affine=kwargs.get("affine", True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_same_seed_same_values_and_keys(bias, affine):
    conv, norm = _pair(bias=bias, affine=affine)
    torch.manual_seed(3)
    block = ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, bias=bias, affine=affine)
    expected = {f"conv_transpose.{k}": v for k, v in conv.state_dict().items()}
    expected |= {f"group_norm.{k}": v for k, v in norm.state_dict().items()}
    state = block.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_positional_arguments_are_those_of_the_issue():
    block = ConvTranspose3dReLUGroupNorm(
        4, 8, 3, 2, 2, 1, 1, 2, False, 1, 1e-6, False, "tf32", "cpu", torch.float64
    )
    conv = block.conv_transpose
    assert (conv.stride, conv.padding, conv.output_padding, conv.groups) == ((2,) * 3, (1,) * 3, (1,) * 3, 2)
    assert conv.bias is None and conv.weight.dtype == torch.float64
    assert block.group_norm.eps == 1e-6 and block.group_norm.weight is None
    assert block.precision == "tf32"


def test_forward_like_eager(device):
    conv, norm = (module.to(device) for module in _pair(stride=2))
    block = ConvTranspose3dReLUGroupNorm.from_modules(conv, norm, precision="ieee")
    x = torch.randn(2, 4, 3, 3, 3, device=device)
    reference = copy.deepcopy(norm).double()(torch.relu(copy.deepcopy(conv).double()(x.double())))
    assert relative_error(block(x), reference) < 1e-6


def test_from_modules_shares_the_parameters():
    conv, norm = _pair()
    block = ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)
    assert block.conv_transpose.weight is conv.weight and block.group_norm.weight is norm.weight
    x = torch.randn(1, 4, 2, 2, 2)
    before = block(x)
    with torch.no_grad():
        conv.weight.mul_(-1)
    assert not torch.equal(block(x), before)


def test_from_modules_refuses():
    conv, norm = _pair()

    class Own(nn.ConvTranspose3d):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(TypeError, match=r"conv_transpose must be a .*ConvTranspose3d; got Conv3d\. Remedy: "):
        ConvTranspose3dReLUGroupNorm.from_modules(nn.Conv3d(4, 8, 3), norm)
    with pytest.raises(TypeError, match="group_norm must be"):
        ConvTranspose3dReLUGroupNorm.from_modules(conv, nn.BatchNorm3d(8))
    with pytest.raises(TypeError, match=r"whose forward is not .* Remedy: "):
        ConvTranspose3dReLUGroupNorm.from_modules(Own(4, 8, 3), norm)
    with pytest.raises(TypeError, match="uninitialized"):
        ConvTranspose3dReLUGroupNorm.from_modules(nn.LazyConvTranspose3d(8, 3), norm)
    with pytest.raises(ValueError, match=r"out_channels=8 and num_channels=6\. Remedy: "):
        ConvTranspose3dReLUGroupNorm.from_modules(conv, nn.GroupNorm(2, 6))
    with pytest.raises(ValueError, match="precision"):
        ConvTranspose3dReLUGroupNorm.from_modules(conv, norm, precision="fp16")
    for each in (conv, norm):
        for hook in (each.register_forward_hook, each.register_forward_pre_hook):
            handle = hook(lambda *_: None)
            with pytest.raises(TypeError, match="hooks"):
                ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)
            handle.remove()
    conv.padding_mode = "reflect"
    with pytest.raises(ValueError, match=r"padding_mode='reflect'\. Remedy: "):
        ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)


class _DoubledConv(nn.ConvTranspose3d):
    def forward(self, input, output_size=None):
        return 2 * super().forward(input, output_size)


class _WideNorm(nn.GroupNorm):
    def forward(self, input):
        return super().forward(input.double()).to(input.dtype)


@pytest.mark.parametrize(
    ("name", "other", "match"),
    [
        ("conv_transpose", _DoubledConv(4, 8, 3), "_DoubledConv whose forward is not that of"),
        ("conv_transpose", nn.Conv3d(4, 8, 3), r"must be a torch\.nn\.ConvTranspose3d; got Conv3d"),
        ("group_norm", _WideNorm(2, 8), "_WideNorm whose forward is not that of"),
        ("group_norm", nn.Identity(), r"must be a torch\.nn\.GroupNorm; got Identity"),
    ],
)
def test_modules_that_were_exchanged_are_asked_at_each_call(name, other, match):
    """What the block would not run is refused when it is put there later, too."""
    block = ConvTranspose3dReLUGroupNorm(4, 8, 3, 2)
    x = torch.randn(1, 4, 2, 2, 2)
    block(x)
    own = getattr(block, name)
    setattr(block, name, other)
    with pytest.raises(TypeError, match=f"{name} .*{match}.* Remedy: "):
        block(x)
    # A subclass with its base's forward, as parametrizations and fully_shard make them, is taken.
    same = type("Same", (type(own),), {})
    setattr(block, name, same(4, 8, 3) if name == "conv_transpose" else same(2, 8))
    assert block(x).shape == (1, 8, 4, 4, 4)


def test_constructor_refuses():
    with pytest.raises(ValueError, match="precision"):
        ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, precision="fp16")
    for num_groups in (None, 2.0):
        with pytest.raises(TypeError, match="num_groups must be an integer"):
            ConvTranspose3dReLUGroupNorm(4, 8, 3, num_groups)
    for num_groups in (0, -1):
        with pytest.raises(
            ValueError, match=f"got num_groups={num_groups}. Remedy: num_groups=1 normalizes all"
        ):
            ConvTranspose3dReLUGroupNorm(4, 8, 3, num_groups)
    with pytest.raises(ValueError):
        ConvTranspose3dReLUGroupNorm(4, 8, 3, 3)


def test_parametrized_weights_are_read_at_each_call():
    conv, norm = _pair()
    nn.utils.parametrizations.weight_norm(conv)
    block = ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)
    x = torch.randn(1, 4, 2, 2, 2)
    block(x).sum().backward()
    assert conv.parametrizations.weight.original0.grad is not None


def test_copies():
    block = ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, precision="ieee")
    x = torch.randn(1, 4, 2, 2, 2)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(twin(x), block(x)) and twin.precision == "ieee"
        assert twin.conv_transpose.weight is not block.conv_transpose.weight


def test_repr_names_everything():
    text = repr(ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, precision="tf32"))
    assert "ConvTranspose3d(4, 8" in text and "GroupNorm(2, 8" in text and "precision='tf32'" in text


@pytest.mark.parametrize("output_size", [[6, 6, 6], [5, 6, 5], (2, 8, 6, 5, 6)])
def test_output_size(output_size):
    conv, norm = _pair(stride=2)
    conv.padding = (1, 1, 1)
    block = ConvTranspose3dReLUGroupNorm.from_modules(conv, norm)
    x = torch.randn(2, 4, 3, 3, 3)
    y = block(x, output_size)
    torch.testing.assert_close(y, norm(torch.relu(conv(x, list(output_size)))), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="output size"):
        block(x, [60, 6, 6])


def test_hooks_of_the_block_run_and_those_inside_do_not():
    block = ConvTranspose3dReLUGroupNorm(4, 8, 3, 2)
    called = []
    block.register_forward_hook(lambda *_: called.append("block"))
    block.conv_transpose.register_forward_hook(lambda *_: called.append("conv_transpose"))
    block(torch.randn(1, 4, 2, 2, 2))
    assert called == ["block"]


def _kernelbench():
    spec = importlib.util.spec_from_file_location("level2_61", KERNELBENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _small_kernelbench_pair(device):
    problem = _kernelbench()
    torch.manual_seed(0)
    model = problem.Model(16, 32, 3, 8).to(device)
    torch.manual_seed(0)
    model_new = problem.ModelNew(16, 32, 3, 8).to(device)
    return model, model_new


def test_kernelbench_model_new(device):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model, model_new = _small_kernelbench_pair(device)
    x = torch.rand(2, 16, 8, 8, 8, device=device)
    kept = x.clone()
    torch.testing.assert_close(model_new(x), model(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept)
    model_new.load_state_dict(model.state_dict())
    model.load_state_dict(model_new.state_dict())
    with torch.no_grad():
        for module in (model, model_new):
            module.conv_transpose.weight.neg_()
    torch.testing.assert_close(model_new(x), model(x), atol=1e-5, rtol=1e-5)


def test_kernelbench_interface():
    source = KERNELBENCH.read_text()
    context = {}
    exec(compile(source, "<kernelbench>", "exec"), context)  # as KernelBench's evaluator loads it
    assert context["get_init_inputs"]() == [64, 128, 3, 8, False]
    problem = _kernelbench()
    init = problem.get_init_inputs()
    model, model_new = problem.Model(*init), context["ModelNew"](*init)
    assert list(model.state_dict()) == list(model_new.state_dict())
    assert (problem.batch_size, problem.depth, problem.height, problem.width) == (16, 32, 32, 32)


def test_kernelbench_at_full_size(cuda):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    problem = _kernelbench()
    (x,) = (tensor.to(cuda) for tensor in problem.get_inputs())
    torch.manual_seed(0)
    model = problem.Model(*problem.get_init_inputs()).to(cuda)
    torch.manual_seed(0)
    model_new = problem.ModelNew(*problem.get_init_inputs()).to(cuda)
    with torch.no_grad():
        assert torch.allclose(model_new(x), model(x), atol=1e-5, rtol=1e-5)


def test_build_config_is_what_the_module_reports():
    assert upconv3d.build_config()["kernels"]


def test_from_modules_refuses_hooks():
    """spectral_norm recomputes the weight in a hook that the block would not run."""
    conv = torch.nn.utils.spectral_norm(torch.nn.ConvTranspose3d(4, 6, 2))
    with pytest.raises(TypeError, match="forward hooks"):
        upconv3d.ConvTranspose3dReLUGroupNorm.from_modules(conv, torch.nn.GroupNorm(2, 6))


def test_modules_pickled_before_recompute_existed():
    block = upconv3d.ConvTranspose3dReLUGroupNorm(4, 4, 1, 2)
    state = {name: value for name, value in block.__dict__.items() if name != "recompute"}
    old = upconv3d.ConvTranspose3dReLUGroupNorm.__new__(upconv3d.ConvTranspose3dReLUGroupNorm)
    old.__setstate__(state)
    x = torch.randn(2, 4, 2, 2, 2)
    assert repr(old) == repr(block) and torch.equal(old(x), block(x))


def _block(family):
    torch.manual_seed(5)
    numbers = {"stride": 2, "num_groups": 2, "dtype": torch.float64}
    if family:
        return ConvTranspose3dNormAct(4, 8, 2, order="act_norm", **numbers)
    return ConvTranspose3dReLUGroupNorm(4, 8, 2, **numbers)


def _through_modules(block, x):
    norm = block.norm if isinstance(block, ConvTranspose3dNormAct) else block.group_norm
    return norm(torch.relu(block.conv_transpose(x)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("family", [False, True])
@pytest.mark.parametrize(
    "renew",
    [
        lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
        lambda conv: prune.random_unstructured(prune.identity(conv, "weight"), "bias", 2),
        weight_norm,
        spectral_norm,
    ],
    ids=["prune", "prune_bias", "weight_norm", "spectral_norm"],
)
def test_parameters_that_hooks_renew(renew, family):
    """prune, weight_norm and spectral_norm of torch.nn.utils compute a weight before each forward."""
    block, twin = _block(family), _block(family)
    for module in (block, twin):
        torch.manual_seed(6)
        renew(module.conv_transpose)
    x = torch.randn(2, 4, 3, 3, 3, dtype=torch.float64)
    for _ in range(2):  # a graph that was kept would be gone the second time
        for module, call in ((block, block), (twin, lambda x: _through_modules(twin, x))):
            module.zero_grad()
            call(x).pow(3).sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.01 * parameter.grad
    state = {name: torch.rand_like(value) for name, value in block.state_dict().items()}
    for module in (block, twin):
        module.load_state_dict(state)
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(block(x), _through_modules(twin, x))
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name))


def test_from_modules_keeps_the_mode_and_passes_options_on():
    conv, norm = torch.nn.ConvTranspose3d(4, 8, 2).eval(), torch.nn.GroupNorm(2, 8).eval()
    assert not ConvTranspose3dReLUGroupNorm.from_modules(conv, norm).training
    x, kept = torch.randn(1, 4, 2, 2, 2), []
    for recompute in (False, True):
        block = ConvTranspose3dReLUGroupNorm.from_modules(conv, norm, recompute=recompute)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t), lambda t: t):
            block(x)
        kept.append(len(saved))
    assert kept[1] == kept[0] - 1  # the convolution
