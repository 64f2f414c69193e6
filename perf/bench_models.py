# SPDX-License-Identifier: Apache-2.0
"""Times whole models before and after upconv3d.accelerate, in inference and in training.

One line per case:

    MODEL name=... pass=... dtype=... layout=... replaced=... seed=... rounds=... eager_ms=... ms=...
          x_eager=... x_eager_low=... x_eager_high=... verdict=... x_copy=... x_copy_low=... x_copy_high=...
          queued_rounds=... x_queued=... x_queued_copy=... compile_ms=... compiled_ms=... x_compile=...
          x_compiled_copy=... memory_mb=... x_memory=... err=... eager_err=... check=...

(and _low and _high of every ratio of times.) In each of so many rounds every model makes one call, in an
order that the seed determines; its time is the host's clock from the call until the device is done. eager_ms
is the median of the model as it was, ms of the accelerated one; compile_ms and compiled_ms are the two under
torch.compile. x_eager and x_compile are after divided by before, below 1 is quicker: the median of the
rounds' ratios, and the ends of its interval of 95 %. x_copy and x_compiled_copy are those of an unchanged
copy of the model, in the same rounds, and should be "alike"; each is compiled with a cache of its own.
verdict is "slower" where x_eager's interval, widened by what x_copy is off 1, lies above 1 in two decimals,
"quicker" where it lies below, else "alike": the rounds do not tell the two apart.

x_queued and x_queued_copy are of training steps of which four are started one after the other, and only the
last is waited for, as where a loop reads no loss: the host runs ahead of the device, if it can. They are
timed where 21 rounds fit into --seconds, in rounds of their own; longer steps keep the device busy.

Rounds go on for --seconds, and there are 21 at least: ten seconds for three models of 160 ms.

replaced counts transposed convolutions, of those that the model has; behind a plus, with --norms, norms.
memory_mb is the peak of the accelerated model beside parameters and input, on a GPU; x_memory is after
divided by before. err and eager_err are rms errors of the output, in training of all gradients together,
relative to the model as it was in float64. check is "ok" where all is finite and err at most twice eager_err.

Inference runs in eval mode without gradients, training in train mode: forward, mean of squares, backward,
without an optimizer. "bfloat16" is autocast of float32 parameters, "float32" has TF32 on.

perf/models.py says what has to be installed.

Exit status 1 if any check fails; 2 for wrong arguments, a result file that cannot be written and models of
which none can be made among them; 4 where the file could be written at first and not after measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import upconv3d
from bench import bench_line, exit_status, regex, result_text
from models import MODELS, Model
from paired import MIN_ROUNDS, interval, ratio_fields, turns_ms, verdict
from report import models_report
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from upconv3d.profile.arguments import ArgumentError, device_of, make_current, seconds
from upconv3d.profile.measure import environment, environment_line
from upconv3d.profile.results import ResultFileError, ResultFiles

ERROR_FACTOR = 2.0
# Rounding of the last operation, where eager's error happens to be smaller still.
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-3}
QUEUED = 4
PASSES = ("inference", "training")
LINE = (
    "name pass dtype layout replaced seed rounds eager_ms ms x_eager x_eager_low x_eager_high verdict "
    "x_copy x_copy_low x_copy_high queued_rounds x_queued x_queued_low x_queued_high "
    "x_queued_copy x_queued_copy_low x_queued_copy_high compile_ms compiled_ms x_compile x_compile_low "
    "x_compile_high x_compiled_copy x_compiled_copy_low x_compiled_copy_high memory_mb x_memory err "
    "eager_err check"
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
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


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
    made = model.make(small).to(device, memory_format=memory_format).train(kind == "training")
    x = torch.randn(model.small if small else model.size, device=device).to(memory_format=memory_format)
    # Modules made first lie where the heap had holes, and take a host up to 1.5 % longer than later copies:
    # none of the first two is timed.
    _, before, after, unchanged = (copy.deepcopy(made) for _ in range(4))
    report = upconv3d.accelerate(after, bare=args.bare, norms=args.norms, sample=(x,))
    replaced = f"{len(report.replaced)}/{len(report.findings)}"
    models = {"eager": before, "ours": after, "copy": unchanged}
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
        times = turns_ms(calls, device, args.seconds, args.seed)
        medians = {name: statistics.median(values) for name, values in times.items()}
        queued: dict[str, list[float]] = {}
        group_ms = QUEUED * sum(medians[name] for name in models)
        if kind == "training" and MIN_ROUNDS * group_ms <= 1e3 * args.seconds:
            eager_calls = {name: calls[name] for name in models}
            queued = turns_ms(eager_calls, device, args.seconds, args.seed, QUEUED)
    x_eager = ratio_fields("x_eager", times, "ours", "eager")
    x_copy = ratio_fields("x_copy", times, "copy", "eager")
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
        "seed": args.seed,
        "rounds": len(times["eager"]),
        "eager_ms": medians["eager"],
        "ms": medians["ours"],
        **x_eager,
        "verdict": verdict(x_eager | x_copy, "x_eager"),
        **x_copy,
        "queued_rounds": len(queued["eager"]) if queued else None,
        **ratio_fields("x_queued", queued, "ours", "eager"),
        **ratio_fields("x_queued_copy", queued, "copy", "eager"),
        "compile_ms": medians.get("compile:eager"),
        "compiled_ms": medians.get("compile:ours"),
        **ratio_fields("x_compile", times, "compile:ours", "compile:eager"),
        **ratio_fields("x_compiled_copy", times, "compile:copy", "compile:eager"),
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
INTERVAL_LABEL = "95 % interval of the ratio"
COPY_INTERVAL_LABEL = "the same of an unchanged copy in the same rounds (no mark: none was timed)"
COPY_LABEL = "scatter: from 1 to the ratio of an unchanged copy in the same rounds (no mark: none was timed)"


def draw(env: dict[str, Any], rows: list[dict[str, Any]]) -> bytes:
    """Times after divided by times before, as the content of a PNG file.

    A bar for each ratio of a row, and on it the interval of the ratio and, below, of an unchanged copy's; in
    files without intervals a line from 1 to what the copy came out at.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 0.5 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    copies: dict[str, list[tuple[float, float, float, float]]] = {COPY_LABEL: [], COPY_INTERVAL_LABEL: []}
    intervals: list[tuple[float, float, float]] = []
    for key, copy_key, offset, colour, label in BARS:
        measured = [(y + offset, row) for y, row in enumerate(rows) if row.get(key) is not None]
        if not measured:
            continue
        places = [y for y, _ in measured]
        axes.barh(places, [row[key] for _, row in measured], BAR_HEIGHT, color=colour, label=label)
        for y in {y + offset for y in range(len(rows))} - set(places):
            axes.text(0.01, y, "not measured", fontsize=6, color="#666666", va="center")
        for y, row in measured:
            ends, copy_ends, ratio = interval(row, key), interval(row, copy_key), row.get(copy_key)
            if ends is not None:
                intervals.append((y - BAR_HEIGHT / 4, *ends))
            if copy_ends is not None:
                copies[COPY_INTERVAL_LABEL].append((y + BAR_HEIGHT / 4, ratio, *copy_ends))
            elif ratio is not None:
                copies[COPY_LABEL].append((y, ratio, 1.0, ratio))
    axes.axvline(1.0, color="black", linewidth=0.8)
    if intervals:
        y, low, high = zip(*intervals, strict=True)
        axes.hlines(y, low, high, color="#CC0000", linewidth=1.6, label=INTERVAL_LABEL)
        axes.plot(low + high, y + y, "|", color="#CC0000", markersize=4, markeredgewidth=1.2)
    for label, found in copies.items():
        if not found:
            continue
        y, ratio, low, high = zip(*found, strict=True)
        axes.hlines(y, low, high, color="black", linewidth=1.6, label=label)
        # Where the line is a point, the mark alone shows that a copy was timed.
        axes.plot(
            ratio, y, "|", color="black", markersize=9 if label == COPY_LABEL else 5, markeredgewidth=1.6
        )
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
        "--seconds",
        type=seconds,
        help="measuring time per row, and once more of queued steps; 21 rounds at least, whatever they take "
        "(default: 6; with --quick: 0.3)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the orders in which calls take turns (default: 0)"
    )
    parser.add_argument("--quick", action="store_true", help="without torch.compile peers")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write environment and rows to this file")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the table to this file")
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw the ratios; needs matplotlib")
    args = parser.parse_args()
    if args.quick:
        args.compile = False
    if args.seconds is None:
        args.seconds = 0.3 if args.quick else 6.0
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed. Remedy: pip install matplotlib")
    try:
        args.device = device_of(args)
        args.files = ResultFiles({"--json": args.json, "--markdown": args.markdown, "--png": args.png})
    except (ArgumentError, ResultFileError) as error:
        parser.error(str(error))
    return args


