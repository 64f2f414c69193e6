# SPDX-License-Identifier: Apache-2.0
"""The SM90 plan's kernels "stored" and "twice" on small blocks, where the estimate would choose but one.

test_held.py has the third kernel, "held".

UPCONV3D_PLAN is read once per process, so the cases run in another.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from oracles import alike_blocks, check_alike, check_gradients_like_eager, check_like_eager, make_block
from test_sm80 import _run_child

# Numbers of make_block: samples, C, K, extent, kernel; and what differs from a plain block.
SHAPES = {
    "kernel-is-stride": ((1, 64, 64, 8, 2), {"stride": 2}),
    "phases-side-by-side": ((2, 64, 32, (6, 7, 8), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "channels-48-as-they-lie": ((2, 48, 72, (5, 6, 7), 2), {"stride": 2}),
    "channels-20-padded": ((2, 20, 64, (5, 6, 7), 2), {"stride": 2, "bias": False}),
    "stride-1": ((3, 16, 24, (5, 4, 6), 2), {"padding": 1, "affine": False}),
    "kernel-1x2x2": ((2, 32, 16, (4, 6, 5), (1, 2, 2)), {"stride": (1, 2, 2)}),
    "channels-72-136": ((2, 72, 136, (9, 4, 17), 3), {}),
    "channels-136-72": ((2, 136, 72, (9, 4, 17), 3), {}),
    "channels-256-64": ((2, 256, 64, (1, 1, 3), 3), {}),
    "64-phases": ((2, 64, 128, (3, 4, 5), 4), {"stride": 4}),
    "64-phases-of-8-taps": ((1, 64, 64, (3, 4, 5), 8), {"stride": 4, "padding": 2}),
    "64-phases-stacked": ((2, 32, 40, (3, 4, 5), (1, 8, 8)), {"stride": (1, 8, 8)}),
    "stride-3": ((2, 64, 72, (3, 4, 5), 4), {"stride": 3, "padding": 1}),
    "stride-1x4x4": ((2, 72, 64, (5, 4, 7), (2, 4, 5)), {"stride": (1, 4, 4), "padding": (1, 0, 2)}),
    "stride-2x4x4": ((2, 64, 128, (4, 3, 5), (2, 4, 4)), {"stride": (2, 4, 4)}),
    "stride-2x4x4-odd": ((2, 72, 40, (4, 3, 5), (3, 5, 6)), {"stride": (2, 4, 4), "padding": 1}),
    "channels-8-8": ((2, 8, 8, (9, 4, 17), 3), {}),
    "channels-3-100": ((2, 3, 100, (9, 4, 17), 3), {"num_groups": 4}),
    "channels-100-3": ((2, 100, 3, (9, 4, 17), 3), {"num_groups": 1}),
    "channels-20-20": ((2, 20, 20, (9, 4, 17), 3), {}),
    "channels-64-2": ((2, 64, 2, (1, 1, 3), 3), {"num_groups": 1}),
    "kernel-1": ((2, 16, 24, 8, 1), {"num_groups": 3}),
    "kernel-7": ((2, 16, 24, 8, 7), {"padding": 3}),
    "kernel-5x1x3": ((2, 16, 24, 8, (5, 1, 3)), {}),
    # Computed twice, a block merges a group's 5176 partial moments, or several blocks 10352 and more.
    "many-partials": ((1, 16, 32, (47, 55, 64), 2), {"stride": 2}),
    "more-partials": ((2, 16, 64, (47, 55, 64), 2), {"stride": 2, "num_groups": 2}),
    "one-group": ((1, 16, 32, (47, 55, 64), 2), {"stride": 2, "num_groups": 1}),
    # From one plane of y to the next 2^41 bytes, if there were another one; TMA takes strides below 2^40.
    "stride-2097152": (
        (1, 64, 64, (1, 32, 64), (1, 3, 3)),
        {"stride": (2**21, 2, 2), "padding": (0, 1, 1), "output_padding": (0, 1, 1)},
    ),
    "stride-4x4x2": ((1, 64, 64, (3, 4, 5), (4, 5, 2)), {"stride": (4, 4, 2), "padding": (0, 1, 0)}),
}
STORED_ALONE = {"channels-72-136", "channels-136-72", "channels-256-64"}
# What the library plan takes of test_cuda.py's blocks.
STORED_ALONE |= {"channels-8-8", "channels-3-100", "channels-100-3", "channels-20-20", "channels-64-2"}
STORED_ALONE |= {"kernel-1", "kernel-7", "kernel-5x1x3"}
# Phases along the width that read differently are not folded, and are then too many views.
STORED_ALONE.add("stride-2x4x4-odd")
# Computed twice, an NCDHW result wants a stride of 2 along the width, or more than 27 phases (transposed).
MANY_PHASES = ("64-phases", "64-phases-of-8-taps", "64-phases-stacked")
CHANNELS_LAST_ALONE = {("twice", name) for name in ("stride-1", "stride-3", "stride-1x4x4")}
KINDS = ((torch.bfloat16, "ieee"), (torch.float16, "ieee"), (torch.float32, "tf32"))

# C, K and groups of the convolution whose outputs fill whole vectors.
GROUPS = [(128, 256, 2), (128, 256, 4), (128, 96, 2), (128, 96, 4), (32, 64, 2), (32, 64, 4), (20, 128, 2)]
GROUPS += [(20, 128, 4), (40, 272, 2), (256, 128, 2), (256, 128, 4)]
STRIDES = ((3, 3, 3), (1, 4, 4), (2, 4, 4), (3, 3, 4), (4, 4, 4))


def check_doubtful_sums(block):
    """Sums of squares that cancel, and ones of values that overflow once they are rounded."""
    for mean in (3, 8, 20):
        check_like_eager(replace(block, bias=block.bias + mean))
    # A channel that ReLU closes throughout, though its bias is large.
    closed = block.weight.clone(memory_format=torch.preserve_format)
    closed[:, 5] = -closed[:, 5].abs() - 1
    for scale in (1, 64):
        check_like_eager(
            replace(block, input=block.input.abs() * scale, weight=closed, bias=block.bias + 6 * scale)
        )
    if block.input.dtype is torch.float16 and not block.plan().twice:  # which never rounds them
        weight = block.weight.clone(memory_format=torch.preserve_format)
        weight[:, 3] *= 6e4
        overflowing = replace(block, weight=weight)
        finite = overflowing.eager().isfinite()
        assert 0 < finite.sum() < finite.numel()
        assert torch.equal(overflowing.ours().isfinite(), finite)


def cases(device, plan):
    """Run by the child: every shape, layout and dtype, against float64 and PyTorch."""
    for (name, (sizes, numbers)), channels_last in itertools.product(SHAPES.items(), (True, False)):
        if not channels_last and (plan, name) in CHANNELS_LAST_ALONE:
            continue
        if plan == "twice" and name in STORED_ALONE:
            continue
        for dtype, precision in KINDS:
            torch.manual_seed(1234)
            options = {"num_groups": 4, "device": device, "dtype": dtype, "precision": precision}
            block = make_block(*sizes, **(options | numbers))
            if channels_last:
                block = block.channels_last()
            assert block.plan().algorithm == "sm90_implicit_gemm", block.plan()
            assert block.plan().twice == (plan == "twice"), block.plan()
            check_like_eager(block)
            if name in ("channels-72-136", "kernel-is-stride"):  # some tiles are whole
                check_doubtful_sums(block)
            if plan == "stored" and name in MANY_PHASES:  # else PyTorch's, where a backward pass follows
                check_gradients_like_eager(block)
            assert torch.equal(block.ours(), block.ours()), (
                f"{name} {dtype} {channels_last=} differs from run to run"
            )


def convolution_groups(device):
    """Run by the child: groups as they lie and packed apart, at float32's accuracy, too."""
    for (c, k, groups), (dtype, precision) in itertools.product(GROUPS, (*KINDS, (torch.float32, "ieee"))):
        torch.manual_seed(1234)
        options = {"num_groups": 4, "device": device, "dtype": dtype, "precision": precision}
        block = make_block(2, c, k, (4, 5, 9), 3, groups=groups, **options)
        for case in (block, block.channels_last()):
            assert case.plan().algorithm == "sm90_implicit_gemm", case.plan()
            check_like_eager(case)


