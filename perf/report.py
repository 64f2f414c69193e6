# SPDX-License-Identifier: Apache-2.0
"""Turns result files of bench.py, bench_training.py and bench_models.py into the tables of the README and its
companions, and into figures of their prose, and keeps them equal.

    python perf/report.py RESULT.json             prints the Markdown of the shapes tagged readme
    python perf/report.py --all RESULT.json       of every shape
    python perf/report.py --write README.md ...   fills every block and span between the markers
    python perf/report.py --check README.md ...   exit status 1 where one differs from its result files

A block in a Markdown file stands between these two lines; the path is relative to that file, the tag one of
shapes.json's (readme, if left out), and of no consequence to whole models:

    <!-- results: perf/results/NAME.json TAG -->
    <!-- /results -->

A span stands within a line, which must not begin with it (Markdown would take the line as HTML), and is of
all rows of one or several files of bench.py:

    <!-- behind: PATH ... --><!-- /behind -->    how many took longer than the better of eager and
                                                 torch.compile, and the least and largest ratio to that
    <!-- coarser: PATH ... --><!-- /coarser -->  how many have more than twice eager's rms error
    <!-- commits: PATH ... --><!-- /commits -->  the files, with the commit that each was measured at

Exit status 2 for wrong arguments, a file that is missing or none of those among them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paired import RATIO_FORMAT, interval, verdict
from upconv3d.profile.cases import SHAPES_FILE, Shape, load_shapes
from upconv3d.profile.measure import environment_line
from upconv3d.profile.peers import ERROR_FACTOR
from upconv3d.profile.results import write_whole

BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<path>\S+?)(?: (?P<tag>\w+))? -->\n).*?(?P<close><!-- /results -->)",
    re.DOTALL,
)
SPAN = re.compile(
    r"(?P<open><!-- (?P<figure>behind|coarser|commits):(?P<paths>(?: [^\s>]+)+) -->).*?"
    r"(?P<close><!-- /(?P=figure) -->)",
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


class ReportError(Exception):
    """A file, or a part of it, that cannot be reported; says the rule and the value."""


def read(path: Path) -> str:
    """The text of a file.

    Raises: ReportError where it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} must be a text file that can be read; got: {error}") from error


def load_result(path: Path) -> dict[str, Any]:
    """A result file.

    Raises: ReportError where it is none.
    """
    rule = f"{path} must be a result file, with environment and rows as perf/bench.py --json writes them"
    try:
        result = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        hint = ". Remedy: --write or --check for Markdown" if path.suffix == ".md" else ""
        raise ReportError(f"{rule}; got no JSON: {error}{hint}") from error
    if not isinstance(result, dict) or not isinstance(result.get("environment"), dict):
        raise ReportError(f"{rule}; got none of an environment")
    rows = result.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ReportError(f"{rule}; got none of rows")
    return result


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


def refuse_failed(rows: list[dict[str, Any]]) -> None:
    """Raises: ReportError where a check failed: such rows may lack figures, and have none to quote."""
    for row in rows:
        if row["check"] != "ok":
            raise ReportError(f"{row['name']} {row['dtype']} {row['layout']} failed its check; not quotable")


