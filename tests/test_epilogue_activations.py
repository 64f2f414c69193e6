# SPDX-License-Identifier: Apache-2.0
"""Activations in the epilogues of the SM90 plan's kernels: before a norm, and without one.

UPCONV3D_PLAN is read once per process, so small blocks, which run by the plan's name, run in another.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import ERROR_FACTOR, relative_error
from tails import ACTIVATIONS, Call, make_call, outputs
from test_returned_conv import laid_out
from test_sm80 import _run_child

# In rows of whole 16 bytes and in others, of one tile and of several, of a stride and of none.
SHAPES = {
    "stride-1": {"n": 3, "c": 32, "k": 72, "extent": (9, 4, 17), "stride": 1},
    "padded-rows": {"n": 2, "c": 40, "k": 20, "extent": (5, 6, 7), "stride": 2},
    "kernel-is-stride": {"n": 2, "c": 64, "k": 136, "extent": 8, "kernel": 2, "stride": 2, "padding": 0},
    "one-sample": {"n": None, "c": 48, "k": 64, "extent": (7, 8, 6), "stride": (1, 2, 2)},
    "64-phases": {"n": 2, "c": 64, "k": 64, "extent": (3, 4, 5), "kernel": 4, "stride": 4, "padding": 0},
}
TAILS = (("norm_act", None), ("act_norm", "group"), ("act_norm", "instance"))
KINDS = (
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
)


def make(shape, order, norm, activation, dtype, precision, layout, device, shapes=SHAPES, **options) -> Call:
    numbers = dict(shapes[shape])
    output_padding = numbers.pop("output_padding", 0)
    extent = numbers.pop("extent")
    numbers["extent"] = (extent,) * 3 if isinstance(extent, int) else extent
    call = make_call(
        **numbers,
        order=order,
        norm=norm,
        activation=activation,
        num_groups=4,
        dtype=dtype,
        precision=precision,
        device=device,
        **options,
    )
    call.numbers["output_padding"] = output_padding
    return laid_out(call, layout)


def plan_of(call, training=False):
    t = call.tensors
    return upconv3d.explain_norm_act(
        t["input"], t["weight"], t.get("bias"), **call.keywords(), training=training
    )


def check_like_eager(call):
    """Errors at most twice PyTorch's, against float64; the same bits twice."""
    precision = call.precision or "ieee"
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = precision
    ours, eager = outputs(call.ours()), outputs(call.eager())
    torch.backends.cudnn.conv.fp32_precision = before
    exact = outputs(call.to(torch.float64).eager())
    is_tf32 = call.tensors["input"].dtype is torch.float32 and precision == "tf32"
    eps = 2.0**-10 if is_tf32 else torch.finfo(call.tensors["input"].dtype).eps
    for result, other, reference in zip(ours, eager, exact, strict=True):
        assert (result.shape, result.dtype) == (other.shape, other.dtype)
        limit = max(ERROR_FACTOR * relative_error(other, reference), 4 * eps)
        assert relative_error(result, reference) <= limit
    assert all(map(torch.equal, ours, outputs(call.ours())))


def cases(device):
    """Run by the child: every activation, tail, shape, dtype and layout."""
    names = [activation for activation in ACTIVATIONS if activation not in ("relu", None)]
    for shape, (order, norm), (dtype, precision), layout in itertools.product(
        SHAPES, TAILS, KINDS, ("NCDHW", "NDHWC")
    ):
        for activation in names:
            torch.manual_seed(1234)
            call = make(shape, order, norm, activation, dtype, precision, layout, device)
            plan = plan_of(call)
            assert plan.algorithm == "sm90_implicit_gemm" and not plan.twice, plan
            assert activation not in plan.stages, plan
            check_like_eager(call)


# Of phases side by side and below each other, with 16 outputs in pairs of views, and of 64 phases.
ONCE = {
    "kernel-is-stride": {"n": 2, "c": 64, "k": 136, "extent": 8, "kernel": 2, "stride": 2, "padding": 0},
    "overlapping": {"n": 2, "c": 40, "k": 24, "extent": (5, 6, 7), "output_padding": 1, "stride": 2},
    "pairs-of-views": {"n": 2, "c": 32, "k": 16, "extent": (6, 8, 7), "output_padding": 1, "stride": 2},
    "unbatched": {"n": None, "c": 16, "k": 64, "extent": (7, 8, 6), "kernel": 2, "stride": 2, "padding": 0},
    "64-phases": {"n": 2, "c": 64, "k": 64, "extent": (3, 4, 5), "kernel": 4, "stride": 4, "padding": 0},
    "stride-1": {"n": 3, "c": 16, "k": 24, "extent": (5, 4, 6), "kernel": 2, "stride": 1},
}


def once(device):
    """Run by the child: without a norm, the kernel that computes twice computes once."""
    for shape, (dtype, precision), layout in itertools.product(ONCE, KINDS[:3], ("NCDHW", "NDHWC")):
        if layout == "NCDHW" and shape in ("64-phases", "stride-1"):
            continue  # it writes two phases along the width
        for activation, bias in itertools.product(ACTIVATIONS, (True, False)):
            torch.manual_seed(1234)
            tail = ("norm_act", None, activation, dtype, precision, layout, device)
            call = make(shape, *tail, shapes=ONCE, bias=bias)
            plan = plan_of(call)
            assert plan.twice and len(plan.stages) <= 2, plan
            check_like_eager(call)
            if bias and activation == "relu":
                infinite = call.tensors["bias"].clone()
                infinite[3], infinite[5] = -float("inf"), float("inf")
                y = replace(call, tensors=call.tensors | {"bias": infinite}).ours().transpose(-4, 0)
                assert (y[3] == 0).all() and (y[5] == float("inf")).all() and y[6:].isfinite().all()


