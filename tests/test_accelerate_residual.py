# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate where a transposed convolution's result is read twice, or in another module."""

import copy
import pickle

import pytest
import torch
from accelerated_models import accelerated_pair
from accelerated_residuals import (
    MODELS,
    Before,
    Between,
    Branches,
    Called,
    Decoder,
    Dropping,
    Hidden,
    InPlaceFirst,
    InPlaceMethod,
    InPlaceModule,
    Modal,
    OwnUp,
    Remembers,
    Residual,
    Reused,
    Shifted,
    Up,
)
from torch import nn
from upconv3d._accelerated import run


def _volume(dtype=torch.float32, device="cpu"):
    x = torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x.to(device, dtype)


@pytest.fixture
def calls(monkeypatch):
    """A list that grows by one entry per block that is run as one call."""
    found, run_block = [], run.run_block

    def counted(*arguments):
        result = run_block(*arguments)
        if result is not None:
            found.append(arguments[0])
        return result

    monkeypatch.setattr(run, "run_block", counted)
    return found


def _flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _check(model, plain, x=None, tolerance=1e-5):
    x = _volume() if x is None else x
    for ours, theirs in zip(_flat(model(x)), _flat(plain(x)), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_calls(name, training, device, calls):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    make, returning = MODELS[name]
    model, plain, report = accelerated_pair(make)
    model.to(device).train(training)
    plain.to(device).train(training)
    found = report.replaced
    assert len(found) == len(report.findings) == max(returning, 1), str(report)
    assert sum("convolution returned" in str(finding) for finding in found) == returning
    x = _volume(device=device)
    tolerance = 1e-5 if device.type == "cpu" else 1e-4  # cuDNN's sums come in any order
    with torch.no_grad():
        _check(model, plain, x, tolerance)
    assert len(calls) == len(found)
    del calls[:]
    if name == "changed afterwards":  # group norm's backward reads it
        return
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for tensor, part in zip(inputs, (model, plain), strict=True):
        outputs = [
            y * torch.linspace(-1, 1, y.numel(), device=device).view(y.shape) for y in _flat(part(tensor))
        ]
        sum(y.sum() for y in outputs).backward()
    # On the CPU PyTorch's own calls are recorded where the convolution is returned.
    recorded = sum("PyTorch's calls" not in str(finding) for finding in found)
    assert len(calls) == (recorded if returning == 0 or device.type == "cuda" else 0)
    ours, theirs = (
        [x.grad, *(p.grad for p in m.parameters())] for x, m in zip(inputs, (model, plain), strict=True)
    )
    # The gradient of a bias before a norm is rounding alone: the scale is that of the largest.
    scale = max(float(gradient.abs().max()) for gradient in theirs)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    assert list(model.state_dict()) == list(plain.state_dict())
    report.restore()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["autoencoder", "cat", "sequential"])
def test_copies_are_accelerated(name, copied, calls):
    model, plain, report = accelerated_pair(MODELS[name][0])
    twin = copied(model)
    report.restore()
    with torch.no_grad():
        _check(twin, plain)
        _check(model, plain)
    assert len(calls) == len(report.findings)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_compiles_without_graph_breaks(name, grad):
    torch._dynamo.reset()
    if name == "changed afterwards" and grad:  # group norm's backward reads it
        return
    model, plain, _ = accelerated_pair(MODELS[name][0])
    with torch.set_grad_enabled(grad):
        _check(torch.compile(model, fullgraph=True, backend="aot_eager"), plain, tolerance=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name, calls):
    model, plain, report = accelerated_pair(MODELS[name][0])
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            _check(model, plain, tolerance=0.1)
    assert len(calls) >= len(report.replaced)


def test_scripts_and_traces():
    model, plain, _ = accelerated_pair(Decoder)
    x = _volume()
    with torch.no_grad():
        for other in (
            torch.jit.script(model),
            torch.jit.trace(model, (x,)),
            torch.fx.symbolic_trace(model),
            torch.export.export(model, (x,)).module(),
        ):
            _check(other, plain)


