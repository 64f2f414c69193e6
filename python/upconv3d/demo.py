# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.demo`: the block on the best device of this machine, checked and timed against PyTorch.

Needs the extra `profile` (rich). Exits with 1 where a check fails, with 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import upconv3d

from ._command import piped
from .profile.arguments import ArgumentError, not_negative, require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# FlashAttention's rule: at most twice PyTorch's own error in the same precision, against a higher precision.
ERROR_FACTOR = 2.0
# The table's columns need so many.
TABLE_WIDTH = 76


@dataclass(frozen=True)
class Shape:
    """One block of a published model; extents and convolution numbers are equal on the three axes."""

    source: str
    n: int
    c: int
    k: int
    extent: int
    kernel: int
    stride: int
    padding: int
    output_padding: int
    num_groups: int
    bias: bool

    def describe(self) -> str:
        numbers = f"k{self.kernel} s{self.stride} p{self.padding} op{self.output_padding}"
        return f"{self.n}x{self.c}x{self.extent}^3 to {self.k}, {numbers}, {self.num_groups} groups"


@dataclass(frozen=True)
class Mode:
    dtype: torch.dtype
    memory_format: torch.memory_format
    precision: str  # for float32 on CUDA

    def label(self, plan: upconv3d.Plan | None = None) -> str:
        """With a plan, the precision too, where it has a choice of precision."""
        layout = "NDHWC" if self.memory_format == torch.channels_last_3d else "NCDHW"
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        chooses = plan is not None and plan.algorithm != "cpu_library" and self.dtype == torch.float32
        return f"{dtype} {layout}" + (f" {self.precision}" if chooses else "")


@dataclass(frozen=True)
class Row:
    """Times in ms (medians), errors relative to the float64 result (root mean square)."""

    shape: Shape
    mode: Mode
    plan: upconv3d.Plan
    ours_ms: float
    eager_ms: float
    ours_error: float
    eager_error: float
    difference: float  # largest |ours - eager|, in units of y

    def passed(self) -> bool:
        # An eps of the dtype stands in where PyTorch happens to be exact to the last bit.
        return self.ours_error <= max(ERROR_FACTOR * self.eager_error, torch.finfo(self.mode.dtype).eps)


KERNELBENCH = Shape("KernelBench level2/61", 16, 64, 128, 32, 3, 1, 0, 0, 8, False)
# Two levels of MONAI 1.6.1 monai.networks.nets.UNet with adn_ordering="AN", act=RELU, norm=GROUP (2 groups).
MONAI_INNER = Shape("MONAI UNet, 12^3 level", 2, 128, 32, 12, 3, 2, 1, 1, 2, True)
MONAI_OUTER = Shape("MONAI UNet, 24^3 level", 2, 64, 16, 24, 3, 2, 1, 1, 2, True)


def cases(device: torch.device) -> list[tuple[Shape, Mode]]:
    """Headline shape on a GPU, real and smaller ones on a CPU."""
    ncdhw, ndhwc = torch.contiguous_format, torch.channels_last_3d
    if device.type == "cuda":
        modes = [Mode(torch.float32, ncdhw, "ieee"), Mode(torch.float32, ncdhw, "tf32")]
        modes.append(Mode(torch.bfloat16, ndhwc, "ieee"))
        return [(KERNELBENCH, mode) for mode in modes]
    modes = [Mode(torch.float32, ncdhw, "ieee"), Mode(torch.float32, ndhwc, "ieee")]
    modes.append(Mode(torch.bfloat16, ndhwc, "ieee"))
    return [(shape, mode) for shape in (MONAI_INNER, MONAI_OUTER) for mode in modes]