def hostile(device, plan):
    """Run by the child: what is not finite, one slope, no bias, slopes of any sign, channels of zeros."""
    shape, shapes = ("stride-1", SHAPES) if plan == "stored" else ("kernel-is-stride", ONCE)
    norms = (None, "group") if plan == "stored" else (None,)
    for (dtype, precision), norm, activation in itertools.product(
        KINDS[: 4 if plan == "stored" else 3],
        norms,
        ("leaky_relu", "prelu", "elu", "silu", "gelu", "gelu_tanh"),
    ):
        torch.manual_seed(1234)
        tail = ("act_norm" if norm else "norm_act", norm, activation, dtype, precision)
        call = make(shape, *tail, "NDHWC", device, shapes=shapes, bias=False, one_slope=True)
        check_like_eager(call)
        t = call.tensors
        closed = t["weight"].clone(memory_format=torch.preserve_format)
        closed[:, 5] = 0
        check_like_eager(replace(call, tensors=t | {"weight": closed}))
        if activation == "prelu":
            for slope in (-2.0, 0.0, 3.0):
                check_like_eager(replace(call, tensors=t | {"slopes": torch.full_like(t["slopes"], slope)}))
        for value in (float("nan"), float("inf"), -float("inf")):
            x = t["input"].clone(memory_format=torch.preserve_format)
            x[1, 3, 4, 1, 2] = value
            broken = replace(call, tensors=t | {"input": x})
            ours, eager = broken.ours(), broken.eager()
            assert not ours[~eager.isfinite()].isfinite().any(), (tail, value)
            if dtype is not torch.float32:  # whose scales reach other samples
                assert ours[0].isfinite().all() and ours[2:].isfinite().all(), (tail, value)
                assert norm or ours[eager.isfinite()].isfinite().all(), (tail, value)


def near_zero(device, plan):
    """Run by the child: each value by itself, where exp(v) - 1 cancels."""
    for (dtype, precision), activation in itertools.product(
        KINDS[: 4 if plan == "stored" else 3], ("elu", "silu", "gelu", "gelu_tanh", "leaky_relu")
    ):
        values = torch.cat([torch.logspace(-7, 0, 4096), torch.linspace(0, 8, 4096)])
        values = torch.cat([values, -values]).half().to(device, dtype)
        x = values.reshape(2, 2, 8, 8, 64).movedim(-1, 1)  # [N, C, D, H, W], as channels_last_3d
        eye = torch.eye(64, device=device, dtype=dtype).reshape(64, 64, 1, 1, 1)
        tensors = {"input": x, "weight": eye}
        call = Call(tensors, {"padding": 0}, norm=None, activation=activation, precision=precision)
        assert plan_of(call).twice == (plan == "twice"), plan_of(call)
        ours, exact = call.ours().double(), call.to(torch.float64).eager()
        # Of products of 11 bits 16, where the result has as many; GELU's tail is a difference of ones.
        accuracy = 2.0**-20 if precision == "ieee" else 2.0**-16
        of_tail = 8 * 2e-7 if activation.startswith("gelu") else 0
        limit = (torch.finfo(dtype).eps / 2 + accuracy) * exact.abs() + 2.0**-25 + of_tail
        assert ((ours - exact).abs() <= limit).all(), (activation, dtype, precision)


def exact_integers(device, plan):
    """Run by the child: sums of integers; slopes are powers of two."""
    shape, shapes = ("stride-1", SHAPES) if plan == "stored" else ("kernel-is-stride", ONCE)
    for dtype, activation in itertools.product((torch.bfloat16, torch.float32), ("prelu", "relu", None)):
        precision = "ieee" if plan == "stored" else "tf32"
        tail = ("norm_act", None, activation, dtype, precision, "NDHWC", device)
        call = make(shape, *tail, shapes=shapes)
        tensors = {
            name: torch.randint(-2, 3, tensor.shape, device=device).to(dtype)
            for name, tensor in call.tensors.items()
        }
        tensors["input"] *= torch.rand(tensors["input"].shape, device=device).lt(0.02)
        if activation == "prelu":
            tensors["slopes"] = torch.full_like(tensors["slopes"], 0.25)
        call = laid_out(replace(call, tensors=tensors), "NDHWC")
        assert plan_of(call).twice == (plan == "twice"), plan_of(call)
        assert torch.equal(call.ours().double(), call.to(torch.float64).eager()), tail


@pytest.mark.parametrize("run", ["cases", "hostile", "near_zero", "exact_integers"])
@pytest.mark.parametrize("plan", ["stored", "twice"])
def test_by_name(hopper, plan, run):
    call = (
        f"{run}('cuda', '{plan}')" if run != "cases" else f"{'cases' if plan == 'stored' else 'once'}('cuda')"
    )
    code = f"import test_epilogue_activations as t, torch\nwith torch.no_grad(): t.{call}"
    result = _run_child(code, plan=plan)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
@pytest.mark.parametrize(("order", "norm"), TAILS, ids=str)
def test_as_chosen(hopper, order, norm, dtype, precision, layout):
    """A block of some length; trained, its backward reads the convolution."""
    torch.manual_seed(1234)
    call = laid_out(
        make_call(
            n=4,
            c=64,
            k=64,
            extent=(32, 32, 32),
            stride=2,
            order=order,
            norm=norm,
            activation="silu",
            num_groups=8,
            dtype=dtype,
            precision=precision,
            device=hopper,
        ),
        layout,
    )
    assert plan_of(call).algorithm == "sm90_implicit_gemm", plan_of(call)
    assert plan_of(call, training=True).keeps_conv
    with torch.no_grad():
        check_like_eager(call)