@pytest.mark.parametrize("precision", [None, "ieee"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grad", [True, False])
def test_traces_do_not_depend_on_the_gradient_mode(name, grad, precision):
    """torch.jit.trace repeats the call without gradients, and compares the graphs."""
    if name == "changed afterwards" and grad:  # group norm's backward reads it
        return
    model, plain, _ = accelerated_pair(MODELS[name][0], precision=precision)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, (_volume(),))
    with torch.no_grad():
        _check(traced, plain)


def test_transforms(calls):
    model, plain, _ = accelerated_pair(Decoder)
    x, tangent = _volume(), _volume() + 1
    for ours, theirs in zip(*(torch.func.jvp(m, (x,), (tangent,)) for m in (model, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    ours, theirs = (torch.func.grad(lambda x, m=m: m(x).square().sum())(x) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    ours, theirs = (torch.func.vmap(m)(torch.stack([x, tangent])) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_precision_that_was_asked_for_holds_in_training_too(calls):
    model, plain, _ = accelerated_pair(Decoder, precision="ieee")
    _check(model, plain)
    assert len(calls) == 2


def test_frozen_models_and_inputs_that_need_gradients(calls):
    model, plain, _ = accelerated_pair(Decoder)
    _check(model.requires_grad_(False), plain)
    assert len(calls) == 2
    _check(model, plain, _volume().requires_grad_())
    model.blocks[4].requires_grad_(True)  # the first block does not record what the second does
    _check(model, plain)
    assert len(calls) == 3


# What comes to a model after it was accelerated: each gets the model and changes it.


def _exchange(block):
    def change(model):
        block_now = block()
        block_now.load_state_dict(model.blocks[3].state_dict())
        model.blocks[3] = block_now

    return change


def _forward_replaced(model):
    model.blocks[3].forward = lambda x: x * 2


def _norm_gone(model):
    model.blocks[3].norm1 = nn.Identity()


def _in_place(model):
    """What silu did in a new tensor, this does in the convolution, which the shortcut reads."""
    model.blocks[3].norm1 = nn.Sequential(nn.ReLU(inplace=True))


def _weights(model):
    model.blocks[3].norm1.weight.data.mul_(3)


CHANGES = {
    "another class": _exchange(Shifted),
    "__call__": _exchange(Called),
    "Sequential": lambda m: m.blocks.__setitem__(3, nn.Sequential(nn.Conv3d(8, 8, 1), nn.ReLU())),
    "forward": _forward_replaced,
    "no norm": _norm_gone,
    "in place": _in_place,
    "weights": _weights,
    "hooked": lambda m: m.blocks[3].register_forward_hook(lambda module, args, y: y * 2),
    "pre-hooked": lambda m: m.blocks[3].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "part hooked": lambda m: m.blocks[3].norm1.register_forward_hook(lambda module, args, y: y * 2),
    "convolution hooked": lambda m: m.blocks[2][0].register_forward_hook(lambda module, args, y: y * 2),
    "shorter": lambda m: m.blocks.__delitem__(3),
    "shared": lambda m: m.blocks.__setitem__(5, m.blocks[3]),
    "eval": lambda m: m.blocks[3].eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name):
    model, plain, _ = accelerated_pair(Decoder)
    x = _volume()
    with torch.no_grad():
        before = model(x)
        for part in (model, plain):
            torch.manual_seed(9)
            CHANGES[name](part)
        _check(model, plain)
        after = model(x)
    assert name == "eval" or before.shape != after.shape or not torch.allclose(before, after)


def test_numbers_that_an_inner_forward_reads():
    model, plain, _ = accelerated_pair(MODELS["two in a module"][0])
    for part in (model, plain):
        part.blocks[3].scale = 2.0
    with torch.no_grad():
        _check(model, plain)


def test_modes_of_an_inner_module(calls):
    model, plain, _ = accelerated_pair(lambda: Decoder(Modal))
    with torch.no_grad():
        for outer, inner, run in ((True, True, 2), (False, False, 2), (True, False, 0), (False, True, 0)):
            del calls[:]
            for part in (model, plain):
                part.train(outer).blocks[3].train(inner)
            _check(model, plain)
            assert len(calls) == run
        model, plain, report = accelerated_pair(lambda: Decoder(Dropping))
        assert "in training" in report.findings[0].training
        for inner, run in ((True, 1), (False, 2)):
            del calls[:]
            for part in (model, plain):
                part.train().blocks[3].train(inner)
            torch.manual_seed(3)
            y = model(_volume())
            torch.manual_seed(3)
            torch.testing.assert_close(y, plain(_volume()), rtol=1e-5, atol=1e-5)
            assert len(calls) == run


def test_a_module_that_is_reused(calls):
    model, plain, report = accelerated_pair(Reused)
    assert len(report.replaced) == 2
    with torch.no_grad():
        _check(model, plain)
        assert len(calls) == 2
        for part in (model, plain):
            torch.manual_seed(1)
            part.second = Residual()
        _check(model, plain)


def test_global_hooks_see_the_inner_module():
    model, _, _ = accelerated_pair(Decoder)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with torch.no_grad():
            model(_volume())
    finally:
        handle.remove()
    assert model.blocks[3] in seen and model.blocks[3].norm1 in seen


def _hooked(c):
    block = Residual(c)
    block.register_forward_hook(lambda module, args, y: y * 2)
    return block


def _replaced(c):
    block = Residual(c)
    block.forward = lambda x: x * 2
    return block


LEFT_ALONE = {
    "changed before": (Before, "used 2 times, not only after"),
    "changed between": (Between, "used 2 times, not only after"),
    "relu in place": (InPlaceFirst, "used 2 times"),
    "relu_": (InPlaceMethod, "used 2 times"),
    "ReLU in place": (lambda: InPlaceModule(act=nn.ReLU(inplace=True)), "used 2 times"),
    "batch norm": (lambda: Up(nn.BatchNorm3d(8)), "used 2 times"),
    "hooks": (lambda: Decoder(_hooked), "Residual follows: Residual has hooks"),
    "forward replaced": (lambda: Decoder(_replaced), "Residual follows: its forward was replaced"),
    "__call__": (lambda: Decoder(Called), "calls Called, which has a __call__ of its own"),
    "a default that is kept": (lambda: Decoder(Remembers), "Remembers follows: its forward has defaults"),
    "data": (lambda: Decoder(Branches), "Branches follows: torch.fx cannot trace"),
    "hidden state": (lambda: Decoder(Hidden), "Hidden follows: its forward reads self.state, a dict"),
    "torch.nn": (lambda: Decoder(lambda c: nn.Conv3d(c, c, 1)), "Conv3d follows"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone_with_the_reason(case):
    make, reason = LEFT_ALONE[case]
    model, plain, report = accelerated_pair(lambda: make().eval())
    left = report.findings[0]
    assert not left.replaced and reason in left.evaluation, str(report)
    # The other block of a decoder is none the worse, unless there is no trace at all.
    assert len(report.replaced) == (0 if case == "__call__" else len(report.findings) - 1)
    if case == "a default that is kept":
        return
    with torch.no_grad():
        _check(model, plain)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
def test_an_inner_module_that_is_accelerated_itself(copied, calls):
    model, plain, report = accelerated_pair(lambda: Decoder(OwnUp))
    assert len(report.replaced) == 3 and type(model.blocks[3]).__mro__[1:] != OwnUp.__mro__
    model = copied(model)
    with torch.no_grad():
        _check(model, plain)
        assert len(calls) == 3
        x = torch.ones(1, 8, 2, 2, 2)
        _check(model.blocks[3], plain.blocks[3], x)
        assert len(calls) == 4
