# SPDX-License-Identifier: Apache-2.0
"""The col2im plan. What UPCONV3D_PLAN asks for is read once per process, so forced cases run in another."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import (
    ERROR_FACTOR,
    check_exact_relu_conv,
    check_gradients_like_eager,
    check_like_eager,
    integer_block,
    make_block,
    relative_error,
)
from tails import COMBINATIONS, make_call
from test_sm80 import _run_child

KINDS = (
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
)

# Numbers of make_block: samples, C, K, extent, kernel; and what differs from a plain block.
SHAPES = {
    "long-sums": ((2, 300, 8, (3, 4, 5), 3), {"padding": 1}),
    "stride-2": ((3, 24, 12, (5, 6, 7), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "kernel-is-stride": ((1, 40, 20, (6, 7, 9), 2), {"stride": 2}),
    "few-outputs": ((2, 33, 3, (9, 12, 11), 3), {"padding": 1}),
    "one-output": ((2, 20, 1, (9, 12, 11), 5), {"padding": 2}),
    "odd-everything": ((3, 5, 7, (3, 5, 9), (1, 3, 5)), {"padding": (0, 1, 2)}),
    "dilated": ((1, 16, 24, (9, 10, 11), 3), {"dilation": (1, 2, 3), "padding": (0, 2, 3)}),
    "stride-and-dilation-share": ((1, 8, 8, 5, 3), {"stride": 4, "dilation": 6, "padding": 3}),
    "stride-3-dilated": (
        (2, 16, 24, 4, 3),
        {"stride": (3, 1, 2), "dilation": (1, 2, 3), "padding": (0, 2, 1)},
    ),
    "kernel-below-stride": ((2, 4, 4, 3, 1), {"stride": 3, "output_padding": 2}),
    "much-padding": ((2, 8, 8, (6, 7, 5), 3), {"stride": 2, "padding": (3, 2, 4), "output_padding": 1}),
    "one-voxel": ((4, 64, 64, 1, 3), {"stride": 2, "padding": 1}),
    "pointwise": ((2, 12, 16, (5, 6, 7), 1), {}),
    "many-outputs": ((1, 8, 72, (18, 20, 22), 2), {"stride": 2}),
    "bare": ((2, 16, 40, 6, 2), {"bias": False, "affine": False}),
    "unbatched": ((None, 24, 48, (4, 6, 5), 3), {}),
}


def _of_kinds(block):
    """The block in every dtype and precision."""
    for dtype, precision in KINDS:
        yield replace(block.to(dtype), precision=precision)


def _cases(device):
    for name, (sizes, numbers) in SHAPES.items():
        k = sizes[2]
        torch.manual_seed(1234)
        block = make_block(*sizes, num_groups=1 if k % 2 else 2, device=device, **numbers)
        for case in _of_kinds(block):
            yield name, case, case.channels_last()


def col2im_cases(device):
    """Run by the child: every shape, dtype and precision, each order of x and w, twice the same bits."""
    for name, case, last in _cases(device):
        for laid_out in (
            case,
            last,
            replace(case, weight=last.weight),
            replace(last, weight=case.weight),
            replace(case, weight=torch.stack([case.weight] * 2, -1)[..., 0]),
        ):
            plan = laid_out.plan()
            assert plan.algorithm == "cuda_col2im", plan
            assert plan.stages[:2] == ("conv_transpose_columns_sm80", "col2im"), plan
            check_like_eager(laid_out)
            assert torch.equal(laid_out.ours(), laid_out.ours()), f"{name} differs: {plan}"


def col2im_unaligned(device):
    """Run by the child: tensors that begin amid 16 bytes."""
    block = make_block(2, 16, 8, (4, 5, 8), 3, num_groups=2, stride=2, padding=1, device=device)

    def moved(tensor, values):
        memory = torch.empty(tensor.numel() + values, device=device, dtype=tensor.dtype)
        return torch.as_strided(memory, tensor.shape, tensor.stride(), values).copy_(tensor)

    for plain, values in itertools.product(_of_kinds(block), (1, 2)):
        for case in (plain, plain.channels_last()):
            for changes in ({"input": moved(case.input, values)}, {"weight": moved(case.weight, values)}):
                laid_out = replace(case, **changes)
                check_like_eager(laid_out)
                assert torch.equal(laid_out.ours(), case.ours())


def col2im_random(device):
    """Run by the child: random numbers of every kind."""
    rng = random.Random(7)
    for _ in range(120):
        dtype, precision = rng.choice(KINDS)
        c, k = rng.randint(1, 70), rng.randint(1, 40)
        kernel = tuple(rng.randint(1, 4) for _ in range(3))
        stride = tuple(rng.randint(1, 3) for _ in range(3))
        dilation = tuple(rng.randint(1, 3) for _ in range(3))
        padding = tuple(rng.randint(0, d * (t - 1) // 2) for d, t in zip(dilation, kernel, strict=True))
        block = make_block(
            rng.randint(1, 3), c, k, tuple(rng.randint(4, 9) for _ in range(3)), kernel, stride=stride,
            dilation=dilation, padding=padding, num_groups=1, bias=rng.random() < 0.5, device=device,
            dtype=dtype, precision=precision,
        )  # fmt: skip
        check_like_eager(block.channels_last() if rng.random() < 0.5 else block)


def col2im_exact(device):
    """Run by the child: small integers are exact."""
    for numbers in ({}, {"stride": 2, "padding": 1}, {"stride": 2}):
        block = integer_block(3, 16, 20, 8, 3 if "padding" in numbers else 2, device=device, **numbers)
        for plain in _of_kinds(block):
            for case in (plain, plain.channels_last()):
                check_exact_relu_conv(case)


def col2im_hostile(device):
    """Run by the child: NaN stays in its sample; large means, outliers and the dtype's range cost nothing."""
    for layout in ("NCDHW", "NDHWC"):
        torch.manual_seed(1234)
        block = make_block(
            3, 16, 24, (3, 4, 5), 3, num_groups=3, stride=2, padding=1, device=device, bias=False
        )
        block = block.channels_last() if layout == "NDHWC" else block
        for clean in _of_kinds(block):
            expected = clean.ours()
            poisoned = replace(clean, input=clean.input.clone())
            poisoned.input[1] = torch.nan
            y = poisoned.ours()
            assert torch.equal(y[0], expected[0]) and torch.equal(y[2], expected[2])
            assert bool(y[1].isnan().all())
        for dtype, exponents in ((torch.bfloat16, (-60, 50)), (torch.float16, (-6, 10))):
            low = block.to(dtype)
            outlier = replace(low, input=low.input.clone())
            outlier.input[:, :, 0, 0, 0] = 1e3
            check_like_eager(outlier)
            for exponent in exponents:
                check_like_eager(replace(low, input=low.input * 2.0**exponent, eps=1e-12 * 4.0**exponent))
        outlier = replace(block, input=block.input.clone())
        outlier.input[:, :, 0, 0, 0] = 1e6
        check_like_eager(outlier)
        for exponent in (-60, -20, 20, 50):
            check_like_eager(replace(block, input=block.input * 2.0**exponent, eps=1e-12 * 4.0**exponent))
        far = make_block(2, 24, 24, (5, 6, 7), 3, num_groups=24, stride=2, padding=1, device=device)
        far = replace(far, bias=far.bias + 1e4)
        far = far.channels_last() if layout == "NDHWC" else far
        for case in (far, far.to(torch.bfloat16), far.to(torch.float16)):
            check_like_eager(case)


