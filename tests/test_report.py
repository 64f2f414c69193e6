# SPDX-License-Identifier: Apache-2.0
"""perf/report.py: tables and figures of documents follow their result files, and wrong files are refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PERF = ROOT / "perf"
DOCUMENTS = [ROOT / "README.md", PERF / "README.md", PERF / "MODELS.md"]
needs_results = pytest.mark.skipif(not (PERF / "results").is_dir(), reason="not a checkout")
ENVIRONMENT = {"date": "today", "cpu": "some", "threads": 2, "torch": "2.13", "upconv3d": "0.1"}
ENVIRONMENT |= {"command": "python perf/bench.py", "commit": "0123456789abcdef"}


def row(ms, name="kernelbench_61", error=1e-3, **peers_ms):
    found = {"name": name, "dtype": "bfloat16", "layout": "ndhwc", "precision": "native", "plan": "some"}
    found |= {"ms": ms, "x_eager": ms / 10, "peers_ms": {"eager": 10.0, "conv": 0.1} | peers_ms}
    return found | {"err_rms": error, "eager_err_rms": 1e-3, "check": "ok"}


def write(path, rows, **environment):
    path.write_text(json.dumps({"environment": ENVIRONMENT | environment, "rows": rows}))


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    import report

    return report


def refusal_of(report, capsys, *given):
    """What it says, where it ends with status 2."""
    with pytest.raises(SystemExit) as refusal:
        report.main([str(text) for text in given])
    assert refusal.value.code == 2
    return capsys.readouterr().err.split("error: ")[1]


@needs_results
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_quote_their_result_files(report, document):
    assert report.main(["--check", str(document)]) == 0


@needs_results
def test_no_line_begins_with_a_span():
    """Markdown would take it, and what follows up to an empty line, as HTML."""
    lines = [line for path in DOCUMENTS for line in path.read_text(encoding="utf-8").splitlines()]
    spans = [line for line in lines if re.search(r"<!-- /?(behind|coarser|commits)", line)]
    assert spans and not any(line.lstrip(" -*").startswith("<!--") for line in spans)


def test_spans_follow_their_files(tmp_path, report, capsys):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write(one, [row(4.0), row(6.0, **{"compile:default": 5.0}), row(9.0, error=3e-3)])
    write(other, [row(1.0, **{"compile:default": 20.0})], commit="fedcba9876 with local changes")
    document = tmp_path / "x.md"
    document.write_text(
        "Behind: <!-- behind: one.json -->?<!-- /behind -->, "
        "<!-- behind: other.json -->of\nold<!-- /behind -->;\n"
        "of both <!-- behind: one.json other.json --><!-- /behind -->, with more error\n"
        "<!-- coarser: one.json -->?<!-- /coarser -->, <!-- coarser: other.json --><!-- /coarser -->:\n"
        "<!-- commits: one.json other.json --><!-- /commits -->.\n"
    )
    assert report.main(["--check", str(document)]) == 1 and "differs" in capsys.readouterr().out
    assert report.main(["--write", str(document)]) == 0 == report.main(["--check", str(document)])
    assert re.sub(r"<!--.*?-->", "", document.read_text()) == (
        "Behind: 1 of 3 (0.40 to 1.20 of its time), none of 1 (0.10 to 0.10 of its time);\n"
        "of both 1 of 4 (0.10 to 1.20 of its time), with more error\n"
        "1 of 3, none of 1:\n"
        "`one.json` (0123456), `other.json` (fedcba9 with local changes).\n"
    )
    write(one, [row(4.0)])
    assert report.main(["--check", str(document)]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A document", "with environment and rows as perf/bench.py --json writes them; got no JSON"),
        ("[1]", "got none of an environment"),
        (json.dumps({"environment": ENVIRONMENT}), "got none of rows"),
        (json.dumps({"environment": ENVIRONMENT, "rows": []}), "got none of rows"),
        (json.dumps({"environment": ENVIRONMENT, "rows": [1]}), "got none of rows"),
        (json.dumps({"environment": {}, "rows": [row(1.0)]}), "a row, or the environment, lacks"),
        (
            json.dumps({"environment": ENVIRONMENT, "rows": [row(1.0, "mine")]}),
            "every shape must be one of shapes.json; got 'mine'",
        ),
        (
            json.dumps({"environment": ENVIRONMENT, "rows": [row(1.0, "pix2vox_128")]}),
            "no shape tagged 'readme'; give --all",
        ),
        (
            json.dumps({"environment": ENVIRONMENT, "rows": [row(1.0) | {"check": "FAILED"}]}),
            "kernelbench_61 bfloat16 ndhwc failed its check; not quotable",
        ),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path, report, capsys, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    said = refusal_of(report, capsys, path)
    assert message in said and str(path) in said
    document = tmp_path / "x.md"
    document.write_text("<!-- results: x.json -->\n<!-- /results -->\n")
    said = refusal_of(report, capsys, "--check", document)
    assert message in said and "x.json" in said


def test_wrong_paths_are_refused(tmp_path, report, capsys):
    missing, document = tmp_path / "missing", tmp_path / "x.md"
    assert str(missing) in refusal_of(report, capsys, missing)
    for option in ("--check", "--write"):
        assert f"{missing} must be a text file that can be read" in refusal_of(
            report, capsys, option, missing
        )
    assert f"{tmp_path} must be a text file" in refusal_of(report, capsys, tmp_path)
    document.write_text("# No block")
    assert "Remedy: --write or --check for Markdown" in refusal_of(report, capsys, document)
    assert "has no results block" in refusal_of(report, capsys, "--write", document)
    document.write_text("Of <!-- behind: gone.json --><!-- /behind -->")
    assert "quotes gone.json, which is missing" in refusal_of(report, capsys, "--check", document)
    write(tmp_path / "gone.json", [row(1.0) | {"check": "FAILED", "err_rms": None}])
    assert "failed its check; not quotable" in refusal_of(report, capsys, "--check", document)
    write(tmp_path / "gone.json", [{"ms": 1.0, "check": "ok"}])
    assert "lacks 'peers_ms'" in refusal_of(report, capsys, "--check", document)
    assert document.read_text() == "Of <!-- behind: gone.json --><!-- /behind -->"


def test_documents_are_utf8_in_any_locale(tmp_path):
    write(tmp_path / "x.json", [row(4.0)])
    document = tmp_path / "x.md"
    text = "Größe: <!-- behind: x.json --><!-- /behind -->\n"
    document.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", str(PERF / "report.py"), "--write", str(document)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    )
    assert done.returncode == 0, done.stderr
    filled = text.replace(" --><!-- /", " -->none of 1 (0.40 to 0.40 of its time)<!-- /")
    assert document.read_text(encoding="utf-8") == filled
