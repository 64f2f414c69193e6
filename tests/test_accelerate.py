# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: values, gradients, what it leaves alone and why, and everything around a module."""

import copy
import pickle

import pytest
import torch
import upconv3d
from accelerated_models import (
    MODELS,
    Scaled,
    SegResDecoder,
    UpTransition,
    ValueSwitched,
    cbn,
    cna,
    count_blocks_run,
)
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from upconv3d._accelerated import block, run


@pytest.fixture(autouse=True)
def folding_everywhere(monkeypatch):
    """What runs on a GPU only is to be tested without one."""
    monkeypatch.setattr(run, "FOLDING_DEVICES", frozenset({"cpu", "cuda"}))


def _volume(channels=6, dtype=torch.float32, device="cpu", n=2):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, channels, 4, 3, 4, generator=generator, dtype=torch.float64).to(device, dtype)


def _made(make, dtype=torch.float32, device="cpu"):
    torch.manual_seed(7)
    model = make().to(device, dtype)
    for parameter in model.parameters():
        parameter.data.add_(torch.rand_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm3d) and module.track_running_stats:
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model


def _gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    tensors = [x, *model.parameters()]
    return y, torch.autograd.grad((y * weights).sum(), tensors, allow_unused=True)


TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name, training, dtype, device):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model = _made(MODELS[name], dtype, device).train(training)
    plain = copy.deepcopy(model)
    report = upconv3d.accelerate(model)
    assert report.replaced, str(report)
    x = _volume(dtype=dtype, device=device)
    (y, gradients), (expected, others) = _gradients(model, x), _gradients(plain, x)
    assert y.dtype == expected.dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients, others, strict=True):
        # The gradient of a bias before a norm is rounding alone: the scale is that of the largest.
        atol = tolerance * max(1.0, float(others[0].abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * atol)
    for (key, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=key)  # batch norm's running statistics too


@pytest.mark.parametrize("name", MODELS)
def test_each_replaced_block_is_one_call(name, monkeypatch):
    model = _made(MODELS[name]).eval()
    report = upconv3d.accelerate(model)
    calls = count_blocks_run(monkeypatch.setattr)
    model(_volume())
    assert len(calls) == len(report.replaced)


@pytest.mark.parametrize("recorded", [True, False])
def test_small_blocks_are_pytorchs(recorded, device, monkeypatch, small_blocks_left):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("which blocks would be cuDNN's was measured on Hopper")
    torch.backends.cudnn.deterministic = True  # equal bits are asked for below
    monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", small_blocks_left)
    calls = count_blocks_run(monkeypatch.setattr)

    def blocks_run(model, x):
        calls.clear()
        with torch.set_grad_enabled(recorded):
            model(x)
        return len(calls)

    def made(num_groups, **options):
        chain_of = [nn.ConvTranspose3d(64, 64, 2, 2), nn.ReLU(), nn.GroupNorm(num_groups, 64)]
        model = nn.Sequential(*chain_of).to(device, dtype)
        plain = copy.deepcopy(model)
        return plain, model, upconv3d.accelerate(model, **options)

    # On a GPU, those of which no kernel of ours could compute the convolution.
    dtype = torch.float64 if device.type == "cuda" else torch.float32
    x = _volume(64, dtype, device)
    plain, model, report = made(4, sample=(x,))
    assert "small: PyTorch's calls" in str(report) and report.replaced
    assert blocks_run(model, x) == 0
    for ours, theirs in zip(_gradients(model, x)[1], _gradients(plain, x)[1], strict=True):
        assert torch.equal(ours, theirs)
    _, told, report = made(4, precision="ieee", sample=(x,))
    assert "small" not in str(report) and blocks_run(told, x) == 1
    # Few large norm groups are what PyTorch's norm is slow at, on a GPU; large blocks are ours anywhere.
    large, x = made(1)[1], torch.randn(1, 64, 13, 13, 13, device=device, dtype=dtype)
    assert blocks_run(large, x) == (device.type == "cuda")
    monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", 2**17)
    assert blocks_run(made(1)[1], x) == 1


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["group", "instance"])
def test_small_blocks_spare_the_host(norm, low, hopper, monkeypatch, small_blocks_left):
    """By the SM90 kernel, where the planner would take another convolution for the device's sake."""
    monkeypatch.setattr(block, "SMALL_BLOCK_VALUES", small_blocks_left)
    torch.backends.cudnn.conv.fp32_precision = "tf32"

    def made():
        after = {
            "group": (nn.ReLU(), nn.GroupNorm(4, 64)),
            "instance": (nn.InstanceNorm3d(64, affine=True), nn.PReLU()),
        }
        return nn.Sequential(nn.ConvTranspose3d(64, 64, 3, 2, 1, 1), *after[norm])

    plain, x = _made(made, device=hopper), _volume(64, device=hopper)
    model = copy.deepcopy(plain)
    report = upconv3d.accelerate(model, sample=(x,))
    assert "sm90_implicit_gemm" in str(report)
    weight = model[0].weight.detach()
    geometry = {"stride": 2, "padding": 1, "output_padding": 1, "norm": "group", "num_groups": 4}
    plans = [upconv3d.explain_norm_act(x, weight, **geometry, spares_host=spares) for spares in (False, True)]
    assert plans[0].algorithm in ("cuda_library", "cuda_col2im")
    assert plans[1].algorithm == "sm90_implicit_gemm"

    with torch.autocast("cuda", low, enabled=low is not None):
        with torch.no_grad():
            first = model(x)  # checked; the next ones are decided, then remembered
            others = [model(x) for _ in range(3)]
            with torch.profiler.profile():
                others.append(model(x))
        assert all(torch.equal(first, y) for y in others)
        (y, ours), (expected, theirs) = _gradients(model, x), _gradients(plain, x)
    assert y.dtype is expected.dtype is first.dtype
    _, exact = _gradients(copy.deepcopy(plain).double(), x.double())
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype is other.dtype
        bar = 2 * (other.double() - right).norm() + 1e-3 * max(right.norm(), exact[0].norm())
        assert (mine.double() - right).norm() <= bar


