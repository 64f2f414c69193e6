# SPDX-License-Identifier: Apache-2.0
"""Training on the CUDA library plan, which keeps PyTorch's convolution, and on the col2im plan, which keeps
its own in that one's place: values, bits, memory, autocast.

`pytest -k library_training` runs all of it; what needs no GPU is the choice of plans.
"""

from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import (
    ERROR_FACTOR,
    Block,
    check_gradients_like_eager,
    make_block,
    peak_memory_bytes,
    relative_error,
)
from tails import ACTIVATIONS, Call, gradients, make_call
from test_select_plan import facts, plan_of
from upconv3d import _autocast
from upconv3d._plan_questions import PlanQuestion

KINDS = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
}
# (n, c, k, extent, kernel) and the other numbers
SHAPES = {
    "last_block": ((2, 32, 2, 8, 3), {"num_groups": 2, "stride": 2, "padding": 1, "output_padding": 1}),
    "one_output": ((2, 128, 1, (20, 19, 18), 3), {"num_groups": 1, "padding": 1}),
    "one_group": ((3, 5, 3, (3, 4, 5), 3), {"num_groups": 1}),
    "conv_groups": ((1, 32, 12, 6, 2), {"num_groups": 3, "stride": 2, "groups": 4, "bias": False}),
    "one_channel_per_group": ((2, 4, 6, (7, 3, 5), 3), {"num_groups": 6, "affine": False}),
    "unbatched": ((None, 4, 2, (7, 3, 5), 3), {"num_groups": 2}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_layouts = pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])


def few(n=2, c=32, k=2, extent=(48, 48, 48), **overrides):
    arguments = {"dtype": "float32", "precision": "tf32", "layout": "NCDHW", "num_groups": 2}
    return facts(n=n, c=c, k=k, extent=extent, **(arguments | overrides)) | {"training": True}


def kind_block(shape: str, kind: str, device, layout: str = "NCDHW") -> Block:
    sizes, numbers = SHAPES[shape]
    dtype, precision = KINDS[kind]
    block = replace(make_block(*sizes, device=device, dtype=dtype, **numbers), precision=precision)
    return block.channels_last() if layout == "NDHWC" else block


def block_gradients(block: Block, grad_y: torch.Tensor, **keywords) -> dict[str, torch.Tensor]:
    leaves = block.requires_grad()
    args, kwargs = leaves.arguments()
    upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, **keywords).backward(grad_y)
    return {name: tensor.grad for name, tensor in leaves.tensors().items()}


def keeps_conv(block: Block) -> bool:
    args, kwargs = block.arguments()
    return upconv3d.explain(*args, **kwargs, training=True).keeps_conv


