# SPDX-License-Identifier: Apache-2.0
"""perf/bench.py, perf/bench_training.py and perf/bench_models.py on what takes milliseconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
SHAPE = {
    "name": "tiny",
    "source": "this test",
    "n": 2,
    "c": 4,
    "k": 6,
    "input": [3, 4, 5],
    "kernel": [3, 3, 3],
    "stride": [2, 2, 2],
    "padding": [1, 1, 1],
    "output_padding": [1, 1, 1],
    "groups": 1,
    "num_groups": 3,
    "bias": True,
    "eps": 1e-5,
}


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PERF / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", ["bench.py", "bench_training.py"])
def test_lines_and_rows(tmp_path, script):
    shapes, result = tmp_path / "shapes.json", tmp_path / "result.json"
    shapes.write_text(json.dumps({"shapes": [SHAPE]}))
    options = ("--shapes-file", str(shapes), "--device", "cpu", "--compile", "none", "--seconds", "0.01")
    done = run(script, *options, "--json", str(result))
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == 4 and all(row["check"] == "ok" and row["ms"] > 0 for row in rows)
    assert sum("name=tiny" in line for line in done.stdout.splitlines()) == len(rows)
    if script == "bench_training.py":
        assert all(set(row["err_ratios"]) == {"x", "w", "bias", "gamma", "beta"} for row in rows)


@pytest.mark.parametrize("script", ["bench.py", "bench_training.py", "bench_models.py"])
def test_a_pattern_that_matches_nothing_is_an_error(script):
    option = "--models" if script == "bench_models.py" else "--shapes"
    done = run(script, option, "no such shape", "--device", "cpu")
    assert done.returncode == 2 and "no such shape" in done.stderr


@pytest.mark.parametrize(
    ("model", "option", "replaced"),
    [
        ("occupancy_head", (), "3/3"),
        ("occupancy_head", ("--norms",), "3/3+3"),
        ("monai_unet_an", (), "2/2"),
    ],
)
def test_models(tmp_path, model, option, replaced):
    if model.startswith("monai"):
        pytest.importorskip("monai")
    result, table, picture = (tmp_path / name for name in ("r.json", "r.md", "r.png"))
    options = ("--models", model, "--device", "cpu", "--dtype", "float32", "--quick", "--seconds", "0.01")
    done = run(
        "bench_models.py", *options, *option, *("--json", result, "--markdown", table, "--png", picture)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert [row["pass"] for row in rows] == ["inference", "training"]
    assert all(row["check"] == "ok" and row["replaced"] == replaced for row in rows)
    assert table.read_text().count(f"| `{model}`") == 2 and picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("script", "option", "value", "message"),
    [
        ("bench.py", "--json", ".", "--json must name a file; got ., a directory"),
        ("bench_training.py", "--json", ".", "--json must name a file; got ., a directory"),
        ("bench_models.py", "--png", "x.xyz", "--png must name a file that ends in .png; got x.xyz"),
        ("bench.py", "--shapes", "(", "must be a regular expression; got '('"),
        ("bench_models.py", "--seconds", "0", "must be a positive number; got 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(script, option, value, message):
    if option == "--png":
        pytest.importorskip("matplotlib")
    done = run(script, "--device", "cpu", option, value)
    assert done.returncode == 2 and message in done.stderr
    assert done.stdout == ""


def test_the_picture_of_models_shows_what_a_copy_came_out_at(monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    monkeypatch.syspath_prepend(str(PERF))
    import bench_models

    result = json.loads((PERF / "results" / "h200_models.json").read_text())
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    assert bench_models.draw(result["environment"], result["rows"]).startswith(b"\x89PNG")
    keys = ("x_copy", "x_compiled_copy")
    copies = [row[key] for key in keys for row in result["rows"] if row.get(key) is not None]
    (axes,) = figures[0].axes
    (ends,) = (line.get_xdata() for line in axes.lines if line.get_marker() == "|")
    assert list(ends) == copies and len(copies) > 10
    assert bench_models.COPY_LABEL in [text.get_text() for text in figures[0].legends[0].get_texts()]
