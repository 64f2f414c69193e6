# SPDX-License-Identifier: Apache-2.0
"""Training where the convolution is returned, or has a skip added to it: the backward reads what was
returned, and leaves it alone, or a sum of its own."""

from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import relative_error
from tails import Call, gradients, make_call, outputs
from test_select_plan import facts, plan_of

SIZES = {
    "strided": {"c": 64, "k": 32, "extent": (5, 4, 6), "kernel": 3, "stride": 2},
    "library": {"c": 4, "k": 6, "extent": (5, 6, 7)},
    "unbatched": {"n": None, "c": 32, "k": 16, "extent": (3, 4, 5)},
    "sm90": {"c": 64, "k": 64, "extent": (24, 24, 24), "kernel": 2, "stride": 2},  # by that plan
}
both_layouts = pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])


def returning(size="strided", layout="NCDHW", **options) -> Call:
    call = make_call(**SIZES[size], return_conv=True, **({"activation": "silu"} | options))
    return call.channels_last("input", "weight") if layout == "NDHWC" else call


def check_like_eager(call: Call, monkeypatch, which=(True, True)) -> None:
    """Gradients' errors against float64 at most twice eager's; `which` of y and conv have a gradient."""
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    which = which if call.return_conv else (True,)
    results = outputs(call.ours())
    seeds = [torch.randn(r.shape, device=r.device, dtype=torch.float64) for r in results]
    seeds = [seed for seed, wanted in zip(seeds, which, strict=True) if wanted]

    def chosen(run):
        return lambda leaves: tuple(
            r for r, wanted in zip(outputs(run(leaves)), which, strict=True) if wanted
        )

    (first, *_), ours = gradients(call, chosen(Call.ours), seeds)
    assert "NormAct" in type(first.grad_fn).__name__
    eager = gradients(call, chosen(Call.eager), seeds)[1]
    wide = gradients(call.to(torch.float64), chosen(Call.eager), seeds)[1]
    # Of a few thousand gates of a kink behind a norm some fall otherwise in 16 bit, maybe more than eager's.
    kink = call.order == "norm_act" and call.activation in ("relu", "prelu", "leaky_relu")
    of_16_bit = 2.0**-4 if kink and "skip" in call.tensors else 2.0**-5
    floor = of_16_bit if call.tensors["input"].dtype is torch.bfloat16 else 1e-5
    for name, right in wide.items():
        if right is None:
            assert ours[name] is None, name
            continue
        of_y_alone = which in ((True, False), (True,))
        if name == "bias" and of_y_alone and call.norm == "instance" and call.order == "norm_act":
            continue  # 0, and what rounding leaves of it in eager's
        error, eager_error = (relative_error(g[name], right) for g in (ours, eager))
        assert error <= max(2 * eager_error, floor), f"{name}: {error:.2e}, eager {eager_error:.2e}"


def check_each_gradient(call: Call, monkeypatch) -> None:
    """check_like_eager where every result has a gradient and, where there are two, where either alone has."""
    for which in ((True, True), (True, False), (False, True)) if call.return_conv else ((True, True),):
        check_like_eager(call, monkeypatch, which)


def laid_out(call: Call, layout: str) -> Call:
    """In channels_last_3d of NDHWC; of "other", a skip in the format that the result does not have."""
    named = {"NCDHW": (), "NDHWC": ("input", "weight", "skip"), "other": ("skip",)}
    return call.channels_last(*named[layout])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@both_layouts
def test_like_eager(cuda, monkeypatch, layout, size, dtype):
    check_each_gradient(returning(size, layout, device=cuda, dtype=dtype), monkeypatch)


@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("norm", ["group", "instance"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "prelu", "gelu", None])
def test_tails_like_eager(cuda, monkeypatch, activation, norm, order):
    tail = {"order": order, "norm": norm, "activation": activation}
    for size in ("sm90", "library"):
        check_like_eager(returning(size, **tail, device=cuda, dtype=torch.float32), monkeypatch)


