# SPDX-License-Identifier: Apache-2.0
"""The direct plan. What UPCONV3D_PLAN asks for is read once per process, so forced cases run in another."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import (
    ERROR_FACTOR,
    check_exact_relu_conv,
    check_like_eager,
    integer_block,
    make_block,
    relative_error,
)
from tails import COMBINATIONS, make_call
from test_sm80 import _run_child

FEW_CHANNELS_KERNEL = "conv_transpose_few_channels_sm80"

# Numbers of make_block: samples, C, K, extent, kernel; and what differs from a plain block.
DEPTHWISE = {
    "k3": ((2, 64, 64, (3, 9, 5), 3), {"stride": 2, "padding": 1}),
    "k3-whole": ((1, 6, 6, (4, 3, 6), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "k3-unpadded": ((1, 70, 70, (2, 5, 4), 3), {"stride": 2}),
    "k3-much-padding": ((1, 4, 4, (6, 7, 5), 3), {"stride": 2, "padding": (3, 2, 4), "output_padding": 1}),
    "k3-wide": ((1, 2, 2, (2, 3, 150), 3), {"stride": 2, "padding": 1}),
    "k3-high": ((1, 4, 4, (2, 90, 3), 3), {"stride": 2, "padding": (1, 1, 0)}),
    "k5": ((2, 20, 20, (3, 4, 7), 5), {"stride": 2, "padding": 2}),
    "k5-whole": ((1, 40, 40, (3, 5, 4), 5), {"stride": 2, "padding": (2, 1, 0), "output_padding": (1, 0, 1)}),
    "k7": ((1, 18, 18, (4, 5, 6), 7), {"stride": 2, "padding": 3}),
    "odd-channels": ((2, 7, 7, (3, 4, 5), 3), {"stride": 2, "padding": 1}),
    "one-position": ((2, 8, 8, 1, 3), {"stride": 2}),
    # Threads are left over that channels cannot take: in NCDHW the kernel would not end.
    "one-voxel": ((2, 64, 64, 1, 3), {"stride": 2, "padding": 1}),
    "one-voxel-k5": ((2, 64, 64, 1, 5), {"stride": 2, "padding": 2}),
    "one-voxel-k7": ((2, 64, 64, 1, 7), {"stride": 2, "padding": 3}),
    "a-column": ((2, 64, 64, (1, 9, 1), 3), {"stride": 2, "padding": 1}),
    "two-columns": ((2, 64, 64, (1, 9, 2), 3), {"stride": 2, "padding": 1}),
    "two-columns-deep": ((2, 64, 64, (2, 9, 1), 3), {"stride": 2, "padding": 1}),
    "unbatched": ((None, 8, 8, (3, 4, 5), 3), {"stride": 2, "padding": 1}),
}
ANY_TAPS = {
    "multiplier": ((2, 5, 20, (3, 4, 9), 3), {"stride": 2, "padding": 1, "groups": 5}),
    "groups-of-3-to-8": ((2, 12, 32, (3, 4, 5), 3), {"stride": 2, "padding": 1, "groups": 4}),
    "groups-of-4-to-3": ((1, 8, 6, (3, 4, 5), 3), {"padding": 1, "groups": 2}),
    "dense": ((2, 3, 16, (4, 6, 7), 3), {"stride": 2, "padding": 1}),
    "to-two": ((2, 32, 2, (4, 5, 6), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "to-four": ((1, 5, 4, (3, 2, 40), 2), {"stride": 2}),
    "stride-1": ((2, 16, 16, (4, 5, 9), 3), {"padding": 1, "groups": 16}),
    "stride-3-dilated": (
        (1, 6, 12, 4, 3),
        {"stride": (3, 1, 2), "dilation": (1, 2, 3), "padding": (0, 2, 1), "groups": 6},
    ),
    "stride-and-dilation-share": ((1, 4, 4, 5, 3), {"stride": 4, "dilation": 6, "groups": 2, "padding": 3}),
    "kernel-below-stride": ((2, 4, 4, 3, 1), {"stride": 3, "output_padding": 2}),
    "anisotropic": (
        (1, 6, 6, (2, 5, 4), (1, 3, 3)),
        {"stride": (1, 2, 2), "padding": (0, 1, 1), "groups": 6},
    ),
    "k4": ((1, 24, 24, 4, 4), {"stride": 2, "padding": 1, "groups": 24}),
}
# On tensor cores, in 16 bit and at both precisions of float32.
FEW_CHANNELS = {
    "up-block": ((2, 32, 16, (16, 17, 18), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "kernel-is-stride": ((1, 64, 32, (12, 12, 20), 2), {"stride": 2}),
    "stride-1": ((1, 16, 24, (20, 21, 22), 3), {"padding": 1}),
    "k4": ((2, 12, 8, (16, 24, 20), 4), {"stride": 2, "padding": 1}),
    "two-blocks-of-channels": ((1, 48, 40, (10, 12, 14), 3), {"stride": 2, "padding": 1}),
    "no-whole-vectors": ((2, 33, 7, (12, 13, 31), 3), {"stride": 2, "padding": 1}),
    "groups-of-80-to-36": ((1, 160, 72, (7, 8, 9), 2), {"stride": 2, "groups": 2}),
    "groups-of-128-to-12": ((2, 256, 24, (6, 7, 8), 2), {"stride": 2, "groups": 2}),
    "groups-of-25-to-36-pointwise": ((2, 50, 72, (9, 10, 11), 1), {"groups": 2}),
    "groups-of-6-to-4": ((2, 24, 16, (9, 10, 11), 3), {"padding": 1, "groups": 4}),
    # Rows of 63, 31, 9 and 1, which the output pass stages in NCDHW.
    "rows-of-63": ((3, 3, 16, (5, 9, 32), 3), {"stride": 2, "padding": 1}),
    "rows-of-31": ((2, 8, 12, (6, 7, 16), 3), {"stride": 2, "padding": 1}),
    "rows-of-9": ((2, 8, 7, (9, 12, 5), 3), {"stride": 2, "padding": 1}),
    "rows-of-1": ((2, 16, 20, (9, 40, 1), 3), {"stride": 2, "padding": 1}),
    "rows-of-63-stride-1": ((2, 8, 16, (9, 20, 63), 3), {"padding": 1}),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _blocks(device, shapes, dtypes=DTYPES):
    for name, ((n, c, k, extent, kernel), numbers) in shapes.items():
        for dtype in dtypes:
            groups = {"groups": c} if shapes is DEPTHWISE else {}
            numbers = numbers | groups
            torch.manual_seed(1234)
            block = make_block(
                n, c, k, extent, kernel, num_groups=1 if k % 2 else 2, device=device, dtype=dtype, **numbers
            )
            for case in (block, block.channels_last()):
                yield f"{name} {dtype}", case


def direct_cases(device, shapes):
    """Run by the child: every shape, dtype and layout against float64 and PyTorch, twice the same bits."""
    for name, case in _blocks(device, shapes):
        plan = case.plan()
        assert plan.algorithm == "cuda_direct", plan
        kernel = "conv_transpose_depthwise" if shapes is DEPTHWISE else "conv_transpose_any_taps"
        if shapes is ANY_TAPS and plan.stages[0] == FEW_CHANNELS_KERNEL:
            kernel = FEW_CHANNELS_KERNEL
        assert plan.stages == (kernel, "group_norm_finalize", kernel), (name, plan)
        check_like_eager(case)
        assert torch.equal(case.ours(), case.ours()), f"{name} differs from run to run"


def direct_few_channels(device):
    """Run by the child: in every order of x and w, twice the same bits."""
    for name, block in _blocks(device, FEW_CHANNELS):
        is_float = block.input.dtype == torch.float32
        for precision in ("tf32", "ieee") if is_float else (block.precision,):
            case = replace(block, precision=precision)
            plan = case.plan()
            assert plan.stages[0] == FEW_CHANNELS_KERNEL, (name, plan)
            last = case.channels_last()
            for mixed in (case, replace(case, weight=last.weight), replace(last, weight=case.weight)):
                check_like_eager(mixed)
                assert torch.equal(mixed.ours(), mixed.ours()), f"{name} differs from run to run"


def direct_depthwise(device):
    direct_cases(device, DEPTHWISE)


def direct_any_taps(device):
    direct_cases(device, ANY_TAPS)


def direct_random(device):
    """Run by the child: random numbers of every kind."""
    rng = random.Random(7)
    for _ in range(60):
        groups = rng.choice([1, 2, 3, 8])
        c, k = groups * rng.randint(1, 4), groups * rng.choice([1, 1, 2, 3, 8])
        kernel = tuple(rng.randint(1, 4) for _ in range(3))
        stride = tuple(rng.randint(1, 3) for _ in range(3))
        dilation = tuple(rng.randint(1, 2) for _ in range(3))
        padding = tuple(rng.randint(0, d * (t - 1) // 2) for d, t in zip(dilation, kernel, strict=True))
        extent = tuple(rng.randint(4, 9) for _ in range(3))
        dtype = rng.choice(DTYPES)
        block = make_block(
            rng.randint(1, 3), c, k, extent, kernel, groups=groups, stride=stride, dilation=dilation,
            padding=padding, num_groups=groups, bias=rng.random() < 0.5, device=device, dtype=dtype,
        )  # fmt: skip
        assert block.plan().algorithm == "cuda_direct", block.plan()
        check_like_eager(block.channels_last() if rng.random() < 0.5 else block)


def direct_exact(device):
    """Run by the child: small integers are exact."""
    for dtype in DTYPES:
        for numbers in ({"groups": 16}, {"groups": 16, "stride": 2, "padding": 1}, {"stride": 2}):
            block = integer_block(
                3, 16, 16, 8, 3 if "padding" in numbers else 2, device=device, dtype=dtype, **numbers
            )
            for case in (block, block.channels_last()):
                check_exact_relu_conv(case)


def direct_mixed_layouts(device):
    """Run by the child: weights and inputs that lie in different orders, and strided ones."""
    for groups in (8, 2):
        block = make_block(2, 8, 16 if groups == 2 else 8, (3, 4, 5), 3, groups=groups, stride=2, padding=1,
                           num_groups=2, device=device)  # fmt: skip
        last = block.channels_last()
        expected = block.ours()
        for case in (
            replace(block, weight=last.weight),
            replace(last, weight=block.weight),
            replace(block, input=torch.stack([block.input] * 2, -1)[..., 0]),
            replace(block, weight=torch.stack([block.weight] * 2, -1)[..., 0]),
        ):  # fmt: skip
            torch.testing.assert_close(case.ours(), expected, rtol=1e-5, atol=1e-5)


def direct_hostile(device):
    """Run by the child: NaN stays in its sample, and a mean far beyond the deviation costs nothing."""
    for layout in ("NCDHW", "NDHWC"):
        for groups in (24, 8):
            block = make_block(
                3, 24, 24, (3, 4, 5), 3, num_groups=3, groups=groups, stride=2, padding=1, device=device,
                dtype=torch.bfloat16,
            )  # fmt: skip
            block = block.channels_last() if layout == "NDHWC" else block
            expected = block.ours()
            block.input[1] = torch.nan
            y = block.ours()
            assert torch.equal(y[0], expected[0]) and torch.equal(y[2], expected[2])
            assert bool(y[1].isnan().all())
            far = make_block(
                2, 24, 24, (5, 6, 7), 3, num_groups=24, groups=groups, stride=2, padding=1, device=device
            )
            far = replace(far, bias=far.bias + 1e4)
            check_like_eager(far.channels_last() if layout == "NDHWC" else far)
            outlier = replace(far, input=far.input.clone())
            outlier.input[:, :, 0, 0, 0] = 1e6
            # An outlier among a thread's first values costs its moments some of the last bits.
            check_like_eager(outlier.channels_last() if layout == "NDHWC" else outlier, floor_factor=4)


def direct_outliers(device):
    """Run by the child: one value of x far from all others, at the start, takes none of their digits."""
    for c, k, groups in ((8, 8, 1), (16, 8, 1), (24, 24, 3), (32, 32, 4)):
        torch.manual_seed(1234)
        block = make_block(
            2, c, k, (9, 10, 11), 3, num_groups=k // 4, groups=groups, stride=2, padding=1, device=device
        )
        for outlier in (1e3, 1e6):
            case = replace(block, input=block.input.clone())
            case.input[:, :, 0, 0, 0] = outlier
            for laid_out in (case, case.channels_last()):
                assert laid_out.plan().stages[0] == FEW_CHANNELS_KERNEL, laid_out.plan()
                check_like_eager(laid_out)


def direct_first_phase_outside(device):
    """Run by the child: volumes of which each tile's first phases are cut off, and a large mean."""
    for dtype in DTYPES:
        for extent, kernel in (((20, 30, 1), 3), ((1, 40, 1), 3), ((1, 1, 50), 3), (1, 3), ((20, 1, 30), 5)):
            block = make_block(
                2,
                16,
                16,
                extent,
                kernel,
                num_groups=4,
                stride=2,
                padding=kernel // 2,
                device=device,
                dtype=dtype,
            )
            case = replace(block, bias=block.bias + 300)
            for laid_out in (case, case.channels_last()):
                assert laid_out.plan().stages[0] == FEW_CHANNELS_KERNEL, laid_out.plan()
                check_like_eager(laid_out)


