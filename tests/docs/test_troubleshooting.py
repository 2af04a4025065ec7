"""Every message on phantomgpu's page of troubleshooting is one that its source can print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "phantomgpu" / "troubleshooting.md"
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def texts() -> str:
    """Return all text in the source; what an f-string fills in is a line of its own."""
    found = [path.read_text() for path in (ROOT / "src/phantomgpu/native").glob("*.c")]
    for path in (ROOT / "src" / "phantomgpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    one.value if isinstance(one, ast.Constant) else "\n" for one in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


TEXTS = texts()


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_printed(message: str) -> None:
    assert all(part.strip("; ") in TEXTS for part in message.split("...")), message


def test_there_are_forty() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 40