@pytest.fixture
def deterministic(cuda, monkeypatch):
    """cuDNN's convolutions with the same bits on every run, for comparisons of bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return cuda


def test_plans():
    plan = plan_of(few(n=32))
    assert plan.algorithm == "cuda_library" and plan.keeps_conv and not plan.keeps_activation
    assert plan.backward_stages[-2:] == ("norm_backward", "aten::convolution_backward")
    assert "backward" in str(plan)
    assert not plan_of(few(n=32) | {"training": False}).keeps_conv
    single = plan_of(few())
    assert single.algorithm == "cuda_col2im" and single.keeps_conv and not single.activation_in_y
    assert single.backward_stages == plan.backward_stages
    wide = plan_of(few(dtype="float64", precision="ieee"))
    assert not wide.keeps_conv and wide.backward_stages == ()
    assert plan_of(few(k=128), compute_capability=80).keeps_conv  # where the SM80 kernel keeps nothing


def test_autocast_asks_for_a_plan_once(monkeypatch):
    asked = []

    class Module:
        @staticmethod
        def explain(arguments):
            asked.append(arguments)
            fits = arguments["weight"]["sizes"][1] >= 8
            few = arguments["weight"]["dtype"] != "float32" and arguments["weight"]["sizes"][1] in (8, 72)
            kernel = "conv_transpose_few_channels_sm80" if few else "another"
            instead = arguments["weight"]["sizes"][1] == 4  # col2im, where the SM90 plan could train
            algorithm = "sm90_implicit_gemm" if fits else "cuda_col2im" if instead else "cuda_library"
            return {"plan": {"algorithm": algorithm, "stages": [kernel], "instead_of_sm90": instead}}

    monkeypatch.setattr(_autocast, "_C", Module)
    question = PlanQuestion(_autocast._plans_are_quicker_in_float32)
    monkeypatch.setattr(_autocast, "_quicker_in_float32", question)
    settings = ((2, 2, 2), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1), 2, 1e-5, "ieee")
    x = torch.zeros(1, 4, 2, 2, 2, dtype=torch.bfloat16)
    for k, expected in ((2, False), (4, True), (8, True)):
        weight = torch.zeros(4, k, 2, 2, 2)
        for _ in range(3):
            assert _autocast._is_quicker_in_float32(x, weight, settings, None) is expected
    assert len(asked) == 3
    assert all(a["input"]["dtype"] == "float32" and a["precision"] == "tf32" for a in asked)
    # Where nothing is recorded, unless 16 bit takes the direct plan on tensor cores, of few outputs.
    for k, expected in ((2, False), (8, False), (16, True), (72, True)):
        weight = torch.zeros(4, k, 2, 2, 2)
        for _ in range(3):
            assert _autocast._is_quicker_in_float32(x, weight, settings, torch.bfloat16) is expected
    assert len(asked) == 3 + 1 + 2 + 2 + 1
    low = [a for a in asked if a["weight"]["dtype"] == "bfloat16"]
    assert len(low) == 2 and all(a["input"]["dtype"] == "bfloat16" and "training" not in a for a in low)


@every_kind
@pytest.mark.parametrize("shape", SHAPES)
@both_layouts
def test_like_eager(cuda, layout, shape, kind):
    block = kind_block(shape, kind, cuda, layout)
    assert keeps_conv(block)
    check_gradients_like_eager(block)


def test_random_problems(cuda):
    """Of all arguments, those that this plan takes."""
    from test_random_problems import random_problem

    kept = 0
    for index in range(150):
        text, block = random_problem(index, cuda)
        if not keeps_conv(block):
            continue
        kept += 1
        try:
            check_gradients_like_eager(block)
        except AssertionError as error:
            raise AssertionError(text) from error
    assert kept > 10


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", ["last_block", "one_output"])
def test_same_bits_and_recompute(deterministic, shape, layout, kind):
    block = kind_block(shape, kind, deterministic, layout)
    grad_y = torch.randn_like(block.ours())
    first = block_gradients(block, grad_y)
    for again in (block_gradients(block, grad_y), block_gradients(block, grad_y, recompute=True)):
        for name, gradient in first.items():
            assert torch.equal(gradient, again[name]), name


def test_recompute_gives_the_same_result(deterministic):
    """Also of an NCDHW block whose operands inference copies, for another convolution than training's."""
    numbers = {"num_groups": 8, "padding": (0, 0, 3)}
    block = make_block(2, 256, 256, (13, 1, 4), (5, 3, 4), device=deterministic, **numbers)
    args, kwargs = block.to(torch.bfloat16).requires_grad().arguments()
    kept, again = (
        upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=recompute)
        for recompute in (False, True)
    )
    assert torch.equal(kept, again)


@every_kind
@pytest.mark.parametrize("shape", ["last_block", "one_output"])
def test_kept_graph(deterministic, shape, kind):
    """A backward that keeps the graph leaves the convolution; the last one may overwrite it."""
    block = kind_block(shape, kind, deterministic).requires_grad()
    tensors = list(block.tensors().values())
    y = block.ours()
    grad_y = torch.randn_like(y)
    passes = [torch.autograd.grad(y, tensors, grad_y, retain_graph=retain) for retain in (True, True, False)]
    for first, second, last in zip(*passes, strict=True):
        assert torch.equal(first, second) and torch.equal(first, last)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "norm_weight", "norm_bias"])
def test_only_what_is_asked_for(deterministic, wanted):
    block = kind_block("last_block", "ieee", deterministic)
    grad_y = torch.randn_like(block.ours())
    expected = block_gradients(block, grad_y)[wanted]
    alone = replace(block, **{wanted: getattr(block, wanted).detach().requires_grad_()})
    (gradient,) = torch.autograd.grad(alone.ours(), getattr(alone, wanted), grad_y)
    assert torch.equal(gradient, expected)