def is_missing(package: str | None) -> bool:
    """Whether a package is needed and not installed."""
    return package is not None and importlib.util.find_spec(package) is None


def main() -> int:
    args = parse_arguments()
    make_current(args.device)
    # From the first call on: the plan cache keeps the first plan it finds for a shape.
    torch.backends.cudnn.benchmark = True
    selected = [model for model in MODELS if args.models.search(model.name)]
    if not selected:
        print(f"bench_models: no model matches --models {args.models.pattern!r}", file=sys.stderr)
        return 2
    missing = [model for model in selected if is_missing(model.needs)]
    if missing == selected:
        packages = " and ".join(sorted({str(model.needs) for model in missing}))
        print(
            f"bench_models: every model that matches --models {args.models.pattern!r} needs a package that "
            f"is not installed. Remedy: install {packages}",
            file=sys.stderr,
        )
        return 2
    env = environment(args.device, ["python", "perf/bench_models.py", *sys.argv[1:]], Path(__file__))
    rows = []
    for model in selected:
        if model in missing:
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
    args.files.write("--png", lambda: draw(env, rows))
    failed = sum(row["check"] != "ok" for row in rows)
    verdicts = [row["verdict"] for row in rows]
    counts = " ".join(f"{one}={verdicts.count(one)}" for one in ("slower", "alike", "quicker"))
    print(f"MODEL_SUMMARY rows={len(rows)} failed={failed} {counts}")
    return exit_status("bench_models", rows, args.files)


if __name__ == "__main__":
    sys.exit(main())
