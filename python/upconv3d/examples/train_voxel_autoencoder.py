# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.examples.train_voxel_autoencoder`: a network, trained with eager blocks and with ours.

An autoencoder of occupancy volumes: ellipsoids and tori, made from a seed. Both runs have the same initial
values, batches and optimizer. A table and a PNG show losses and step times.

Needs the extra `profile` (rich, matplotlib). Exits with 1 where the runs do not begin alike, or where a loss
is not finite; with 2 for wrong options, a folder that cannot be written among them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import upconv3d
from upconv3d.profile.arguments import ArgumentError, require

if TYPE_CHECKING:
    from rich.table import Table

PNG_NAME = "voxel_autoencoder.png"
NORM_GROUPS = 8
VOLUMES = 256  # to train on
HELD_OUT = 16  # further ones, for the intersection over union
# Of Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {"eager": "#0072B2", "upconv3d": "#D55E00"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {"ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}
# Of each device: what is well trained within a minute or so.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"steps": 120, "batch": 4, "size": 16, "width": 16, "dtype": "float32"},
    "cuda": {"steps": 300, "batch": 16, "size": 64, "width": 64, "dtype": "bfloat16"},
}
# How far the first losses of two runs may be apart: both round, in the dtype of the convolutions.
FIRST_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 5e-3}

Block = Callable[[int, int], nn.Module]  # in_channels and out_channels to a module that doubles the extents