@every_kind
@both_layouts
def test_other_memory_formats_of_grad_y(deterministic, layout, kind):
    block = kind_block("last_block", kind, deterministic, layout)
    grad_y = torch.randn_like(block.ours())
    expected = block_gradients(block, grad_y)
    padded = torch.zeros(*grad_y.shape[:-1], grad_y.shape[-1] + 3, device=grad_y.device, dtype=grad_y.dtype)
    padded[..., : grad_y.shape[-1]] = grad_y
    formats = [torch.contiguous_format, torch.channels_last_3d]
    dense = [grad_y.contiguous(memory_format=memory_format) for memory_format in formats]
    for other in (*dense, padded[..., : grad_y.shape[-1]]):
        for name, gradient in block_gradients(block, other).items():
            assert torch.equal(gradient, expected[name]), name


@every_kind
@pytest.mark.parametrize("scale", [2.0**-27, 2.0**13])
def test_tiny_and_huge_gradients(deterministic, scale, kind):
    """Gradients are linear in grad_y: a power of two in comes out again, where the dtype can hold it."""
    block = kind_block("last_block", kind, deterministic)
    if kind == "float16" and scale < 1:
        pytest.skip("float16 holds no such gradients, PyTorch's neither")
    grad_y = torch.randn_like(block.ours()) * 2.0**-10
    expected = block_gradients(block, grad_y)
    for name, gradient in block_gradients(block, grad_y * scale).items():
        assert torch.isfinite(gradient).all(), name
        assert relative_error(gradient.double() / scale, expected[name].double()) <= 1e-3, name


