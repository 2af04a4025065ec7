"""Pages are read as plain files too: none is empty without Sphinx, every link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import generated_docs
import pytest
from tests.docs.pages import FENCE, PAGES, ROOT, anchors, links

SHOWN_BY_SPHINX_ALONE = ("include", "literalinclude")
ADDRESS = re.compile(r"https://[\w.-]+\.\w+(/[\w./~%+=&?#:@-]*)?")
STARTS = ("README.md", "RELEASING.md", "bench/README.md")
"""What needs no link: what a stranger, a maintainer and GitHub open first."""


def empty(text: str) -> list[str]:
    """The directives of a page that show nothing without Sphinx."""
    found = []
    for block in FENCE.finditer(text):
        name = re.match(r"\{([\w:-]+)\}", block["info"].strip())
        lines = [line for line in block["body"].splitlines() if not line.startswith(":")]
        if name and (name[1] in SHOWN_BY_SPHINX_ALONE or not "".join(lines).strip()):
            found.append(name[1])
    return found


def targets(path: Path) -> Iterator[tuple[Path, str]]:
    """The files of this repository that a page links to or shows, and the heading there."""
    for link in links(path.read_text(encoding="utf-8")):
        if "://" not in link and not link.startswith("mailto:"):
            file, _, heading = link.partition("#")
            yield path.resolve().parent / file if file else path.resolve(), heading


def broken(file: Path, heading: str) -> bool:
    """Whether a link leads to no file, or to no heading of its page."""
    if heading and file.suffix == ".md" and file.exists():
        return heading not in anchors(file.read_text(encoding="utf-8"))
    return not file.exists()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert empty(text) == []
    assert [one for one in targets(path) if broken(*one)] == []
    assert [one for one in links(text) if "://" in one and not ADDRESS.fullmatch(one)] == []
    assert generated_docs.renewed(text) == text, "write it again: make golden"


def test_every_page_is_reached_by_links() -> None:
    reached, ahead = set[Path](), [ROOT / name for name in STARTS]
    while ahead:
        page = ahead.pop().resolve()
        if page.suffix == ".md" and page.exists() and page not in reached:
            reached.add(page)
            ahead += [file for file, _ in targets(page)]
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


@pytest.mark.parametrize("link", ["b.md", "a.md#other", "#none"])
def test_a_link_that_leads_nowhere_is_found(link: str, tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(f"# One `two`, [three](a.md)\n\n[x]({link}), [y](a.md#one-two-three)\n")
    assert [broken(*one) for one in targets(page)] == [False, True, False]
