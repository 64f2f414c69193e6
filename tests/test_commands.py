# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of the command lines, and packages that they need: one sentence, and status 2."""

import importlib.util
import json
import shlex
import subprocess
import sys

import pytest
import torch
from test_benchmarks import SHAPE
from upconv3d.profile import arguments

ROW = SHAPE | {"name": "some"}
needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="needs rich (the extra profile)"
)


@needs_rich
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": 5}, "name must be a string that can be printed; got 5"),
        ({"name": ["some"]}, "name must be a string that can be printed; got ('some',)"),
        ({"name": "\ud800"}, "name must be a string that can be printed"),
        ({"input": 4}, "shape some: input must be three positive integers; got 4"),
        ({"input": [[4], 4, 4]}, "shape some: input must be three positive integers; got ([4], 4, 4)"),
        ({"dilation": 1}, "shape some: dilation must be three positive integers; got 1"),
        ({"kernel": {"a": 1}}, "shape some: kernel must be three positive integers; got {'a': 1}"),
        ({"padding": [0, 0, -1]}, "padding must be three integers that are not negative; got (0, 0, -1)"),
        ({"n": 0}, "shape some: n must be a positive integer; got 0"),
        ({"num_groups": True}, "shape some: num_groups must be a positive integer; got True"),
        ({"bias": "no"}, "shape some: bias must be true or false; got 'no'"),
        ({"eps": None}, "shape some: eps must be a number that is not negative; got None"),
        ({"tags": "quick"}, "shape some: tags must be a list of strings; got 'quick'"),
    ],
)
@pytest.mark.parametrize("listed", [False, True], ids=["measured", "listed"])
def test_a_wrong_row_of_a_shapes_file_is_refused(tmp_path, capsys, values, message, listed):
    from upconv3d.profile.__main__ import main

    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"shapes": [ROW | values]}))
    with pytest.raises(SystemExit) as refusal:
        main([*(["--list-shapes"] if listed else ["--shape", "all"]), "--shapes-file", str(path)])
    assert refusal.value.code == 2 and message in capsys.readouterr().err


def test_lists_in_one_another_without_end_are_refused(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text("[" * 100_000)
    with pytest.raises(arguments.ArgumentError, match=r"must be a JSON file in the form of shapes\.json"):
        arguments.shapes_of_file(path)


@needs_rich
def test_a_name_that_reads_as_markup_is_printed_as_it_is(tmp_path, capsys):
    from upconv3d.profile.__main__ import main

    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"shapes": [ROW | {"name": name} for name in ("some[/x]", "[red]other")]}))
    given = ["--device", "cpu", "--shape", "all", "--seconds", "0.01", "--no-compile"]
    assert main([*given, "--shapes-file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("some[/x]: ") == printed.count("[red]other: ") == 2


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
def test_the_demo_refuses_a_time_that_is_none(seconds, capsys):
    from upconv3d import demo

    with pytest.raises(SystemExit) as refusal:
        demo.parse(["--seconds", seconds])
    assert refusal.value.code == 2
    assert f"--seconds: must be a number and not negative; got {seconds}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_demo_refuses_a_gpu_where_there_is_none(capsys):
    from upconv3d import demo

    with pytest.raises(SystemExit) as refusal:
        demo.main(["--device", "cuda"])
    assert refusal.value.code == 2
    assert "--device cuda needs a GPU that PyTorch sees; got none." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("upconv3d.demo", "rich"),
        ("upconv3d.examples.train_voxel_autoencoder", "rich"),
        ("upconv3d.examples.train_voxel_autoencoder", "matplotlib"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(module, missing, tmp_path):
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['--device', 'cpu']\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    remedy = "Remedy: pip install 'upconv3d[profile]'"
    assert f"needs {missing}, which is not installed. {remedy}" in result.stderr


@needs_rich
@pytest.mark.parametrize(
    ("program", "line"),
    [("upconv3d.info", "build\n"), ("upconv3d.profile --list-shapes", "kernelbench_61: ")],
)
def test_readers_may_leave(program, line):
    """As `| head -1` does; nothing is kept back until the end."""
    command = f"PYTHONUNBUFFERED=1 {shlex.quote(sys.executable)} -m {program} | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith(line) and result.stderr == ""


def test_output_that_is_closed(monkeypatch):
    from upconv3d import _command

    monkeypatch.setattr(sys, "stdout", None)
    assert _command.piped(lambda: 3) == 3


def test_the_demo_s_numbers_are_whole_in_narrow_terminals(monkeypatch, capsys):
    from upconv3d import demo

    monkeypatch.setenv("COLUMNS", "40")
    shape, mode = demo.cases(torch.device("cpu"))[0]
    monkeypatch.setattr(demo, "cases", lambda device: [(shape, mode)])
    assert demo.main(["--device", "cpu", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "max diff" in printed and "\u2026" not in printed


def test_a_result_file_is_not_where_the_command_prints(tmp_path):
    """Links such as /dev/stdout lead to a file where the shell has made one of it."""
    given = "--device cpu --input 1 4 3 3 3 --out-channels 8 --kernel 3 --seconds 0.01 --no-compile"
    command = [sys.executable, "-m", "upconv3d.profile", *given.split(), "--json", "/dev/stdout"]
    with open(tmp_path / "printed", "w") as file:
        result = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 2 and "a file of its own; got /dev/stdout" in result.stderr
