# SPDX-License-Identifier: Apache-2.0
"""Autocast's casts of recorded calls: gradients of what one operator casts, and what is kept for them.

The measure is what `one_by_one` makes of the same call: every parameter's .to(), recorded. On the CPU the
kernels are stand-ins (the fixture `kernels`), and the operator is PyTorch's casts behind the same dispatch.
"""

import contextlib
import gc
import weakref

import pytest
import torch
from recorded_casts import (
    ALONE,
    CASES,
    LOW,
    check_close,
    check_same,
    check_second_derivatives,
    exchanged,
    forward,
    gradients_of,
    loss_of,
    make,
    make_module,
    of_cases,
    one_by_one,
)
from torch import nn


@of_cases([*CASES, ALONE])
def test_one_operator(kernels, casts, case):
    """With kernels that keep nothing too, whatever runs in their place."""
    call = make(case).leaves()
    results, found = gradients_of(call)
    (given,) = casts
    assert given[0].dtype is LOW and {t.dtype for t in given[1:] if t is not None} == {torch.float32}
    with one_by_one():
        expected, right = gradients_of(call)
    assert len(casts) == 1
    check_same(results, expected)
    check_same(found, right)
    for gradient, leaf in zip(found, call.tensors.values(), strict=True):
        assert gradient.dtype is leaf.dtype


def test_no_casts_are_recorded(keeping_kernels, casts):
    call = make("prelu").leaves()
    (y,) = forward(call)
    assert type(y.grad_fn).__name__ == "ConvTranspose3dNormActBackward"
    of_input, *of_parameters = [node for node, _ in y.grad_fn.next_functions if node is not None]
    assert "ToCopy" in of_input.name() and len(of_parameters) == 5
    assert all("AccumulateGrad" in node.name() for node in of_parameters)


def test_values_of_the_other_sign(keeping_kernels, casts):
    """Kernels would read a view that negates as it lies."""
    call = make("prelu").leaves()
    call = exchanged(call, bias=torch._neg_view(call.tensors["bias"].detach()).requires_grad_())
    results, found = gradients_of(call)
    assert not casts and call.tensors["bias"].is_neg()
    plain = exchanged(call, bias=call.tensors["bias"].detach().resolve_neg().requires_grad_())
    expected, right = gradients_of(plain)
    check_same(results, expected)
    check_same(found, right)


@of_cases([*CASES, ALONE])
def test_gradients_are_cast_together(keeping_kernels, casts, case, monkeypatch):
    batches, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: batches.append(len(of)) or copy(to, of))
    call = make(case).leaves()
    results = forward(call)
    made = []
    results[0].grad_fn.register_hook(lambda gradients, _: made.extend(gradients))
    torch.autograd.grad(loss_of(results), list(call.tensors.values()))
    parameters = [name for name in call.tensors if name not in ("input", "skip")]
    assert batches == [len(parameters)]
    if len(made) > 1:  # else the hook is on the cast of a result
        assert [g.dtype for g in made if g is not None].count(torch.float32) == len(parameters)


@pytest.mark.parametrize("times", [2, 3])
@of_cases([*CASES, ALONE])
def test_higher_derivatives(keeping_kernels, casts, case, times):
    """Where an optimizer stepped between forward and backward, too. The first ones bit by bit."""
    call = make(case).leaves()
    leaves = list(call.tensors.values())
    found = []
    for way in (contextlib.nullcontext, one_by_one):
        values = [leaf.detach().clone() for leaf in leaves]
        with way():
            results = forward(call)
        with torch.no_grad():
            for leaf in leaves[1:]:
                if leaf.dtype is torch.float32:
                    leaf.mul_(1.5)
        gradients, every = loss_of(results), []
        for _ in range(times):
            gradients = torch.autograd.grad(gradients, leaves, create_graph=True, allow_unused=True)
            every += gradients
            reached = [g for g in gradients if g is not None and g.requires_grad]
            gradients = sum((g * torch.linspace(-1, 1, g.numel()).view(g.shape)).sum() for g in reached)
        found.append(every)
        with torch.no_grad():
            for leaf, value in zip(leaves, values, strict=True):
                leaf.copy_(value)
    assert len(casts) == 1
    assert any(g is not None and g.any() for g in found[0][-len(leaves) :])
    check_same(*(every[: len(leaves)] for every in found))
    check_close(*found)


@of_cases(["silu", "prelu", ALONE])
def test_second_derivatives_like_pytorchs(keeping_kernels, casts, case):
    check_second_derivatives(make(case).leaves())
    assert len(casts) == 1


