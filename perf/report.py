# SPDX-License-Identifier: Apache-2.0
"""Turns result files of bench.py, bench_training.py and bench_models.py into the tables of the README and its
companions, and keeps them equal.

    python perf/report.py RESULT.json             prints the Markdown of the shapes tagged readme
    python perf/report.py --all RESULT.json       of every shape
    python perf/report.py --write README.md ...   fills every block between the markers
    python perf/report.py --check README.md ...   exit status 1 where a block differs from its result file

A block in a Markdown file stands between these two lines; the path is relative to that file, the tag one of
shapes.json's (readme, if left out), and of no consequence to whole models:

    <!-- results: perf/results/NAME.json TAG -->
    <!-- /results -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from paired import RATIO_FORMAT, interval, verdict
from upconv3d.profile.cases import Shape, load_shapes
from upconv3d.profile.measure import environment_line

BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<path>\S+?)(?: (?P<tag>\w+))? -->\n).*?(?P<close><!-- /results -->)",
    re.DOTALL,
)
LAYOUT_NAMES = {"ncdhw": "NCDHW", "ndhwc": "channels_last_3d"}
COLUMNS = [
    ("time, ms", "ms", "{:.3f}"),
    ("forward, ms", "forward_ms", "{:.3f}"),
    ("x floor", "x_floor", "{:.2f}"),
    ("x eager", "x_eager", "{:.2f}"),
    ("x torch.compile", "x_compile", "{:.2f}"),
    ("x convolution alone", "x_conv", "{:.2f}"),
    ("memory, MB", "memory_mb", "{:.0f}"),
    ("x eager's memory", "x_memory", "{:.2f}"),
    ("worst gradient's error / eager's", "err_ratio", "{:.2f}"),
    ("TFLOP/s", "tflops", "{:.3g}"),
    ("GB/s", "gbs", "{:.3g}"),
    ("rms error", "err_rms", "{:.1e}"),
    ("eager's", "eager_err_rms", "{:.1e}"),
]


# Of whole models, by bench_models.py: before and after, in ms and MB.
MODEL_COLUMNS = [
    ("eager, ms", "eager_ms", "{:.2f}"),
    ("accelerated, ms", "ms", "{:.2f}"),
    ("ratio", "x_eager", RATIO_FORMAT),
    ("of a copy", "x_copy", RATIO_FORMAT),
    ("rounds", "rounds", "{}"),
    ("ratio of queued steps", "x_queued", RATIO_FORMAT),
    ("of a copy", "x_queued_copy", RATIO_FORMAT),
    ("torch.compile, ms", "compile_ms", "{:.2f}"),
    ("accelerated and compiled, ms", "compiled_ms", "{:.2f}"),
    ("ratio", "x_compile", RATIO_FORMAT),
    ("of a copy", "x_compiled_copy", RATIO_FORMAT),
    ("accelerated, MB", "memory_mb", "{:.0f}"),
    ("ratio to eager", "x_memory", "{:.2f}"),
    ("rms error", "err", "{:.1e}"),
    ("eager's", "eager_err", "{:.1e}"),
]


PAIRED = (
    "Every step is waited for, but for queued ones. A ratio is the median of its rounds', in brackets its\n"
    '95 % interval: "slower" where that, widened by what the copy is off 1, lies above 1, "quicker"\n'
    'where it lies below, else "alike".'
)


def model_cell(row: dict[str, Any], key: str, form: str) -> str:
    """A figure, with its interval and what that says where it has one."""
    if row.get(key) is None:
        return "-"
    ends = interval(row, key)
    if ends is None:
        return form.format(row[key])
    low, high = (form.format(end) for end in ends)
    return f"{form.format(row[key])} [{low}, {high}] {verdict(row, key)}"


def models_report(result: dict[str, Any]) -> str:
    """The Markdown of a result file of bench_models.py: a row per case."""
    env, rows = result["environment"], result["rows"]
    columns = [column for column in MODEL_COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    lines = [f"Measured {environment_line(env)}, by", "", "```console", env["command"], "```", ""]
    if any(interval(row, "x_eager") for row in rows):
        lines += [PAIRED, ""]
    lines.append("| model, input | replaced | pass | " + " | ".join(title for title, _, _ in columns) + " |")
    lines.append("|---|---|---|" + "---:|" * len(columns))
    for row in rows:
        size = "x".join(map(str, row["size"]))
        layout = " channels_last_3d" if row["layout"] == "ndhwc" else ""
        kind = f"{row['pass']}, {row['dtype']}{layout}"
        kind += "" if row["check"] == "ok" else " (check failed)"
        cells = [model_cell(row, key, form) for _, key, form in columns]
        lines.append(f"| `{row['name']}` {size} | {row['replaced']} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(result: dict[str, Any], shapes: dict[str, Shape], tag: str | None = "readme") -> str:
    """The Markdown of a result file: where it was measured, the command, the table of shapes tagged `tag`."""
    if any("replaced" in row for row in result["rows"]):
        return models_report(result)
    env = result["environment"]
    rows = [row for row in result["rows"] if tag is None or tag in shapes[row["name"]].tags]
    if not rows:
        raise SystemExit(
            f"report: the result has no shape tagged {tag!r}; give --all, or run bench.py on those"
        )
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    with_plan = "plan" in rows[0]
    lines = [f"Measured {environment_line(env)}, by", "", "```console", env["command"], "```", ""]
    titles = [title for title, _, _ in columns] + (["plan"] if with_plan else [])
    lines.append("| shape | input | " + " | ".join(titles) + " |")
    lines.append("|---|---|" + "---:|" * len(columns) + ("---|" if with_plan else ""))
    for row in rows:
        if row["check"] != "ok":
            raise SystemExit(
                f"report: {row['name']} {row['dtype']} {row['layout']} failed its check; not quotable"
            )
        kind = row["dtype"] if row["precision"] == "native" else f"{row['dtype']} {row['precision']}"
        cells = [
            f"`{row['name']}` {shapes[row['name']].describe()}",
            f"{kind} {LAYOUT_NAMES[row['layout']]}",
        ]
        cells += ["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns]
        lines.append("| " + " | ".join(cells + ([row["plan"]] if with_plan else [])) + " |")
    return "\n".join(lines) + "\n"


def fill(path: Path, shapes: dict[str, Shape]) -> str:
    """The text of `path` with every block replaced by the report of its result file."""

    def body(match: re.Match[str]) -> str:
        source = path.parent / match["path"]
        if not source.is_file():
            raise SystemExit(
                f"report: {path} quotes {match['path']}, which is missing; run perf/bench.py --json"
            )
        table = report(json.loads(source.read_text()), shapes, match["tag"] or "readme")
        return match["open"] + table + match["close"]

    text = path.read_text()
    if BLOCK.search(text) is None:
        raise SystemExit(
            f"report: {path} has no results block; add the two marker lines of {Path(__file__).name}"
        )
    return BLOCK.sub(body, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", type=Path, nargs="+", help="result files, or with --write or --check Markdown files"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="fill the blocks of Markdown files")
    action.add_argument("--check", action="store_true", help="compare the blocks of Markdown files")
    parser.add_argument("--all", action="store_true", help="print every shape, not only those tagged readme")
    args = parser.parse_args()
    shapes = {shape.name: shape for shape in load_shapes()}
    if not (args.write or args.check):
        tag = None if args.all else "readme"
        for path in args.paths:
            print(report(json.loads(path.read_text()), shapes, tag), end="")
        return 0
    status = 0
    for path in args.paths:
        filled = fill(path, shapes)
        if args.write:
            path.write_text(filled)
        elif filled != path.read_text():
            print(f"report: {path} differs from its result files; run perf/report.py --write {path}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
