"""What a reader sees of a page: its blocks of code, its commands, its links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = ("_build", "_templates", "api")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("RELEASING.md", "SECURITY.md", "bench/README.md")),
    *(
        path
        for path in sorted(DOCS.rglob("*.md"))
        if not set(MADE) & set(path.relative_to(DOCS).parts)
    ),
]
FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
CODE = re.compile(r"`(?P<code>[^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)$", re.MULTILINE)


def text_of(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / page).read_text("utf-8")


def section(page: str, title: str) -> str:
    """What a page says below a heading, up to the next one of its level or above."""
    found = re.search(
        rf"^(?P<level>#+) {re.escape(title)}\n(?P<text>.*?)(?=^(?!(?P=level)#)#+ |\Z)",
        FENCE.sub(lambda block: block[0].replace("\n#", "\n\0#"), text_of(page)),
        re.DOTALL | re.MULTILINE,
    )
    assert found is not None, f"{page} has no section {title!r}"
    return found["text"].replace("\0", "")


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a language in a text."""
    return [block["body"] for block in FENCE.finditer(text) if block["info"].strip() == language]


def commands(text: str) -> list[str]:
    """The commands in the `console` blocks of a text; one that goes over several lines is one."""
    lines = COMMAND.findall("\n".join(blocks(text, "console")))
    return [line.replace("\\\n", " ") for line in lines]


def prose(text: str) -> str:
    """A text without its blocks of code."""
    return FENCE.sub("", text)


def links(text: str) -> Iterator[str]:
    """What a text links to or shows."""
    return (link["target"] for link in LINK.finditer(CODE.sub("", prose(text))))


def anchors(text: str) -> set[str]:
    """The names of a page's headings in links, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in HEADING.finditer(prose(text)):
        title = LINK.sub(lambda link: link[0].partition("]")[0].lstrip("!["), heading["title"])
        name = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        number = 0
        while (f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(f"{name}-{number}" if number else name)
    return found
