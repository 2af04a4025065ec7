"""Files of others: whatever lies under a name, an answer or one line, and nothing waits."""

from __future__ import annotations

import ast
import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import phantomgpu
from phantomgpu.cli import app
from phantomgpu.errors import PhantomError
from phantomgpu.files import MOST, read, read_json, write
from stretto._location import read_plain

OPENS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes"}
OWN = {"files.py", "call.py"}
"""The opener, and what reads the pickles that another process of ours wrote, before it is there."""


def opened_in(source: str) -> list[int]:
    """The lines of a source that open a file."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [(one.lineno, getattr(one.func, "attr", getattr(one.func, "id", ""))) for one in calls]
    return [line for line, name in named if name in OPENS]


def test_nothing_else_opens_a_file() -> None:
    files = Path(phantomgpu.__file__).parent.rglob("*.py")
    found = {file.name: lines for file in files if (lines := opened_in(file.read_text()))}
    assert set(found) == OWN, found
    assert opened_in("open(a)\nb.read_text()\nc.open('w')\nd.close()") == [1, 2, 3]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def link(to: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(to)


def to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": fifo,
    "link to a pipe": to_a_fifo,
    "folder": Path.mkdir,
    "device": link("/dev/zero"),
    "link to itself": link("given.json"),
    "huge": huge,
    "deep": text("[" * 200_000),
    "deep object": text('{"a":' * 200_000),
    "list": text("[]"),
    "number": text("1e999"),
    "digits": text("9" * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "empty": text(""),
    "missing": lambda path: None,
}
VERBS = {
    "why": ("why", "given.json"),
    "check": ("check", "--gpu", "h100", "--baseline", "given.json", "--", "true"),
    "model": ("model", "given.json", "--gpu", "h100", "--length", "8"),
}


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs Linux")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("what", HOSTILE)
def test_each_verb_refuses_what_is_no_file_of_its_kind(
    verb: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verb == "check" and what in ("missing", "link to itself"):  # it is written
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phantomgpu.questions.run", lambda *_, **__: pytest.fail("it ran"))
    HOSTILE[what](tmp_path / "given.json")
    said = CliRunner().invoke(app, VERBS[verb])
    assert isinstance(said.exception, PhantomError), said.exception
    assert len(str(said.exception).splitlines()) == 1
    assert "given.json" in str(said.exception)


WHOLE = {
    "categories": {"activations": 1 << 30},
    "peak_reserved": 1,
    "fits": True,
    "ranks": 1,
    "notes": ["a note"],
    "again": {"script": ["true"], "folder": ".", "gpu": "h100"},
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


@given(
    changes=st.dictionaries(st.sampled_from(sorted(WHOLE)), values, max_size=3),
    again=st.dictionaries(st.sampled_from(["script", "folder", "gpu", "args", "steps"]), values),
    rerun=st.booleans(),
)
def test_a_report_of_other_types_is_refused_or_used(
    *, changes: dict[str, Any], again: dict[str, Any], rerun: bool
) -> None:
    from phantomgpu import questions

    report = {**WHOLE, "again": {"script": ["true"], **again}, **changes}
    try:
        line = questions.command_line(report)
        advice = questions.why(report, rerun=rerun and not line)
    except PhantomError:
        return
    assert line.isprintable()
    assert all(one.saves >= 0 and map(str.isprintable, one.notes) for one in advice)


@given(st.binary() | st.from_regex(rb'\{"[ab]": ?[\[\]{}0-9,."tfn]*\}', fullmatch=True))
def test_any_bytes_are_an_object_or_an_error(content: bytes) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder, "any.json")
        file.write_bytes(content)
        with suppress(PhantomError):
            assert isinstance(read_json(file, "report", a=int)["a"], int)


def test_a_file_is_read_up_to_a_limit_or_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("first\nlast")
    assert read(file, last=4) == b"last"
    assert read(file, last=400) == b"first\nlast"
    os.truncate(file, MOST)
    assert len(read(file)) == MOST
    os.truncate(file, MOST + 1)
    with pytest.raises(PhantomError, match="more than 64 MiB"):
        read(file)
    assert len(read(file, last=4)) == 4


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """A process may have a limit that is nearly reached."""
    file = tmp_path / "log"
    file.write_text("last")
    for reads in (read, read_plain):
        tracemalloc.start()
        assert reads(file) == b"last"
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_two_writers_of_one_name_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "peak.json"
    write(file, json.dumps([0] * 50_000))

    def writes(number: int) -> None:
        for _ in range(30):
            write(file, json.dumps([number] * 50_000))

    threads = [threading.Thread(target=writes, args=[number]) for number in (1, 2)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        found = json.loads(file.read_text())
        assert len(found) == 50_000
        assert len(set(found)) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["peak.json"]


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("whole")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "whole").read_text() == "text"


@pytest.mark.timeout(60)
def test_a_pipe_is_written_if_somebody_reads(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PhantomError, match="cannot write"):
        write(pipe, "nobody")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "somebody")
    assert os.read(end, 99) == b"somebody"
    os.close(end)
    assert pipe.is_fifo()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none" / "peak.json", tmp_path / ("a" * 300)):
        with pytest.raises(PhantomError, match="cannot write"):
            write(file, "{}")
    assert not list(tmp_path.iterdir())
