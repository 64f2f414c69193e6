# SPDX-License-Identifier: Apache-2.0
"""Times whole models before and after upconv3d.accelerate, in inference and in training.

One line per case:

    MODEL name=... pass=... dtype=... layout=... replaced=... eager_ms=... ms=... x_eager=... compile_ms=...
          compiled_ms=... x_compile=... x_copy=... x_compiled_copy=... memory_mb=... x_memory=... err=...
          eager_err=... check=...

ms is the accelerated model's median, eager_ms that of the model as it was; compile_ms and compiled_ms are
the two under torch.compile. Every x_ is after divided by before: below 1 is quicker, or less memory.
replaced counts transposed convolutions, of those that the model has; behind a plus, with --norms, norms.
x_copy and x_compiled_copy divide the time of an unchanged copy of the model by that of the model, in the same
rounds: how far apart two equal models come out, which is what another ratio can be told from 1 by. Each is
compiled with a cache of its own.
memory_mb is the peak of the accelerated model beside parameters and input, on a GPU. err and eager_err are
rms errors of the output, in training of all gradients together, relative to the model as it was in
float64. check is "ok" where all is finite and err at most twice eager_err.

Inference runs in eval mode without gradients, training in train mode: forward, mean of squares, backward,
without an optimizer. "bfloat16" is autocast of float32 parameters, "float32" has TF32 on.

perf/models.py says what has to be installed.

Exit status 1 if any check fails; 2 for wrong arguments, a result file that cannot be written among them; 4
where it could be written at first and not after measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import upconv3d
from bench import bench_line, exit_status, regex, result_text
from models import MODELS, Model
from report import models_report
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from upconv3d.profile.arguments import ArgumentError, device_of, seconds
from upconv3d.profile.measure import environment, environment_line, medians_ms
from upconv3d.profile.results import ResultFileError, ResultFiles

ERROR_FACTOR = 2.0
# Rounding of the last operation, where eager's error happens to be smaller still.
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3}
# The host's pace changes within a second by a tenth and more, and small models wait for the host.
ROUNDS = 12
PASSES = ("inference", "training")
LINE = (
    "name pass dtype layout replaced eager_ms ms x_eager compile_ms compiled_ms x_compile x_copy "
    "x_compiled_copy memory_mb x_memory err eager_err check"
)


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """TF32 on, in convolutions and products."""
    kept = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = kept


def first(y: Any) -> Tensor:
    """The first tensor of what a model returns."""
    return y if isinstance(y, Tensor) else first(y[0])


def step(
    model: Any, parameters: list[Tensor], x: Tensor, kind: str, dtype: str
) -> Callable[[], list[Tensor]]:
    """One call: the output, or the gradients of all parameters."""

    def autocast() -> Any:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def inference() -> list[Tensor]:
        with torch.no_grad(), autocast():
            return [first(model(x))]

    def training() -> list[Tensor]:
        with autocast():
            y = first(model(x))
            loss = (y if y.dtype == torch.float64 else y.float()).square().mean()
        return [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]

    return inference if kind == "inference" else training


def exact_results(model: nn.Module, x: Tensor, kind: str) -> list[Tensor]:
    """What step() returns of the model in float64."""
    exact = copy.deepcopy(model).double()
    torch.backends.cudnn.benchmark = False  # trying all of float64's convolutions takes ten seconds
    try:
        return step(exact, list(exact.parameters()), x.double(), kind, "float64")()
    finally:
        torch.backends.cudnn.benchmark = True


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of a call beside what was allocated before; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_rms(found: list[Tensor], right: list[Tensor]) -> float:
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, right, strict=True))
    scale = sum(float(b.double().square().sum()) for b in right)
    return (off / max(scale, 1e-300)) ** 0.5


@contextlib.contextmanager
def without_dropout(*models: nn.Module) -> Iterator[None]:
    """Sets every dropout's p to 0: masks would differ between dtypes."""
    dropouts = [
        m for model in models for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)
    ]
    kept = [dropout.p for dropout in dropouts]
    for dropout in dropouts:
        dropout.p = 0.0
    try:
        yield
    finally:
        for dropout, p in zip(dropouts, kept, strict=True):
            dropout.p = p