def col2im_tails(device):
    """Run by the child: everything that may follow, with the convolution returned and not."""
    for order, norm, activation in COMBINATIONS:
        for returned, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
            torch.manual_seed(1234)
            call = make_call(
                2, 6, 8, extent=(3, 4, 5), order=order, norm=norm, activation=activation, stride=2,
                device=device, dtype=dtype, return_conv=returned,
            )  # fmt: skip
            for case in (call, call.channels_last("input", "weight")):
                results = [value if returned else (value,) for value in (
                    case.ours(), case.eager(), case.to(torch.float64).eager())]  # fmt: skip
                for y, eager, exact in zip(*results, strict=True):
                    limit = max(ERROR_FACTOR * relative_error(eager, exact), 4 * torch.finfo(y.dtype).eps)
                    assert relative_error(y, exact) <= limit, (order, norm, activation, returned, dtype)


def col2im_infinite_weight(device):
    """Run by the child: an infinite weight makes NaN of no output where no input reaches it."""
    call = make_call(
        2, 6, 16, (3, 4, 5), norm=None, order="norm_act", activation="relu", bias=False, device=device,
        dtype=torch.float32, stride=2,
    )  # fmt: skip
    call.tensors["input"].abs_().add_(0.5)
    call.tensors["weight"][:, ::2, :, :, 0] = torch.inf
    expected = call.to(torch.float64).map(lambda tensor: tensor.cpu()).eager()
    assert bool(expected.isinf().any()) and not bool(expected.isnan().any())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        typed = call.to(dtype)
        for case in (typed, typed.channels_last("input", "weight")):
            y = case.ours().cpu().double()
            assert torch.equal(y.isinf(), expected.isinf()) and not bool(y.isnan().any())


