# SPDX-License-Identifier: Apache-2.0
"""Times the block on real decoder shapes beside its peers, with its error beside its time.

One line per case, to grep and to compare:

    BENCH name=... dtype=... layout=... precision=... plan=... ms=... tflops=... gbs=... x_floor=...
          x_eager=... x_compile=... x_conv=... err_max=... err_rms=... eager_err_rms=... check=...

ms is a median. tflops counts useful arithmetic, gbs x, w and y once each. Every x_ is this block's time
divided by the other's: below 1 is quicker than eager, than torch.compile at its best, than the library's
convolution alone; x_floor is explained in block.floor_ms and given on an H200 only. Errors are absolute,
against float64, on normalized values. check is "ok" where every value is finite and the rms error is at most
twice eager's.

Exit status 1 if any check fails. See perf/README.md for how to read and record results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import upconv3d
from block import SHAPES_FILE, Case, Shape, Tensors, conv_arguments, floor_ms, load_shapes, make_tensors
from measure import environment, errors, medians_ms, poison

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
COMPILE_MODES = {"default": ["default"], "best": ["default", "max-autotune-no-cudagraphs"], "none": []}
# A float64 reference of more arithmetic than this would take longer than the measurement.
REFERENCE_FLOPS = {"cuda": 2e11, "cpu": 4e9}
# Rounding of the result itself, where eager happens to be exact.
ERROR_FLOOR = {torch.float32: 1e-7, torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float64: 1e-15}
DASH = "na"


def convolution(t: Tensors, shape: Shape) -> torch.Tensor:
    """The library's convolution alone."""
    return F.conv_transpose3d(t.x, t.w, t.bias, **conv_arguments(shape))


def eager(t: Tensors, shape: Shape) -> torch.Tensor:
    """PyTorch's three calls."""
    a = torch.relu(convolution(t, shape))
    return F.group_norm(a, shape.num_groups, t.gamma, t.beta, shape.eps)


def block_arguments(t: Tensors, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of this library's op, and of explain."""
    keywords = conv_arguments(case.shape) | {
        "num_groups": case.shape.num_groups,
        "norm_weight": t.gamma,
        "norm_bias": t.beta,
        "eps": case.shape.eps,
        "precision": case.precision if case.dtype is torch.float32 else None,
    }
    return (t.x, t.w, t.bias), keywords


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """The selected shapes crossed with dtypes, memory formats and precisions, in a fixed order."""
    pattern = re.compile(args.shapes)
    for shape in load_shapes(args.shapes_file):
        if not pattern.search(shape.name):
            continue
        if args.quick and "quick" not in shape.tags:
            continue
        for dtype_name in args.dtype:
            precisions = ["native"]
            if dtype_name == "float32":
                precisions = args.precision if device.type == "cuda" else ["ieee"]
            for layout in args.layout:
                for precision in precisions:
                    yield Case(shape, DTYPES[dtype_name], layout, precision)


def compiled_peers(
    t: Tensors, case: Case, modes: list[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """torch.compile of the three calls in each mode; one that fails to compile is returned as its error."""
    calls: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    torch._dynamo.reset()  # a recompilation limit reached by earlier shapes would leave this one uncompiled
    for mode in modes:

        def three_calls(t: Tensors = t) -> torch.Tensor:
            return eager(t, case.shape)

        call = torch.compile(three_calls, mode=mode, dynamic=False, fullgraph=True)
        try:
            call()
        except RuntimeError as error:  # what the compiler raises is its result, recorded in the row
            failures[mode] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            calls[f"compile:{mode}"] = call
    return calls, failures


def check_errors(
    t: Tensors, case: Case, call: Callable[[], torch.Tensor], workspace_bytes: int
) -> dict[str, Any]:
    """Errors of this block and of eager against float64, on the first and the last sample.

    GroupNorm is per sample, so two samples stand for all; one where two would be too much float64 arithmetic.
    """
    n = case.shape.n
    index = [0, n - 1] if n > 1 else [0]
    per_sample = case.shape.useful_flops / n
    if per_sample * len(index) > REFERENCE_FLOPS[t.x.device.type]:
        index = [n - 1]
    y_eager = eager(t, case.shape)
    size = y_eager.shape
    y_eager = y_eager[index].clone()
    poison(size, case.dtype, t.x.device, workspace_bytes)
    y = call()
    finite = bool(torch.isfinite(y).all())
    y = y[index].clone()
    y64 = eager(t.samples(index, torch.float64), case.shape.with_samples(len(index)))
    err_max, err_rms = errors(y, y64)
    eager_err_max, eager_err_rms = errors(y_eager, y64)
    ok = finite and err_rms <= 2 * max(eager_err_rms, ERROR_FLOOR[case.dtype])
    return {
        "err_max": err_max,
        "err_rms": err_rms,
        "eager_err_max": eager_err_max,
        "eager_err_rms": eager_err_rms,
        "check": "ok" if ok else "FAILED",
    }


def measure(case: Case, device: torch.device, modes: list[str], budget_s: float) -> dict[str, Any]:
    """One row: plan, times, ratios, errors."""
    # The older switch, because the compiler reads it and raises once the newer one was set.
    torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    t = make_tensors(case, device)
    positional, keywords = block_arguments(t, case)
    plan = upconv3d.explain(*positional, **keywords)

    def block() -> torch.Tensor:
        return upconv3d.conv_transpose3d_relu_group_norm(*positional, **keywords)

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
    floor = floor_ms(case) if on_h200 else None
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


def bench_line(row: dict[str, Any]) -> str:
    """The greppable line of one row."""

    def text(value: Any) -> str:
        if value is None:
            return DASH
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "BENCH " + " ".join(f"{key}={text(row[key])}" for key in LINE.split())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", default="", metavar="REGEX", help="names to run (default: all)")
    parser.add_argument("--shapes-file", type=Path, default=SHAPES_FILE, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", choices=["ncdhw", "ndhwc"], default=["ncdhw", "ndhwc"])
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["ieee", "tf32"],
        default=["tf32", "ieee"],
        help="of float32 on a GPU",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile",
        choices=list(COMPILE_MODES),
        help="torch.compile peers (default: best; with --quick: default)",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per case (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write environment and rows to this file")
    parser.add_argument("--quick", action="store_true", help="only the shapes tagged quick in shapes.json")
    args = parser.parse_args()
    if args.compile is None:
        args.compile = "default" if args.quick else "best"
    return args


def write_json(path: Path, env: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The result file, written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")
    part.replace(path)


@torch.no_grad()
def main() -> int:
    args = parse_arguments()
    device = torch.device(args.device)
    # From the first call on: the plan cache keeps the first plan it finds for a shape.
    torch.backends.cudnn.benchmark = True
    selected = list(cases(args, device))
    if not selected:
        print(
            f"bench: no shape matches --shapes {args.shapes!r}; see {args.shapes_file.name}", file=sys.stderr
        )
        return 2
    env = environment(device)
    print("BENCH_ENVIRONMENT " + json.dumps(env), flush=True)
    rows = []
    for case in selected:
        row = measure(case, device, COMPILE_MODES[args.compile], args.seconds)
        rows.append(row)
        print(bench_line(row), flush=True)
        for mode, failure in row["compile_failures"].items():
            print(f"BENCH_NOTE name={row['name']} torch.compile mode={mode} failed: {failure}", flush=True)
        if args.json is not None:
            write_json(args.json, env, rows)  # after every case, so that an interrupted run keeps what it has
    failed = sum(row["check"] != "ok" for row in rows)
    print(f"BENCH_SUMMARY cases={len(rows)} failed={failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