def measure(model: Model, kind: str, dtype: str, layout: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    device = torch.device(args.device)
    small = device.type == "cpu" or args.small
    torch.manual_seed(0)
    memory_format = torch.channels_last_3d if layout == "ndhwc" else torch.contiguous_format
    before = model.make(small).to(device, memory_format=memory_format).train(kind == "training")
    x = torch.randn(model.small if small else model.size, device=device).to(memory_format=memory_format)
    after = copy.deepcopy(before)
    report = upconv3d.accelerate(after, bare=args.bare, norms=args.norms, sample=(x,))
    replaced = f"{len(report.replaced)}/{len(report.findings)}"
    models = {"eager": before, "ours": after, "copy": copy.deepcopy(before)}
    calls = {name: step(m, list(m.parameters()), x, kind, dtype) for name, m in models.items()}
    with without_dropout(before, after):
        right = exact_results(before, x, kind)
        with tf32():
            ours, theirs = calls["ours"](), calls["eager"]()
    finite = all(bool(torch.isfinite(t).all()) for t in ours)
    err, eager_err = relative_rms(ours, right), relative_rms(theirs, right)
    del right, ours, theirs
    failures = {}
    with tf32():
        memory, eager_memory = (peak_bytes(calls[name], device) for name in ("ours", "eager"))
        # Where nothing was replaced, the compiler gets the same model twice.
        if args.compile and report.replaced:
            torch._dynamo.reset()
            for name, m in models.items():
                call = step(torch.compile(m, dynamic=False), list(m.parameters()), x, kind, dtype)
                try:
                    with fresh_cache():  # else the copy is the model's own code, tuned once for both
                        call()
                except Exception as error:  # the compiler's, which a row reports
                    failures[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                else:
                    calls[f"compile:{name}"] = call
        times = medians_ms(calls, device, args.seconds, ROUNDS)

    def ratio(one: str, other: str) -> float | None:
        return times[one] / times[other] if one in times and other in times else None

    good = finite and err <= max(ERROR_FACTOR * eager_err, ROUNDING[dtype])
    return {
        "name": model.name,
        "source": model.source,
        "size": list(x.shape),
        "pass": kind,
        "dtype": dtype,
        "layout": layout,
        "replaced": replaced + (f"+{len(report.norms)}" if report.norms else ""),
        "report": str(report).splitlines()[1:],
        "eager_ms": times["eager"],
        "ms": times["ours"],
        "x_eager": ratio("ours", "eager"),
        "compile_ms": times.get("compile:eager"),
        "compiled_ms": times.get("compile:ours"),
        "x_compile": ratio("compile:ours", "compile:eager"),
        "x_copy": ratio("copy", "eager"),
        "x_compiled_copy": ratio("compile:copy", "compile:eager"),
        "compile_failures": failures,
        "memory_mb": None if memory is None else memory / 1e6,
        "x_memory": None if memory is None or not eager_memory else memory / eager_memory,
        "err": err,
        "eager_err": eager_err,
        "check": "ok" if good else "FAILED",
    }


# Of each kind of bar: the ratio, that of an unchanged copy, offset from the row, colour and label.
BARS = (
    ("x_eager", "x_copy", -0.2, "#0072B2", "accelerated / eager"),
    ("x_compile", "x_compiled_copy", 0.2, "#E69F00", "accelerated and compiled / torch.compile"),
)
BAR_HEIGHT = 0.36
COPY_LABEL = "scatter: from 1 to the ratio of an unchanged copy in the same rounds (no mark: none was timed)"


def draw(env: dict[str, Any], rows: list[dict[str, Any]]) -> bytes:
    """Times after divided by times before, as the content of a PNG file.

    A bar for each ratio of a row, and on it a line from 1 to what an unchanged copy of the model came out at.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.5 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    scatter: dict[str, list[float]] = {"y": [], "ratio": []}
    for key, copy_key, offset, colour, label in BARS:
        measured = [(y + offset, row) for y, row in enumerate(rows) if row.get(key) is not None]
        if not measured:
            continue
        places = [y for y, _ in measured]
        axes.barh(places, [row[key] for _, row in measured], BAR_HEIGHT, color=colour, label=label)
        for y in {y + offset for y in range(len(rows))} - set(places):
            axes.text(0.01, y, "not measured", fontsize=6, color="#666666", va="center")
        copies = [(y, row[copy_key]) for y, row in measured if row.get(copy_key) is not None]
        scatter["y"] += [y for y, _ in copies]
        scatter["ratio"] += [ratio for _, ratio in copies]
    axes.axvline(1.0, color="black", linewidth=0.8)
    if scatter["y"]:
        axes.hlines(scatter["y"], 1.0, scatter["ratio"], color="black", linewidth=1.6, label=COPY_LABEL)
        # Where the copy came out at 1, the end alone shows that there was one.
        axes.plot(scatter["ratio"], scatter["y"], "|", color="black", markersize=9, markeredgewidth=1.6)
    labels = [f"{row['name']}\n{row['pass']}, {row['dtype']}, {row['layout']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.05)
    axes.set_xlabel("time, below 1 is quicker")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.suptitle(environment_line(env), fontsize=7)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.legend(loc="outside lower center", fontsize=7, frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--models", type=regex, default="", metavar="REGEX", help="names to run (default: all)"
    )
    parser.add_argument("--pass", dest="passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--dtype", nargs="+", choices=list(ROUNDING), default=["bfloat16", "float32"])
    parser.add_argument("--layout", nargs="+", choices=["ncdhw", "ndhwc"], default=["ncdhw"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="few channels and small volumes, as on a CPU")
    parser.add_argument("--bare", action="store_true", help="accelerate(bare=True)")
    parser.add_argument("--norms", action="store_true", help="accelerate(norms=True)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no torch.compile peers")
    parser.add_argument(
        "--seconds", type=seconds, help="measuring time per row (default: 2; with --quick: 0.3)"
    )
    parser.add_argument("--quick", action="store_true", help="without torch.compile peers")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write environment and rows to this file")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the table to this file")
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw the ratios; needs matplotlib")
    args = parser.parse_args()
    if args.quick:
        args.compile = False
    if args.seconds is None:
        args.seconds = 0.3 if args.quick else 2.0
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed. Remedy: pip install matplotlib")
    try:
        device_of(args)
        args.files = ResultFiles({"--json": args.json, "--markdown": args.markdown, "--png": args.png})
    except (ArgumentError, ResultFileError) as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse_arguments()
    # From the first call on: the plan cache keeps the first plan it finds for a shape.
    torch.backends.cudnn.benchmark = True
    selected = [model for model in MODELS if args.models.search(model.name)]
    if not selected:
        print(f"bench_models: no model matches --models {args.models.pattern!r}", file=sys.stderr)
        return 2
    env = environment(
        torch.device(args.device), ["python", "perf/bench_models.py", *sys.argv[1:]], Path(__file__)
    )
    rows = []
    for model in selected:
        if model.needs is not None and importlib.util.find_spec(model.needs) is None:
            print(f"MODEL_NOTE name={model.name} skipped: it needs the package {model.needs}", flush=True)
            continue
        for kind in args.passes:
            for dtype in args.dtype:
                for layout in args.layout:
                    row = measure(model, kind, dtype, layout, args)
                    rows.append(row)
                    print(bench_line(row, "MODEL", LINE), flush=True)
                    for name, failure in row["compile_failures"].items():
                        print(f"MODEL_NOTE name={model.name} torch.compile of {name}: {failure}", flush=True)
                    args.files.write("--json", lambda: result_text(env, rows))
    table = models_report({"environment": env, "rows": rows})
    print(table)
    args.files.write("--markdown", lambda: table)
    if rows:
        args.files.write("--png", lambda: draw(env, rows))
    failed = sum(row["check"] != "ok" for row in rows)
    print(f"MODEL_SUMMARY rows={len(rows)} failed={failed}")
    return exit_status("bench_models", rows, args.files)


if __name__ == "__main__":
    sys.exit(main())
