"""Every example in the README and the documentation is executed and says what really comes out.

Python blocks of a document share one namespace, from top to bottom, in an empty folder. What a
block prints must be in the `text` block below it, if that has `<!-- output -->` before it. A block
with `<!-- file: NAME -->` before it is written into the folder. In `console` blocks, each
`$ stretto` and `$ python` line is run, and what follows up to the next `$` must be what it prints
(`...` stands for anything). Each `yaml` block must be a run file, or lines of one.
`<!-- skip: next -->` leaves a block out.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from stretto.config import parse_run_file

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = ("_build", "_templates", "api")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(
        path for path in DOCS.rglob("*.md") if not set(MADE) & set(path.relative_to(DOCS).parts)
    ),
]
OPTIONS = doctest.ELLIPSIS
COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<output>(?:(?!\$ ).*\n?)*)", re.MULTILINE)
RANKS = re.compile(
    r"-m torch\.distributed\.run --standalone --nproc-per-node (?P<number>\d+) (?P<script>\S+)"
)
FILE = re.compile(r"<!-- file: (?P<name>[\w./-]+) -->\s*\Z")
OUTPUT = re.compile(r"<!-- output -->\s*\Z")
NEEDED = {"max_duration": "4ep", "data": {"target": "mine:Data"}, "batch_size": 8}
"""What a few lines of a run file leave out."""


def before(example: Example) -> str:
    """The text of a document before a block."""
    return example.document.text[: example.start]


def differs(expected: str, printed: str) -> str | None:
    """What is wrong with what was printed, if anything."""
    checker = doctest.OutputChecker()
    if checker.check_output(expected.rstrip() + "\n", printed.rstrip() + "\n", OPTIONS):
        return None
    return f"expected:\n{expected}\nprinted:\n{printed}"


def run_command(example: Example, verb: str, arguments: str) -> str:
    """Return what a command prints in the current folder; as `python` does, and as `torchrun`."""
    python, launch_ranks = example.namespace["run_python"], example.namespace["launch_ranks"]
    ranks = RANKS.fullmatch(arguments)
    if ranks is not None:
        printed: str = launch_ranks(Path(ranks["script"]), ranks=int(ranks["number"])).stdout
        return printed
    module = ["-m", "stretto"] if verb == "stretto" else []
    done = python(*module, *shlex.split(arguments), NO_COLOR="1", COLUMNS="100")
    return str(done.stdout + done.stderr)


def evaluate_console(example: Example) -> str | None:
    """Run the `$ stretto` and `$ python` lines of a block; return what is wrong, if anything."""
    for match in COMMAND.finditer(str(example.parsed)):
        verb, _, arguments = match["command"].partition(" ")
        if verb not in ("stretto", "python"):
            continue
        wrong = differs(match["output"], run_command(example, verb, arguments))
        if wrong:
            return f"$ {match['command']}\n{wrong}"
    return None


def evaluate_file(example: Example) -> None:
    """Write a block into the folder, if it says so."""
    named = FILE.search(before(example))
    if named is not None:
        Path(named["name"]).write_text(str(example.parsed))


def evaluate_output(example: Example) -> str | None:
    """Compare a block with what the Python block above it printed."""
    if OUTPUT.search(before(example)) is None:
        return None
    return differs(str(example.parsed), str(example.namespace["printed"]))


def evaluate_yaml(example: Example) -> None:
    """Read a block as a run file, or as lines of one; several are parted by `---`."""
    evaluate_file(example)
    for part in str(example.parsed).split("---\n"):
        values = yaml.safe_load(part)
        if values is not None and values.keys().isdisjoint({"jobs", "on"}):
            parse_run_file(yaml.safe_dump({**NEEDED, **values}))


def evaluate(example: Example) -> None:
    """Run a block and note what it printed; a Python block that is a file is only written."""
    is_python = example.region.lexemes.get("arguments") == "python"
    if is_python and FILE.search(before(example)):
        evaluate_file(example)
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.evaluate()
    if is_python:
        example.namespace["printed"] = printed.getvalue()


SYBIL = Sybil(
    [
        PythonCodeBlockParser(doctest_optionflags=OPTIONS),
        CodeBlockParser("console", evaluate_console),
        CodeBlockParser("text", evaluate_output),
        CodeBlockParser("yaml", evaluate_yaml),
        SkipParser(),
    ]
)


@pytest.fixture
def check(
    run_python: Callable[..., Any], launch_ranks: Callable[..., Any]
) -> Callable[[Path], None]:
    """Run the examples of a document."""

    def examples(path: Path) -> None:
        document = SYBIL.parse(path)
        document.namespace |= {"run_python": run_python, "launch_ranks": launch_ranks}
        for example in document.examples():
            evaluate(example)

    return examples


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_document(
    path: Path, check: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    before_it = set(sys.modules)
    check(path)
    for name in set(sys.modules) - before_it:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "```python\n>>> 1 + 1\n3\n```\n",
        "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n",
        "```yaml\nbatch_sizes: 3\n```\n",
        "```console\n$ stretto convert 1ep --to ep\n2ep\n```\n",
    ],
    ids=["doctest", "output", "run file", "command"],
)
def test_a_wrong_example_is_noticed(
    text: str, check: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "wrong.md"
    path.write_text(text)
    with pytest.raises(Exception, match=r"."):
        check(path)
