# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: calls by keyword, and forwards that flags change (SegResNetDS2 in VISTA3D)."""

import copy
import itertools
import pickle

import accelerated_flags as flags
import pytest
import torch
import upconv3d
from accelerated_flags import CALLS, CONSTANTS, REFUSED
from accelerated_models import accelerated_pair, count_blocks_run
from torch import nn
from upconv3d._accelerated import run
from upconv3d._accelerated.traced import Traced


def _volume(c=6, extent=(3, 4, 3)):
    return torch.randn(2, c, *extent, generator=torch.Generator().manual_seed(5))


def _large():
    return _volume(2, (8, 4, 8))


def _other(x):
    return torch.randn(
        x.shape[0], 8, *(2 * s for s in x.shape[2:]), generator=torch.Generator().manual_seed(9)
    )


@pytest.fixture
def calls(monkeypatch):
    """A list that grows by one entry per block that runs as one call, with a skip or without."""
    found = count_blocks_run(monkeypatch.setattr)
    run_with_sum = run.run_with_sum

    def counted(*arguments):
        pair = run_with_sum(*arguments)
        if pair is not None:
            found.append(pair)
        return pair

    monkeypatch.setattr(run, "run_with_sum", counted)
    return found


@pytest.fixture
def entered(monkeypatch):
    """A list that grows by one entry per call for which there is a trace, be the module as it was or not."""
    found, fits = [], Traced.fits

    def seen(self, module, tensors):
        found.append(tensors)
        return fits(self, module, tensors)

    monkeypatch.setattr(Traced, "fits", seen)
    return found


