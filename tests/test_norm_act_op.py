# SPDX-License-Identifier: Apache-2.0
"""The family's operator as PyTorch's compiler, transforms and autograd see it.

Stand-ins for the internal CUDA operators, the fixture `kernels`, let autograd's node, the numbers and the
casts around them run on the CPU too.
"""

from dataclasses import replace

import pytest
import torch
import upconv3d
from tails import COMBINATIONS, gradients, make_call, outputs
from torch._subclasses.fake_tensor import FakeTensorMode
from upconv3d import _tail_arguments, _tail_call, _tail_op

OP = torch.ops.upconv3d.conv_transpose3d_norm_act.default
BACKWARD = torch.ops.upconv3d.conv_transpose3d_norm_act_backward.default
CASES = {
    "silu": {"activation": "silu"},
    "prelu-skip": {"activation": "prelu", "order": "act_norm", "skip": True},
    "prelu": {"activation": "prelu"},
    "instance-conv": {"norm": "instance", "return_conv": True},
    "act-conv": {"order": "act_norm", "activation": "prelu", "return_conv": True, "n": None},
    "relu-conv": {"order": "act_norm", "return_conv": True},
    "no-norm": {"norm": None, "activation": "elu", "skip": True, "return_conv": True},
    "bare-relu": {"norm": None},
    "bare-relu-skip-conv": {"norm": None, "skip": True, "return_conv": True, "n": None},
    "bare-gelu": {"norm": None, "activation": "gelu"},
    "bare-prelu-conv": {"norm": None, "activation": "prelu", "return_conv": True},
    "skip-alone": {"norm": None, "activation": None, "skip": True},
    "nothing": {"norm": None, "activation": None, "return_conv": True},
    "unbatched": {"n": None, "activation": "gelu", "skip": True},
}


def _call(case, **options):
    return make_call(**({"dtype": torch.float32} | CASES[case] | options))


def _by_name(call):
    y, conv = OP(*call.operator_arguments())
    return (y, conv) if call.return_conv else y