def direct_tails(device):
    """Run by the child: everything that may follow, on both kernels."""
    for order, norm, activation in COMBINATIONS:
        for dtype in DTYPES:
            for numbers in ({"c": 8, "k": 8, "groups": 8, "stride": 2}, {"c": 6, "k": 4, "groups": 2}):
                torch.manual_seed(1234)
                call = make_call(
                    2,
                    extent=(3, 4, 5),
                    order=order,
                    norm=norm,
                    activation=activation,
                    device=device,
                    dtype=dtype,
                    **numbers,
                )
                for case in (call, call.channels_last("input", "weight")):
                    y, eager, exact = case.ours(), case.eager(), case.to(torch.float64).eager()
                    limit = max(ERROR_FACTOR * relative_error(eager, exact), 4 * torch.finfo(dtype).eps)
                    assert relative_error(y, exact) <= limit, (order, norm, activation, dtype, numbers)


def direct_infinite_weight(device):
    """Run by the child: an infinite weight makes NaN of no output where no input reaches it."""
    for dtype in DTYPES:
        call = make_call(
            2, 6, 16, (3, 4, 5), norm=None, order="norm_act", activation="relu", bias=False, device=device,
            dtype=dtype, groups=2, stride=2,
        )  # fmt: skip
        call.tensors["input"].abs_().add_(0.5)
        call.tensors["weight"][:, ::2, :, :, 0] = torch.inf
        call.tensors["weight"][:, ::2, 0] = torch.inf
        expected = call.to(torch.float64).map(lambda tensor: tensor.cpu()).eager()
        assert bool(expected.isinf().any()) and not bool(expected.isnan().any())
        for case in (call, call.channels_last("input", "weight")):
            y = case.ours().cpu().double()
            assert torch.equal(y.isinf(), expected.isinf()) and not bool(y.isnan().any()), dtype