@dataclass(frozen=True)
class History:
    """One training run."""

    blocks: str  # "eager" or "upconv3d"
    losses: list[float]  # of each step, binary cross entropy
    step_ms: list[float]
    iou: float  # intersection over union on volumes that were not trained on
    peak_bytes: int | None  # of PyTorch's CUDA allocator

    def median_ms(self) -> float:
        """Of the steps after the first tenth, in which libraries choose their algorithms."""
        return statistics.median(self.step_ms[len(self.step_ms) // 10 :])

    def last_loss(self) -> float:
        """Mean of the last tenth: the loss of a single batch is noisy."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def random_volume(size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """[1, size, size, size] float32 occupancies, 0 or 1: an ellipsoid and a torus."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=generator)).to(device)

    axis = torch.linspace(-1, 1, size, device=device)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)

    def placed() -> Tensor:
        """[size, size, size, 3] positions as a solid of random place and direction sees them."""
        rotation: Tensor = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
        return (grid - uniform(-0.4, 0.4, 3)) @ rotation.to(device)

    ellipsoid = (placed() / uniform(0.2, 0.6, 3)).square().sum(-1) < 1
    x, y, z = placed().unbind(-1)
    torus = torch.hypot(torch.hypot(x, y) - uniform(0.3, 0.6), z) < uniform(0.12, 0.22)
    return (ellipsoid | torus).float().unsqueeze(0)


def eager_block(in_channels: int, out_channels: int) -> nn.Module:
    """PyTorch's three modules."""
    return nn.Sequential(
        nn.ConvTranspose3d(in_channels, out_channels, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.GroupNorm(NORM_GROUPS, out_channels),
    )


def fused_block(in_channels: int, out_channels: int) -> nn.Module:
    """The same as one module; the same seed gives the same initial values."""
    return upconv3d.ConvTranspose3dReLUGroupNorm(
        in_channels, out_channels, 4, NORM_GROUPS, stride=2, padding=1
    )


BLOCKS: dict[str, Block] = {"eager": eager_block, "upconv3d": fused_block}


class VoxelAutoencoder(nn.Module):
    """[N, 1, S, S, S] occupancies to logits of that shape, by way of [N, 4*width, S/8, S/8, S/8]."""

    def __init__(self, block: Block, width: int) -> None:
        super().__init__()
        channels = [1, width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for c, k in pairwise(channels):
            layers += [nn.Conv3d(c, k, 3, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(NORM_GROUPS, k)]
        self.encoder = nn.Sequential(*layers)
        self.decoder = nn.Sequential(
            block(4 * width, 2 * width),
            block(2 * width, width),
            block(width, width),
            nn.Conv3d(width, 1, 3, padding=1),
        )

    def forward(self, volumes: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.encoder(volumes))
        return logits


class StepClock:
    """Times of steps in ms. On CUDA from events that are read at the end: no step waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Between two steps, and around all of them."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        pairs = pairwise(self.marks)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [float(start.elapsed_time(end)) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


def intersection_over_union(logits: Tensor, volumes: Tensor) -> float:
    predicted, occupied = logits > 0, volumes > 0.5
    return float((predicted & occupied).sum() / (predicted | occupied).sum().clamp(min=1))


def train(blocks: str, options: argparse.Namespace, advance: Callable[[], None]) -> History:
    """One run. `advance` is called after every step."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    memory_format = FORMATS[options.layout]
    torch.manual_seed(options.seed)  # before the model: both kinds of blocks then draw the same values
    model: nn.Module = VoxelAutoencoder(BLOCKS[blocks], options.width)
    model.to(device).to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype != torch.float32)
    generator = torch.Generator().manual_seed(options.seed)
    volumes = torch.stack(
        [random_volume(options.size, generator, device) for _ in range(VOLUMES + HELD_OUT)]
    ).contiguous(memory_format=memory_format)
    order = torch.randint(VOLUMES, (options.steps, options.batch), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = []
    clock = StepClock(device)
    clock.mark()
    for step in range(options.steps):
        batch = volumes[order[step]].contiguous(memory_format=memory_format)
        with autocast():
            loss = F.binary_cross_entropy_with_logits(model(batch).float(), batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        clock.mark()
        advance()
    step_ms = clock.step_ms()
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    with torch.inference_mode(), autocast():
        iou = intersection_over_union(model(volumes[VOLUMES:]), volumes[VOLUMES:])
    return History(blocks, [float(loss) for loss in losses], step_ms, iou, peak_bytes)


def table_of(histories: list[History]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("blocks", no_wrap=True)
    with_peak = any(history.peak_bytes is not None for history in histories)
    with_speed = len(histories) > 1
    headings = ["ms per step", "loss, first", "last", "IoU"]
    for heading in [*headings, *(["speed"] if with_speed else []), *(["peak MB"] if with_peak else [])]:
        table.add_column(heading, justify="right")
    for history in histories:
        row = [f"{history.median_ms():.3f}", f"{history.losses[0]:.5f}", f"{history.last_loss():.5f}"]
        row.append(f"{history.iou:.3f}")
        if with_speed:
            row.append(f"{histories[0].median_ms() / history.median_ms():.2f}x")
        if with_peak:
            row.append("-" if history.peak_bytes is None else f"{history.peak_bytes / 1e6:.0f}")
        table.add_row(history.blocks, *row)
    return table


def draw(path: Path, histories: list[History], title: str) -> None:
    """The PNG: losses to the left, step times to the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, time_axes = figure.subplots(1, 2)
    for index, history in enumerate(histories):
        steps = range(1, len(history.losses) + 1)
        # Losses lie on one another where all is well: the second is drawn thin on the first.
        style: dict[str, Any] = {"color": COLOURS[history.blocks], "linewidth": (2.6, 1.1)[index]}
        loss_axes.plot(steps, history.losses, label=f"{history.blocks}, IoU {history.iou:.3f}", **style)
        label = f"{history.blocks}, median {history.median_ms():.3g} ms"
        time_axes.plot(steps, history.step_ms, label=label, color=style["color"], linewidth=1.1)
    loss_axes.set_yscale("log")
    loss_axes.set_ylabel("binary cross entropy")
    # The first steps choose algorithms; they would press all others against the axis.
    time_axes.set_ylim(0, 2.5 * max(history.median_ms() for history in histories))
    time_axes.set_ylabel("time of a step, ms")
    for axes in (loss_axes, time_axes):
        axes.set_xlabel("step")
        axes.grid(True, which="both", color="#e6e6e6", linewidth=0.6)
        axes.legend(fontsize=8.5)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def failures(histories: list[History], dtype: str) -> list[str]:
    """What is wrong with the runs, in words."""
    found = []
    for history in histories:
        if not all(math.isfinite(loss) for loss in history.losses):
            found.append(f"{history.blocks}: a loss is not finite")
    first, last = histories[0].losses[0], histories[-1].losses[0]
    if abs(first - last) > FIRST_LOSS_TOLERANCE[dtype] * abs(first):
        found.append(
            f"first losses must agree within {FIRST_LOSS_TOLERANCE[dtype]:g}, relative; got {first:.6g} and "
            f"{last:.6g}"
        )
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def parse(given: list[str] | None) -> argparse.Namespace:
    """Options, with the device's defaults where nothing was given."""
    parser = argparse.ArgumentParser(
        prog="python -m upconv3d.examples.train_voxel_autoencoder",
        description=(__doc__ or "").partition("\n\n")[2],  # without the line that names the program
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--blocks", choices=("eager", "upconv3d", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--steps", type=positive, help="default: 120 on the CPU, 300 on CUDA")
    parser.add_argument("--batch", type=positive, help="volumes of a step; default: 4 on the CPU, 16 on CUDA")
    parser.add_argument(
        "--size", type=positive, help="extent of a volume, a multiple of 8; default: 16 or 64"
    )
    parser.add_argument("--width", type=positive, help="channels, a multiple of 8; default: 16 or 64")
    parser.add_argument("--dtype", choices=DTYPES, help="of autocast; default: float32 (none) or bfloat16")
    parser.add_argument("--layout", choices=FORMATS, default="ndhwc")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help=f"folder of {PNG_NAME}")
    options = parser.parse_args(given)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not 0 <= options.lr < math.inf:
        parser.error(f"--lr must be a number and not negative; got {options.lr}")
    if not -(2**63) <= options.seed < 2**64:
        parser.error(f"--seed must fit in 64 bit; got {options.seed}")
    for name in ("size", "width"):
        if getattr(options, name) % 8 != 0:
            parser.error(f"--{name} must be a multiple of 8; got {getattr(options, name)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that PyTorch sees; got none. Use --device cpu")
    try:  # before training, not after it
        require("rich", "the example")
        require("matplotlib", "the example")
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
        if (options.out / PNG_NAME).is_dir():
            parser.error(f"--out must not hold a folder {PNG_NAME}; got {options.out}. Use another one")
    except ArgumentError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out must be a folder that can be written; got {options.out}: {error.strerror}")
    return options


def main(given: list[str] | None = None) -> int:
    options = parse(given)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    torch.backends.cudnn.benchmark = True  # before the first call: PyTorch keeps the first plan it finds
    console = Console()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    title = (
        f"{options.batch} volumes of {options.size}^3, width {options.width}, {options.dtype}, "
        f"{'channels_last_3d' if options.layout == 'ndhwc' else 'NCDHW'}; {device}, torch {torch.__version__}"
    )
    console.print(title, highlight=False)
    kinds = ["eager", "upconv3d"] if options.blocks == "both" else [options.blocks]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    histories = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for kind in kinds:
            task = progress.add_task(kind, total=options.steps)
            histories.append(train(kind, options, partial(progress.advance, task)))
    console.print(table_of(histories))
    draw(options.out / PNG_NAME, histories, title)
    console.print(f"wrote {options.out / PNG_NAME}", highlight=False, soft_wrap=True)
    found = failures(histories, options.dtype)
    for text in found:
        console.print(f"check failed: {text}", markup=False, highlight=False)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
