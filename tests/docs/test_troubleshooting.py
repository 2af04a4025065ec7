"""Every message on phantomgpu's page of troubleshooting is one that its source can print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "phantomgpu" / "troubleshooting.md"
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def texts() -> list[str]:
    """Return each text in the source that is no docstring; what an f-string fills in is a gap."""
    found = [path.read_text() for path in (ROOT / "src/phantomgpu/native").glob("*.c")]
    for path in (ROOT / "src" / "phantomgpu").rglob("*.py"):
        tree = ast.parse(path.read_text())
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    one.value if isinstance(one, ast.Constant) else "\0" for one in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and id(node) not in bare:
                found.append(str(node.value))
    return found


TEXTS = texts()


@pytest.mark.parametrize("message", MESSAGES)
def test_one_text_of_the_source_has_all_of_a_message_in_order(message: str) -> None:
    parts = re.compile(
        ".*".join(re.escape(part.strip()) for part in message.split("...")), re.DOTALL
    )
    assert any(parts.search(text) for text in TEXTS)


def test_there_are_forty() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 40
