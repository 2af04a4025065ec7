"""The documentation stays short: limits on words, on pages, and on sentences."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LEFT_OUT = ("decisions", "_build", "_templates", "api")
PAGES = [
    path
    for path in sorted(DOCS.rglob("*.md"))
    if not set(LEFT_OUT) & set(path.relative_to(DOCS).parts) and path.name != "changelog.md"
]
ALL_WORDS = 19_000
PAGE_WORDS = 1_000
LONGER = ("reference/", "background/measurements.md", "background/published.md")
"""What may be longer than other pages: the reference, and results."""
GENERATED = re.compile(r"<!-- (results|generated|table)\b.*?<!-- end(?: of \1)? -->", re.DOTALL)
"""What a benchmark or a tool writes is not counted."""
FIRST_WORDS = 1_200
README_WORDS = 600
SENTENCE_WORDS = 15

CODE = re.compile(r"^(?P<fence>```+|:::+).*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\S*\w\S*")
INLINE = re.compile(r"`[^`]+`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
END = re.compile(r"[.!?:](?=\s|$)")


def words(path: Path) -> int:
    """How many words a file has, code included; bars of tables are none."""
    return len(WORD.findall(path.read_text(encoding="utf-8")))


def written(path: Path) -> int:
    """How many words a file has outside of blocks of code and of what is generated."""
    return len(WORD.findall(GENERATED.sub("", CODE.sub("", path.read_text(encoding="utf-8")))))


def sentences(text: str) -> list[int]:
    """How many words each sentence of prose has; code, tables and headings are none."""
    text = re.sub(r"<!--.*?-->", "", GENERATED.sub("", CODE.sub("", text)), flags=re.DOTALL)
    text = LINK.sub(r"\1", INLINE.sub("code", text))
    found = []
    for paragraph in PARAGRAPHS.split(text):
        lines = [line for line in paragraph.splitlines() if not line.startswith(("#", "|", "("))]
        found += [len(one.split()) for one in END.split(" ".join(lines)) if len(one.split()) > 1]
    return found


def test_all_pages_together() -> None:
    assert sum(map(written, PAGES)) <= ALL_WORDS


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page(path: Path) -> None:
    assert str(path.relative_to(DOCS)).startswith(LONGER) or words(path) <= PAGE_WORDS


def test_the_first_path() -> None:
    """Front page, which has the installation, and first tutorial: in the docs, and on GitHub."""
    tutorial = words(DOCS / "start" / "own-loop.md")
    for front in (DOCS / "index.md", ROOT / "README.md"):
        assert words(front) + tutorial <= FIRST_WORDS


def test_the_readme() -> None:
    assert words(ROOT / "README.md") <= README_WORDS


def test_sentences_are_short() -> None:
    lengths = [one for path in PAGES for one in sentences(path.read_text(encoding="utf-8"))]
    assert mean(lengths) <= SENTENCE_WORDS


def test_a_sentence_is_counted_without_code_and_tables() -> None:
    text = (
        "# Title\n\nOne two `a b`. Three [four](x.md) five six:\n\n```python\nx = 1\n```\n\n| a |\n"
    )
    assert sentences(text) == [3, 4]
