# SPDX-License-Identifier: Apache-2.0
"""What `python -m upconv3d.profile` prints and writes: numbers, names, JSON, and files that were there."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from test_commands import ROW
from upconv3d.profile import arguments, measure, results
from upconv3d.profile.cases import SHAPES_FILE, load_shapes, shape_from_json
from upconv3d.profile.report import significant
from upconv3d.profile.results import ResultFileError, ResultFiles, json_text, write_whole

needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="needs rich (the extra profile)"
)
QUICK = ["--device", "cpu", "--seconds", "0.01", "--no-compile"]
# Of one position, whose only tap lands in the padding; output_padding alone makes an output.
IDLE = ROW | {"name": "idle", "input": [1, 1, 1], "kernel": [1, 1, 1], "stride": [4, 4, 4]}
IDLE |= {"output_padding": [3, 3, 3]}


def run_on(tmp_path, rows, *given):
    """The command on these rows of a shapes file."""
    from upconv3d.profile.__main__ import main

    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"shapes": rows}))
    return main([*QUICK, "--shape", "all", "--shapes-file", str(path), *given])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (99.96, "100"),
        (9.996, "10.0"),
        (999.6, "1000"),
        (1e-5, "0.0000100"),
        (0.0123, "0.0123"),
        (-1.234, "-1.23"),
        (123.4, "123"),
        (12345.0, "12345"),
        (0.0, "0.00"),
        (0, "0.00"),
        (math.nan, "nan"),
        (None, "-"),
    ],
)
def test_three_digits_without_exponent(value, text):
    assert significant(value) == text


@needs_rich
def test_a_name_that_reads_as_an_emoji_is_printed_as_it_is(tmp_path, capsys):
    assert run_on(tmp_path, [ROW | {"name": name} for name in (":x:", "some:smile:")]) == 0
    printed = capsys.readouterr().out
    assert printed.count(":x:: ") == printed.count("some:smile:: ") == 2


@needs_rich
def test_two_shapes_of_one_name_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refusal:
        run_on(tmp_path, [ROW, ROW | {"name": "other"}, ROW | {"n": 1}])
    assert refusal.value.code == 2
    assert "every shape must have a name of its own; got 'some' 2 times" in capsys.readouterr().err


def test_files_are_utf8_in_any_locale(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_bytes(json.dumps({"shapes": [ROW | {"name": "größe"}]}, ensure_ascii=False).encode())
    code = (
        "import locale, sys; from upconv3d.profile.cases import load_shapes; from pathlib import Path\n"
        "assert locale.getpreferredencoding(False) != 'UTF-8'\n"
        "print(ascii(load_shapes(Path(sys.argv[1]))[0].name))"
    )
    result = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    )
    assert (result.returncode, result.stdout) == (0, ascii("größe") + "\n"), result.stderr


def test_json_has_null_for_what_is_no_number():
    data = {"rms": math.nan, "rows": [(1.5, -math.inf), {"n": 3, "ok": True, "text": "nan"}]}
    text = json_text(data)
    strict = json.loads(text, parse_constant=pytest.fail)
    assert strict == {"rms": None, "rows": [[1.5, None], {"n": 3, "ok": True, "text": "nan"}]}


@needs_rich
def test_json_of_a_check_that_failed(tmp_path, monkeypatch):
    import upconv3d

    def wrong(input, *_, **__):
        return torch.full((2, 6, 6, 8, 10), math.nan)

    monkeypatch.setattr(upconv3d, "conv_transpose3d_relu_group_norm", wrong)
    assert run_on(tmp_path, [ROW], "--json", str(tmp_path / "x.json")) == 1
    result = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    block = result["cases"][0]["implementations"][0]
    assert block["error_rms"] is block["error_max"] is None and block["time_ms"] > 0


def test_files_beside_a_result_stay(tmp_path):
    """Also one with the name that a temporary file might have, and one that the command reads."""
    others = {tmp_path / name: f"of {name}" for name in ("x.json.part", "x.part", "part")}
    for path, text in others.items():
        path.write_text(text)
    files = ResultFiles({"--json": tmp_path / "x.json"}, inputs=[tmp_path / "x.json.part"])
    assert {path: path.read_text() for path in tmp_path.iterdir()} == others
    files.write("--json", lambda: "text")
    assert files.failures == [] and (tmp_path / "x.json").read_text() == "text"
    assert {path: path.read_text() for path in others} == others
    assert len(list(tmp_path.iterdir())) == len(others) + 1


def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    (tmp_path / "x.json").write_text("before")
    monkeypatch.setattr(results.Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "x.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "before"


def test_the_mode_of_a_result_is_as_of_a_file_that_is_opened(tmp_path):
    kept = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", "text")
        (tmp_path / "there").touch()
        (tmp_path / "there").chmod(0o604)
        write_whole(tmp_path / "there", "text")
    finally:
        os.umask(kept)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "there")]
    assert modes == [0o640, 0o604]


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    for path in (tmp_path / "one", tmp_path / "one" / "x.json"):
        with pytest.raises(ResultFileError, match=r"--json must name a file that can be written; got .*one"):
            ResultFiles({"--json": path})
        with pytest.raises(OSError):
            write_whole(path, "text")
    assert (tmp_path / "one").is_symlink() and (tmp_path / "other").is_symlink()


def test_a_longest_name_is_taken(tmp_path):
    files = ResultFiles({"--json": tmp_path / ("n" * 255)})
    files.write("--json", lambda: "text")
    assert files.failures == []
    with pytest.raises(ResultFileError, match="File name too long"):
        ResultFiles({"--json": tmp_path / ("n" * 256)})


@needs_rich
def test_a_roofline_leaves_out_what_has_no_arithmetic(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from upconv3d.profile import __main__ as command

    assert shape_from_json(IDLE).useful_flops == 0
    picture = tmp_path / "x.png"
    assert run_on(tmp_path, [IDLE, ROW], "--png", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "idle" in capsys.readouterr().out
    monkeypatch.setattr(command, "profile_case", None)  # nothing is measured
    picture.unlink()
    with pytest.raises(SystemExit) as refusal:
        run_on(tmp_path, [IDLE], "--png", str(picture))
    assert refusal.value.code == 2 and not picture.exists()
    assert "--png takes a case with useful arithmetic; got none" in capsys.readouterr().err


def test_a_commit_that_was_told_is_taken_as_it_is(tmp_path, monkeypatch):
    """A copy without its history may lie in somebody else's repository, with changes of theirs."""

    def git(*given):
        subprocess.run(["git", *given], cwd=tmp_path, check=True, capture_output=True)

    theirs, copy = tmp_path / "theirs.py", tmp_path / "copy" / "bench.py"
    theirs.touch()
    git("init", "-q")
    git("add", "theirs.py")
    git("-c", "user.name=n", "-c", "user.email=n@n", "commit", "-qm", "theirs")
    copy.parent.mkdir()
    copy.touch()
    theirs.write_text("changed")
    monkeypatch.setenv("UPCONV3D_COMMIT", "0123456")
    assert measure.git_commit(copy) == "0123456"
    monkeypatch.delenv("UPCONV3D_COMMIT")
    assert measure.git_commit(copy) is None
    assert measure.git_commit(theirs).endswith(" with local changes")


def test_times_wait_for_the_device_that_is_measured(monkeypatch):
    class Event:
        def __init__(self, device, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    waited = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    flush = torch.zeros(1)
    assert measure.cuda_times_ms(int, 2, flush) == [1.0, 1.0]
    assert waited == [flush.device]


def test_the_device_that_is_measured_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda:1"):
        arguments.make_current(torch.device(name))
    assert chosen == [torch.device("cuda", 1)]


def test_the_shapes_of_the_package_have_names_of_their_own():
    assert len(load_shapes()) == len(json.loads(SHAPES_FILE.read_text())["shapes"])
