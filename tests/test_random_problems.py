# SPDX-License-Identifier: Apache-2.0
"""Random problems of every argument against float64, from a printed seed.

Values must be as exact as eager's and, on a GPU, the same bits twice.

A failure names UPCONV3D_SEED and the problem; UPCONV3D_PROBLEMS sets how many are drawn on a GPU.
"""

import math
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import SEED
from oracles import ERROR_FACTOR, Block, check_like_eager, error_floor, make_block, relative_error

GPU_PROBLEMS = int(os.environ.get("UPCONV3D_PROBLEMS", "500"))
CPU_PROBLEMS = 40
BATCHES = 10  # tests that share the problems

# dtype and precision; precision concerns float32 alone.
KINDS = [
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
]
LARGEST_EXTENT = 12
CHANNELS = [1, 2, 3, 8, 16, 20, 24, 40, 48, 64, 72, 100, 128, 136]
CONV_GROUPS = [1, 1, 1, 1, 2, 4]


def outputs(axis: dict[str, int]) -> int:
    reach = axis["dilation"] * (axis["kernel"] - 1) + axis["output_padding"]
    return (axis["extent"] - 1) * axis["stride"] - 2 * axis["padding"] + reach + 1


def random_axis(rng, largest=LARGEST_EXTENT) -> dict[str, int]:
    """Extent and convolution arguments of one axis with at least one output."""
    while True:
        extent, kernel = rng.randint(1, largest), rng.randint(1, 7 if rng.random() < 0.2 else 4)
        stride, dilation = rng.choice([1, 1, 2, 2, 3, 4]), rng.choice([1, 1, 1, 2, 3])
        padding = rng.randint(0, 3)
        axis = {
            "extent": extent,
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "output_padding": rng.randrange(max(stride, dilation)),
            "dilation": dilation,
        }
        if outputs(axis) > 0:
            return axis


def random_problem(index: int, device: torch.device) -> tuple[str, Block]:
    """A block, and its description for messages."""
    rng = random.Random(f"{SEED}/{index}")
    axes = [random_axis(rng) for _ in range(3)]
    while math.prod(map(outputs, axes)) == 1:  # norm groups of one channel want two values
        axes[2] = random_axis(rng)
    arguments = {name: tuple(axis[name] for axis in axes) for name in axes[0]}
    extent, kernel = list(arguments.pop("extent")), list(arguments.pop("kernel"))
    if max(extent) == 1:
        extent[2] = 2  # groups of one channel should have a variance, where the kernel is 1 as well
    groups = rng.choice(CONV_GROUPS)
    n, c, k = rng.randint(1, 3), groups * rng.choice(CHANNELS), groups * rng.choice(CHANNELS)
    num_groups = rng.choice([g for g in range(1, k + 1) if k % g == 0])
    numbers = {
        **arguments,
        "groups": groups,
        "num_groups": num_groups,
        "bias": rng.random() < 0.5,
        "affine": rng.random() < 0.7,
    }
    dtype, precision = rng.choice(KINDS)
    layout = rng.choice(["NCDHW", "NDHWC", "input NDHWC", "weight NDHWC"])
    torch.manual_seed(SEED + index)
    block = make_block(n, c, k, extent, kernel, device=device, dtype=dtype, **numbers)
    both = block.channels_last()
    block = replace(
        block,
        precision=precision,
        input=both.input if layout in ("NDHWC", "input NDHWC") else block.input,
        weight=both.weight if layout in ("NDHWC", "weight NDHWC") else block.weight,
    )
    text = (
        f"UPCONV3D_SEED={SEED} index={index}: N={n} C={c} K={k} in={extent} kernel={kernel} {numbers} "
        f"{dtype} {precision} {layout}"
    )
    return text, block


def bits(y: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and 0 differs from -0."""
    return y.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()])


def deterministic_cudnn(monkeypatch):
    # cuDNN's float64 convolution, the reference, is not deterministic otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def rounded_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """float32 to the nearest of 10 bits of mantissa, ties to even."""
    bits = tensor.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def operand_error(block: Block) -> float:
    """What rounding the operands to TF32 alone does to a result: a norm group of a few positions that ReLU
    closes nearly all of magnifies it by up to 1/sqrt(eps), and PyTorch may take a float32 kernel."""
    wide = block.to(torch.float64)
    operands = {name: rounded_to_tf32(getattr(block, name)).double() for name in ("input", "weight")}
    return relative_error(replace(wide, **operands).eager(), wide.eager())


def floor_factor(block: Block) -> float:
    """Among hundreds, some eager result is right by luck.

    And where every tap reads padding, the bias is all there is: 1/sqrt(eps) magnifies the rounding of its 16
    bits under "tf32" (cpp/README.md, Numbers at the edges), where PyTorch may return norm_bias exactly.
    """
    if block.input.dtype is not torch.float32 or block.precision != "tf32":
        return 2
    if not replace(block, bias=None).conv().any():
        return 16
    return max(2, ERROR_FACTOR * operand_error(block) / error_floor(block)) if block.input.is_cuda else 2


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_problems(device, batch, monkeypatch):
    deterministic_cudnn(monkeypatch)
    problems = GPU_PROBLEMS if device.type == "cuda" else CPU_PROBLEMS
    wrong, plans = [], Counter()
    for index in range(batch, problems, BATCHES):
        text, block = random_problem(index, device)
        plans[block.plan().algorithm] += 1
        try:
            check_like_eager(block, floor_factor(block))
            if device.type == "cuda":
                assert torch.equal(bits(block.ours()), bits(block.ours())), "two calls, two results"
        except AssertionError as error:
            wrong.append(f"{text}\n  {error}")
    print(f"UPCONV3D_SEED={SEED}, batch {batch}: {dict(plans)}")
    assert not wrong, f"{len(wrong)} of {sum(plans.values())} problems are wrong:\n" + "\n".join(wrong)
