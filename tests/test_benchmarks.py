# SPDX-License-Identifier: Apache-2.0
"""perf/bench.py, bench_training.py, bench_models.py on what takes milliseconds, plan_times.py's blocks."""

import argparse
import importlib
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PERF = Path(__file__).parent.parent / "perf"
needs_results = pytest.mark.skipif(not (PERF / "results").is_dir(), reason="not a checkout")
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


@pytest.fixture
def perf_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))


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


@pytest.mark.parametrize("script", ["bench.py", "bench_training.py"])
def test_quick_is_named_where_it_leaves_no_shape(tmp_path, script):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"shapes": [SHAPE]}))
    done = run(script, "--shapes-file", shapes, "--shapes", "tiny", "--quick", "--device", "cpu")
    assert done.returncode == 2
    assert "no shape matches --shapes 'tiny' and is tagged quick, as --quick asks" in done.stderr


def test_models_of_which_none_can_be_made_are_an_error(perf_scripts, monkeypatch, tmp_path, capsys):
    import bench_models

    found = bench_models.importlib.util.find_spec
    monkeypatch.setattr(
        bench_models.importlib.util, "find_spec", lambda name: None if name == "monai" else found(name)
    )
    result = tmp_path / "x.json"
    given = ["bench_models.py", "--models", "monai_unet", "--device", "cpu", "--json", str(result)]
    monkeypatch.setattr(sys, "argv", given)
    assert bench_models.main() == 2
    printed = capsys.readouterr()
    assert "needs a package that is not installed. Remedy: install monai" in printed.err
    assert printed.out == "" and not result.exists()


@pytest.mark.parametrize("script", ["bench", "bench_training", "bench_models"])
def test_the_device_that_was_asked_for_is_made_the_current_one(perf_scripts, monkeypatch, script):
    chosen = []
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(sys, "argv", [script, "--device", "cuda:1"])
    module = importlib.import_module(script)
    # Nothing is left to measure.
    if script == "bench_models":
        monkeypatch.setattr(module, "MODELS", ())
    else:
        monkeypatch.setattr(module, "cases", lambda args, device: iter(()))
    assert module.main() == 2
    assert chosen == [torch.device("cuda", 1)]


def test_what_is_no_number_is_not_quoted(perf_scripts):
    """As the error of a check that failed."""
    import bench

    row = dict.fromkeys(bench.LINE.split(), math.nan) | {"ms": 1.5, "name": "tiny"}
    line = bench.bench_line(row)
    assert "nan" not in line and "ms=1.5 " in line and line.endswith("err_rms=na eager_err_rms=na check=na")
    assert json.loads(bench.result_text({}, [row]), parse_constant=pytest.fail)["rows"][0]["check"] is None


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
    assert table.read_text().count("] ") >= 4 and "rounds" in table.read_text()
    lines = [line for line in done.stdout.splitlines() if line.startswith("MODEL name=")]
    for row, line in zip(rows, lines, strict=True):
        # The time is over long before: as many rounds as an interval takes, and no queued steps.
        assert row["rounds"] == 21 and "seed=0 rounds=21 " in line and row["x_queued"] is None
        assert all(row[f"{key}_low"] <= row[key] <= row[f"{key}_high"] for key in ("x_eager", "x_copy"))
        assert f"x_eager_low={row['x_eager_low']:.4g}" in line and f"verdict={row['verdict']}" in line
        assert row["x_compile"] is row["x_compile_low"] is row["x_compile_high"] is None