def report(result: dict[str, Any], shapes: dict[str, Shape], tag: str | None = "readme") -> str:
    """The Markdown of a result file: where it was measured, the command, the table of shapes tagged `tag`.

    Raises: ReportError where it has no such shape, one that `shapes` lacks, or one that failed its check;
    KeyError where a row or the environment lacks a field.
    """
    if any("replaced" in row for row in result["rows"]):
        return models_report(result)
    env = result["environment"]
    strange = [row["name"] for row in result["rows"] if row["name"] not in shapes]
    if strange:
        raise ReportError(f"every shape must be one of {SHAPES_FILE.name}; got {strange[0]!r}")
    rows = [row for row in result["rows"] if tag is None or tag in shapes[row["name"]].tags]
    if not rows:
        raise ReportError(f"it has no shape tagged {tag!r}; give --all, or run bench.py on those")
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    with_plan = "plan" in rows[0]
    lines = [f"Measured {environment_line(env)}, by", "", "```console", env["command"], "```", ""]
    titles = [title for title, _, _ in columns] + (["plan"] if with_plan else [])
    lines.append("| shape | input | " + " | ".join(titles) + " |")
    lines.append("|---|---|" + "---:|" * len(columns) + ("---|" if with_plan else ""))
    refuse_failed(rows)
    for row in rows:
        kind = row["dtype"] if row["precision"] == "native" else f"{row['dtype']} {row['precision']}"
        cells = [
            f"`{row['name']}` {shapes[row['name']].describe()}",
            f"{kind} {LAYOUT_NAMES[row['layout']]}",
        ]
        cells += ["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns]
        lines.append("| " + " | ".join(cells + ([row["plan"]] if with_plan else [])) + " |")
    return "\n".join(lines) + "\n"


def over_the_better(row: dict[str, Any]) -> float:
    """The block's time divided by that of the better of eager and torch.compile."""
    peers = row["peers_ms"]
    return row["ms"] / min(ms for name, ms in peers.items() if name == "eager" or name.startswith("compile"))


def behind(rows: list[dict[str, Any]]) -> str:
    """ "none of 43 (0.04 to 0.96 of its time)": cases slower than the better peer, and the range of all."""
    ratios = [over_the_better(row) for row in rows]
    least, largest = (RATIO_FORMAT.format(ratio) for ratio in (min(ratios), max(ratios)))
    count = sum(ratio > 1 for ratio in ratios)
    return f"{count or 'none'} of {len(rows)} ({least} to {largest} of its time)"


def coarser(rows: list[dict[str, Any]]) -> str:
    """ "5 of 43": cases whose rms error is more than ERROR_FACTOR times eager's."""
    count = sum(row["err_rms"] > ERROR_FACTOR * row["eager_err_rms"] for row in rows)
    return f"{count or 'none'} of {len(rows)}"


FIGURES: dict[str, Callable[[list[dict[str, Any]]], str]] = {"behind": behind, "coarser": coarser}


def commit_of(result: dict[str, Any]) -> str:
    """As documents quote it: seven digits, and whether files differed."""
    commit, _, changes = (result["environment"].get("commit") or "unknown").partition(" ")
    return f"{commit[:7]} {changes}".strip()


@contextmanager
def of(place: str | Path) -> Iterator[None]:
    """Says of what is wrong with a result where it was found or quoted.

    Raises: ReportError.
    """
    try:
        yield
    except KeyError as error:
        raise ReportError(f"{place}: a row, or the environment, lacks {error}") from error
    except ReportError as error:
        raise ReportError(f"{place}: {error}") from error


def fill(path: Path, shapes: dict[str, Shape]) -> str:
    """The text of `path`, every block replaced by the report of its result file, every span by its figure.

    Raises: ReportError where a file is missing or cannot be reported, or `path` has neither block nor span.
    """

    def source(name: str) -> Path:
        found = path.parent / name
        if not found.is_file():
            raise ReportError(f"{path} quotes {name}, which is missing; run perf/bench.py --json")
        return found

    def body(match: re.Match[str]) -> str:
        result = load_result(source(match["path"]))
        with of(match["path"]):
            return match["open"] + report(result, shapes, match["tag"] or "readme") + match["close"]

    def figure(match: re.Match[str]) -> str:
        results = {name: load_result(source(name)) for name in match["paths"].split()}
        if match["figure"] == "commits":
            text = ", ".join(f"`{Path(name).name}` ({commit_of(result)})" for name, result in results.items())
        else:
            rows = [row for result in results.values() for row in result["rows"]]
            with of(match["open"]):
                refuse_failed(rows)
                text = FIGURES[match["figure"]](rows)
        return match["open"] + text + match["close"]

    text = read(path)
    if BLOCK.search(text) is None and SPAN.search(text) is None:
        raise ReportError(f"{path} has no results block; add the two marker lines of {Path(__file__).name}")
    return SPAN.sub(figure, BLOCK.sub(body, text))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", type=Path, nargs="+", help="result files, or with --write or --check Markdown files"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="fill the blocks and spans of Markdown files")
    action.add_argument("--check", action="store_true", help="compare the blocks and spans of Markdown files")
    parser.add_argument("--all", action="store_true", help="print every shape, not only those tagged readme")
    args = parser.parse_args(given)
    shapes = {shape.name: shape for shape in load_shapes()}
    tag = None if args.all else "readme"
    status = 0
    for path in args.paths:
        try:
            if not (args.write or args.check):
                result = load_result(path)
                with of(path):
                    print(report(result, shapes, tag), end="")
                continue
            filled = fill(path, shapes)
            if args.write:
                write_whole(path, filled)
            elif filled != read(path):
                print(f"report: {path} differs from its result files; run perf/report.py --write {path}")
                status = 1
        except (ReportError, OSError) as error:  # OSError: of a document that cannot be written
            parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