def _check_like_eager(call, run, tolerance=1e-4):
    results, grads = gradients(call, run)
    expected, expected_grads = gradients(call, type(call).eager)
    torch.testing.assert_close(list(results), list(expected), rtol=tolerance, atol=tolerance)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("case", "layout"),
    [("silu", "NCDHW"), ("prelu-skip", "NDHWC"), ("instance-conv", "NCDHW"), ("unbatched", "NDHWC")],
)
def test_opcheck(device, case, layout):
    call = _call(case, device=device)
    call = call.channels_last("input", "weight", "skip") if layout == "NDHWC" else call
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OP, call.leaves().operator_arguments(), test_utils=tests, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("returned", ["y", "conv", "both"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_the_backward_operator(device, case, returned):
    call = _call(case, device=device)
    *arguments, _, precision = replace(call, return_conv=False).operator_arguments()
    grad = torch.randn_like(outputs(call.ours())[0])
    grads = (None if returned == "conv" else grad, None if returned == "y" else grad)
    mask = [tensor is not None for tensor in _tail_arguments.split(call.operator_arguments())[0]]
    for wanted in (mask, [mask[0]] + [False] * 6):
        torch.library.opcheck(
            BACKWARD, (*grads, *arguments, precision, wanted), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("case", CASES)
def test_operator_by_its_name(device, case):
    _check_like_eager(_call(case, device=device, dtype=torch.float64), _by_name, 1e-9)


@pytest.mark.parametrize(("order", "norm", "activation"), COMBINATIONS)
def test_gradients_of_the_operator(device, order, norm, activation):
    """Its backward is written out, where a call's by the function is PyTorch's own."""
    call = make_call(
        order=order, norm=norm, activation=activation, skip=True, return_conv=True, device=device
    )
    _check_like_eager(call, _by_name, 1e-8)


def test_double_backward_of_the_operator(device):
    call = make_call(n=1, c=2, k=4, extent=(2, 2, 2), activation="silu", skip=True, device=device).leaves()
    names = list(call.tensors)

    def function(*tensors):
        return _by_name(replace(call, tensors=dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradgradcheck(function, tuple(call.tensors.values()), fast_mode=True)


def test_gradient_of_the_convolution_alone(device):
    call = _call("instance-conv", device=device, dtype=torch.float64)
    for run in (_by_name, type(call).ours):
        leaves = call.leaves()
        wanted = [leaves.tensors[name] for name in ("weight", "norm_weight")]
        grad, none = torch.autograd.grad(run(leaves)[1].square().sum(), wanted, allow_unused=True)
        assert none is None
        leaves = call.leaves()
        (expected,) = torch.autograd.grad(leaves.eager()[1].square().sum(), leaves.tensors["weight"])
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors(device, case):
    call = _call(case, device=device)
    results = OP(*call.operator_arguments())
    with FakeTensorMode() as mode:
        fakes = OP(*call.map(mode.from_tensor).operator_arguments())
        from_function = outputs(call.map(mode.from_tensor).ours())
    for result, fake in zip(results, fakes, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)
    for result, fake in zip(outputs(call.ours()), from_function, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (result.shape, result.stride(), result.dtype)
    for result, meta in zip(
        outputs(call.ours()), outputs(call.map(lambda tensor: tensor.to("meta")).ours()), strict=True
    ):
        assert meta.is_meta and (meta.shape, meta.stride()) == (result.shape, result.stride())


def test_explain_says_what_runs():
    """On the CPU the plan is always PyTorch's operators; the rules are checked as a call's are."""
    call = make_call(activation="silu", skip=True)
    t = call.tensors
    plan = upconv3d.explain_norm_act(t["input"], t["weight"], t["bias"], **call.keywords())
    assert (
        plan.algorithm == "cpu_library" and plan.problem["activation"] == "silu" and plan.problem["has_skip"]
    )
    for wrong, exception in (({"num_groups": 4}, RuntimeError), ({"order": "norm"}, ValueError)):
        with pytest.raises(exception):
            upconv3d.explain_norm_act(t["input"], t["weight"], **(call.keywords() | wrong))


def test_operator_refuses_unknown_names():
    arguments = list(make_call().operator_arguments())
    for index, name in ((8, "order"), (13, "activation")):
        wrong = [*arguments[:index], "sideways", *arguments[index + 1 :]]
        with pytest.raises(ValueError, match=f"{name} must be one of .*; got {name}='sideways'"):
            OP(*wrong)


@pytest.mark.parametrize(
    ("case", "by_name", "dynamic"),
    [
        ("silu", False, False),
        ("prelu-skip", True, True),
        ("instance-conv", True, False),
    ],
)
def test_compile_without_graph_breaks(device, case, by_name, dynamic):
    torch._dynamo.reset()
    run = _by_name if by_name else type(make_call()).ours

    def function(call):
        return tuple(result * 2 for result in outputs(run(call)))

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, extent in ((2, (3, 2, 4)), (3, (4, 3, 5))):
        call = _call(case, n=n, extent=extent, device=device)
        results, grads = gradients(call, function)
        compiled_results, compiled_grads = gradients(call, compiled)
        torch.testing.assert_close(compiled_results, results, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(compiled_grads, grads, rtol=1e-3, atol=1e-3)


def test_compile_for_kernels(kernels):
    """torch.compile sees the operator by its name, autocast included, instead of autograd's node."""
    torch._dynamo.reset()
    call = _call("prelu-skip")
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(type(call).ours, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(call), call.eager(), rtol=1e-5, atol=1e-5)
    assert "upconv3d.conv_transpose3d_norm_act.default" in targets
    call.tensors["skip"] = call.tensors["skip"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(call), call.eager(), rtol=0.05, atol=0.05)


def test_compile_with_inductor_and_autocast(device):
    torch._dynamo.reset()
    call = _call("silu", device=device)
    compiled = torch.compile(type(call).ours, fullgraph=True)
    with torch.autocast(device.type, torch.bfloat16):
        expected, y = call.ours(), compiled(call)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


def test_torch_func(device):
    call = _call("silu", device=device, dtype=torch.float64)

    def of_input(x, run):
        return run(replace(call, tensors=call.tensors | {"input": x}))

    def ours(x):
        return of_input(x, type(call).ours)

    def eager(x):
        return of_input(x, type(call).eager)

    x, slices = call.tensors["input"], torch.stack([call.tensors["input"], call.tensors["input"] * 2])
    torch.testing.assert_close(torch.vmap(ours)(slices), torch.vmap(eager)(slices))
    torch.testing.assert_close(torch.func.jacrev(ours)(x), torch.func.jacrev(eager)(x))
    tangent = torch.ones_like(x)
    torch.testing.assert_close(
        torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(eager, (x,), (tangent,))
    )
    by_name = torch.vmap(lambda x: of_input(x, _by_name))(slices)
    torch.testing.assert_close(by_name, torch.vmap(eager)(slices))


def test_trace_and_fx(device):
    module = upconv3d.ConvTranspose3dNormAct(4, 6, 3, num_groups=2, activation="silu", device=device)
    x = torch.randn(2, 4, 3, 3, 3, device=device)
    traced = torch.jit.trace(module, (x,))
    torch.testing.assert_close(traced(x[:1] * 2), module(x[:1] * 2))

    def function(x, weight):
        return upconv3d.conv_transpose3d_norm_act(x, weight, num_groups=2) + 1

    graph = torch.fx.symbolic_trace(function)
    targets = [node.target for node in graph.graph.nodes]
    assert upconv3d.conv_transpose3d_norm_act in targets
    weight = module.conv_transpose.weight
    torch.testing.assert_close(graph(x, weight), function(x, weight))
    plain = weight.detach()
    # Proxies behind real tensors: weights of a network's own for a constant, a bias alone, slopes.
    for traced_function in (
        lambda weight: upconv3d.conv_transpose3d_relu_group_norm(x, weight, num_groups=2),
        lambda weight: upconv3d.conv_transpose3d_norm_act(x, weight, num_groups=2, activation="elu"),
        lambda weight: upconv3d.conv_transpose3d_norm_act(
            x, plain, weight[0, :, 0, 0, 0], num_groups=2, activation_param=None
        ),
    ):
        graph = torch.fx.symbolic_trace(traced_function)
        torch.testing.assert_close(graph(weight), traced_function(weight))


def test_export(device):
    module = upconv3d.ConvTranspose3dNormAct(4, 6, 3, num_groups=2, device=device, precision="ieee").eval()
    x = torch.randn(2, 4, 3, 3, 3, device=device)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


@pytest.mark.parametrize("case", [case for case in CASES if case != "nothing"])
def test_node(kernels, case):
    call = _call(case)
    # A backward of ours begins with the convolution, its sum with a skip or ReLU's result, not in float64.
    apart = call.return_conv or "skip" in call.tensors or call.norm is None
    call = call if apart else _call(case, dtype=torch.float64)
    _check_like_eager(call, type(call).ours, 1e-4 if apart else 1e-9)
    keeps = kernels.keeps or call.norm is None
    expected = ["for_training", "forward", "backward"] if keeps else ["for_training"]
    if call.return_conv or (call.norm is None and case != "bare-gelu"):
        expected = ["forward", "backward"]
    assert kernels.calls == expected
    # What was returned is the caller's, unless relu alone reads it, of which the result is kept, or a sum is.
    is_returned = call.return_conv and case not in ("relu-conv", "no-norm")
    is_result = case in ("bare-relu", "bare-relu-skip-conv", "skip-alone")
    assert kernels.consumed == ([not (is_returned or is_result)] if "backward" in kernels.calls else [])


def test_skip_of_inference_mode(kernels):
    """Autograd cannot keep it, and PyTorch's addition need not."""
    call = _call("prelu-skip").leaves()
    with torch.inference_mode():
        call.tensors["skip"] = call.tensors["skip"].detach().clone()
    for run in (type(call).ours, type(call).eager):
        run(call).sum().backward()
    assert kernels.calls == [] and call.tensors["weight"].grad is not None
    with torch.no_grad():
        call.ours()
    assert kernels.calls == ["forward"]


def test_backward_operator_without_samples(kernels):
    call = _call("instance-conv", n=0, norm="group", dtype=torch.float32)
    y, conv = call.eager()
    *arguments, _, precision = replace(call, return_conv=False).operator_arguments()
    mask = [tensor is not None for tensor in _tail_arguments.split(call.operator_arguments())[0]]
    gradients = BACKWARD(y, conv, *arguments, precision, mask, conv, True)
    assert kernels.calls == []
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("batched_grad", ["y", "conv", "both"])
def test_node_under_vmap(kernels, batched_grad):
    """torch.vmap of autograd.grad, where either result's gradient is batched, or both are."""
    call = _call("instance-conv", dtype=torch.float32).leaves()
    results, weight = call.ours(), call.tensors["weight"]
    batches = [torch.randn(3, *r.shape) for r in results]
    dims = [0 if batched_grad in (name, "both") else None for name in ("y", "conv")]

    def of(*grads):
        return torch.autograd.grad(results, weight, grads, retain_graph=True)[0]

    grads = [b if dim == 0 else b[0] for b, dim in zip(batches, dims, strict=True)]
    found = torch.vmap(of, in_dims=tuple(dims))(*grads)
    for index in range(3):
        one = [b[index] if dim == 0 else b[0] for b, dim in zip(batches, dims, strict=True)]
        torch.testing.assert_close(found[index], of(*one), rtol=1e-3, atol=1e-3)


def test_node_keeps_what_it_may_need_again(kernels):
    call = _call("prelu", dtype=torch.float64).leaves()
    tensors = list(call.tensors.values())
    y = call.ours()
    first = torch.autograd.grad(y.square().sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), tensors)
    torch.testing.assert_close(first, second)
    assert kernels.consumed == ([False, True] if kernels.keeps else [])


def test_node_double_backward(kernels):
    call = make_call(n=1, c=2, k=4, extent=(2, 2, 2), activation="silu").leaves()
    names = list(call.tensors)

    def function(*tensors):
        return replace(call, tensors=dict(zip(names, tensors, strict=True))).ours()

    tensors = tuple(call.tensors.values())
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


def test_node_with_batched_gradients(kernels):
    call = _call("silu", dtype=torch.float64).leaves()
    y = call.ours()
    grads = torch.randn(3, *y.shape, dtype=torch.float64)
    weight = call.tensors["weight"]
    together = torch.autograd.grad(y, weight, grads, is_grads_batched=True, retain_graph=True)[0]
    apart = [torch.autograd.grad(y, weight, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(together, torch.stack(apart))


def test_node_only_wanted_gradients(kernels):
    call = _call("prelu", dtype=torch.float64)
    for name in call.tensors:
        leaves = replace(call, tensors={n: t.detach().clone() for n, t in call.tensors.items()})
        leaves.tensors[name].requires_grad_()
        (grad,) = torch.autograd.grad(leaves.ours().square().sum(), leaves.tensors[name])
        (expected,) = torch.autograd.grad(leaves.eager().square().sum(), leaves.tensors[name])
        torch.testing.assert_close(grad, expected, msg=name)


def test_kernels_without_gradients(kernels):
    call = _call("prelu-skip", dtype=torch.float64)
    torch.testing.assert_close(call.ours(), call.eager())
    assert kernels.calls == ["forward"]
    with torch.no_grad():
        torch.testing.assert_close(call.leaves().ours(), call.eager())
    assert kernels.calls == ["forward"] * 2
    torch.testing.assert_close(_by_name(call), call.eager())
    assert kernels.calls == ["forward"] * 3
    _check_like_eager(call, _by_name, 1e-9)
    assert kernels.calls[3:] == ["forward"]
    kernels.calls.clear()
    _check_like_eager(call.to(torch.float32), _by_name)
    # Nothing tells how much to keep.
    assert kernels.calls == ["forward", "for_training"] + ["forward", "backward"] * kernels.keeps


def test_kernels_under_autocast(kernels):
    call = _call("prelu")
    with torch.autocast("cpu", torch.bfloat16):
        _check_like_eager(call, type(call).ours, 0.1)
    assert kernels.calls[0] == "for_training"
    # A float32 skip promotes what it is added to, which the kernels do not do.
    kernels.calls.clear()
    call = _call("prelu-skip")
    with torch.autocast("cpu", torch.bfloat16):
        call.ours()
    assert kernels.calls == []


def _dtypes(tensors):
    return {tensor.dtype for tensor in tensors if tensor is not None}


@pytest.mark.parametrize("recorded", [False, True])
def test_autocast_leaves_parameters_to_the_operator(kernels, recorded):
    call = _call("prelu")
    call = call.leaves() if recorded else call
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(recorded):
        torch.testing.assert_close(call.ours(), call.eager(), rtol=0.05, atol=0.05)
        if kernels.keeps or not recorded:
            input, *others = kernels.given
            # What is recorded is cast before, for a backward that reads what was cast.
            expected = torch.bfloat16 if recorded else torch.float32
            assert input.dtype is torch.bfloat16 and _dtypes(others) == {expected}
        if recorded:
            _check_like_eager(call, type(call).ours, 0.1)
            assert kernels.calls.count("backward") == kernels.keeps
        # Who watches sees PyTorch's casts.
        kernels.given = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            call.ours()
        assert kernels.given is None or _dtypes(kernels.given) == {torch.bfloat16}


def test_autocast_of_a_parameter_that_is_low_already(kernels):
    call = _call("prelu")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = call.eager()
        call.tensors["norm_weight"] = call.tensors["norm_weight"].bfloat16()
        torch.testing.assert_close(call.ours(), expected, rtol=0.05, atol=0.05)
        assert _dtypes(kernels.given[1:]) == {torch.float32, torch.bfloat16}
        call.tensors["norm_weight"] = call.tensors["norm_weight"].half()  # the operator casts float32 alone
        torch.testing.assert_close(call.ours(), expected, rtol=0.05, atol=0.05)
    assert _dtypes(kernels.given) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["group", "instance"])
def test_autocast_of_volumes(kernels, monkeypatch, norm, dtype):
    """float32 in the place of casts, unless it would cast both the input and the result."""
    asked, ran = [], []

    def in_float32(*arguments):
        asked.append(arguments)
        return True

    def forward(*arguments):
        ran.append(arguments[0].dtype)
        return type(kernels).forward(kernels, *arguments)

    monkeypatch.setattr(_tail_call, "computes_in_float32", in_float32)
    monkeypatch.setattr(_tail_call, "numbered_tail", forward)
    tensors = [torch.randn(1, 4, 3, 3, 3, dtype=dtype), torch.randn(4, 4, 2, 2, 2)]
    num_groups = {"num_groups": 2} if norm == "group" else {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = upconv3d.conv_transpose3d_norm_act(*tensors, norm=norm, activation="silu", **num_groups)
    # On the CPU, whose group_norm returns what it gets, both norms' results are 16 bit.
    assert y.dtype is torch.bfloat16
    assert ran == [dtype] and len(asked) == (dtype is torch.float32)


def test_kernels_refuse_a_skip_of_other_sizes(kernels):
    call = _call("prelu-skip")
    call.tensors["skip"] = call.tensors["skip"][..., :1]
    with pytest.raises(RuntimeError, match="skip must have the sizes"):
        call.ours()


def test_numbers_of_settings():
    settings = ((1, 1, 1), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1), 2, 1e-5, "ieee", "norm_act", "silu", 0.0, True)
    assert _tail_op.tail_number(settings) == _tail_op.tail_number(settings) is not None
    assert _tail_op._settings[_tail_op.tail_number(settings)] == settings


def test_autocast_where_too_many_settings_are_remembered(kernels, monkeypatch):
    """The public operator, which casts nothing, gets what is cast."""
    monkeypatch.setattr(_tail_op, "_remember", lambda key: None)
    call = _call("prelu")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(call.ours(), call.eager(), rtol=0.05, atol=0.05)
    assert kernels.given is None


def test_parameters_changed_before_the_backward(kernels):
    """Our backward under autocast reads what the forward read."""
    if not kernels.keeps:
        pytest.skip("PyTorch's norm asks for the vectors that it was given")
    call = _call("prelu").leaves()
    with torch.autocast("cpu", torch.bfloat16):
        y = call.ours()
    leaves = list(call.tensors.values())
    expected = torch.autograd.grad(y.float().square().sum(), leaves, retain_graph=True)
    with torch.no_grad():
        for leaf in leaves[1:]:
            leaf.add_(1)
    found = torch.autograd.grad(y.float().square().sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_results_are_tensors_of_their_own(device):
    y, conv = OP(*_call("nothing", device=device).operator_arguments())
    assert torch.equal(y, conv) and y.data_ptr() != conv.data_ptr()
