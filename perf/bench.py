# SPDX-License-Identifier: Apache-2.0
"""Times the block on real decoder shapes beside its peers, with its error beside its time.

One line per case, to grep and to compare:

    BENCH name=... dtype=... layout=... precision=... plan=... ms=... tflops=... gbs=... x_floor=...
          x_eager=... x_compile=... x_conv=... err_max=... err_rms=... eager_err_rms=... check=...

ms is a median. tflops counts useful arithmetic, gbs x, w and y once each. Every x_ is this block's time
divided by the other's: below 1 is quicker than eager, than torch.compile at its best, than the library's
convolution alone; x_floor is explained in upconv3d.profile.cases.floor_ms and given on an H200 only. Errors
are absolute, against float64, on normalized values. check is "ok" where every value is finite and the rms
error is at most twice eager's, or under "tf32" twice that of an operand's rounding.

Exit status 1 if any check fails; 2 for wrong arguments, a result file that cannot be written among them; 4
where it could be written at first and not after measuring. See perf/README.md for how to read and
record results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import upconv3d
from upconv3d.profile.arguments import (
    PRECISIONS,
    ArgumentError,
    device_of,
    make_current,
    precisions_of,
    seconds,
    shapes_of_file,
)
from upconv3d.profile.cases import (
    DTYPES,
    LAYOUTS,
    SHAPES_FILE,
    Case,
    floor_ms,
    h200_rates,
    make_tensors,
)
from upconv3d.profile.measure import environment, medians_ms
from upconv3d.profile.peers import (
    COMPILE_MODES,
    block_arguments,
    block_call,
    check_errors,
    compiled_peers,
    convolution,
    eager,
    set_precision,
)
from upconv3d.profile.results import NOT_WRITTEN_STATUS, ResultFileError, ResultFiles, json_text

DASH = "na"


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """The selected shapes crossed with dtypes, memory formats and precisions, in a fixed order."""
    for shape in shapes_of_file(args.shapes_file):
        if not args.shapes.search(shape.name):
            continue
        if args.quick and "quick" not in shape.tags:
            continue
        for dtype_name in args.dtype:
            for layout in args.layout:
                for precision in precisions_of(args, device, dtype_name):
                    yield Case(shape, DTYPES[dtype_name], layout, precision)


def measure(case: Case, device: torch.device, modes: list[str], budget_s: float) -> dict[str, Any]:
    """One row: plan, times, ratios, errors."""
    set_precision(case)
    t = make_tensors(case, device)
    positional, keywords = block_arguments(t, case)
    plan = upconv3d.explain(*positional, **keywords)
    block = block_call(t, case)
    row: dict[str, Any] = {
        "name": case.shape.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "layout": case.layout,
        "precision": case.precision,
        "plan": plan.algorithm,
        "kernel": plan.kernel,
        "reason": plan.reason,
    }
    row |= check_errors(t, case, block, plan.workspace_bytes)
    peers, row["compile_failures"] = compiled_peers(t, case, modes)
    calls: dict[str, Callable[[], Any]] = {
        "block": block,
        "eager": lambda: eager(t, case.shape),
        "conv": lambda: convolution(t, case.shape),
    }
    times = medians_ms(calls | peers, device, budget_s)
    ms = times["block"]
    row |= {"ms": ms, "peers_ms": {name: value for name, value in times.items() if name != "block"}}
    row["useful_flops"] = case.shape.useful_flops
    row["tflops"] = case.shape.useful_flops / ms / 1e9
    row["gbs"] = (case.bytes_x + case.bytes_w + case.bytes_y) / ms / 1e6
    on_h200 = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    rates = h200_rates(case) if on_h200 else None
    floor = None if rates is None else floor_ms(case, rates)
    compiled = min((times[name] for name in peers), default=None)
    row["floor_ms"] = floor
    for name, other in (
        ("floor", floor),
        ("eager", times["eager"]),
        ("compile", compiled),
        ("conv", times["conv"]),
    ):
        row[f"x_{name}"] = None if other is None else ms / other
    return row


LINE = (
    "name dtype layout precision plan ms tflops gbs x_floor x_eager x_compile x_conv "
    "err_max err_rms eager_err_rms check"
)


def bench_line(row: dict[str, Any], kind: str = "BENCH", columns: str = LINE) -> str:
    """The greppable line of one row."""

    def text(value: Any) -> str:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return DASH
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return f"{kind} " + " ".join(f"{key}={text(row[key])}" for key in columns.split())


def regex(text: str) -> re.Pattern[str]:
    """A regular expression of an argument."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression; got {text!r}: {error}") from error