SKIPS = {
    "relu": {"activation": "relu"},
    "relu-first": {"activation": "relu", "order": "act_norm"},
    "elu-first": {"activation": "elu", "order": "act_norm", "norm": "instance"},
    "instance": {"activation": "prelu", "norm": "instance"},
    "returned": {"activation": "gelu", "return_conv": True},
    "relu-first-returned": {"activation": "relu", "order": "act_norm", "return_conv": True},
    "alone": {"activation": None},
}


def adding(size="library", layout="NCDHW", **options) -> Call:
    """With a skip; of "other", in the format that the result does not have."""
    call = make_call(**SIZES[size], skip=True, **({"activation": "silu"} | options))
    return laid_out(call, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SKIPS)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC", "other"])
def test_skips_like_eager(cuda, monkeypatch, layout, case, dtype):
    for size in SIZES:
        call = adding(size, layout, **SKIPS[case], device=cuda, dtype=dtype)
        check_each_gradient(call, monkeypatch)


@pytest.mark.parametrize("case", ["relu", "returned", "relu-first-returned"])
def test_skips_twice(cuda, case):
    """A graph that is kept, and what the caller holds: the sum takes no tensor's place but its own."""
    call = adding(**SKIPS[case], device=cuda, dtype=torch.float32).leaves()
    results, tensors = outputs(call.ours()), list(call.tensors.values())
    before = [tensor.detach().clone() for tensor in (*results, *tensors)]
    seeds = [torch.randn_like(r) for r in results]
    first = torch.autograd.grad(results, tensors, seeds, retain_graph=True)
    second = torch.autograd.grad(results, tensors, seeds, retain_graph=True)
    (once,) = torch.autograd.grad(results[0].square().sum(), call.tensors["skip"], create_graph=True)
    assert once.requires_grad
    last = torch.autograd.grad(results, tensors, seeds)  # which may overwrite what was kept
    for one, *others in zip(first, second, last, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for tensor, kept in zip((*results, *tensors), before, strict=True):
        assert torch.equal(tensor, kept)


def test_only_the_skip(cuda):
    """Where nothing but the skip has a gradient, as where a decoder's blocks are frozen."""
    for return_conv in (False, True):
        call = adding(return_conv=return_conv, device=cuda, dtype=torch.float32)
        leaf = call.tensors["skip"].detach().clone().requires_grad_()
        alone = replace(call, tensors=call.tensors | {"skip": leaf})
        y, *conv = outputs(alone.ours())
        assert y.requires_grad and not any(c.requires_grad for c in conv)
        (found,) = torch.autograd.grad(y.square().sum(), leaf)
        (expected,) = torch.autograd.grad(outputs(alone.eager())[0].square().sum(), leaf)
        assert relative_error(found, expected) <= 1e-3


@pytest.mark.parametrize("keeps_sizes", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", ["relu", "returned", "relu-first-returned"])
def test_skips_compiled(cuda, monkeypatch, case, keeps_sizes):
    """Of known sizes the sum is kept; else the backward computes it again. Either way the norm's is ours."""
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    torch._dynamo.reset()
    call = adding(**SKIPS[case], device=cuda, dtype=torch.float32)
    names, run = list(call.tensors), Call.ours

    def function(*tensors):
        return run(replace(call, tensors=dict(zip(names, tensors, strict=True))))

    compiled = torch.compile(function, fullgraph=True, dynamic=not keeps_sizes)
    seeds = [torch.randn_like(r) for r in outputs(call.ours())]
    found = gradients(call, lambda leaves: compiled(*leaves.tensors.values()), seeds)[1]
    expected = gradients(call, run, seeds)[1]
    for name, right in expected.items():
        assert relative_error(found[name], right) <= 1e-4, name
    results = outputs(compiled(*call.leaves().tensors.values()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.backward(results, seeds)
    called = {event.key for event in profile.key_averages()}
    forwards = {"upconv3d::_numbered_tail", "upconv3d::_numbered_tail_for_training"}
    assert bool(called & forwards) is not keeps_sizes
    assert "aten::native_group_norm_backward" not in called


def test_without_bias_and_affine(cuda, monkeypatch):
    call = returning(bias=False, affine=False, device=cuda, dtype=torch.float32)
    check_like_eager(call, monkeypatch)


@both_layouts
def test_returned_values_stay(cuda, layout):
    call = returning(layout=layout, device=cuda, dtype=torch.bfloat16).leaves()
    y, conv = call.ours()
    kept = conv.detach().clone()
    tensors = list(call.tensors.values())
    first = torch.autograd.grad((y.sin().sum(), conv.cos().sum()), tensors, retain_graph=True)
    second = torch.autograd.grad((y.sin().sum(), conv.cos().sum()), tensors)
    assert torch.equal(conv, kept)
    for one, other, owner in zip(first, second, tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # cuDNN's sums come in any order
        assert one.dtype == owner.dtype and one.stride() == owner.stride()


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "norm_weight", "norm_bias", "slopes"])
def test_only_what_is_asked_for(cuda, wanted):
    call = returning(activation="prelu", device=cuda, dtype=torch.float32)
    seeds = [torch.randn_like(r) for r in call.ours()]
    expected = gradients(call, Call.ours, seeds)[1][wanted]
    alone = replace(call, tensors=call.tensors | {wanted: call.tensors[wanted].detach().requires_grad_()})
    results = alone.ours()
    assert [r.requires_grad for r in results] == [r.requires_grad for r in alone.eager()]
    reached = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    (gradient,) = torch.autograd.grad([r for r, _ in reached], alone.tensors[wanted], [s for _, s in reached])
    y = alone.ours()[0]
    (once,) = torch.autograd.grad(y.square().sum(), alone.tensors[wanted], create_graph=True)
    assert once.requires_grad
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
def test_no_samples(cuda, order):
    call = returning("library", n=0, order=order, activation="prelu", device=cuda, dtype=torch.float32)
    for name, gradient in gradients(call, Call.ours)[1].items():
        assert gradient.shape == call.tensors[name].shape and not gradient.any(), name


def test_changed_in_place(cuda):
    """As PyTorch's calls: of ReLU before a norm the convolution is not read again, else it is missed."""
    for order, activation in (("act_norm", "relu"), ("norm_act", "relu"), ("act_norm", "silu")):
        call = returning(order=order, activation=activation, device=cuda, dtype=torch.float32)
        refused = []
        for run in (Call.ours, Call.eager):
            y, conv = run(call.leaves())
            conv.add_(1)
            try:
                (y.sum() + conv.sum()).backward()
            except RuntimeError as error:
                assert "inplace operation" in str(error)
                refused.append(run)
        assert len(refused) in (0, 2), (order, activation, refused)


def test_batched_gradients_of_the_convolution_alone(cuda):
    call = returning(device=cuda, dtype=torch.float32).leaves()
    y, conv = call.ours()
    weight, grad_y, grads = (
        call.tensors["weight"],
        torch.randn_like(y),
        torch.randn(3, *conv.shape, device=cuda),
    )

    def of(grad_conv):
        return torch.autograd.grad((y, conv), weight, (grad_y, grad_conv), retain_graph=True)[0]

    found = torch.vmap(of)(grads)
    assert relative_error(found, torch.stack([of(grad) for grad in grads])) <= 1e-3


def test_saved_convolution_in_another_format(cuda):
    call = returning(layout="NDHWC", device=cuda, dtype=torch.float32)
    seeds = [torch.randn_like(r) for r in call.ours()]
    expected = gradients(call, Call.ours, seeds)[1]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        found = gradients(call, Call.ours, seeds)[1]
    for name, right in expected.items():
        assert relative_error(found[name], right) <= 1e-4, name


def test_transforms_of_gradients(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    call = returning(device=cuda, dtype=torch.float32).leaves()
    tensors = list(call.tensors.values())
    y, _ = call.ours()
    grads = torch.randn(2, *y.shape, device=cuda)
    together = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, tensors, grad, retain_graph=True) for grad in grads]
    for both, first, second in zip(together, *apart, strict=True):
        torch.testing.assert_close(both, torch.stack([first, second]), rtol=1e-3, atol=1e-3)
    weight = call.tensors["weight"]
    (once,) = torch.autograd.grad(y, weight, grads[0], create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), call.tensors["input"])
    (once,) = torch.autograd.grad(call.eager()[0], weight, grads[0], create_graph=True)
    (expected,) = torch.autograd.grad(once.square().sum(), call.tensors["input"])
    assert relative_error(twice, expected) <= 1e-4


@pytest.mark.parametrize("norm", ["group", "instance"])
def test_autocast(cuda, norm):
    call = returning(norm=norm, device=cuda, dtype=torch.float32).leaves()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, eager = call.ours(), call.eager()
    assert [r.dtype for r in ours] == [r.dtype for r in eager]
    seeds = [torch.randn_like(r) for r in eager]
    tensors = list(call.tensors.values())
    found, others = (torch.autograd.grad(results, tensors, seeds) for results in (ours, eager))
    wide = call.to(torch.float64).leaves()
    right = torch.autograd.grad(wide.eager(), list(wide.tensors.values()), [s.double() for s in seeds])
    for name, gradient, other, reference in zip(call.tensors, found, others, right, strict=True):
        assert gradient.dtype is torch.float32
        limit = max(2 * relative_error(other, reference), 2.0**-6)
        assert relative_error(gradient, reference) <= limit, name


@both_layouts
def test_compiled(cuda, monkeypatch, layout):
    """The backward reads the convolution that was returned, and computes none again."""
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    torch._dynamo.reset()
    call = returning(layout=layout, device=cuda, dtype=torch.float32)
    seeds = [torch.randn_like(r) for r in call.ours()]
    names, run = list(call.tensors), Call.ours

    def function(*tensors):
        return run(replace(call, tensors=dict(zip(names, tensors, strict=True))))

    compiled = torch.compile(function, fullgraph=True)
    found = gradients(call, lambda leaves: compiled(*leaves.tensors.values()), seeds)
    expected = gradients(call, run, seeds)
    for name, right in expected[1].items():
        assert relative_error(found[1][name], right) <= 1e-4, name
    leaves = call.leaves()
    results = compiled(*leaves.tensors.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.backward(results, seeds)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages()]
    assert not any("conv_transpose_relu_group_norm_sm90" in key for key in kernels), kernels


def test_plan_of_training():
    """The forward is that of inference, and keeps nothing beside what it returns."""
    call = facts(n=2, c=64, k=128, dtype="bfloat16", num_groups=8)
    call |= {"order": "norm_act", "activation": "silu", "activation_param": 0.0, "return_conv": True}
    call |= {"slopes": None, "skip": None}
    plan, training = plan_of(call), plan_of(call | {"training": True})
    assert training.algorithm == plan.algorithm and not training.keeps_conv
    assert training.backward_stages[-2:] == ("norm_backward", "aten::convolution_backward")
    skip = call["input"] | {
        "sizes": [2, 128, 34, 34, 34],
        "strides": [128 * 34**3, 1, *(128 * 34**i for i in (2, 1, 0))],
    }
    summed = call | {"return_conv": False, "skip": skip}
    plan, training = plan_of(summed), plan_of(summed | {"training": True})
    assert training.algorithm == plan.algorithm == "cuda_library" and not training.keeps_conv
    assert training.backward_stages[-2:] == ("norm_backward", "aten::convolution_backward")
    bare = plan_of(summed | {"num_groups": 0, "training": True})
    assert bare.keeps_sum and bare.backward_stages == ("activation_backward", "aten::convolution_backward")


def test_explained_without_computing(device):
    call = returning(device=device, dtype=torch.float32)
    t = call.tensors
    plan = upconv3d.explain_norm_act(t["input"], t["weight"], t.get("bias"), **call.keywords(), training=True)
    assert ("norm_backward" in plan.backward_stages) == (device.type == "cuda")
