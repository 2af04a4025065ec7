"""The server of running runs: who may ask, and what is sent."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, final

import pytest
from tests.report.page.test_reading import array, clock, measured, write_run

from stretto.errors import ConfigError
from stretto.planning import plan
from stretto.planning.plan import plan_record
from stretto.report.page import build, payload, read_or_problem
from stretto.report.page.watch import MOST_READ, WatchedRuns, server
from stretto.run_folder import event_line, json_line
from stretto.timing import Horizon


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server of the runs in a folder."""
    write_run(tmp_path / "runs" / "a")
    with server(tmp_path / "runs", 0) as opened:
        thread = threading.Thread(target=opened.serve_forever)
        thread.start()
        yield opened.server_port
        opened.shutdown()
        thread.join(20)


class Answer(NamedTuple):
    status: int
    headers: Any
    text: str


def ask(port: int, method: str = "GET", path: str = "/", **headers: str) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as found:
            return Answer(found.status, found.headers, found.read().decode())


def add_batch(folder: Path, batch: int, sample: int, size: int = 32) -> None:
    """Append a batch and its line, as a run does."""
    with (folder / "ledger.csv").open("a") as file:
        file.write(f"{batch},0,{sample},0,{size},0,4,{batch / 2},{size},0.5\n")
    with (folder / "metrics.jsonl").open("a") as file:
        line = {**clock(batch + 1, sample + size), **measured(batch, size)}
        file.write(json_line(line))


def test_who_may_ask(port: int) -> None:
    assert ask(port).status == 200
    assert ask(port, Host=f"localhost:{port}").status == 200
    assert ask(port, Host="runs.example").status == 400
    assert ask(port, "GET", "/runs", Host="runs.example").status == 400
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, method).status == 501
        assert ask(port, method, "/runs").status == 501
    assert ask(port, Host="[").status == 400
    assert ask(port, path="/runs/a/ledger.csv").status == 404
    assert ask(port, path="/../a/ledger.csv").status == 404


def test_the_page_may_run_its_own_script_and_ask_its_own_server_alone(port: int) -> None:
    answer = ask(port)
    text = answer.text
    policy = answer.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for kind in ("script", "style"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules[f"{kind}-src"]), rules
    assert answer.headers["cache-control"] == "no-store"
    payload = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert (payload["live"], [run["name"] for run in payload["runs"]]) == (True, ["a"])


def test_a_page_is_told_what_changed_since_it_asked(port: int, tmp_path: Path) -> None:
    first = json.loads(ask(port, path="/runs?after=0").text)
    assert [run["name"] for run in first["runs"]] == ["a"]
    assert json.loads(ask(port, path="/runs?after=x").text) == first
    path = f"/runs?after={first['at']}"
    assert json.loads(ask(port, path=path).text)["runs"] == []
    add_batch(tmp_path / "runs" / "a", 8, 120)
    (run,) = json.loads(ask(port, path=path).text)["runs"]
    assert array(run["clock"]["sp"])[-1] == 152
    write_run(tmp_path / "runs" / "b")
    found = json.loads(ask(port, path=path).text)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["at"] == first["at"] + 2, "each was read once"
    assert found["at"] < 2**53, "JavaScript has no larger whole numbers"


@final
class Page:
    """A page that asks for what is new to it."""

    def __init__(self, folder: Path) -> None:
        self.watched, self.at = WatchedRuns(folder), 0

    def new(self) -> list[dict[str, Any]]:
        found = self.watched.payload(self.at)
        self.at = found["at"]
        return list(found["runs"])