def _same(ours, theirs):
    """That results are alike, down to their types: a list for a list."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    else:
        assert len(ours) == len(theirs)
        for mine, others in zip(ours, theirs, strict=True):
            _same(mine, others)


def _tensors(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in _tensors(result)]


def _gradients(model, x, args, kwargs):
    """Results of model(x, ...), and gradients of x and the parameters."""
    leaf = x.clone().requires_grad_()
    results = model(leaf, *args, **kwargs)
    model.zero_grad()
    total = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in _tensors(results))
    if _tensors(results):
        total.backward()
    return results, [each.grad for each in (leaf, *model.parameters())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_every_call(call, training, keeping_kernels, calls):
    args, kwargs, blocks = CALLS[call]
    model, plain, report = accelerated_pair(flags.TwoBranches, precision="ieee")
    assert len(report.replaced) == len(report.findings) == 4, str(report)
    assert all("called with" not in str(finding) for finding in report.findings)
    x = _large()
    for each in (model, plain):
        each.train(training)
    (ours, gradients), (theirs, others) = (_gradients(each, x, args, kwargs) for each in (model, plain))
    _same(ours, theirs)
    assert len(calls) == blocks
    largest = max([float(gradient.abs().max()) for gradient in others if gradient is not None], default=0.0)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5 * largest)
    del calls[:]
    with torch.no_grad():
        if len(args) == 2 or not args:  # the input by keyword too, behind which nothing is positional
            named = dict(zip(("with_point", "with_label"), args, strict=False)) | kwargs
            _same(model(x=x, **named), theirs)
            _same(model(**named, x=x), theirs)
            assert len(calls) == 2 * blocks


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_are_none(case):
    """What PyTorch says of them it says of ours."""
    model, plain, _ = accelerated_pair(flags.TwoBranches, precision="ieee")
    said = []
    for each in (model, plain):
        with pytest.raises(TypeError) as refused:
            REFUSED[case](each, _large())
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_what_a_forward_refuses_by_keyword():
    for each in accelerated_pair(flags.TwoBranches)[:2]:
        with pytest.raises(ValueError, match=r"\(2, 2, 8, 4, 7\) must be divisible by \[4, 4, 4\]"):
            each(x=_large()[..., :7], with_label=False)


def test_a_model_that_calls_it(keeping_kernels, calls):
    model, plain, report = accelerated_pair(flags.Calling, precision="ieee")
    assert len(report.replaced) == 4, str(report)
    for arguments, blocks in (((), 2), ((1, None), 2), ((None, 1), 2), ((1, 1), 4)):
        del calls[:]
        _same(model(_large(), *arguments), plain(_large(), *arguments))
        assert len(calls) == blocks


def test_lists_are_each_calls_own():
    model, _, _ = accelerated_pair(flags.TwoBranches, precision="ieee")
    first, second = (model(_large(), False)[0] for _ in range(2))
    assert first == second == [] and first is not second


def test_tensors_in_any_order(calls):
    model, plain, report = accelerated_pair(flags.Two)
    assert report.replaced
    x = _volume()
    other = _other(x)
    given = [
        ((x, other), {}),
        ((x,), {"other": other}),
        ((), {"other": other, "x": x}),
        ((x, other, True), {}),
        ((), {"negate": True, "other": other, "x": x}),
        ((x,), {"negate": False, "other": other}),
    ]
    for at, (args, kwargs) in enumerate(given):
        assert torch.allclose(model(*args, **kwargs), plain(*args, **kwargs), atol=1e-4)
        assert len(calls) == at + 1
    assert torch.allclose(model(x, other=1), plain(x, 1), atol=1e-4) and len(calls) == len(given)


@pytest.mark.parametrize(("given", "same"), CONSTANTS, ids=repr)
def test_constants_are_compared_by_type_and_value(given, same, calls):
    model, plain, report = accelerated_pair(flags.Numbers)
    assert report.replaced
    _same(model(_volume(), **given), plain(_volume(), **given))
    assert len(calls) == same


def test_flags_without_a_trace_are_the_modules_own(calls):
    model, plain, report = accelerated_pair(flags.OneTraced)
    assert report.replaced and "called with" not in str(report)
    x = _volume().abs()
    for args, blocks in (((), 1), ((False,), 1), ((True,), 0)):
        for sign in (1, -1):
            del calls[:]
            _same(model(sign * x, *args), plain(sign * x, *args))
            assert len(calls) == blocks
    for each, checked in itertools.product((model, plain), (True, False)):
        with pytest.raises(ValueError, match="strict"):
            each(x, checked, strict=True)


def test_defaults_without_a_trace_are_a_reason():
    _, _, report = accelerated_pair(flags.OnlyDefaultUntraced)
    assert not report.replaced and "torch.fx cannot trace its forward" in str(report)


def test_a_block_that_a_flag_makes(calls):
    model, plain, report = accelerated_pair(flags.Elsewhere)
    (finding,) = report.findings
    assert finding.replaced and finding.container == ""
    assert finding.evaluation == finding.training == "conv + group norm (2) + relu, called with refined=True"
    for args, blocks in (((), 0), ((False,), 0), ((True,), 1)):
        del calls[:]
        _same(model(_volume(), *args), plain(_volume(), *args))
        assert len(calls) == blocks
    report.restore()
    assert type(model) is flags.Elsewhere and model.__dict__.keys() == plain.__dict__.keys()


def test_what_keeps_a_block_from_being_found_is_of_the_defaults():
    model = flags.Elsewhere()
    model.after = nn.Tanh()
    (finding,) = upconv3d.accelerate(model).findings
    assert not finding.replaced and finding.evaluation == "cat follows"


CHANGES = {
    "a number": lambda model: setattr(model.after, "gain", 3.0),
    "a hook": lambda model: model.after.register_forward_hook(lambda module, args, y: y + 1),
    "a class": lambda model: setattr(model, "after", nn.Tanh()),
    "a second name": lambda model: setattr(model, "again", nn.Tanh()),
}


@pytest.mark.parametrize("make", [flags.Elsewhere, flags.Turned])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_followed_with_every_flag(change, make, calls):
    """Whichever flag it is of, all calls run the module's own forward."""
    model, plain, _ = accelerated_pair(make)
    concerned = change != "a second name" or make is flags.Turned
    for each in (model, plain):
        CHANGES[change](each)
    for args in ((), (True,)):
        _same(model(_volume(), *args), plain(_volume(), *args))
    assert len(calls) == (not concerned)


