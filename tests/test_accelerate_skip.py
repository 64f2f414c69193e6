# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate where a skip is added to a transposed convolution before its norm (SegResNet)."""

import copy
import pickle

import accelerated_skips as skips
import pytest
import torch
import upconv3d
from accelerated_models import accelerated_pair
from accelerated_skips import skip_like
from oracles import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint
from upconv3d import _tail_sum
from upconv3d._accelerated import run

# Models of two arguments, and whether others read the sum.
MODELS = {
    "segresnet": (skips.Up, True),
    "instance": (lambda: skips.Up(nn.InstanceNorm3d(8, affine=True), nn.PReLU(8)), True),
    "in place": (skips.InPlace, True),
    "by method": (lambda: skips.ByMethod(act=nn.ELU(0.5)), True),
    "skip first": (lambda: skips.SkipFirst(bias=False), True),
    "alone": (lambda: skips.Alone(act=nn.LeakyReLU(0.2)), False),
    "dropout": (skips.Dropping, False),
    "without activation": (lambda: skips.WithoutActivation(nn.GroupNorm(4, 8)), True),
    "changing": (skips.Changing, False),
}


def _volume(c=6, extent=(3, 4, 3), dtype=torch.float32, device="cpu"):
    x = torch.randn(2, c, *extent, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x.to(device, dtype)


@pytest.fixture
def calls(monkeypatch):
    """A list that grows by one entry per block that runs as one call: whether it returned the sum."""
    found, run_with_sum = [], run.run_with_sum

    def counted(*arguments):
        pair = run_with_sum(*arguments)
        if pair is not None:
            found.append(pair[1] is not None)
        return pair

    monkeypatch.setattr(run, "run_with_sum", counted)
    return found


def _flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _gradients(model, inputs, dtype=None):
    """Results, and gradients of inputs and parameters, for the same seeds whatever the dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast(inputs[0].device.type, dtype, enabled=dtype is not None):
        results = _flat(model(*leaves))
    seeds = [torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64) for y in results]
    sum((y * seed.view(y.shape).to(y.dtype)).sum() for y, seed in zip(results, seeds, strict=True)).backward()
    return results, [leaf.grad for leaf in leaves] + [p.grad for p in model.parameters()]


def _check(model, plain, inputs, dtype=None, factor=2.0):
    """Results and gradients at most as far from float64's as twice those of PyTorch's calls."""
    wide = copy.deepcopy(plain).double()
    right = _gradients(wide, [x.double() for x in inputs])
    ours, eager = _gradients(model, inputs, dtype), _gradients(plain, inputs, dtype)
    floor = 1e-5 if dtype is None else 2.0**-5
    # The gradient of a bias before a norm is rounding alone: the scale is that of the largest.
    largest = max(float(g.abs().max()) for g in right[1] if g is not None)
    for values, ours_of, eager_of in zip(right, ours, eager, strict=True):
        for value, mine, theirs in zip(values, ours_of, eager_of, strict=True):
            if value is None:  # of a head that is not called
                assert mine is None
                continue
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            if values is right[1] and float(value.abs().max()) < 1e-6 * largest:
                assert float(mine.abs().max()) <= max(4 * float(theirs.abs().max()), floor * largest)
                continue
            error, eager_error = (relative_error(g, value) for g in (mine, theirs))
            assert error <= max(factor * eager_error, floor), f"{error:.2e}, eager {eager_error:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_found_and_equal_on_the_cpu(name):
    make, returned = MODELS[name]
    model, plain, report = accelerated_pair(make, precision="ieee")  # else its own forward runs on the CPU
    (finding,) = report.findings
    assert finding.replaced and "conv + skip + " in finding.evaluation, str(report)
    assert (" + relu" in finding.training) == (name in ("segresnet", "in place", "dropout", "changing"))
    assert ("sum returned" in finding.evaluation) == returned and "on the CPU" in finding.evaluation
    x = _volume()
    for training in (True, False):
        model.train(training)
        plain.train(training)
        for ours, theirs in zip(*(_gradients(m, [x, skip_like(x)])[1] for m in (model, plain)), strict=True):
            assert torch.equal(ours, theirs)
    assert list(model.state_dict()) == list(plain.state_dict())
    report.restore()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("name", MODELS)
def test_by_stand_ins(name, kernels, calls):
    """All that is not a kernel: what is kept, what is differentiated, what is asked for."""
    model, plain, _ = accelerated_pair(MODELS[name][0], precision="ieee")
    x = _volume()
    with torch.no_grad():
        for ours, theirs in zip(*(_flat(m(x, skip_like(x))) for m in (model, plain)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert calls == ([MODELS[name][1]] if kernels.keeps or not MODELS[name][1] else [])
    del calls[:]
    _check(model, plain, [x, skip_like(x)])
    assert calls == ([True] if kernels.keeps else [])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("name", MODELS)
def test_like_eager(cuda, name, layout, dtype, calls):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model, plain, _ = accelerated_pair(MODELS[name][0])
    model.to(cuda), plain.to(cuda)
    x = _volume(extent=(7, 8, 9), device=cuda).contiguous(memory_format=layout)
    skip = skip_like(x).to(dtype or torch.float32).contiguous(memory_format=layout)
    _check(model, plain, [x, skip], dtype)
    assert calls == [True]
    del calls[:]
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype is not None):
        for ours, theirs in zip(*(_flat(m(x, skip)) for m in (model, plain)), strict=True):
            assert ours.dtype is theirs.dtype
            assert relative_error(ours, theirs) < (1e-4 if dtype is None else 2.0**-6)
    assert calls == [MODELS[name][1]]


@pytest.mark.parametrize("training", [True, False])
def test_segresnet_ds(device, training, calls):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model, plain, report = accelerated_pair(skips.SegResNetDS)
    assert len(report.replaced) == len(report.findings) == 2, str(report)
    assert all("sum returned" in finding.training for finding in report.findings)
    for each in (model, plain):
        each.to(device).train(training)
    x = _volume(c=2, extent=(8, 12, 4), device=device)
    _check(model, plain, [x])
    assert calls == ([True, True] if device.type == "cuda" else [])
    for each in (model, plain):
        with pytest.raises(ValueError, match=r"\(2, 2, 8, 9, 4\) must be divisible by \[4, 4, 4\]"):
            each(x[:, :, :, :9])


def test_segresnet_ds_by_stand_ins(kernels, calls):
    model, plain, _ = accelerated_pair(skips.SegResNetDS, precision="ieee")
    _check(model, plain, [_volume(c=2, extent=(8, 12, 4))])
    assert calls == ([True, True] if kernels.keeps else [])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        del calls[:]
        torch.testing.assert_close(
            copied(_volume(c=2, extent=(8, 8, 8)))[0],
            plain(_volume(c=2, extent=(8, 8, 8)))[0],
            rtol=1e-4,
            atol=1e-4,
        )
        assert calls == ([True, True] if kernels.keeps else [])


LEFT = {
    "batch norm": (lambda: skips.Alone(nn.BatchNorm3d(8)), "no group or instance norm follows the sum"),
    "number": (skips.Number, "add follows"),
    "onto the skip": (skips.OntoSkip, "iadd follows"),
    "between": (skips.Between, "add follows"),
    "read twice": (skips.ReadTwice, "used 2 times"),
    "activation first": (skips.ActivationFirst, "no group or instance norm follows the sum"),
    "changed first": (skips.ChangedFirst, "its sum with a skip is used 3 times, not only after"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone_with_the_reason(case):
    make, reason = LEFT[case]
    model, plain, report = accelerated_pair(make)
    (finding,) = report.findings
    assert not finding.replaced and reason in finding.evaluation, str(report)
    x = _volume()
    assert torch.equal(model(x, skip_like(x)), plain(x, skip_like(x)))


def _with_encoder(encoder):
    def make():
        model = skips.SegResNetDS()
        model.encoder = encoder()
        return model

    return make


class _HookedEncoder(skips.Encoder):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, args, output: None)


UNTRACED = {
    "valid twice": (skips.ValidTwice, "its forward uses self.fine() for more than to raise"),
    "valid late": (skips.ValidLate, "asks is_valid() whether to raise, after other calls"),
    "lengths by data": (
        _with_encoder(skips.CountedEncoder),
        "cannot trace",
    ),
    "hooks": (
        _with_encoder(_HookedEncoder),
        "asks for the length of what encoder returns: _HookedEncoder has hooks",
    ),
}


@pytest.mark.parametrize("case", UNTRACED)
def test_not_traced_with_the_reason(case):
    make, reason = UNTRACED[case]
    model, _, report = accelerated_pair(make)
    assert not report.replaced and all(reason in f.evaluation for f in report.findings), str(report)
    model(_volume(c=2, extent=(8, 8, 8)))


ASKED = {
    "sets an attribute": (skips.Setting, "is_valid() assigns to self.gain"),
    "appends": (skips.Listing, "is_valid() calls self.calls.append()"),
    "draws": (skips.Drawing, "is_valid() calls torch.rand"),
    "overwrites": (skips.Overwriting, "is_valid() calls x.mul_()"),
    "adds": (skips.Counting, "is_valid() has a statement that may do more than compute, x += 1"),
    "consumes": (skips.Iterating, "is_valid() calls next()"),
    "calls a default": (skips.Keyed, "is_valid() has defaults that are no plain numbers"),
    "property": (skips.OfProperty, "is_valid() reads self.least"),
    "global": (skips.OfGlobal, "of no argument of its own"),
    "self": (skips.OfSelf, "reads module.gain"),
    "list": (skips.OfList, "of no argument of its own"),
    "a tensor of its own": (skips.ByZeros, "makes a tensor, by ones"),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_is_asked_must_only_compute(case):
    make, reason = ASKED[case]
    model, _, report = accelerated_pair(make)
    assert not report.replaced and reason in report.findings[0].evaluation, str(report)
    model(_volume())


@pytest.mark.parametrize(
    "make",
    [skips.Refusing, skips.Sized, skips.Joined, skips.Traceable, skips.Unpacking],
    ids=lambda make: make.__name__,
)
def test_asked_at_each_call(make, monkeypatch):
    model, plain, report = accelerated_pair(make, precision="ieee")
    assert report.replaced, str(report)
    found, run_block = [], run.run_block
    monkeypatch.setattr(run, "run_block", lambda *a: found.append(a) or run_block(*a))
    x = _volume()
    assert torch.equal(model(x), plain(x)) and len(found) == 1
    if make is skips.Unpacking:
        return
    for each in (model, plain):
        each.gain = -1.0 if make is skips.Traceable else 1.0
        with pytest.raises(ValueError, match="gain" if make is skips.Traceable else "sizes"):
            each(x[:, :, :2, :1])
    assert len(found) == 1


def test_batch_norms_are_called_in_their_order():
    model, plain, _ = accelerated_pair(skips.SharedBatchNorm)
    x = _volume()
    torch.testing.assert_close(model(x), plain(x))
    ours, theirs = (list(each.state_dict().values()) for each in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_encoder_that_changed_is_followed(keeping_kernels, calls):
    model, plain, _ = accelerated_pair(skips.SegResNetDS, precision="ieee")
    x = _volume(c=2, extent=(8, 8, 8))
    model(x)
    assert len(calls) == 2
    for each in (model, plain):
        each.encoder.layers[0]["blocks"][0] = nn.Softplus()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 4  # it is called by its name
    for each in (model, plain):
        each.encoder.register_forward_hook(lambda module, args, output: [o * 2 for o in output])
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 4


def test_skips_that_pytorch_adds(kernels, calls):
    """Where it is broadcast, promotes the sum or is no tensor, the addition is PyTorch's."""
    model, plain, _ = accelerated_pair(skips.Up)
    x = _volume()
    skip = skip_like(x)
    with torch.no_grad():
        for other in (skip[:1], skip[:, :, :, :1], 2.0):
            assert torch.equal(model(x, other), plain(x, other))
        assert calls == []
        model(x, skip)
    assert len(calls) == (1 if kernels.keeps else 0)


def test_in_place_additions_keep_the_dtype(kernels, calls):
    model, plain, _ = accelerated_pair(skips.InPlace, precision="ieee")
    x = _volume()
    ours, theirs = (m.bfloat16()(x.bfloat16(), skip_like(x)) for m in (model, plain))
    assert ours.dtype is theirs.dtype is torch.bfloat16 and torch.equal(ours, theirs) and calls == []


def test_precision_is_kept_on_the_cpu():
    model, plain, _ = accelerated_pair(skips.Up, precision="ieee")
    x = _volume()
    assert torch.equal(model(x, skip_like(x)), plain(x, skip_like(x)))


@pytest.mark.parametrize("name", ["segresnet", "instance", "alone"])
def test_twice_differentiable(name, keeping_kernels, calls):
    model, plain, _ = accelerated_pair(MODELS[name][0], precision="ieee")
    found = []
    for each in (model, plain):
        x = _volume().requires_grad_()
        skip = skip_like(x).requires_grad_()
        tensors = [x, skip, *each.parameters()]
        y = each(x, skip)
        first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    assert calls == [True]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_twice_differentiable_by_kernels(cuda, calls):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model, plain, _ = accelerated_pair(lambda: skips.Up(act=nn.SiLU()))
    found = []
    for each in (model.to(cuda), plain.to(cuda)):
        x = _volume(device=cuda).requires_grad_()
        skip = skip_like(x).requires_grad_()
        tensors = [x, skip, *each.parameters()]
        first = torch.autograd.grad(each(x, skip).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    assert calls == [True]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_nothing_of_the_skip_is_kept(keeping_kernels):
    """It may be changed before the backward, as with PyTorch's addition; the sum may not be."""
    tensors = [torch.randn(2, 6, 3, 4, 3), torch.randn(6, 8, 2, 2, 2), None, None, None, None]
    skip = torch.randn(2, 8, 6, 8, 6)
    tensors[0].requires_grad_()
    triple = (2, 2, 2)
    settings = (triple, (0, 0, 0), (0, 0, 0), 1, (1, 1, 1), 2, 1e-5, "ieee", "norm_act", "relu", 0.0, False)
    y, s = _tail_sum.run_with_sum((*tensors, skip), settings, "group", True)
    skip.zero_()
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        s.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_sum_is_the_models_own(cuda):
    """A backward leaves it alone; changed in place, its norm's backward refuses it as PyTorch's does."""
    model = skips.Up().to(cuda)
    x = _volume(extent=(9, 8, 10), device=cuda).requires_grad_()
    conv, norm = model.up, model.norm
    triple = (2, 2, 2)
    settings = (triple, (0, 0, 0), (0, 0, 0), 1, (1, 1, 1), 2, 1e-5, "ieee", "norm_act", "relu", 0.0, False)
    tensors = (x, conv.weight, conv.bias, norm.weight, norm.bias, None, skip_like(x))
    y, s = _tail_sum.run_with_sum(tensors, settings, "group", True)
    before = s.clone()
    (y.sum() + s.sum()).backward(retain_graph=True)
    assert torch.equal(s, before)
    s.mul_(2)
    s.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_kept_of_what_is_frozen(keeping_kernels):
    """Where the convolution has no gradients, its input and weight may change before the backward."""
    for skip_is_trained in (True, False):
        model, plain, _ = accelerated_pair(skips.Up, precision="ieee")
        for each in (model, plain):
            each.up.requires_grad_(False)
            x = _volume()
            skip = skip_like(x).requires_grad_(skip_is_trained)
            y = each(x, skip)
            x.mul_(2)
            with torch.no_grad():
                each.up.weight.mul_(2)
                each.up.bias.mul_(2)
            y.sum().backward()
        torch.testing.assert_close(model.norm.weight.grad, plain.norm.weight.grad, rtol=1e-3, atol=1e-3)


def test_a_bias_may_change_before_the_backward(keeping_kernels):
    model, plain, _ = accelerated_pair(skips.Up, precision="ieee")
    for each in (model, plain):
        y = each(_volume(), skip_like(_volume()))
        with torch.no_grad():
            each.up.bias.zero_()
        y.sum().backward()
    torch.testing.assert_close(model.up.weight.grad, plain.up.weight.grad, rtol=1e-3, atol=1e-3)


def test_the_sum_lies_as_pytorchs(kernels, calls):
    """As its first summand does."""
    x = _volume().contiguous(memory_format=torch.channels_last_3d)
    skip = skip_like(_volume())
    for make, ours in ((skips.SkipFirst, 0), (skips.Up, 1)):
        model, plain, _ = accelerated_pair(make, precision="ieee")
        del calls[:]
        with torch.no_grad():
            torch.testing.assert_close(model(x, skip), plain(x, skip), rtol=1e-4, atol=1e-4)
        assert len(calls) == (ours if kernels.keeps else 0)


def test_where_others_watch(kernels, calls):
    """Forward-mode AD and torch.func get PyTorch's calls; checkpoints run ours twice."""
    model, plain, _ = accelerated_pair(skips.Up, precision="ieee")
    x = _volume()
    skip = skip_like(x)
    _, ours = torch.func.jvp(lambda x: model(x, skip), (x,), (x,))
    _, theirs = torch.func.jvp(lambda x: plain(x, skip), (x,), (x,))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.func.grad(lambda x: model(x, skip).sum())(x), torch.func.grad(lambda x: plain(x, skip).sum())(x)
    )
    assert calls == []
    found = []
    for each in (model, plain):
        leaf = x.clone().requires_grad_()
        checkpoint(each, leaf, skip, use_reentrant=False).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert calls == ([True] if kernels.keeps else [])  # the second ends amid it, with what was missing


def test_compiled(device):
    model, plain, _ = accelerated_pair(skips.Up)
    model.to(device).eval(), plain.to(device).eval()
    x = _volume(device=device)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x, skip_like(x)), plain(x, skip_like(x)), rtol=1e-3, atol=1e-3)
    ds, plain_ds, _ = accelerated_pair(skips.SegResNetDS)
    y = torch.compile(ds.to(device), backend="aot_eager")(_volume(c=2, extent=(8, 8, 8), device=device))
    expected = plain_ds.to(device)(_volume(c=2, extent=(8, 8, 8), device=device))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def test_plan_is_reported(cuda):
    model = skips.Up().to(cuda)
    x = _volume(extent=(40, 40, 40), device=cuda)
    (finding,) = upconv3d.accelerate(model, sample=(x, skip_like(x))).findings
    assert finding.plan == "cuda_library"