def groups_of_many_phases(device):
    """Run by the child: in several launches from 28 phases on, whose moments one more merges."""
    for stride, (dtype, precision) in itertools.product(STRIDES, (*KINDS, (torch.float32, "ieee"))):
        torch.manual_seed(1234)
        options = {"num_groups": 8, "device": device, "dtype": dtype, "precision": precision}
        block = make_block(2, 64, 128, (3, 4, 5), (5, 4, 6), groups=2, stride=stride, padding=1, **options)
        for case in (block, block.channels_last()):
            stages = case.plan().stages
            assert ("group_norm_finalize_slabs" in stages) == (math.prod(stride) > 27), case.plan()
            check_like_eager(case)
            assert torch.equal(case.ours(), case.ours())


def constant_volumes(device, plan):
    """Run by the child: means that rounding moves, which eps does not hide."""
    for (dtype, precision), channels_last in itertools.product(KINDS, (True, False)):
        torch.manual_seed(1234)
        for block in alike_blocks(device, dtype, precision):
            if plan == "twice" and not channels_last and block.stride == 1:
                continue  # as CHANNELS_LAST_ALONE
            case = block.channels_last() if channels_last else block
            assert case.plan().algorithm == "sm90_implicit_gemm", case.plan()
            assert case.plan().twice == (plan == "twice"), case.plan()
            check_alike(case)


@pytest.mark.parametrize("run", ["cases", "constant_volumes"])
@pytest.mark.parametrize("plan", ["stored", "twice"])
def test_forced_kernel(hopper, plan, run):
    result = _run_child(f"import test_forced_sm90; test_forced_sm90.{run}('cuda', '{plan}')", plan=plan)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("run", ["convolution_groups", "groups_of_many_phases"])
def test_forced_groups(hopper, run):
    result = _run_child(f"import test_forced_sm90; test_forced_sm90.{run}('cuda')", plan="stored")
    assert result.returncode == 0, result.stdout + result.stderr
