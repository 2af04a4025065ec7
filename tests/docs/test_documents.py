"""Every example in the README and the documentation is executed and says what really comes out.

Python blocks of a document share one namespace, from top to bottom, in an empty folder. In
`console` blocks, each `$ stretto ...` line is run, and what stands below it up to the next `$` must
be what it prints (`...` stands for anything). `<!-- skip: next -->` before a block leaves it out.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS = doctest.ELLIPSIS
COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<output>(?:(?!\$ ).*\n?)*)", re.MULTILINE)


def run_stretto(arguments: str) -> str:
    """Return what the command line prints, with this Python's stretto, in the current folder."""
    done = subprocess.run(
        f"{sys.executable} -m stretto {arguments}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100"},
    )
    return done.stdout + done.stderr


def evaluate_console(example: Example) -> str | None:
    """Run the `$ stretto` lines of a block; return what is wrong, if anything."""
    for match in COMMAND.finditer(str(example.parsed)):
        verb, _, arguments = match["command"].partition(" ")
        if verb != "stretto":
            continue
        printed = run_stretto(arguments)
        expected = match["output"].rstrip() + "\n"
        if not doctest.OutputChecker().check_output(expected, printed.rstrip() + "\n", OPTIONS):
            return f"$ {match['command']}\nexpected:\n{expected}\nprinted:\n{printed}"
    return None


SYBIL = Sybil(
    [
        PythonCodeBlockParser(doctest_optionflags=OPTIONS),
        CodeBlockParser("console", evaluate_console),
        SkipParser(),
    ]
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_document(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in SYBIL.parse(path).examples():
        example.evaluate()


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "wrong.md"
    path.write_text("```python\n>>> 1 + 1\n3\n```\n")
    (example,) = SYBIL.parse(path).examples()
    with pytest.raises(Exception, match="Expected"):
        example.evaluate()
