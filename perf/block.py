# SPDX-License-Identifier: Apache-2.0
"""The benchmark's cases: shapes.json as data, what each costs at least, and its tensors."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

SHAPES_FILE = Path(__file__).with_name("shapes.json")

# An H200's measured rates: 8192^3 matmuls on random data and a device-to-device copy, bytes read and written.
H200_FLOPS_16_BIT = 679e12  # 1/s
H200_BYTES = 4.28e12  # 1/s
# What one sample's output may occupy and still be in L2 when it is normalized, out of 60 MB.
H200_L2_PER_SAMPLE = 40e6  # bytes


@dataclass(frozen=True)
class Shape:
    """One row of shapes.json; letters as in the C++ core (n samples, c input, k output channels)."""

    name: str
    source: str
    n: int
    c: int
    k: int
    input: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    output_padding: tuple[int, int, int]
    groups: int
    num_groups: int
    bias: bool
    eps: float
    tags: tuple[str, ...]

    @property
    def output(self) -> tuple[int, ...]:
        """Z, P, Q of the output."""
        axes = zip(self.input, self.stride, self.padding, self.kernel, self.output_padding, strict=True)
        return tuple((i - 1) * s - 2 * p + t + o for i, s, p, t, o in axes)

    @property
    def useful_flops(self) -> int:
        """2*N*(C/groups)*K*taps, counting the (input, tap) pairs that land inside the output."""
        taps = 1
        for i, s, p, t, z in zip(
            self.input, self.stride, self.padding, self.kernel, self.output, strict=True
        ):
            taps *= sum(1 for x in range(i) for r in range(t) if 0 <= x * s - p + r < z)
        return 2 * self.n * (self.c // self.groups) * self.k * taps

    def with_samples(self, n: int) -> Shape:
        return replace(self, n=n)


def load_shapes(path: Path = SHAPES_FILE) -> list[Shape]:
    """All shapes, in the order of the file."""
    rows = json.loads(path.read_text())["shapes"]
    return [Shape(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in rows]


@dataclass(frozen=True)
class Case:
    """A shape with what the caller hands over: dtype, memory format and, for float32, precision."""

    shape: Shape
    dtype: torch.dtype
    layout: str  # "ncdhw" or "ndhwc" (channels_last_3d)
    precision: str  # "ieee" or "tf32" for float32, "native" otherwise

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last_3d if self.layout == "ndhwc" else torch.contiguous_format

    @property
    def bytes_x(self) -> int:
        return self.shape.n * self.shape.c * math.prod(self.shape.input) * self.dtype.itemsize

    @property
    def bytes_w(self) -> int:
        s = self.shape
        return s.c * (s.k // s.groups) * math.prod(s.kernel) * self.dtype.itemsize

    @property
    def bytes_y(self) -> int:
        return self.shape.n * self.shape.k * math.prod(self.shape.output) * self.dtype.itemsize


def floor_ms(case: Case) -> float | None:
    """The least time an H200 could need for the block, in ms; None for float64, which has no rate here.

    GroupNorm needs every value before it can finish one, so a block moves one of
      x + y     where a sample's output stays in L2 until it is normalized,
      x + 3y    where it is stored, read back and stored again,
      2x + y    with twice the arithmetic, where the convolution is computed twice,
    and takes, for each, the larger of its arithmetic's time and its bytes' time; the least of the three is
    the floor. Arithmetic counts useful taps only, at the 16-bit rate also for float32: one product carries
    TF32's accuracy, three carry float32's. Weights are not counted.
    """
    if case.dtype is torch.float64:
        return None
    products = 3 if case.precision == "ieee" else 1
    flops_s = products * case.shape.useful_flops / H200_FLOPS_16_BIT
    x, y = case.bytes_x, case.bytes_y
    ways = [
        max(flops_s, (x + 3 * y) / H200_BYTES),
        max(2 * flops_s, (2 * x + y) / H200_BYTES),
    ]
    if y / case.shape.n <= H200_L2_PER_SAMPLE:
        ways.append(max(flops_s, (x + y) / H200_BYTES))
    return 1e3 * min(ways)


@dataclass
class Tensors:
    """The arguments of one case; the seed follows from the shape's name."""

    x: torch.Tensor  # [N,C,D,H,W]
    w: torch.Tensor  # [C,K/groups,T,R,S]
    bias: torch.Tensor | None  # [K]
    gamma: torch.Tensor  # [K]
    beta: torch.Tensor  # [K]

    def samples(self, index: list[int], dtype: torch.dtype) -> Tensors:
        """The chosen samples, every tensor in `dtype`."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return Tensors(
            self.x[index].to(dtype), self.w.to(dtype), bias, self.gamma.to(dtype), self.beta.to(dtype)
        )


def make_tensors(case: Case, device: torch.device) -> Tensors:
    """Random data: x uniform in [0,1), as KernelBench has it, w and bias as PyTorch initializes them."""
    s = case.shape
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(s.name.encode()))

    def uniform(size: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        values = torch.rand(size, generator=generator, device=device)
        return (values * (high - low) + low).to(case.dtype)

    bound = 1.0 / math.sqrt((s.k // s.groups) * math.prod(s.kernel))  # nn.ConvTranspose3d's, from its fan-in
    x = uniform((s.n, s.c, *s.input), 0.0, 1.0).contiguous(memory_format=case.memory_format)
    w = uniform((s.c, s.k // s.groups, *s.kernel), -bound, bound).contiguous(memory_format=case.memory_format)
    bias = uniform((s.k,), -bound, bound) if s.bias else None
    return Tensors(x, w, bias, uniform((s.k,), 0.5, 1.5), uniform((s.k,), -0.5, 0.5))


def conv_arguments(shape: Shape) -> dict[str, Any]:
    """Keyword arguments shared by F.conv_transpose3d and the block."""
    return {
        "stride": shape.stride,
        "padding": shape.padding,
        "output_padding": shape.output_padding,
        "groups": shape.groups,
    }