@pytest.mark.parametrize("name", MODELS)
def test_names_state_dict_types_and_back(name):
    model = _made(MODELS[name]).eval()
    names = [(key, type(module)) for key, module in model.named_modules()]
    parameters = {key: id(tensor) for key, tensor in model.named_parameters()}
    x = _volume()
    expected = model(x)
    report = upconv3d.accelerate(model)
    assert [key for key, _ in names] == [key for key, _ in model.named_modules()]
    assert all(isinstance(model.get_submodule(key), cls) for key, cls in names)
    assert parameters == {key: id(tensor) for key, tensor in model.named_parameters()}
    other = _made(MODELS[name])
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    assert repr(model) == repr(other)
    report.restore()
    assert names == [(key, type(module)) for key, module in model.named_modules()]
    assert not any(key.startswith("_upconv3d") for module in model.modules() for key in module.__dict__)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_are_accelerated(name, copied, monkeypatch):
    model = _made(MODELS[name]).eval()
    report = upconv3d.accelerate(model)
    twin = copied(model)
    x = _volume()
    calls = count_blocks_run(monkeypatch.setattr)
    assert torch.equal(twin(x), model(x)) and len(calls) == 2 * len(report.replaced)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    report.restore()
    assert not torch.equal(twin(x), model(x)) and len(calls) == 3 * len(report.replaced)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_compiles_without_graph_breaks(name, training):
    torch._dynamo.reset()
    model = _made(MODELS[name]).train(training)
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = _volume()
    (y, gradients), (expected, others) = _gradients(compiled, x), _gradients(plain, x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[0], others[0], rtol=1e-3, atol=1e-2)


def test_outer_hooks_run_and_inner_hooks_win(monkeypatch):
    model = nn.Sequential(cna(), nn.Conv3d(8, 2, 1))
    upconv3d.accelerate(model)
    calls, seen = count_blocks_run(monkeypatch.setattr), []
    x = _volume()
    expected = model(x)
    model.register_forward_hook(lambda *_: seen.append("model"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("block"))
    assert torch.equal(model(x), expected) and seen == ["block", "model"] and len(calls) == 2
    handle = model[0][0].register_forward_hook(lambda *_: seen.append("conv"))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert seen[2:] == ["block", "conv", "model"] and len(calls) == 2
    handle.remove()
    model(x)
    assert len(calls) == 3
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        model(x)
    finally:
        everywhere.remove()
    assert len(calls) == 3


def test_modules_of_the_chain_called_by_themselves_are_themselves():
    model = _made(cna)
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model)
    x = _volume()
    assert torch.equal(model[0](x), plain[0](x))
    assert torch.equal(model[1](model[0](x)), plain[1](plain[0](x)))
    assert torch.equal(model[:2](x), plain[:2](x))


def test_a_module_that_is_exchanged_later_is_the_one_that_runs():
    model = _made(cna)
    upconv3d.accelerate(model)
    x = _volume()
    model[2] = nn.Tanh()
    torch.testing.assert_close(model(x), torch.tanh(model[1](model[0](x))), rtol=1e-4, atol=1e-5)
    model[1] = nn.Identity()
    torch.testing.assert_close(model(x), torch.tanh(model[0](x)), rtol=1e-4, atol=1e-5)


