# SPDX-License-Identifier: Apache-2.0
"""Times of drawn blocks by one plan: what cpp/core/plan_times.cpp is fitted to.

    for plan in library stored twice col2im direct; do
        UPCONV3D_PLAN=$plan python perf/plan_times.py --seed 4711 --count 700 >> times.jsonl
    done

One line of JSON per block and input: the block, the input, the plan that UPCONV3D_PLAN names (read once per
process), its time in us, and with the library plan PyTorch's operators and their convolution as well. A block
that the plan cannot run has no line. With --groups the convolutions have several groups, drawn as those that
cpp/core/group_times.cpp was fitted to. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import upconv3d

Triple = tuple[int, int, int]

TURNS = 9
FLUSHED_BYTES = 1 << 29  # ten times an H200's L2
AHEAD_CYCLES = 300_000  # for which the device waits, so that the host is ahead of it

# Kernel, stride, padding and output padding, the more frequent ones of decoders more often.
KERNELS = (
    [(2, 2, 0, 0)] * 5
    + [((1, 2, 2), (1, 2, 2), 0, 0)] * 2
    + [(3, 2, 1, 1)] * 4
    + [(4, 2, 1, 0)] * 2
    + [(3, 1, 1, 0)] * 3
    + [(3, 1, 0, 0)] * 2
    + [((3, 3, 3), (1, 2, 2), (1, 1, 1), (0, 1, 1)), (4, 4, 0, 0), (5, 1, 2, 0), (1, 1, 0, 0), (2, 1, 0, 0)]
    + [((1, 3, 3), 1, (0, 1, 1), 0), (5, 2, 2, 1), (3, 3, 0, 0)]
)
WHOLE_CHANNELS = [16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512]
ODD_CHANNELS = [3, 8, 12, 20, 40, 72, 80, 100, 144, 160, 200]
EXTENTS = [4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48]
# dtype, layout and float32's precision.
INPUTS = [
    ("bfloat16", "NDHWC", "tf32"),
    ("float32", "NCDHW", "tf32"),
    ("bfloat16", "NCDHW", "tf32"),
    ("float32", "NDHWC", "tf32"),
    ("float16", "NDHWC", "tf32"),
]
INPUTS_OF_GROUPS = [
    *INPUTS,
    ("float32", "NCDHW", "ieee"),
    ("bfloat16", "NDHWC", "tf32"),
    ("float32", "NDHWC", "ieee"),
]
GROUPS = (2, 3, 4, 5, 8, 16, 32)
MOST_GROUP_FLOPS = 12e9  # of which cuDNN may take milliseconds each


def triple(value: int | Triple) -> Triple:
    return (value, value, value) if isinstance(value, int) else value


@dataclasses.dataclass(frozen=True)
class Block:
    """A block: x [n,c,*extent], w [c,k,*kernel], and what follows the convolution."""

    n: int
    c: int
    k: int
    extent: Triple
    kernel: Triple
    stride: Triple
    padding: Triple
    output_padding: Triple
    bias: bool
    order: str
    norm: str | None
    num_groups: int
    activation: str | None
    groups: int = 1
    dilation: Triple = (1, 1, 1)


def draw(rng: random.Random) -> Block:
    """A block with a result of 0.2 to 70 MB in 16 bit and at most 80 GFLOP."""
    while True:
        kernel, stride, padding, output_padding = map(triple, rng.choice(KERNELS))
        channels = WHOLE_CHANNELS if rng.random() < 0.8 else ODD_CHANNELS
        c, k = rng.choice(channels), rng.choice(channels)
        if k > 2 * c or k < 4:
            continue
        n, base = rng.choice([1, 1, 2, 4, 8]), rng.choice(EXTENTS)
        d, h, w = (max(2, base + rng.choice([-1, 0, 0, 0, 1])) for _ in range(3))
        extent = (d, h, w)
        sides = zip(extent, stride, kernel, padding, output_padding, strict=True)
        values, products = n * k, n * c * k
        for e, s, r, p, o in sides:
            values *= (e - 1) * s - 2 * p + r + o
            products *= e * r
        if not (0.2e6 < 2 * values < 70e6 and 2 * products < 80e9):
            continue
        kind = rng.random()
        if kind < 0.5:
            order, norm, activation = "act_norm", "group", "relu"
        elif kind < 0.8:
            order, norm = "norm_act", rng.choice(["group", "instance"])
            activation = rng.choice(["relu", "leaky_relu", "leaky_relu", "silu", "prelu", None])
        else:
            order, norm, activation = "norm_act", None, rng.choice([None, "relu", "leaky_relu", "gelu"])
        num_groups = rng.choice([g for g in (1, 2, 4, 8, 8, 16, 32, k) if k % g == 0])
        bias = rng.random() < 0.6
        return Block(
            n,
            c,
            k,
            extent,
            kernel,
            stride,
            padding,
            output_padding,
            bias,
            order,
            norm,
            num_groups,
            activation,
        )


def has_output(block: Block) -> bool:
    """Whether PyTorch accepts the output padding, and an axis has a voxel left."""
    sides = zip(
        block.extent,
        block.stride,
        block.kernel,
        block.padding,
        block.output_padding,
        block.dilation,
        strict=True,
    )
    return all(o < max(s, d) and (e - 1) * s - 2 * p + d * (r - 1) + o >= 0 for e, s, r, p, o, d in sides)


def draw_groups(rng: random.Random) -> Block:
    """A block as draw's, of several convolution groups of four input channels and more, at most 12 GFLOP."""
    while True:
        block = draw(rng)
        if rng.random() < 0.6:
            block = dataclasses.replace(block, order="act_norm", norm="group", activation="relu")
        if rng.random() < 0.25:
            ones, zeros = (1, 1, 1), (0, 0, 0)
            block = dataclasses.replace(block, kernel=ones, stride=ones, padding=zeros, output_padding=zeros)
        fitting = [g for g in GROUPS if block.c % g == block.k % g == 0 and block.c // g >= 4]
        if not fitting:
            continue
        dilation = triple(rng.choice([2, (1, 2, 2), 3])) if rng.random() < 0.12 else (1, 1, 1)
        block = dataclasses.replace(block, groups=rng.choice(fitting), dilation=dilation)
        products = block.n * block.c * block.k // block.groups * math.prod(block.extent + block.kernel)
        if 2 * products <= MOST_GROUP_FLOPS and has_output(block):
            return block


def make_calls(block: Block, dtype: torch.dtype, layout: str, seed: int) -> dict[str, Callable[[], Any]]:
    """By name: "ours", which UPCONV3D_PLAN's plan runs, "eager", its "convolution", and "explain"."""
    torch.manual_seed(seed)
    memory_format = torch.channels_last_3d if layout == "NDHWC" else torch.contiguous_format

    def normal(*sizes: int) -> torch.Tensor:
        tensor = torch.randn(sizes, device="cuda")
        return tensor.to(dtype, memory_format=memory_format) if len(sizes) == 5 else tensor.to(dtype)

    x, w = normal(block.n, block.c, *block.extent), normal(block.c, block.k // block.groups, *block.kernel)
    w *= (
        block.c / block.groups * w[0, 0].numel() / (block.stride[0] * block.stride[1] * block.stride[2])
    ) ** -0.5
    bias = normal(block.k) if block.bias else None
    gamma, beta, slopes = normal(block.k), normal(block.k), normal(block.k)
    groups = block.k if block.norm == "instance" else block.num_groups
    sizes = (block.stride, block.padding, block.output_padding, block.groups, block.dilation)
    name = block.activation
    param: Any = {"leaky_relu": 0.01, "prelu": slopes}.get(name or "")
    options: dict[str, Any] = {"order": block.order, "norm": block.norm, "activation": name}
    options["activation_param"] = param
    if block.norm:
        options |= {"norm_weight": gamma, "norm_bias": beta}
    if block.norm == "group":
        options["num_groups"] = groups

    def activate(y: torch.Tensor) -> torch.Tensor:
        if name is None:
            return y
        activated: torch.Tensor = getattr(F, name)(y) if param is None else getattr(F, name)(y, param)
        return activated

    def eager() -> torch.Tensor:
        y = F.conv_transpose3d(x, w, bias, *sizes)
        if block.order == "act_norm":
            return F.group_norm(activate(y), groups, gamma, beta)
        return activate(F.group_norm(y, groups, gamma, beta) if block.norm else y)

    return {
        "ours": lambda: upconv3d.conv_transpose3d_norm_act(x, w, bias, *sizes, **options),
        "eager": eager,
        "convolution": lambda: F.conv_transpose3d(x, w, None, *sizes),
        "explain": lambda: upconv3d.explain_norm_act(x, w, bias, *sizes, **options),
    }


def turns_us(calls: Mapping[str, Callable[[], Any]], flushed: torch.Tensor) -> dict[str, float]:
    """Medians by CUDA events, in us, of calls in turns, L2 read over before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(TURNS):
        for name, call in calls.items():
            flushed.max()
            torch.cuda._sleep(AHEAD_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end))
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the blocks that are drawn")
    parser.add_argument("--count", type=int, default=100, help="of blocks, each in two inputs")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further block is timed")
    parser.add_argument("--groups", action="store_true", help="draw blocks of several convolution groups")
    arguments = parser.parse_args()
    plan = os.environ.get("UPCONV3D_PLAN", "")
    if not torch.cuda.is_available():
        parser.error("times of plans take a CUDA device; torch.cuda.is_available() is False")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    rng, end = random.Random(arguments.seed), time.monotonic() + arguments.seconds
    draw_one, inputs = (draw_groups, INPUTS_OF_GROUPS) if arguments.groups else (draw, INPUTS)
    blocks = [draw_one(rng) for _ in range(arguments.count)]
    apart = 3 if arguments.groups else 1  # of a block's two inputs
    with torch.no_grad():
        for i, block in enumerate(blocks):
            if time.monotonic() > end:
                print(f"out of time after {i} blocks of {len(blocks)}", file=sys.stderr)
                return 1
            for dtype, layout, precision in (inputs[i % len(inputs)], inputs[(i + apart) % len(inputs)]):
                torch.backends.cudnn.conv.fp32_precision = precision
                calls = make_calls(block, getattr(torch, dtype), layout, i)
                try:
                    ran = calls.pop("explain")()
                except RuntimeError as refusal:
                    if "UPCONV3D_PLAN" not in str(refusal):
                        raise
                    continue
                peers = {"eager", "convolution"} if plan == "library" else set()
                timed = {name: call for name, call in calls.items() if name == "ours" or name in peers}
                row = {"block": dataclasses.asdict(block), "dtype": dtype, "layout": layout, "plan": plan}
                row |= {
                    "precision": precision,
                    "algorithm": ran.algorithm,
                    "twice": ran.twice,
                    "us": turns_us(timed, flushed),
                }
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
