"""The server of running runs: who may ask, and what is sent."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.report.page.test_reading import array, clock, measured, write_run

from stretto.planning import plan
from stretto.planning.plan import plan_record
from stretto.report.page import build, payload, read_or_problem
from stretto.report.page.watch import MOST_READ, Feed, application
from stretto.run_folder import event_line, json_line
from stretto.timing import Horizon

uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server of the runs in a folder."""
    write_run(tmp_path / "runs" / "a")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number = int(found.getsockname()[1])
    settings = {"port": number, "log_level": "warning", "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(application(tmp_path / "runs"), **settings))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield number
    server.should_exit = True
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
    assert ask(port, "GET", "/events", Host="runs.example").status == 400
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, method).status == 405
        assert ask(port, method, "/events").status == 405
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


def read_event(stream: Any) -> tuple[str, Any]:
    name = ""
    while True:
        key, _, value = stream.readline().decode().rstrip().partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            return name, json.loads(value)


def test_new_rows_come_within_two_seconds(port: int, tmp_path: Path) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/events")
        with connection.getresponse() as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            kind, run = read_event(stream)
            assert (kind, run["name"]) == ("run", "a")
            add_batch(tmp_path / "runs" / "a", 8, 120)
            start = time.monotonic()
            while array(run["clock"]["sp"])[-1] != 152:
                kind, run = read_event(stream)
            assert time.monotonic() - start < 2
            assert (kind, run["name"]) == ("run", "a")
            write_run(tmp_path / "runs" / "b")
            kind, run = read_event(stream)
            assert (kind, run["name"]) == ("run", "b")


def test_a_run_is_sent_again_when_it_has_changed(tmp_path: Path) -> None:
    write_run(tmp_path)
    feed = Feed(tmp_path)
    assert [kind for kind, _ in feed.messages()] == ["run"]
    for batch in range(8, 12):
        assert list(feed.messages()) == []
        add_batch(tmp_path, batch, 120 + 32 * (batch - 8))
        with (tmp_path / "events.jsonl").open("a") as file:  # of a position before the last row
            file.write(event_line("checkpoint", clock(4, 40), "saved", attempt=1, utc=1e9))
        ((kind, run),) = feed.messages()
        batches = array(run["clock"]["ba"])
        assert (kind, batches.max()) == ("run", batch + 1)
        assert batches[run["events"][-1]["row"]] == 4
    planned = plan(Horizon("2ep", dataset_num_samples=256), "0sp:8")
    (tmp_path / "plan.json").write_text(json.dumps(plan_record(planned)))
    ((_, run),) = feed.messages()
    assert array(run["clock"]["ba"]).max() > 50


def test_a_file_that_was_cut_sends_the_run_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    feed = Feed(tmp_path)
    assert [kind for kind, _ in feed.messages()] == ["run"]
    write_run(tmp_path / "a", batches=5)
    ((kind, run),) = feed.messages()
    assert (kind, array(run["clock"]["ba"]).max()) == ("run", 5)
    text = (tmp_path / "a" / "ledger.csv").read_text().replace(",2.0,16,", ",2.1,16,")
    (tmp_path / "a" / "ledger.csv").write_text(text + text.splitlines()[-1] + "\n")
    assert [kind for kind, _ in feed.messages()] == ["run"]
    shutil.rmtree(tmp_path / "a")
    assert list(feed.messages()) == []
    write_run(tmp_path / "a", batches=6)
    ((kind, run),) = feed.messages()
    assert (kind, array(run["clock"]["ba"]).max()) == ("run", 6)


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
    feed = Feed(tmp_path)
    assert [data["problem"] for _, data in feed.messages()] == ["", ""]
    spoil(tmp_path / "bad", how)
    found = payload(map(read_or_problem, [tmp_path / "bad", tmp_path / "good"]))
    assert [run["name"] for run in found["runs"] if run["problem"]] == ["bad"]
    assert "problem" in build(found)
    list(feed.messages())
    assert list(feed.messages()) == []  # said once
    messages = {data["name"]: data["problem"] for _, data in Feed(tmp_path).messages()}
    assert messages["good"] == ""
    assert messages.get("bad", "gone") != ""
    shutil.rmtree(tmp_path / "bad")
    write_run(tmp_path / "bad")
    assert [data["problem"] for _, data in feed.messages()] == [""]


def test_of_many_runs_those_that_are_looked_at_are_read(tmp_path: Path) -> None:
    for number in range(MOST_READ + 5):
        write_run(tmp_path / f"run{number:03}", batches=1)
        os.utime(tmp_path / f"run{number:03}", (number, number))
    feed = Feed(tmp_path, ["run002"])
    (kind, others), *runs = feed.messages()
    assert (kind, others["names"]) == ("others", ["run000", "run001", "run003", "run004"])
    assert {data["name"] for _, data in runs} == {
        "run002",
        *(f"run{number:03}" for number in range(5, MOST_READ + 5)),
    }
    write_run(tmp_path / "new", batches=1)
    assert [data.get("name") for kind, data in feed.messages() if kind == "run"] == ["new"]


def test_the_page_and_its_feed_read_no_more_than_they_show(port: int, tmp_path: Path) -> None:
    for number in range(MOST_READ + 5):
        write_run(tmp_path / "runs" / f"run{number:03}", batches=1)
        os.utime(tmp_path / "runs" / f"run{number:03}", (number, number))
    text = ask(port).text
    found = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert len(found["runs"]) == MOST_READ
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/events?run=run001")
        with connection.getresponse() as stream:
            kind, others = read_event(stream)
            assert kind == "others"
            assert "run001" not in others["names"]
            assert "run000" in others["names"]