def test_weights_changed_through_data_are_seen_by_a_folded_batch_norm():
    model = _made(cbn).eval()
    upconv3d.accelerate(model)
    x = _volume()
    with torch.no_grad():
        model(x)
        model[0].weight.data.mul_(3)
        model[1].running_mean.data.add_(1)
        torch.testing.assert_close(model(x), model[2](model[1](model[0](x))), rtol=1e-4, atol=1e-4)


def test_batch_norm_on_a_cpu_is_pytorchs_to_the_bit(monkeypatch):
    monkeypatch.undo()
    model = _made(UpTransition).eval()
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model)
    x = _volume()
    assert torch.equal(model(x), plain(x))


def test_parametrized_weights(monkeypatch):
    model = _made(cna)
    nn.utils.parametrizations.weight_norm(model[0])
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model)
    calls = count_blocks_run(monkeypatch.setattr)
    x = _volume()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert len(calls) == 2 and model[0].parametrizations.weight.original0.grad is not None


class _OwnForward(nn.GroupNorm):
    def forward(self, input):
        return super().forward(input) + 1


def _hooked():
    model = cna()
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    return model


def _spectral():
    model = cna()
    nn.utils.spectral_norm(model[0])
    return model


def _conv():
    return nn.ConvTranspose3d(6, 8, 3, 2)


def _replaced_norm():
    model = cna()
    model[1].forward = lambda x: 2 * nn.GroupNorm.forward(model[1], x)
    return model


class _CalledByKeyword(UpTransition):
    def forward(self, x):
        return self.bn1(self.up_conv(input=x))


class _CalledWithSize(UpTransition):
    def forward(self, x):
        return self.bn1(self.up_conv(x, output_size=[8, 6, 8]))


class _CalledWithSizeInPlace(UpTransition):
    def forward(self, x):
        return self.bn1(self.up_conv(x, [8, 6, 8]))


class _AddedInPlace(UpTransition):
    def forward(self, x):
        y = self.up_conv(x)
        y += 1
        return self.bn1(y)


LEFT_ALONE = {
    "hooks": (_hooked, "hooks"),
    "spectral_norm": (_spectral, "hooks"),
    "own forward": (lambda: nn.Sequential(_conv(), _OwnForward(2, 8), nn.ReLU()), "_OwnForward follows,"),
    "own forward of the instance": (_replaced_norm, "GroupNorm follows, with a forward of its own"),
    "computed weight": (
        lambda: nn.Sequential(_conv(), register_parametrization(nn.GroupNorm(2, 8), "weight", nn.Softplus())),
        "GroupNorm follows, with a weight or bias that is computed",
    ),
    "unknown": (lambda: nn.Sequential(_conv(), nn.Conv3d(8, 2, 1)), "Conv3d follows"),
    "alone": (lambda: nn.Sequential(_conv()), "nothing that is known follows"),
    "the model itself": (_conv, "nothing that calls it was found"),
    "running statistics": (
        lambda: nn.Sequential(_conv(), nn.InstanceNorm3d(8, track_running_stats=True)),
        "running statistics",
    ),
    "other channels": (lambda: nn.Sequential(_conv(), nn.InstanceNorm3d(4)), "has 4 channels"),
    "batch statistics": (
        lambda: nn.Sequential(_conv(), nn.BatchNorm3d(8, track_running_stats=False), nn.ReLU()),
        "the batch's statistics",
    ),
    "groups": (
        lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 2, groups=2), nn.BatchNorm3d(8), nn.ReLU()),
        "groups=2",
    ),
    "skip": (SegResDecoder, "add"),
    "in place": (_AddedInPlace, "iadd follows"),
    "data": (ValueSwitched, "cannot trace"),
    "hidden state": (Scaled, "self.state, a dict"),
    "keyword": (_CalledByKeyword, "is called by keyword (input=)"),
    "output_size": (_CalledWithSize, "is called with output_size"),
    "output_size without its name": (_CalledWithSizeInPlace, "is called with output_size"),
}


@pytest.mark.filterwarnings("ignore:input's size at dim:UserWarning")
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone_with_the_reason(case):
    make, reason = LEFT_ALONE[case]
    model = _made(make).eval()
    types = [type(module) for module in model.modules()]
    report = upconv3d.accelerate(model)
    (finding,) = report.findings
    assert not finding.replaced and reason in finding.evaluation, str(report)
    assert reason in str(report) and types == [type(module) for module in model.modules()]