def test_a_run_is_sent_again_when_it_has_changed(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(tmp_path)
    assert len(page.new()) == 1
    for batch in range(8, 12):
        assert page.new() == []
        add_batch(tmp_path, batch, 120 + 32 * (batch - 8))
        with (tmp_path / "events.jsonl").open("a") as file:  # of a position before the last row
            file.write(event_line("checkpoint", clock(4, 40), "saved", attempt=1, utc=1e9))
        (run,) = page.new()
        batches = array(run["clock"]["ba"])
        assert batches.max() == batch + 1
        assert batches[run["events"][-1]["row"]] == 4
    planned = plan(Horizon("2ep", dataset_num_samples=256), "0sp:8")
    (tmp_path / "plan.json").write_text(json.dumps(plan_record(planned)))
    (run,) = page.new()
    assert array(run["clock"]["ba"]).max() > 50


def test_a_file_that_was_cut_sends_the_run_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    page = Page(tmp_path)
    assert len(page.new()) == 1
    write_run(tmp_path / "a", batches=5)
    (run,) = page.new()
    assert array(run["clock"]["ba"]).max() == 5
    text = (tmp_path / "a" / "ledger.csv").read_text().replace(",2.0,16,", ",2.1,16,")
    (tmp_path / "a" / "ledger.csv").write_text(text + text.splitlines()[-1] + "\n")
    assert len(page.new()) == 1
    shutil.rmtree(tmp_path / "a")
    assert page.new() == []
    write_run(tmp_path / "a", batches=6)
    (run,) = page.new()
    assert array(run["clock"]["ba"]).max() == 6


def spoil(folder: Path, how: str) -> None:
    if how == "number":
        (folder / "plan.json").write_text('{"dataset_num_samples": 1' + "0" * 400 + "}")
    elif how == "hole":
        os.truncate(folder / "ledger.csv", 1 << 40)
    else:
        for path in folder.iterdir():
            path.unlink()


@pytest.mark.parametrize("how", ["number", "hole", "gone"])
def test_a_run_that_cannot_be_read_says_why_and_hides_no_other(how: str, tmp_path: Path) -> None:
    for name in ("bad", "good"):
        write_run(tmp_path / name)
    with (tmp_path / "bad" / "metrics.jsonl").open("a") as file:
        file.write(json_line({**clock(9, 90), "memory_peak_bytes": 1}))
    page = Page(tmp_path)
    assert [run["problem"] for run in page.new()] == ["", ""]
    spoil(tmp_path / "bad", how)
    found = payload(map(read_or_problem, [tmp_path / "bad", tmp_path / "good"]))
    assert [run["name"] for run in found["runs"] if run["problem"]] == ["bad"]
    assert "problem" in build(found)
    page.new()
    assert page.new() == []  # said once
    messages = {run["name"]: run["problem"] for run in Page(tmp_path).new()}
    assert messages["good"] == ""
    assert messages.get("bad", "gone") != ""
    shutil.rmtree(tmp_path / "bad")
    write_run(tmp_path / "bad")
    assert [run["problem"] for run in page.new()] == [""]


def test_of_many_runs_those_that_changed_last_are_read(tmp_path: Path) -> None:
    for number in range(MOST_READ + 5):
        write_run(tmp_path / f"run{number:03}", batches=1)
        os.utime(tmp_path / f"run{number:03}", (number, number))
    page = Page(tmp_path)
    names = {run["name"] for run in page.new()}
    assert names == {f"run{number:03}" for number in range(5, MOST_READ + 5)}
    write_run(tmp_path / "new", batches=1)
    assert [run["name"] for run in page.new()] == ["new"]


def test_a_server_that_starts_again_tells_an_open_page_everything(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    at = WatchedRuns(tmp_path).payload()["at"]
    time.sleep(0.005)
    assert [run["name"] for run in WatchedRuns(tmp_path).payload(at)["runs"]] == ["a"]


def test_the_address_is_said_when_it_can_be_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "stretto", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            port = re.findall(r"http://127\.0\.0\.1:(\d+)/", line)[0]
            assert ask(int(port)).status == 200
        finally:
            process.terminate()


def test_nothing_is_said_before_an_error(tmp_path: Path, port: int) -> None:
    for folder, taken in ((tmp_path / "none", 0), (tmp_path, port), (tmp_path, 1 << 20)):
        with pytest.raises(ConfigError):
            server(folder, taken)


def others(path: Path) -> None:
    path.mkdir()
    path.chmod(0)


ODD: dict[str, Callable[[Path], object]] = {
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the folder": lambda path: path.symlink_to("."),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "of somebody else": others,
    "a name that is no text": lambda path: write_run(path.with_name(os.fsdecode(b"\xff\xfe"))),
    "a file": lambda path: path.write_text("x"),
    "a pipe": os.mkfifo,
    "half a line": lambda path: half(path, '{"ep": 0.1, "ba'),
    "deep": lambda path: half(path, '{"a":' * 100_000 + "\n"),
    "not text": lambda path: half(path, "\0\ud800\x1b\n"),
    "numbers too large": lambda path: half(path, json_line({**clock(9, 200), "sp": 10**400})),
    "twenty thousand metrics": lambda path: half(
        path, json_line({**clock(9, 200), **{f"m{n}": 1.0 for n in range(20_000)}})
    ),
    "names of settings": lambda path: rules(path, "a:\n" * 5_000 + "[[[[ &a *a\n- - - :\n\0: x\n"),
    "settings without end": lambda path: rules(path, "  " * 200_000),
}


def half(path: Path, text: str) -> None:
    write_run(path)
    with (path / "metrics.jsonl").open("a", errors="surrogatepass") as file:
        file.write(text)


def rules(path: Path, text: str) -> None:
    write_run(path)
    (path / "run.yaml").write_text(text)


@pytest.mark.parametrize("odd", ODD)
def test_no_folder_hides_another(odd: str) -> None:
    """Also for a user who may not read all of them; root may."""
    with tempfile.TemporaryDirectory() as made:  # not `tmp_path`, whose parents are of one user
        folder = Path(made)
        folder.chmod(0o755)
        write_run(folder / "good")
        ODD[odd](folder / "odd")
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            page = Page(folder)
            runs = {run["name"]: run["problem"] for run in page.new()}
            assert page.new() == []
        finally:
            os.seteuid(user)
            if odd == "of somebody else":
                (folder / "odd").chmod(0o755)
    assert runs["good"] == ""
    json.dumps(sorted(runs)).encode()
    assert "".join(runs).encode(), "a page can ask for it by name"


def test_a_folder_that_may_not_be_read_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(ConfigError, match="permission"):
                server(Path(made), 0)
        finally:
            os.seteuid(user)
            Path(made).chmod(0o755)


def test_files_of_another_tool_are_a_problem_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (run,) = Page(tmp_path).new()
    assert "no line" in run["problem"]


def test_any_run_can_be_asked_for_by_name(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for number in range(MOST_READ):
        write_run(folder / f"new {number}&", batches=1)
    os.utime(folder / "a", (1, 1))
    first = json.loads(ask(port, path="/runs?after=0").text)
    assert "a" not in [run["name"] for run in first["runs"]]
    assert first["names"][-1] == "a"
    assert len(first["names"]) == MOST_READ + 1
    at = first["at"]

    def names(query: str) -> list[str]:
        return [
            run["name"]
            for run in json.loads(ask(port, path=f"/runs?after={at + 1}&{query}").text)["runs"]
        ]

    assert names("new=a") == ["a"]
    assert names("also=a") == []
    assert names("new=new+1%26&also=a") == ["new 1&"]
    assert names("new=../../a&new=%2Fetc&new=") == []
    add_batch(folder / "a", 8, 120)
    assert json.loads(ask(port, path=f"/runs?after={at + 1}").text)["runs"] == []
    assert names("also=a") == ["a"]