@of_cases(["prelu", ALONE])
def test_a_step_between(keeping_kernels, casts, case):
    """Neither an error nor other gradients: what the forward read is kept."""
    call = make(case).leaves()
    parameters = list(call.tensors.values())[1:]
    for module in (contextlib.nullcontext, one_by_one):
        with module():
            results = forward(call)
        expected = torch.autograd.grad(loss_of(results), parameters, retain_graph=True)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        loss_of(forward(call)).backward()
        optimizer.step()
        check_same(torch.autograd.grad(loss_of(results), parameters), expected)


@of_cases(["prelu", ALONE])
def test_parameters_without_gradients(keeping_kernels, casts, case):
    for name in make(case).tensors:
        for left in (True, False):  # all but it, or it alone
            call = make(case).leaves()
            for other, tensor in call.tensors.items():
                tensor.requires_grad_((other != name) is left)
            found = gradients_of(call, create_graph=True)
            with one_by_one():
                expected = gradients_of(call, create_graph=True)
            for ours, theirs in zip(found, expected, strict=True):
                check_same(ours, theirs)


@pytest.mark.parametrize("before", [True, False])
@of_cases(["silu", ALONE])
def test_toggled_between(keeping_kernels, casts, case, before):
    """Frozen, or no longer so, between forward and backward."""
    call = make(case).leaves()
    leaves, weight = list(call.tensors.values()), call.tensors["weight"]
    others = [leaf for leaf in leaves if leaf is not weight]
    found = []
    for way in (contextlib.nullcontext, one_by_one):
        weight.requires_grad_(before)
        with way():
            results = forward(call)
        weight.requires_grad_(not before)
        first = torch.autograd.grad(loss_of(results), others, create_graph=True)
        loss = sum(g.sin().sum() for g in first)
        second = torch.autograd.grad(loss, others, allow_unused=True, retain_graph=True)
        if not before:  # it was a constant, and is none of what these depend on
            assert torch.autograd.grad(loss, weight, allow_unused=True) == (None,)
        found.append([*first, *second])
    check_same(*(every[: len(others)] for every in found))
    check_close(*found)


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_computed_weight(keeping_kernels, casts):
    module, x = make_module(), torch.randn(2, 4, 3, 3, 3)
    nn.utils.parametrize.register_parametrization(module.conv_transpose, "weight", _Doubled())
    with torch.autocast("cpu", LOW):
        y = module(x)
    assert casts == [] and "ToCopy" in str([node for node, _ in y.grad_fn.next_functions])
    gradients = torch.autograd.grad(y.float().sin().sum(), list(module.parameters()), create_graph=True)
    assert all(g.dtype is torch.float32 for g in gradients)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
@of_cases(["silu", "returned", ALONE])
def test_no_cycle(keeping_kernels, casts, case, create_graph, computed):
    """Result and weight go with their last reference, without the collector."""
    call = make(case).leaves()
    weight = call.tensors["weight"]
    if computed:
        weight = 2 * weight
        call = exchanged(call, weight=weight)
    gc.collect()
    gc.disable()
    try:
        results = forward(call)
        assert len(casts) == (not computed)
        casts.clear()
        first = torch.autograd.grad(loss_of(results), call.tensors["bias"], create_graph=create_graph)
        watched = [weakref.ref(tensor) for tensor in (*results, *first, results[0].grad_fn)]
        del results, first
        assert [ref() for ref in watched] == [None] * len(watched)
        watched = weakref.ref(weight)
        del call, weight
        assert watched() is None
    finally:
        gc.enable()


def test_only_leaves_with_gradients_are_kept(keeping_kernels, casts):
    """What needs none may become part of the graph that it would keep alive."""
    call = make("silu").leaves()
    bias = call.tensors["bias"].requires_grad_(False)
    (y,) = forward(call)
    assert [leaf is None for leaf in y.grad_fn.leaves] == [False, True, False, False, True]
    assert not any(saved is bias for saved in y.grad_fn.saved_tensors)
    alive = weakref.ref(bias)
    del bias, call.tensors["bias"], casts[:]
    assert alive() is None


@of_cases(["silu", "returned", ALONE])
def test_backward_twice(keeping_kernels, casts, case):
    call = make(case).leaves()
    leaves = list(call.tensors.values())
    loss = loss_of(forward(call))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    check_same(torch.autograd.grad(loss, leaves), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)