@pytest.mark.parametrize(
    ("script", "option", "value", "message"),
    [
        ("bench.py", "--json", ".", "--json must name a file; got ., a directory"),
        ("bench_training.py", "--json", ".", "--json must name a file; got ., a directory"),
        ("bench_models.py", "--png", "x.xyz", "--png must name a file that ends in .png; got x.xyz"),
        ("bench.py", "--shapes", "(", "must be a regular expression; got '('"),
        ("bench_models.py", "--seconds", "0", "must be a positive number; got 0"),
        ("bench.py", "--precision", "tf32", "a CPU computes float32 as it is. Leave it out"),
        ("bench_training.py", "--precision", "ieee", "a CPU computes float32 as it is. Leave it out"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(script, option, value, message):
    if option == "--png":
        pytest.importorskip("matplotlib")
    done = run(script, "--device", "cpu", option, value)
    assert done.returncode == 2 and message in done.stderr
    assert done.stdout == ""


def orders(seed, queued=1):
    """Who was called when, after the warm-up, in rounds that end as soon as they may; and the times."""
    import paired
    import torch

    made = []
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    times = paired.turns_ms(calls, torch.device("cpu"), 1e-9, seed, queued)
    return made[len(calls) * paired.WARM_UPS :], times


def test_turns_are_in_an_order_that_the_seed_gives(perf_scripts):
    made, times = orders(seed=3)
    assert made == orders(seed=3)[0] != orders(seed=4)[0]
    rounds = [tuple(made[i : i + 3]) for i in range(0, len(made), 3)]
    assert len(rounds) == 21 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 3
    assert all(len(values) == 21 and min(values) >= 0 for values in times.values())


def test_a_queued_turn_is_of_several_calls(perf_scripts):
    made, times = orders(seed=3, queued=4)
    assert made == [name for name in orders(seed=3)[0] for _ in range(4)]
    assert all(len(values) == 21 for values in times.values())


def test_rounds_go_on_until_the_time_is_over(perf_scripts, monkeypatch):
    import paired
    import torch

    seconds = itertools.count()
    monkeypatch.setattr(paired, "time", argparse.Namespace(perf_counter=lambda: next(seconds)))
    # Every reading is a second later: four in a round, from the 22nd on one more that asks whether to go on.
    times = paired.turns_ms({"a": int, "b": int}, torch.device("cpu"), 21 * 4 + 3 * 5, 0)
    assert times == {"a": [1000.0] * 24, "b": [1000.0] * 24}


@pytest.mark.parametrize(("n", "low", "high"), [(6, 1, 6), (21, 6, 16), (30, 10, 21), (120, 49, 72)])
def test_the_interval_of_a_median(perf_scripts, n, low, high):
    from paired import median_interval

    values = [float(1 + i * 7 % n) for i in range(n)] if n % 7 else [float(i) for i in range(n, 0, -1)]
    assert median_interval(values) == ((n + 1) / 2, low, high)
    # What it promises, by the binomial distribution; and no narrower pair keeps it.
    outside = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in (low, low + 1)]
    assert outside[0] <= 0.05 < outside[1]


def test_too_few_values_have_no_interval(perf_scripts):
    from paired import median_interval

    with pytest.raises(ValueError, match="takes six values; got 5"):
        median_interval([1.0] * 5)


@pytest.mark.parametrize(
    ("factor", "said"), [(1.1, "slower"), (1.0, "alike"), (0.9, "quicker"), (1.001, "alike")]
)
def test_a_verdict(perf_scripts, factor, said):
    """A host whose pace changes by 40 % meanwhile, and calls that scatter by 3 %."""
    from paired import ratio_fields, verdict

    draw = random.Random(0)
    pace = [1 + 0.4 * (i // 10 % 2) for i in range(100)]
    eager = [10 * p * draw.gauss(1, 0.03) for p in pace]
    ours = [10 * p * factor * draw.gauss(1, 0.03) for p in pace]
    ours[7] *= 20  # one call that was interrupted
    row = ratio_fields("x", {"eager": eager, "ours": ours}, "ours", "eager")
    assert row["x_low"] < factor < row["x_high"] and row["x_low"] < row["x"] < row["x_high"]
    assert verdict(row, "x") == said


def test_ends_are_judged_as_shown(perf_scripts):
    from paired import interval, ratio_fields, verdict

    def said(low, high, copy=None):
        row = {"x_eager": low, "x_eager_low": low, "x_eager_high": high, "x_copy": copy}
        return verdict(row, "x_eager")

    assert said(1.002, 1.003) == "alike" and said(0.996, 0.997) == "alike"
    assert said(1.006, 1.02) == "slower" and said(0.98, 0.994) == "quicker"
    # A copy that is no copy of the model's pace says how far a ratio can be off.
    assert said(1.02, 1.03, copy=0.97) == said(0.97, 0.98, copy=1.03) == "alike"
    assert said(1.05, 1.06, copy=0.97) == "slower" and said(0.94, 0.95, copy=0.97) == "quicker"
    with pytest.raises(ValueError, match="without x_copy_low"):
        verdict({"x_copy": 1.0}, "x_copy")
    assert ratio_fields("x", {"eager": [1.0]}, "ours", "eager") == dict.fromkeys(("x", "x_low", "x_high"))
    assert interval({"x": 1.0}, "x") is None


@pytest.mark.parametrize(
    ("kind", "step_ms", "queued"),
    [("training", 1.0, True), ("training", 2.0, False), ("inference", 1.0, False)],
)
def test_queued_steps_are_timed_in_training_where_they_fit(perf_scripts, monkeypatch, kind, step_ms, queued):
    import bench_models
    import models

    (head,) = (model for model in models.MODELS if model.name == "occupancy_head")
    args = argparse.Namespace(device="cpu", small=True, bare=False, norms=False, compile=False)
    args.seconds, args.seed = 0.5, 5
    turns = []

    def turns_ms(calls, device, budget_s, seed, queued=1):
        turns.append((list(calls), queued, seed))
        return {name: [step_ms] * 21 for name in calls}

    monkeypatch.setattr(bench_models, "turns_ms", turns_ms)
    row = bench_models.measure(head, kind, "float32", "ncdhw", args)
    names = ["eager", "ours", "copy"]
    assert turns == [(names, 1, 5), (names, 4, 5)][: 1 + queued]
    assert (row["queued_rounds"], row["x_queued"]) == ((21, 1.0) if queued else (None, None))
    assert row["verdict"] == "alike" and row["rounds"] == 21


@needs_results
def test_tables_with_and_without_intervals(perf_scripts):
    import report

    for name in ("h200_models", "h200_models_norms"):
        result = json.loads((PERF / "results" / f"{name}.json").read_text())
        table = report.models_report(result)
        assert table in (PERF / "MODELS.md").read_text()
        assert "rounds" not in table and "[" not in table
    row = result["rows"][0] | {"rounds": 21, "x_eager": 1.1, "x_eager_low": 1.08, "x_eager_high": 1.12}
    table = report.models_report(result | {"rows": [row, result["rows"][1]]})
    assert "| 1.10 [1.08, 1.12] slower | 0.96 | 21 |" in table and "| 0.80 | 1.00 | - |" in table
    assert report.PAIRED in table


@needs_results
def test_the_picture_of_models_shows_intervals(perf_scripts):
    pytest.importorskip("matplotlib")
    import bench_models

    result = json.loads((PERF / "results" / "h200_models.json").read_text())
    ends = {"x_eager_low": 0.7, "x_eager_high": 0.9, "x_copy_low": 0.95, "x_copy_high": 1.05}
    # Files that are joined from several may have both kinds of row.
    rows = [result["rows"][0] | ends, result["rows"][1]]
    assert bench_models.draw(result["environment"], rows).startswith(b"\x89PNG")


@needs_results
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


def test_blocks_for_the_times_of_plans(monkeypatch):
    """The same from the same seed, within what was timed, and such that ops take them."""
    monkeypatch.syspath_prepend(PERF)
    import plan_times

    blocks = [plan_times.draw(random.Random(seed)) for seed in range(200)]
    assert blocks == [plan_times.draw(random.Random(seed)) for seed in range(200)]
    for block in blocks:
        sides = zip(
            block.extent, block.stride, block.kernel, block.padding, block.output_padding, strict=True
        )
        out = [(e - 1) * s - 2 * p + r + o for e, s, r, p, o in sides]
        assert min(out) > 0 and 0.2e6 < 2 * block.n * block.k * math.prod(out) < 70e6, block
        assert block.k % block.num_groups == 0 and (block.norm or block.order == "norm_act"), block
    assert {block.norm for block in blocks} == {"group", "instance", None}


def test_blocks_of_groups_for_the_times_of_plans(monkeypatch):
    """As those of one group; every kind is among them, and PyTorch takes each."""
    monkeypatch.syspath_prepend(PERF)
    import plan_times

    blocks = [plan_times.draw_groups(random.Random(seed)) for seed in range(200)]
    assert blocks == [plan_times.draw_groups(random.Random(seed)) for seed in range(200)]
    for block in blocks:
        x = torch.empty(block.n, block.c, *block.extent, device="meta")
        w = torch.empty(block.c, block.k // block.groups, *block.kernel, device="meta")
        sizes = (block.stride, block.padding, block.output_padding, block.groups, block.dilation)
        y = torch.nn.functional.conv_transpose3d(x, w, None, *sizes)
        assert y.numel() > 0 and block.k % block.num_groups == 0, block
        assert block.groups > 1 and block.c // block.groups >= 4, block
    assert {block.groups for block in blocks} == set(plan_times.GROUPS)
    assert {max(block.dilation) for block in blocks} == {1, 2, 3}
    assert {max(block.stride) for block in blocks} == {1, 2, 3, 4}
    assert any(max(block.kernel) == 1 for block in blocks)


def test_times_of_plans_take_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("plan_times.py", "--count", "1")
    assert done.returncode == 2 and "times of plans take a CUDA device" in done.stderr