def direct_closed_channel(device):
    """Run by the child: a bias of -inf makes 0 of its channel before the norm, as in PyTorch."""
    blocks = [
        ((2, 16, 16, (5, 6, 7), 3), {"stride": 2, "padding": 1}),  # few channels
        ((2, 5, 20, (3, 4, 9), 3), {"stride": 2, "padding": 1, "groups": 5}),  # any taps
        ((2, 16, 16, (3, 9, 5), 3), {"stride": 2, "padding": 1, "groups": 16}),  # depthwise
    ]
    for at, (shape, options) in enumerate(blocks):
        for dtype in DTYPES:
            block = make_block(*shape, num_groups=4, device=device, dtype=dtype, **options)
            block.bias[3] = -torch.inf
            for case in (block, block.channels_last()):
                assert (FEW_CHANNELS_KERNEL in case.plan().stages) == (at == 0), case.plan()
                assert bool(case.ours().isfinite().all()), (shape, dtype)
                check_like_eager(case)


def direct_threads(device):
    """Run by the child: threads launch one kernel for shapes of more and of less shared memory."""
    blocks = [
        make_block(1, c, 64, 6, kernel, groups=8, stride=2, padding=kernel // 2, num_groups=8, device=device,
                   dtype=torch.bfloat16).channels_last()
        for c, kernel in ((56, 7), (8, 7), (16, 5))
    ]  # fmt: skip
    expected = [block.ours() for block in blocks]

    def run(i):
        with torch.no_grad():
            return all(torch.equal(blocks[i].ours(), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(len(blocks)) as pool:
        assert all(pool.map(run, range(len(blocks))))


@pytest.mark.parametrize(
    "cases",
    ["depthwise", "any_taps", "few_channels", "random", "exact", "mixed_layouts", "hostile", "outliers",
     "first_phase_outside", "tails", "infinite_weight", "closed_channel", "threads"],
)  # fmt: skip
def test_forced_direct_plan(cuda, cases):
    result = _run_child(f"import test_direct; test_direct.direct_{cases}('cuda')", plan="direct")
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_direct_plan_refuses(cuda):
    code = (
        "import torch\n"
        "from tails import make_call\n"
        "make_call(c=8, k=8, groups=8, return_conv=True, device='cuda', dtype=torch.float32).ours()"
    )
    result = _run_child(code, plan="direct")
    assert result.returncode != 0
    assert "got direct, but the convolution is wanted beside what follows it" in result.stderr


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_in_inference_alone(cuda, dtype, layout):
    """An up-block of MedNeXt runs the direct plan; its training keeps PyTorch's convolution."""
    block = make_block(
        1, 32, 32, 16, 3, groups=32, stride=2, padding=1, num_groups=32, device=cuda, dtype=dtype
    )
    block = block.channels_last() if layout == "NDHWC" else block
    assert block.plan().algorithm == "cuda_direct"
    args, kwargs = block.arguments()
    assert upconv3d.explain(*args, **kwargs, training=True).algorithm == "cuda_library"
    check_like_eager(block)
    leaves = block.requires_grad()
    leaves.ours().sum().backward()
    assert leaves.weight.grad.isfinite().all()