def make_arguments(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random float32 input and parameters; the scale of weight keeps activations near 1."""
    torch.manual_seed(0)
    taps = shape.kernel**3
    scale = (shape.c * taps / shape.stride**3) ** -0.5
    arguments = {
        "input": torch.rand(shape.n, shape.c, *[shape.extent] * 3, device=device),
        "weight": torch.randn(shape.c, shape.k, *[shape.kernel] * 3, device=device) * scale,
        "norm_weight": torch.rand(shape.k, device=device) + 0.5,
        "norm_bias": torch.randn(shape.k, device=device) * 0.1,
    }
    if shape.bias:
        arguments["bias"] = torch.randn(shape.k, device=device) * 0.1
    return arguments


def cast(arguments: dict[str, Tensor], mode: Mode) -> dict[str, Tensor]:
    """The same values, rounded to the mode's dtype, input and weight in its memory format."""
    cast_to = {name: tensor.to(mode.dtype) for name, tensor in arguments.items()}
    for name in ("input", "weight"):
        cast_to[name] = cast_to[name].contiguous(memory_format=mode.memory_format)
    return cast_to


def eager(shape: Shape, tensors: dict[str, Tensor]) -> Tensor:
    """PyTorch's three calls."""
    c = F.conv_transpose3d(
        tensors["input"],
        tensors["weight"],
        tensors.get("bias"),
        shape.stride,
        shape.padding,
        shape.output_padding,
    )
    return F.group_norm(F.relu(c), shape.num_groups, tensors["norm_weight"], tensors["norm_bias"])


def median_ms(call: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Median time of one call, in ms, from at least 5 calls and about `seconds` of them."""

    def once() -> float:
        if device.type == "cuda":
            start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(2):
        once()
    times = [once() for _ in range(5)]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline and len(times) < 1000:
        times.append(once())
    return statistics.median(times)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Root mean square of the error over that of the reference."""
    return float((value.double() - reference).norm() / reference.norm())


def run_case(shape: Shape, mode: Mode, device: torch.device, seconds: float) -> Row:
    """One row of the table: plan, times of ours and of PyTorch, errors of both against float64."""
    torch.backends.cudnn.conv.fp32_precision = mode.precision  # type: ignore[attr-defined]
    tensors = cast(make_arguments(shape, device), mode)
    options: dict[str, Any] = {
        "bias": tensors.get("bias"),
        "norm_weight": tensors["norm_weight"],
        "norm_bias": tensors["norm_bias"],
    }
    options |= {"stride": shape.stride, "padding": shape.padding, "output_padding": shape.output_padding}
    options |= {"num_groups": shape.num_groups, "precision": mode.precision}

    def ours() -> Tensor:
        return upconv3d.conv_transpose3d_relu_group_norm(
            tensors["input"],
            tensors["weight"],
            **options,
        )

    plan = upconv3d.explain(
        tensors["input"],
        tensors["weight"],
        **options,
    )
    with torch.inference_mode():
        reference = eager(shape, {name: tensor.double() for name, tensor in tensors.items()})
        y, y_eager = ours(), eager(shape, tensors)
        errors = relative_error(y, reference), relative_error(y_eager, reference)
        difference = float((y.double() - y_eager.double()).abs().max())
        del reference, y, y_eager
        ours_ms = median_ms(ours, device, seconds)
        eager_ms = median_ms(lambda: eager(shape, tensors), device, seconds)
    return Row(shape, mode, plan, ours_ms, eager_ms, *errors, difference)


def table_of(shape: Shape, rows: list[Row]) -> Table:
    """One block's rows; narrow enough for 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"{shape.source}: {shape.describe()}",
        box=SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    table.add_column("input", no_wrap=True)
    for heading in ("ms", "torch ms", "speed", "error", "torch's", "max diff"):
        table.add_column(heading, justify="right")
    table.add_column("check")
    for row in rows:
        table.add_row(
            row.mode.label(row.plan),
            f"{row.ours_ms:.3f}",
            f"{row.eager_ms:.3f}",
            f"{row.eager_ms / row.ours_ms:.2f}x",
            f"{row.ours_error:.1e}",
            f"{row.eager_error:.1e}",
            f"{row.difference:.1e}",
            "[green]ok[/]" if row.passed() else "[red]FAILED[/]",
        )
    return table


def report(console: Console, rows: list[Row]) -> int:
    """Prints plans, tables and failures; returns the exit status."""
    for shape in dict.fromkeys(row.shape for row in rows):
        mine = [row for row in rows if row.shape == shape]
        console.print(table_of(shape, mine))
        for plan in {row.plan.stages: row.plan for row in mine}.values():
            text = f"  {plan.algorithm}: {plan.reason}\n  stages: {' > '.join(plan.stages)}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(
        "\nForward, medians. error: against float64, root mean square, relative; max diff: |ours - torch|; "
        f"check: error at most {ERROR_FACTOR:g} times torch's.",
        highlight=False,
    )
    failed = [row for row in rows if not row.passed()]
    for row in failed:
        console.print(
            f"check failed: {row.shape.source}, {row.mode.label(row.plan)}: error {row.ours_error:.2e} is "
            f"more than {ERROR_FACTOR:g} times PyTorch's {row.eager_error:.2e}",
            markup=False,
        )
    return 1 if failed else 0


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m upconv3d.demo", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--seconds", type=not_negative, default=1.0, help="time for each measurement (s); default: 1"
    )
    options = parser.parse_args(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that PyTorch sees; got none. Use --device cpu")
    try:
        require("rich", "the demo")
    except ArgumentError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.benchmark = True  # before the first call: PyTorch keeps the first plan it finds
    console = Console()
    if console.width < TABLE_WIDTH:  # a line that the terminal wraps has its numbers still
        console = Console(width=TABLE_WIDTH)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    console.print(f"upconv3d {upconv3d.__version__}, torch {torch.__version__}, {name}", highlight=False)
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        todo = cases(device)
        task = progress.add_task("running", total=len(todo))
        for shape, mode in todo:
            progress.update(task, description=f"{shape.source}, {mode.label()}")
            rows.append(run_case(shape, mode, device, options.seconds))
            progress.advance(task)
    return report(console, rows)


if __name__ == "__main__":
    raise SystemExit(piped(main))
