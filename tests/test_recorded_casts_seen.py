# SPDX-License-Identifier: Apache-2.0
"""Casts of recorded calls by one operator, as others see them: modes, hooks, checkpoints, errors, a GPU.

See test_recorded_casts.py.
"""

import contextlib
import copy

import pytest
import torch
from modes import OperatorNames
from recorded_casts import (
    ALONE,
    CASES,
    LOW,
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
from torch.utils.checkpoint import checkpoint


def _message(call, way=contextlib.nullcontext):
    try:
        with way():
            forward(call)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", ["meta", "sizes", "float64"])
@of_cases(["silu", ALONE])
def test_errors(keeping_kernels, casts, case, wrong):
    call = make(case).leaves()
    change = {"meta": lambda t: t.to("meta"), "sizes": lambda t: t[:-1], "float64": torch.Tensor.double}[
        wrong
    ]
    for name in ("weight", "bias", "norm_bias"):
        changed = exchanged(call, **{name: change(call.tensors[name].detach()).requires_grad_()})
        if wrong == "float64":  # which autocast leaves as it is on no device
            gradients_of(changed)
            assert casts == []
        else:
            assert _message(changed) == _message(changed, one_by_one)


@of_cases(["prelu", "returned", ALONE])
def test_modes_see_pytorchs_casts(kernels, casts, case):
    call = make(case).leaves()
    with OperatorNames() as ours:
        results = gradients_of(call)
    with one_by_one(), OperatorNames() as theirs:
        expected = gradients_of(call)
    assert casts == [] and ours.names == theirs.names
    for a, b in zip(results, expected, strict=True):
        check_same(a, b)


class _Subclass(torch.Tensor):
    """A tensor whose operators are looked at."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("name", ["input", "weight", "norm_bias"])
@of_cases(["prelu", ALONE])
def test_subclasses(keeping_kernels, casts, case, name):
    call = make(case).leaves()
    tensor = call.tensors[name].detach().as_subclass(_Subclass).requires_grad_()
    gradients_of(exchanged(call, **{name: tensor}))
    assert casts == []


def test_profiles_show_what_runs(keeping_kernels, casts):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(make("silu").leaves())
    assert "upconv3d::_cast_parameters" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_and_graphs(keeping_kernels, casts):
    module, x = make_module(), torch.randn(2, 4, 3, 3, 3)
    with torch.autocast("cpu", LOW):
        traced = torch.jit.trace(module, (x,), check_trace=False)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        assert casts == []
        y = module(x)
        assert len(casts) == 1
        for other in (compiled, traced(x)):
            torch.testing.assert_close(other.float(), y.float(), rtol=0.05, atol=0.05)
    compiled.float().sum().backward()


@pytest.mark.parametrize("create_graph", [False, True])
@of_cases(["silu", "returned", ALONE])
def test_hooks_of_saved_tensors(keeping_kernels, casts, case, create_graph):
    """They are shown what autograd's casts would save, and what they return is read."""
    call, packed = make(case).leaves(), []

    def pack(tensor):
        packed.append((tensor.dtype, tensor.shape, tensor.stride()))
        return tensor.detach().clone()

    found = []
    for way in (contextlib.nullcontext, one_by_one):
        packed.append(way)
        with way(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append(gradients_of(call, create_graph=create_graph))
    at = packed.index(one_by_one)
    assert packed[1:at] == packed[at + 1 :]
    check_same(found[0][1], found[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
@of_cases(["silu", ALONE])
def test_checkpoints(keeping_kernels, casts, case, reentrant):
    call = make(case).leaves()
    leaves, found = list(call.tensors.values()), []
    for way in (contextlib.nullcontext, one_by_one):
        with way(), torch.autocast("cpu", LOW):
            x = call.tensors["input"]
            y = checkpoint(lambda x: exchanged(call, input=x).ours(), x, use_reentrant=reentrant)
            plain = call.ours()
            y.float().sin().sum().backward()
        assert torch.equal(y, plain)
        found.append([y, *(leaf.grad for leaf in leaves)])
        plain = torch.autograd.grad(plain.float().sin().sum(), leaves)
        check_same(found[-1][1:], plain)
        for leaf in leaves:
            leaf.grad = None
    check_same(*found)


@pytest.mark.parametrize("create_graph", [False, True])
@of_cases(["prelu", "returned", ALONE])
def test_batches_of_gradients(keeping_kernels, casts, case, create_graph):
    call = make(case).leaves()
    weight, found = call.tensors["weight"], []
    seeds = torch.randn(3, *forward(call)[0].shape).to(LOW)
    for way in (contextlib.nullcontext, one_by_one):
        with way():
            y = forward(call)[0]
        options = {"retain_graph": True, "create_graph": create_graph}
        found.append(torch.autograd.grad(y, weight, seeds, is_grads_batched=True, **options))
        of = lambda seed, y=y, o=options: torch.autograd.grad(y, weight, seed, **o)  # noqa: E731
        found[-1] += torch.vmap(of)(seeds)
    check_same(*found)
    assert found[0][0].dtype is torch.float32


def test_hooks_of_parameters(keeping_kernels, casts):
    """They get gradients of the parameter's dtype, and a parameter that is used twice their sum."""
    call, seen, found = make("prelu").leaves(), [], []
    gamma = call.tensors["norm_weight"]
    call = exchanged(call, norm_bias=gamma)
    for way in (contextlib.nullcontext, one_by_one):
        with way():
            results = [*forward(call), *forward(call)]
        handle = gamma.register_hook(lambda g: seen.append(g.dtype) or 2 * g)
        loss_of(results).backward()
        handle.remove()
        found.append([gamma.grad])
        gamma.grad = None
    assert set(seen) == {torch.float32}
    check_same(*found)


def test_copies_of_models(keeping_kernels, casts):
    module, x = make_module(), torch.randn(2, 4, 3, 3, 3)
    gradients = []
    with torch.autocast("cpu", LOW):
        module(x).float().sum().backward()
        for one in (module, copy.deepcopy(module)):
            one.zero_grad()
            one(x).float().sin().sum().backward()
            gradients.append([parameter.grad for parameter in one.parameters()])
    check_same(*gradients)


def test_parameters_that_are_low_already(keeping_kernels, casts):
    call = make("prelu").leaves()
    call = exchanged(call, norm_weight=call.tensors["norm_weight"].detach().to(LOW).requires_grad_())
    results, found = gradients_of(call, create_graph=True)
    assert results[0].grad_fn.leaves[2] is None
    with one_by_one():
        expected, right = gradients_of(call, create_graph=True)
    check_same((*results, *found), (*expected, *right))
    assert len(casts) == 1 and casts[0][3].dtype is LOW


@pytest.mark.parametrize(
    "why", ["float16", "permuted", "no autocast", "no gradients", "all low", "grad_dtype"]
)
@of_cases(["prelu", ALONE])
def test_left_as_it_is(keeping_kernels, casts, case, why):
    call = make(case).leaves()
    low = torch.float16 if why == "float16" else LOW
    tensors = dict(call.tensors)
    if why == "permuted":
        weight = tensors["weight"].detach()
        tensors["weight"] = weight.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    if why == "all low":
        tensors = {name: t.detach().to(LOW).requires_grad_() for name, t in tensors.items()}
    if why == "grad_dtype":
        tensors["bias"].grad_dtype = None
    asked = torch.set_grad_enabled(why != "no gradients")
    with asked, torch.autocast("cpu", low, enabled=why != "no autocast"):
        exchanged(call, **tensors).ours()
    assert casts == []


def test_tensors_of_inference_mode(keeping_kernels, casts):
    """A parameter of which nothing but its cast is saved."""
    call = make("silu").leaves()
    with torch.inference_mode():
        call.tensors["norm_weight"] = call.tensors["norm_weight"].detach().clone()
    found = gradients_of(call)
    with one_by_one():
        expected = gradients_of(call)
    assert len(casts) == 1
    for a, b in zip(found, expected, strict=True):
        check_same(a, b)


# On a GPU: the operator itself.


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@of_cases([*CASES, ALONE])
def test_same_bits_on_a_gpu(cuda, casts, case, layout):
    call = make(case, cuda)
    if layout == "NDHWC":
        volumes = [name for name in ("input", "weight", "skip") if name in call.tensors]
        lies = {"memory_format": torch.channels_last_3d}
        call = exchanged(call, **{name: call.tensors[name].contiguous(**lies) for name in volumes})
    call = call.leaves()
    found = gradients_of(call)
    assert len(casts) == 1
    first = gradients_of(call, create_graph=True)
    with one_by_one():
        expected = gradients_of(call)
        graph = gradients_of(call, create_graph=True)
    for a, b in zip((*found, *first), (*expected, *graph), strict=True):
        check_same(a, b)


@of_cases(["silu", "prelu", ALONE])
def test_second_derivatives_on_a_gpu(cuda, casts, case):
    check_second_derivatives(make(case, cuda).leaves())


@of_cases(["silu", ALONE])
def test_a_step_between_on_a_gpu(cuda, casts, case):
    call = make(case, cuda).leaves()
    parameters = list(call.tensors.values())[1:]
    results = forward(call)
    expected = torch.autograd.grad(loss_of(results), parameters, retain_graph=True)
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    check_same(torch.autograd.grad(loss_of(results), parameters), expected)


@pytest.mark.parametrize("name", ["weight", "bias", "norm_weight", "norm_bias"])
@of_cases(["silu", ALONE])
def test_other_devices(cuda, casts, case, name):
    call = make(case, cuda).leaves()
    changed = exchanged(call, **{name: call.tensors[name].detach().cpu().requires_grad_()})
    found = _message(changed)
    assert found == _message(changed, one_by_one)
    assert "on the device of input" in found and f"{name}.device=cpu" in found
    torch.cuda.synchronize()


def test_the_operator_refuses_other_devices(cuda):
    x, weight = torch.zeros(8, dtype=LOW, device=cuda), torch.ones(4, 4, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"weight.device=cpu. Pass weight.to\(input.device\)"):
        torch.ops.upconv3d._cast_parameters(x, weight, None, None, None, None)
    with pytest.raises(RuntimeError, match=r"activation_param\.device=cpu"):
        torch.ops.upconv3d._cast_parameters(x, weight.to(cuda), None, None, None, torch.ones(1))
    with pytest.raises(RuntimeError, match=r"cast to 16 bit; got input\.dtype=float64"):
        torch.ops.upconv3d._cast_parameters(x.double(), weight.to(cuda), None, None, None, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"], indirect=True)
def test_the_operators_results(device):
    vectors = torch.randn(3, 6, device=device).unbind()
    weight = torch.randn(4, 6, 3, 3, 3, device=device)
    given = (weight, vectors[0], None, vectors[1].to(LOW), vectors[2])
    found = torch.ops.upconv3d._cast_parameters(torch.zeros(1, dtype=LOW, device=device), *given)
    assert found[3] is given[3]
    check_same(found, [None if t is None else t.to(LOW) for t in given])