def test_norms_of_all_flags_stay(calls):
    """By themselves would be those that are in no block, whatever the flags."""
    model, plain, report = accelerated_pair(flags.Either, norms=True)
    assert report.replaced and report.norms == ("third",)
    assert report.findings[0].evaluation == "conv + group norm (2) + relu"
    for swapped in (False, True):
        _same(model(_volume(), swapped), plain(_volume(), swapped))
    assert len(calls) == 2


def test_more_flags_than_there_are_traces_for(calls):
    model, plain, report = accelerated_pair(flags.Many)
    assert report.replaced
    for values in itertools.product((False, True), repeat=4):
        del calls[:]
        _same(model(_volume(), *values), plain(_volume(), *values))
        assert len(calls) == (values == (False, False, True, False))


def test_copies_have_all_traces(keeping_kernels, calls):
    model, plain, _ = accelerated_pair(flags.TwoBranches, precision="ieee")
    assert list(model.state_dict()) == list(plain.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for point, label in itertools.product((True, False), repeat=2):
            del calls[:]
            _same(copied(_large(), point, with_label=label), plain(_large(), point, label))
            assert len(calls) == 2 * (point + label)
        upconv3d.restore(copied)
        assert type(copied) is flags.TwoBranches


def test_idle_calls_by_keyword_cost_no_guards(entered):
    """As without keywords: on the CPU no block that adds a skip runs where gradients are recorded."""
    model, plain, _ = accelerated_pair(flags.TwoBranches)
    for each in (model, plain):
        each.requires_grad_(False)
    x = _large()
    _same(model(x=x.clone().requires_grad_(), with_label=False), plain(x, with_label=False))
    assert not entered
    _same(model(x=x, with_label=False), plain(x, with_label=False))
    assert len(entered) == 1


def test_hooks_on_all_modules_see_them(calls):
    model, plain, _ = accelerated_pair(flags.Two)
    x, seen = _volume(), []
    expected = plain(x, _other(x), True)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        _same(model(x, other=_other(x), negate=True), expected)
    finally:
        handle.remove()
    assert nn.GroupNorm in seen and not calls


@pytest.mark.parametrize("make", [flags.TwoBranches, flags.Calling])
def test_compiled(make):
    torch._dynamo.reset()
    model, plain, _ = accelerated_pair(make)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if make is flags.Calling:
        given = [((), {}), ((None, torch.ones(1)), {})]
    else:
        given = [CALLS[call][:2] for call in ("nothing", "keyword", "mixed", "neither", "1")]
    for args, kwargs in given:
        torch.testing.assert_close(
            compiled(_large(), *args, **kwargs), plain(_large(), *args, **kwargs), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_with_constants(dynamic):
    """Of those Dynamo takes numbers for symbols, once they vary."""
    torch._dynamo.reset()
    model, plain, _ = accelerated_pair(flags.Numbers)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for given in ({"scale": 2.0}, {"scale": 3.0, "count": 1}, {"scale": 2}, {"zero": float("0")}):
        _same(compiled(_volume(), **given), plain(_volume(), **given))


def test_in_other_programs():
    model, plain, _ = accelerated_pair(flags.Two)
    x = _volume()
    other = _other(x)
    expected = plain(x, other, negate=True)
    _same(torch.jit.script(model)(x, other, negate=True), expected)
    program = torch.export.export(model, (x,), {"other": other, "negate": True}, strict=False)
    _same(program.module()(x, other=other, negate=True), expected)
    traced = torch.jit.trace(model, example_kwarg_inputs={"x": x, "other": other})
    _same(traced(x=x, other=other), -expected)
    graph = torch.fx.symbolic_trace(model, concrete_args={"negate": True})
    _same(graph(x, other, True), expected)
