# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m upconv3d.profile`, and the cases that it asks for."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from .cases import DTYPES, LAYOUTS, SHAPES_FILE, Case, Shape, load_shapes

DESCRIPTION = """\
Where the time of group_norm(relu(conv_transpose3d(x))) goes on this machine.

For each case: time, useful TFLOP/s and GB/s with their shares of the matmul and copy rates measured in the
same run, ratio to the floor, to PyTorch's three calls, to torch.compile and to the library's convolution
alone, error against float64, peak memory, and a row per kernel. Without a GPU the same for the CPU, with
operators for kernels.

A shape is named from the shapes file, or given by its numbers:
  upconv3d-profile --shape kernelbench_61 --dtype bfloat16 --layout ndhwc --png roofline.png
  upconv3d-profile --input 16 64 32 32 32 --out-channels 128 --kernel 3 --num-groups 8

Exit status: 0; 1 where a result is not finite or its error too large; 2 for wrong arguments, a result file
that cannot be written among them; 3 where --ncu was asked for and all but Nsight Compute's counters could be
measured; 4 where a result file could be written at first and not after measuring. Tables are printed all the
same. Of several, the status is the first in the order 1, 4, 3.
"""
DEFAULT_SHAPE = {"cuda": "kernelbench_61", "cpu": "monai_unet_128"}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
DEFAULT_LAYOUT = {"cuda": "ndhwc", "cpu": "ncdhw"}
PRECISIONS = ("tf32", "ieee")  # of float32 on a GPU
DEFAULT_SECONDS = 1.0
QUICK_SECONDS = 0.2
# Options that describe a shape by its numbers, and so exclude --shape.
SHAPE_OPTIONS: tuple[str, ...] = (
    "out_channels",
    "kernel",
    "stride",
    "padding",
    "output_padding",
    "dilation",
    "groups",
)
SHAPE_OPTIONS += ("num_groups", "eps", "bias")


class ArgumentError(Exception):
    """A command line that asks for something impossible; says the rule, the value and the remedy."""


def require(module: str, purpose: str) -> None:
    """Refuses to begin without a package of the extra `profile`.

    Raises: ArgumentError naming package, purpose and remedy.
    """
    if importlib.util.find_spec(module) is None:
        raise ArgumentError(
            f"{purpose} needs {module}, which is not installed. Remedy: pip install 'upconv3d[profile]'"
        )


Number = TypeVar("Number", int, float)