def test_public_operators_and_transforms(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    block = kind_block("one_group", "ieee", cuda).requires_grad()
    tensors = list(block.tensors().values())
    y = block.ours()
    grads = torch.randn(2, *y.shape, device=cuda)
    together = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, tensors, grad, retain_graph=True) for grad in grads]
    for both, first, second in zip(together, *apart, strict=True):
        torch.testing.assert_close(both, torch.stack([first, second]), rtol=1e-4, atol=1e-5)
    (once,) = torch.autograd.grad(y, block.weight, grads[0], create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), block.input)
    (once,) = torch.autograd.grad(block.eager(), block.weight, grads[0], create_graph=True)
    (expected,) = torch.autograd.grad(once.square().sum(), block.input)
    torch.testing.assert_close(twice, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["group", "instance"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@both_layouts
def test_family_like_eager(cuda, monkeypatch, layout, order, activation, norm, dtype):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    for one_slope in (False, True) if activation == "prelu" else (False,):
        tail = {"order": order, "norm": norm, "activation": activation, "one_slope": one_slope}
        call = make_call(c=4, k=6, extent=(5, 6, 7), **tail, device=cuda, dtype=dtype)
        call = call.channels_last("input", "weight") if layout == "NDHWC" else call
        seeds = [torch.randn(call.ours().shape, device=cuda, dtype=torch.float64)]
        (y,), ours = gradients(call, Call.ours, seeds)
        assert "NormAct" in type(y.grad_fn).__name__ or "ReLUGroupNorm" in type(y.grad_fn).__name__
        eager = gradients(call, Call.eager, seeds)[1]
        wide = gradients(call.to(torch.float64), Call.eager, seeds)[1]
        floor = 2.0**-5 if dtype is torch.bfloat16 else 1e-5
        if norm == "instance" and order == "norm_act":
            wide.pop("bias")  # 0, and what rounding leaves of it in eager's
        for name, right in wide.items():
            error, eager_error = (relative_error(g[name], right) for g in (ours, eager))
            assert error <= max(2 * eager_error, floor), f"{name}: {error:.2e}, eager {eager_error:.2e}"


def test_family_keeps_its_graph_and_precision(deterministic, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32")
    call = make_call(
        c=8, k=2, norm="instance", activation="prelu", device=deterministic, dtype=torch.float32
    ).leaves()
    tensors = list(call.tensors.values())
    y = call.ours()
    grad_y = torch.randn_like(y)
    first = torch.autograd.grad(y, tensors, grad_y, retain_graph=True)
    second = torch.autograd.grad(y, tensors, grad_y)
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    wide = call.to(torch.float64).leaves()
    right = torch.autograd.grad(wide.eager(), list(wide.tensors.values()), grad_y.double())
    for name, one, two, reference in zip(call.tensors, first, second, right, strict=True):
        assert torch.equal(one, two), name
        if name != "bias":
            assert relative_error(one, reference) <= 1e-5, name  # "ieee", whatever PyTorch's setting says


def test_peak_memory(cuda):
    """Forward and backward, gradients included: no more than eager needs."""
    block = kind_block("last_block", "ieee", cuda)
    block = replace(block, input=torch.randn(2, 32, 24, 24, 24, device=cuda)).requires_grad()
    tensors = list(block.tensors().values())
    grad_y = torch.randn_like(block.ours())

    ours, eager = (
        peak_memory_bytes(lambda run=run: torch.autograd.grad(run(), tensors, grad_y))
        for run in (block.ours, block.eager)
    )
    print(f"{ours / 2**20:.1f} MiB, eager {eager / 2**20:.1f} MiB")
    assert ours <= eager


def test_autocast_casts_as_pytorch_does(cuda):
    """float32 "tf32" is quick on the SM90 plan alone."""
    block = kind_block("last_block", "ieee", cuda).requires_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, eager = block.ours(), block.eager()
    assert y.dtype == eager.dtype
    kept = y.grad_fn.next_functions[0][0]  # behind the cast to float32
    assert [t.dtype for t in kept.saved_tensors if t is not None] == [torch.bfloat16] * 5
    grad_y = torch.randn_like(y)
    tensors = list(block.tensors().values())
    ours, theirs = (torch.autograd.grad(result, tensors, grad_y) for result in (y, eager))
    wide = block.to(torch.float64).requires_grad()
    wide.eager().backward(grad_y.double())
    for name, gradient, other in zip(block.tensors(), ours, theirs, strict=True):
        assert gradient.dtype == torch.float32
        reference = getattr(wide, name).grad
        limit = max(ERROR_FACTOR * relative_error(other, reference), torch.finfo(torch.bfloat16).eps)
        assert relative_error(gradient, reference) <= limit, name


@pytest.mark.parametrize("family", [False, True])
@pytest.mark.parametrize("shape", ["last_block", "wide"])
def test_float16_autocast_overflows_where_pytorch_does(cuda, monkeypatch, shape, family):
    """The norm's gradients are float32 there, whose sums float16 would not hold."""
    monkeypatch.setattr(_autocast, "_MOST_FLOAT32_VALUES", 0)
    wide = make_block(2, 64, 32, 8, 3, num_groups=4, device=cuda)
    block = wide if shape == "wide" else kind_block("last_block", "ieee", cuda)
    block = replace(block, input=block.input * 16).requires_grad()
    args, kwargs = block.arguments()
    run = upconv3d.conv_transpose3d_relu_group_norm
    if family:
        run, kwargs = upconv3d.conv_transpose3d_norm_act, kwargs | {"order": "act_norm"}
        kwargs["activation"] = "leaky_relu"
    with torch.autocast("cuda", dtype=torch.float16):
        y, eager = run(*args, **kwargs), block.eager()
    assert y.dtype == eager.dtype == torch.float32
    grad_y = torch.randn_like(y) * 2.0**12
    tensors = list(block.tensors().values())
    ours, theirs = (torch.autograd.grad(result, tensors, grad_y) for result in (y, eager))
    finite = {
        name: (bool(gradient.isfinite().all()), bool(other.isfinite().all()))
        for name, gradient, other in zip(block.tensors(), ours, theirs, strict=True)
    }
    assert finite["norm_weight"] == finite["norm_bias"] == (True, True), finite
    assert all(own or not other for own, other in finite.values()), finite


@pytest.mark.parametrize("wrong", ["bytes", "rank", "dtype", "format"])
def test_what_the_forward_kept_must_fit(cuda, wrong):
    block = kind_block("last_block", "ieee", cuda)
    args, kwargs = block.arguments()
    numbers = [[v] * 3 for v in (args[3], args[4], args[5], args[7])]
    saved = torch.randn_like(block.ours())
    saved = {
        "bytes": saved[:1],
        "rank": saved.flatten(),
        "dtype": saved.half(),
        "format": saved.transpose(3, 4).contiguous().transpose(3, 4),
    }[wrong]
    with pytest.raises(RuntimeError, match="what the forward kept must be of the same call"):
        torch.ops.upconv3d.fused_backward(
            torch.randn_like(block.ours()), *args[:3], *numbers[:3], 1, numbers[3], kwargs["num_groups"],
            kwargs["norm_weight"], kwargs["eps"], kwargs["precision"], saved, 31, False,
        )  # fmt: skip


def test_the_plan_of_both_passes_is_told_in_lines():
    plan = plan_of(facts(n=2, c=2, k=2, dtype="float32", num_groups=2) | {"training": True})
    assert "\nbackward:" in plan.description
