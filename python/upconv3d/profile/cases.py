# SPDX-License-Identifier: Apache-2.0
"""What is measured: shapes.json as data, what each shape costs at least, and its tensors."""

from __future__ import annotations

import json
import math
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES_FILE = Path(__file__).with_name("shapes.json")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LAYOUTS = ("ncdhw", "ndhwc")
# Of a last-level cache, what one sample's output may occupy and still be there when it is normalized.
CACHE_SHARE = 2 / 3


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
    tags: tuple[str, ...] = ()
    dilation: tuple[int, int, int] = (1, 1, 1)

    def axes(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Input extent, stride, padding, kernel, output_padding and dilation of each axis, depth first."""
        return zip(
            self.input,
            self.stride,
            self.padding,
            self.kernel,
            self.output_padding,
            self.dilation,
            strict=True,
        )

    @property
    def output(self) -> tuple[int, ...]:
        """Z, P, Q of the output."""
        return tuple((i - 1) * s - 2 * p + d * (t - 1) + o + 1 for i, s, p, t, o, d in self.axes())

    @property
    def useful_flops(self) -> int:
        """2*N*(C/groups)*K*taps, counting the (input, tap) pairs that land inside the output."""
        taps = 1
        for (i, s, p, t, _, d), z in zip(self.axes(), self.output, strict=True):
            taps *= sum(1 for x in range(i) for r in range(t) if 0 <= x * s - p + d * r < z)
        return 2 * self.n * (self.c // self.groups) * self.k * taps

    def with_samples(self, n: int) -> Shape:
        return replace(self, n=n)

    def describe(self) -> str:
        """ "16x64x32x32x32 > 128, k3 s1 p0", extents that are alike on all axes written once."""

        def axes(values: tuple[int, ...]) -> str:
            return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))

        extent = "x".join(map(str, (self.n, self.c, *self.input)))
        text = f"{extent} > {self.k}, k{axes(self.kernel)} s{axes(self.stride)} p{axes(self.padding)}"
        if any(self.output_padding):
            text += f" op{axes(self.output_padding)}"
        if self.dilation != (1, 1, 1):
            text += f" d{axes(self.dilation)}"
        if self.groups > 1:
            text += f" groups {self.groups}"
        return f"{text}, {self.num_groups} norm groups"


def _is_integer(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _are_axes(value: Any, least: int) -> bool:
    return type(value) is tuple and len(value) == 3 and all(_is_integer(one, least) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


# Of a field of Shape, what it must be and whether a value is.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("name", "source"), ("a string that can be printed", _is_text)),
    **dict.fromkeys(
        ("n", "c", "k", "groups", "num_groups"), ("a positive integer", lambda v: _is_integer(v, 1))
    ),
    **dict.fromkeys(
        ("input", "kernel", "stride", "dilation"), ("three positive integers", lambda v: _are_axes(v, 1))
    ),
    **dict.fromkeys(
        ("padding", "output_padding"),
        ("three integers that are not negative", lambda v: _are_axes(v, 0)),
    ),
    "bias": ("true or false", lambda v: type(v) is bool),
    "eps": ("a number that is not negative", lambda v: type(v) in (int, float) and 0 <= v < math.inf),
    "tags": ("a list of strings", lambda v: type(v) is tuple and all(map(_is_text, v))),
}


def shape_from_json(row: dict[str, Any]) -> Shape:
    """A shape from one row of shapes.json, or from what json made of asdict(shape).

    Raises: ValueError for a value that is none of its field's; TypeError for fields that Shape has not.
    """
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    shape = Shape(**values)
    for field, (rule, holds) in _RULES.items():
        value = getattr(shape, field)
        if not holds(value):
            name = "" if field == "name" else f"shape {shape.name}: "
            raise ValueError(f"{name}{field} must be {rule}; got {reprlib.repr(value)}")
    return shape


def load_shapes(path: Path = SHAPES_FILE) -> list[Shape]:
    """All shapes, in the order of the file.

    Raises: ValueError where a row is no shape, or two have the same name; OSError where it cannot be read.
    """
    shapes = [shape_from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))["shapes"]]
    for name, count in Counter(shape.name for shape in shapes).items():
        if count > 1:
            raise ValueError(f"every shape must have a name of its own; got {name!r} {count} times")
    return shapes


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


@dataclass(frozen=True)
class Rates:
    """What bounds a block on one device.

    flops_per_s: useful arithmetic, for one case's dtype and precision: a float32 result that takes three
        16-bit products has a third of the 16-bit rate.
    bytes_per_s: of a copy, bytes read and written.
    cached_bytes: what one sample's output may occupy and still be in cache when it is normalized.
    source: where the three come from, for people.
    """

    flops_per_s: float
    bytes_per_s: float
    cached_bytes: float
    source: str


def products(case: Case) -> int:
    """16-bit products that make one of the case's: one carries TF32's accuracy, three carry float32's."""
    return 3 if case.precision == "ieee" else 1


def h200_rates(case: Case) -> Rates | None:
    """An H200's rates: 8192^3 matmuls on random data, a device-to-device copy, and 40 of 60 MB of L2.

    The 16-bit rate also for float32. None for float64, which was not measured.
    """
    if case.dtype is torch.float64:
        return None
    return Rates(679e12 / products(case), 4.28e12, CACHE_SHARE * 60e6, "an H200's rates, fixed")


def floor_ms(case: Case, rates: Rates) -> float:
    """The least time that `rates` allow the block, in ms.

    GroupNorm needs every value before it can finish one, so a block moves one of
      x + y     where a sample's output stays in cache until it is normalized,
      x + 3y    where it is stored, read back and stored again,
      2x + y    with twice the arithmetic, where the convolution is computed twice,
    and takes, for each, the larger of its arithmetic's time and its bytes' time; the least of the three is
    the floor. Arithmetic counts useful taps only. Weights are not counted.
    """
    flops_s = case.shape.useful_flops / rates.flops_per_s
    x, y = case.bytes_x, case.bytes_y
    ways = [
        max(flops_s, (x + 3 * y) / rates.bytes_per_s),
        max(2 * flops_s, (2 * x + y) / rates.bytes_per_s),
    ]
    if y / case.shape.n <= rates.cached_bytes:
        ways.append(max(flops_s, (x + y) / rates.bytes_per_s))
    return 1e3 * min(ways)


@dataclass
class Tensors:
    """The arguments of one case; the seed follows from the shape's name."""

    x: Tensor  # [N,C,D,H,W]
    w: Tensor  # [C,K/groups,T,R,S]
    bias: Tensor | None  # [K]
    gamma: Tensor  # [K]
    beta: Tensor  # [K]

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

    def uniform(size: tuple[int, ...], low: float, high: float) -> Tensor:
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
        "dilation": shape.dilation,
    }