def _number(text: str, kind: Callable[[str], Number], rule: str, holds: Callable[[Number], bool]) -> Number:
    """The number that `text` writes, where `rule` holds for it."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{rule}; got {text}")
    return value


def positive(text: str) -> int:
    """A positive integer."""
    return _number(text, int, "must be a positive integer", lambda value: value > 0)


def natural(text: str) -> int:
    """An integer that is not negative."""
    return _number(text, int, "must be an integer and not negative", lambda value: value >= 0)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    return _number(text, float, "must be a positive number", lambda value: 0 < value < math.inf)


def not_negative(text: str) -> float:
    """A number that is not negative: what may be added to a variance, or a time that may be none."""
    return _number(text, float, "must be a number and not negative", lambda value: 0 <= value < math.inf)


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        prog="python -m upconv3d.profile",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    named = made.add_argument_group("shapes by name")
    named.add_argument("--shape", nargs="+", metavar="NAME", help="names from the shapes file, or all")
    named.add_argument(
        "--shapes-file",
        type=Path,
        default=SHAPES_FILE,
        metavar="JSON",
        help="default: the one of the package",
    )
    named.add_argument("--list-shapes", action="store_true", help="print the names and end")
    numbers = made.add_argument_group(
        "a shape by its numbers (one value for all axes, or depth, height, width)"
    )
    numbers.add_argument("--input", nargs=5, type=positive, metavar=("N", "C", "D", "H", "W"))
    numbers.add_argument("--out-channels", type=positive, metavar="K")
    for option, kind, default in (
        ("--kernel", positive, "needed"),
        ("--stride", positive, "1"),
        ("--padding", natural, "0"),
        ("--output-padding", natural, "0"),
        ("--dilation", positive, "1"),
    ):
        help_text = "needed" if default == "needed" else f"default: {default}"
        numbers.add_argument(option, nargs="+", type=kind, metavar="T", help=help_text)
    numbers.add_argument("--groups", type=positive, help="of the convolution (default: 1)")
    numbers.add_argument("--num-groups", type=positive, help="of GroupNorm (default: 8)")
    numbers.add_argument("--eps", type=not_negative, help="added to the variance (default: 1e-5)")
    numbers.add_argument(
        "--bias", action=argparse.BooleanOptionalAction, help="of the convolution (default: no)"
    )
    data = made.add_argument_group("data; several values give several cases")
    data.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    data.add_argument("--layout", nargs="+", choices=LAYOUTS, help="default: ndhwc on a GPU, ncdhw on a CPU")
    data.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, help="of float32 on a GPU (default: both)"
    )
    measuring = made.add_argument_group("measuring")
    measuring.add_argument("--device", help="default: cuda where there is one, else cpu")
    measuring.add_argument(
        "--seconds", type=seconds, help=f"of timing per case (default: {DEFAULT_SECONDS:g})"
    )
    measuring.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_SECONDS:g} s per case, torch.compile in its default mode only",
    )
    measuring.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    measuring.add_argument(
        "--ncu", action="store_true", help="add counters from Nsight Compute, where it is installed"
    )
    results = made.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="everything")
    results.add_argument("--csv", type=Path, metavar="FILE", help="a row per case")
    results.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="a roofline, of cases with useful arithmetic; needs matplotlib",
    )
    return made


def axes(values: list[int] | None, default: int, option: str) -> tuple[int, int, int]:
    """Three values from one or three."""
    given = [default] if values is None else values
    if len(given) == 1:
        return (given[0], given[0], given[0])
    if len(given) != 3:
        raise ArgumentError(
            f"{option} takes one value, or three for depth, height, width; got {len(given)}: "
            f"{' '.join(map(str, given))}"
        )
    return (given[0], given[1], given[2])


def shape_from_numbers(options: argparse.Namespace) -> Shape:
    """The shape that --input and its companions describe.

    Raises: ArgumentError where one is missing or the result would be empty.
    """
    for name in ("out_channels", "kernel"):
        if getattr(options, name) is None:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(
                f"a shape by its numbers needs --input, --out-channels and --kernel; add {option}"
            )
    n, c, d, h, w = options.input
    shape = Shape(
        name="custom",
        source="command line",
        n=n,
        c=c,
        k=options.out_channels,
        input=(d, h, w),
        kernel=axes(options.kernel, 1, "--kernel"),
        stride=axes(options.stride, 1, "--stride"),
        padding=axes(options.padding, 0, "--padding"),
        output_padding=axes(options.output_padding, 0, "--output-padding"),
        groups=options.groups or 1,
        num_groups=options.num_groups or 8,
        bias=bool(options.bias),
        eps=1e-5 if options.eps is None else options.eps,
        dilation=axes(options.dilation, 1, "--dilation"),
    )
    if shape.c % shape.groups or shape.k % shape.groups:
        raise ArgumentError(
            f"--groups must divide input and output channels; got {shape.groups} for {shape.c} and {shape.k}"
        )
    if min(shape.output) < 1:
        raise ArgumentError(
            f"the output would be empty: {shape.output}; use less --padding or a larger --input"
        )
    return shape


def shapes(options: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The shapes that were asked for.

    Raises: ArgumentError for names that the file lacks, a file that cannot be read, or both kinds of shape.
    """
    if options.input is not None:
        if options.shape is not None:
            raise ArgumentError("--shape and --input exclude one another; give one of them")
        return [shape_from_numbers(options)]
    stray = [name for name in SHAPE_OPTIONS if getattr(options, name) is not None]
    if stray:
        raise ArgumentError(
            f"--{stray[0].replace('_', '-')} describes a shape by its numbers; add --input N C D H W"
        )
    listed = {shape.name: shape for shape in shapes_of_file(options.shapes_file)}
    wanted = options.shape or [DEFAULT_SHAPE[device.type]]
    if wanted == ["all"]:
        return list(listed.values())
    if "all" in wanted and "all" not in listed:
        raise ArgumentError(f"--shape takes names, or all alone; got {' '.join(wanted)}")
    for name in wanted:
        if name not in listed:
            near = difflib.get_close_matches(name, listed, n=3, cutoff=0.4)
            hint = f"near it: {', '.join(near)}" if near else "--list-shapes prints them"
            raise ArgumentError(f"--shape names a shape of {options.shapes_file.name}; got {name!r} ({hint})")
    return [listed[name] for name in dict.fromkeys(wanted)]


def shapes_of_file(path: Path) -> list[Shape]:
    """The shapes of a file in the form of shapes.json.

    Raises: ArgumentError where it cannot be read as such, or has no shape.
    """
    try:
        found = load_shapes(path)
        if not found:
            raise ValueError("it has no shape")
        return found
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"--shapes-file must be a JSON file in the form of {SHAPES_FILE.name}; got {path}: {error}"
        ) from error


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that was asked for, or the best there is.

    Raises: ArgumentError where there is no such device.
    """
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"--device must be cpu, cuda or cuda:INDEX; got {name!r}") from error
    if device.type not in DEFAULT_SHAPE:
        raise ArgumentError(f"--device must be cpu, cuda or cuda:INDEX; got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ArgumentError(f"--device {name}: PyTorch sees {count} CUDA devices; use --device cpu")
    # torch.cuda.set_device wants an index.
    whole = device.type == "cpu" or device.index is not None
    return device if whole else torch.device("cuda", torch.cuda.current_device())


def make_current(device: torch.device) -> None:
    """Makes a GPU PyTorch's current one, on which events, streams and the allocator's figures are taken."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def precisions_of(options: argparse.Namespace, device: torch.device, dtype: str) -> Sequence[str]:
    """The precisions in which cases of `dtype` are measured.

    Raises: ArgumentError where one was asked for and the device is a CPU.
    """
    on_gpu = device.type == "cuda"
    if options.precision and not on_gpu:
        raise ArgumentError(
            "--precision is of float32 on a GPU; a CPU computes float32 as it is. Leave it out"
        )
    if dtype != "float32":
        return ("native",)
    return (options.precision or PRECISIONS) if on_gpu else ("ieee",)


def cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """Shapes crossed with dtypes, layouts and precisions, in that order; a value given twice counts once."""
    found = [
        Case(shape, DTYPES[dtype], layout, precision)
        for shape in shapes(options, device)
        for dtype in options.dtype or [DEFAULT_DTYPE[device.type]]
        for layout in options.layout or [DEFAULT_LAYOUT[device.type]]
        for precision in precisions_of(options, device, dtype)
    ]
    return list(dict.fromkeys(found))