def parse_arguments(description: str | None = __doc__) -> argparse.Namespace:
    """The options of bench.py and bench_training.py; `files` are the ResultFiles that were asked for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--shapes", type=regex, default="", metavar="REGEX", help="names to run (default: all)"
    )
    parser.add_argument("--shapes-file", type=Path, default=SHAPES_FILE, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        help="of float32 on a GPU (default: both)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile",
        choices=list(COMPILE_MODES),
        help="torch.compile peers (default: best; with --quick: default)",
    )
    parser.add_argument("--seconds", type=seconds, default=1.0, help="measuring time per case (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write environment and rows to this file")
    parser.add_argument("--quick", action="store_true", help="only the shapes tagged quick in shapes.json")
    args = parser.parse_args()
    if args.compile is None:
        args.compile = "default" if args.quick else "best"
    try:
        args.device = device_of(args)
        precisions_of(args, args.device, "float32")
        shapes_of_file(args.shapes_file)
        args.files = ResultFiles({"--json": args.json}, inputs=[args.shapes_file])
    except (ArgumentError, ResultFileError) as error:
        parser.error(str(error))
    return args


def nothing_selected(command: str, args: argparse.Namespace) -> int:
    """The exit status where no shape is left to measure, which it says on stderr."""
    quick = " and is tagged quick, as --quick asks" if args.quick else ""
    pattern = args.shapes.pattern
    print(
        f"{command}: no shape matches --shapes {pattern!r}{quick}; see {args.shapes_file.name}",
        file=sys.stderr,
    )
    return 2


def exit_status(command: str, rows: list[dict[str, Any]], files: ResultFiles) -> int:
    """1 where a check failed, else 4 where a file is missing, which it says on stderr."""
    for failure in files.failures:
        print(f"{command}: {failure}", file=sys.stderr)
    if any(row["check"] != "ok" for row in rows):
        return 1
    return NOT_WRITTEN_STATUS if files.failures else 0


def result_text(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The content of a result file."""
    return json_text({"environment": env, "rows": rows})


@torch.no_grad()
def main() -> int:
    args = parse_arguments()
    device = args.device
    make_current(device)
    # From the first call on: the plan cache keeps the first plan it finds for a shape.
    torch.backends.cudnn.benchmark = True
    selected = list(cases(args, device))
    if not selected:
        return nothing_selected("bench", args)
    env = environment(device, ["python", "perf/bench.py", *sys.argv[1:]], Path(__file__))
    print("BENCH_ENVIRONMENT " + json.dumps(env), flush=True)
    rows = []
    for case in selected:
        row = measure(case, device, COMPILE_MODES[args.compile], args.seconds)
        rows.append(row)
        print(bench_line(row), flush=True)
        for mode, failure in row["compile_failures"].items():
            print(f"BENCH_NOTE name={row['name']} torch.compile mode={mode} failed: {failure}", flush=True)
        # After every case, so that an interrupted run keeps what it has.
        args.files.write("--json", lambda: result_text(env, rows))
    failed = sum(row["check"] != "ok" for row in rows)
    print(f"BENCH_SUMMARY cases={len(rows)} failed={failed}")
    return exit_status("bench", rows, args.files)


if __name__ == "__main__":
    sys.exit(main())
