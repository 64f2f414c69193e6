# SPDX-License-Identifier: Apache-2.0
"""Documents: links lead somewhere, and what the sources cite of the notes is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("cpp", "perf", "python", "third_party") for path in (ROOT / folder).rglob("*.md")),
]
SOURCES = [
    path
    for folder in ("cpp", "perf", "python", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".cpp", ".cu", ".cuh", ".hpp", ".py", ".md", ".txt")
]
NOTES = ROOT / "perf" / "NOTES.md"
# As prose is wrapped; tables and what is generated are not.
COLUMNS = 130

pytestmark = pytest.mark.skipif(not (ROOT / "perf" / "results").is_dir(), reason="not a checkout")


def _headings(document):
    return re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", document, flags=re.M | re.S), flags=re.M)


def _anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _broken(target, document):
    path, _, anchor = target.partition("#")
    file = document.parent / path if path else document
    if not file.exists():
        return True
    return bool(anchor) and anchor not in map(_anchor, _headings(file.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    text = document.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, flags=re.M)
    links = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in links if _broken(target, document)] == []


def test_the_notes_are_listed():
    """Every entry of perf/notes, once, by its heading."""
    contents = " ".join(NOTES.read_text().split())
    listed = re.findall(r"- \[([^\]]+)\]\[\d+\]:", contents)
    entries = [
        heading
        for path in (NOTES.parent / "notes").glob("*.md")
        for heading in _headings(path.read_text())[1:]
    ]
    assert sorted(listed) == sorted(entries)
    assert len(re.findall(r"\[\d+\]: notes/", contents)) == len(entries)


def test_citations_of_the_notes():
    headings = {
        heading
        for path in (NOTES, *(NOTES.parent / "notes").glob("*.md"))
        for heading in _headings(path.read_text())
    }
    cited = {}
    for path in SOURCES:
        text = re.sub(r"\s*\n\s*(?:///?|#)? ?", " ", path.read_text())
        for quoted in re.findall(r'perf/NOTES\.md, ((?:"[^"]+"(?:, | and )?)+)', text):
            cited |= dict.fromkeys(re.findall(r'"([^"]+)"', quoted), path)
    assert len(cited) > 20
    assert {heading: path for heading, path in cited.items() if heading not in headings} == {}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_wrapped(document):
    text = re.sub(r"<!-- (\w+):.*?<!-- /\1 -->", "", document.read_text(), flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "[", "    "))]
    assert [line for line in prose if len(line) > COLUMNS] == []