def test_dropout_and_batch_norm_are_decided_at_the_call(monkeypatch):
    model = nn.Sequential(cbn(), nn.Sequential(nn.ConvTranspose3d(8, 4, 2), nn.Dropout(0.5), nn.ReLU()))
    report = upconv3d.accelerate(model)
    assert ["in training" in finding.training for finding in report.findings] == [True, True]
    calls, x = count_blocks_run(monkeypatch.setattr), _volume()
    for training, expected in ((True, 0), (False, 2), (True, 2)):
        model.train(training)(x)
        assert len(calls) == expected
    before = model[0][1].num_batches_tracked.clone()
    model(x)
    assert model[0][1].num_batches_tracked == before + 1


def test_unbatched_volumes_mean_what_they_mean_to_pytorch():
    model = nn.Sequential(nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8), nn.ReLU())
    upconv3d.accelerate(model)
    x = torch.randn(6, 3, 3, 7)  # group_norm takes the 8 channels for samples, and the 4 slices for channels
    with pytest.raises(RuntimeError):
        model(x)


def test_a_forward_that_changed_its_ways_is_followed(monkeypatch):
    model = _made(UpTransition).eval()
    report = upconv3d.accelerate(model)
    assert report.replaced
    calls, x = count_blocks_run(monkeypatch.setattr), _volume()
    expected = model(x)
    model.scale = 2.0
    torch.testing.assert_close(model(x), expected * 2)
    assert len(calls) == 1  # the forward as it was written ran, for scale is not what was traced
    model.scale = 1.0
    model(x)
    assert len(calls) == 2
    torch.testing.assert_close(model(x, skip=expected), expected * 2)
    assert len(calls) == 2


def test_bare_convolutions_on_demand(monkeypatch):
    model = _made(SegResDecoder)
    plain = copy.deepcopy(model)
    (finding,) = upconv3d.accelerate(model, bare=True).findings
    assert finding.replaced and finding.evaluation == "conv" and finding.container == "up"
    calls, x = count_blocks_run(monkeypatch.setattr), _volume()
    assert torch.equal(model(x), plain(x)) and len(calls) == 1
    assert torch.equal(model.up(x, output_size=[8, 6, 8]), plain.up(x, output_size=[8, 6, 8]))
    assert isinstance(pickle.loads(pickle.dumps(model)).up, nn.ConvTranspose3d)


def test_report_is_data_and_sample_gives_sizes():
    model = nn.Sequential(cna(), nn.ConvTranspose3d(8, 2, 2))
    report = upconv3d.accelerate(model, sample=(_volume(),))
    first, last = report.findings
    assert (first.name, first.replaced, first.container) == ("0.0", True, "0")
    assert first.evaluation == first.training == "conv + group norm (2) + relu"
    assert first.input_size == (2, 6, 4, 3, 4) and last.input_size == (2, 8, 8, 6, 8)
    assert first.plan is not None and last.plan is None
    assert (last.name, last.replaced) == ("1", False) and report.replaced == (first,)
    assert "1 of 2" in str(report) and not model[0][0]._forward_pre_hooks


def test_a_sample_without_data():
    """As a large model is made, whose sizes are known and whose device is not."""
    with torch.device("meta"):
        model = nn.Sequential(cna(), nn.LazyConvTranspose3d(4, 2), nn.GELU())
        report = upconv3d.accelerate(model)
        assert "has no parameters before its first call" in report.findings[1].evaluation
        report.restore()
        (first, last) = upconv3d.accelerate(model, sample=(torch.empty(2, 6, 4, 3, 4),)).findings
    assert first.replaced and last.replaced and first.plan is last.plan is None
    assert first.input_size == (2, 6, 4, 3, 4) and last.input_size == (2, 8, 8, 6, 8)


def test_refused():
    model = cna()
    upconv3d.accelerate(model)
    with pytest.raises(ValueError, match="accelerated once"):
        upconv3d.accelerate(model)
    with pytest.raises(ValueError, match="precision"):
        upconv3d.accelerate(cna(), precision="fp16")


def test_scripts_and_traces():
    model = _made(cna).eval()
    x = _volume()
    expected = model(x)
    upconv3d.accelerate(model)
    torch.testing.assert_close(torch.jit.script(model)(x), expected)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-5)


def test_autocast_and_dtypes(device):
    for name, make in MODELS.items():
        model = _made(make, device=device).eval()
        plain = copy.deepcopy(model)
        upconv3d.accelerate(model)
        x = _volume(device=device)
        with torch.autocast(device.type, torch.bfloat16):
            y, expected = model(x), plain(x)
        assert y.dtype == expected.dtype, name
        torch.testing.assert_close(y.float(), expected.float(), rtol=0.1, atol=0.1)
    converted = upconv3d_of(cna).to(torch.bfloat16)
    assert converted(_volume(dtype=torch.bfloat16)).dtype == torch.bfloat16


def upconv3d_of(make):
    model = make()
    upconv3d.accelerate(model)
    return model