def col2im_gradients(device):
    """Run by the child: the backward pass reads the convolution, which is kept or computed again."""
    for name in ("stride-2", "odd-everything", "dilated"):
        sizes, numbers = SHAPES[name]
        torch.manual_seed(1234)
        block = make_block(*sizes, num_groups=1, device=device, **numbers)
        for case in _of_kinds(block):
            check_gradients_like_eager(case)
            check_gradients_like_eager(case.channels_last())


def col2im_recompute(device):
    """Run by the child: the bits of inference, whether the convolution is kept or computed again."""
    torch.backends.cudnn.deterministic = True  # of the convolution's gradients
    for name in ("few-outputs", "one-output", "unbatched"):
        sizes, numbers = SHAPES[name]
        torch.manual_seed(1234)
        block = make_block(*sizes, num_groups=1, device=device, **numbers)
        for plain, last in itertools.product(_of_kinds(block), (False, True)):
            case = plain.channels_last() if last else plain
            y = case.ours()
            grad_y = torch.randn_like(y)
            gradients = []
            for recompute in (False, True):
                leaves = case.requires_grad()
                args, kwargs = leaves.arguments()
                trained = upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=recompute)
                assert torch.equal(trained, y), (name, recompute)
                trained.backward(grad_y)
                gradients.append([tensor.grad for tensor in leaves.tensors().values()])
            for kept, again in zip(*gradients, strict=True):
                assert torch.equal(kept, again), name


def col2im_empty(device):
    """Run by the child: a batch of no samples."""
    block = make_block(2, 8, 8, 4, 3, num_groups=2, device=device)
    for case in (block, block.channels_last(), block.to(torch.bfloat16), block.to(torch.float16)):
        y = replace(case, input=case.input[:0]).ours()
        assert y.shape == (0, *case.ours().shape[1:]) and y.device == case.input.device


def col2im_graph(device):
    """Run by the child: captured, then replayed with other inputs, the same bits."""
    block = make_block(2, 20, 12, (5, 6, 7), 3, num_groups=3, stride=2, padding=1, device=device)
    for plain, last in itertools.product(_of_kinds(block), (False, True)):
        case = plain.channels_last() if last else plain
        case.ours()  # reserves shared memory
        static = replace(case, input=case.input.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = static.ours()
        static.input.copy_(case.input * 3 + 1)
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, static.ours())


@pytest.mark.parametrize(
    "cases",
    [
        "cases", "unaligned", "random", "exact", "hostile", "tails", "infinite_weight", "gradients",
        "recompute", "empty", "graph",
    ],
)  # fmt: skip
def test_forced_col2im_plan(cuda, cases):
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    result = _run_child(f"import test_col2im; test_col2im.col2im_{cases}('cuda')", plan="col2im")
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_col2im_plan_refuses(cuda):
    for code, what in (
        ("make_block(2, 8, 8, 4, 3, device='cuda', dtype=torch.float64)", "it computes no float64"),
        ("make_block(2, 8, 8, 4, 3, device='cuda', groups=2)", "the convolution has groups"),
    ):
        result = _run_child(f"import torch\nfrom oracles import make_block\n{code}.ours()", plan="col2im")
        assert result.returncode != 0
        assert f"got col2im, but {what}" in result.stderr


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_trains_few_outputs(hopper, dtype, layout):
    """As chosen, in the SM90 plan's place: the forward has the bits of inference, and gradients are right."""
    block = make_block(1, 192, 2, (10, 20, 21), 5, num_groups=2, padding=2, device=hopper, dtype=dtype)
    block = replace(block, precision="tf32")
    block = block.channels_last() if layout == "NDHWC" else block
    args, kwargs = block.arguments()
    plan = upconv3d.explain(*args, **kwargs, training=True)
    assert plan.algorithm == "cuda_col2im" and plan.keeps_conv and not plan.keeps_activation
    assert torch.equal(block.requires_grad().ours(), block.ours())
    check_gradients_like_eager(block)
