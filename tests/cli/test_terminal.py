"""What every command has: examples, --quiet, --json, exit codes, progress, completion."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from typer.main import get_command

from stretto.cli.app import app, main
from stretto.cli.terminal import progress

Stretto = Callable[..., Any]
COMMAND: Any = get_command(app)
VERBS = sorted(COMMAND.commands)


def examples(verb: str) -> list[list[str]]:
    """The example command lines of a verb's help."""
    lines = (COMMAND.commands[verb].epilog or "").splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith("stretto")]


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_command_lines(verb: str) -> None:
    found = examples(verb)
    assert found
    for name, first, *arguments in found:
        assert (name, first) == ("stretto", verb)
        given = arguments[: arguments.index(">")] if ">" in arguments else arguments
        COMMAND.commands[verb].make_context(verb, given)


@pytest.mark.parametrize("verb", VERBS)
def test_prints_json(verb: str) -> None:
    options = {name for one in COMMAND.commands[verb].params for name in one.opts}
    assert verb in {"schema", "watch"} or "--json" in options


def test_quiet_prints_only_errors(stretto: Stretto, project: Path) -> None:
    said = stretto("plan", "run.yaml", "--quiet")
    assert (said.code, said.out) == (0, "")
    assert all(line.startswith("note: not checked") for line in said.err.splitlines())
    said = stretto("--quiet", "convert", "1q", "--to", "ep")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("Error [time]: ")


def test_training_as_json(stretto: Stretto, project: Path) -> None:
    said = stretto("train", "run.yaml", "--folder", "a", "--json")
    record = json.loads(said.out)
    assert (record["finished"], record["sample"], record["folder"]) == (True, 80, "a")
    assert record["metrics"]["validation"]["entropy"] == 3.25
    assert Path(record["checkpoint"]).is_dir()
    assert "trained 2ep" in said.err


def test_time_as_json(stretto: Stretto) -> None:
    said = stretto("convert", "0.1dur", "--to", "ep", "--max-duration", "90ep", "--json")
    assert json.loads(said.out) == {"time": "9ep"}


def test_progress_of_slow_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("counting", after=0.01, every=60):
        sleep(0.2)
    monkeypatch.setenv("RANK", "1")
    with progress("waiting", after=0.01, every=60):
        sleep(0.1)
    with progress("nothing"):
        pass
    assert capsys.readouterr().err == "counting (0 s) ...\n"


def test_completes_verbs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("_STRETTO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "stretto pl")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["plan"]


OUTPUTS = {
    "full": ">/dev/full",
    "full, errors too": ">/dev/full 2>/dev/full",
    "closed": ">&-",
    "all closed": "<&- >&- 2>&-",
    "read in part": "| head -1",
}


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_run_outlives_its_output(output: str, project: Path) -> None:
    code = "from stretto.cli import main; main(['train', 'run.yaml', '--folder', 'a'])"
    command = f'set -o pipefail; {sys.executable} -c "{code}" {OUTPUTS[output]}'
    done = subprocess.run(["bash", "-c", command], cwd=project, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    events = (project / "a" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["text"] == "the end"
    ledger = (project / "a" / "ledger.csv").read_text().splitlines()
    assert len(ledger) == 1 + 11
    assert len(list((project / "a" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConnectionError("gone")])
def test_an_error_of_the_system_is_one_line(
    error: OSError, stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("stretto.timing.convert", fail)
    said = stretto("convert", "1ep", "--to", "ba")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert (error.strerror or "gone").lower() in said.err
    with pytest.raises(type(error)):
        main(["convert", "1ep", "--to", "ba", "--traceback"])
