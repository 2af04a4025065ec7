"""Pages are read as plain files too: none is empty without Sphinx, every link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import generated_docs
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = ("_build", "_templates", "api")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(one for one in DOCS.rglob("*.md") if not set(MADE) & set(one.relative_to(DOCS).parts)),
]
FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")
SHOWN_BY_SPHINX_ALONE = ("include", "literalinclude")


def empty(text: str) -> list[str]:
    """The directives of a page that show nothing without Sphinx."""
    found = []
    for block in FENCE.finditer(text):
        name = re.match(r"\{([\w:-]+)\}", block["info"].strip())
        lines = [line for line in block["body"].splitlines() if not line.startswith(":")]
        if name and (name[1] in SHOWN_BY_SPHINX_ALONE or not "".join(lines).strip()):
            found.append(name[1])
    return found


def targets(path: Path) -> Iterator[Path]:
    """The files of this repository that a page links to or shows."""
    text = CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))
    for link in LINK.finditer(text):
        if "://" not in link["target"] and not link["target"].startswith(("#", "mailto:")):
            yield path.resolve().parent / link["target"].partition("#")[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert empty(text) == []
    assert [one for one in targets(path) if not one.exists()] == []
    assert generated_docs.renewed(text) == text, "write it again: make golden"


def test_every_page_is_reached_by_links() -> None:
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page.suffix == ".md" and page.exists() and page not in reached:
            reached.add(page)
            ahead += targets(page)
    assert {path.resolve() for path in PAGES} - reached == set()


@pytest.mark.parametrize("example", generated_docs.pictures(), ids=lambda path: str(path.name))
def test_a_picture_is_of_its_example(example: Path) -> None:
    assert generated_docs.is_current(example, generated_docs.pictures()[example]), "make golden"


@pytest.mark.long
def test_a_picture_is_drawn_alike(tmp_path: Path) -> None:
    for name in ("ramp.yaml", "own_loop.py"):  # plans: no numbers of a run, which differ by machine
        example = generated_docs.GALLERY / name
        generated_docs.draw(example, tmp_path / "again.svg")
        again = (tmp_path / "again.svg").read_text(encoding="utf-8") + generated_docs.mark(example)
        assert again == generated_docs.pictures()[example].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```{include} a.md\n```\n", ["include"]),
        ("```{literalinclude} a.py\n:language: python\n```\n", ["literalinclude"]),
        ("```{toctree}\n:hidden:\n\na\n```\n", []),
        ("```{eval-rst}\n\n```\n", ["eval-rst"]),
        ("```python\n```\n", []),
    ],
)
def test_what_shows_nothing_is_found(text: str, found: list[str]) -> None:
    assert empty(text) == found
