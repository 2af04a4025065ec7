"""`stretto watch`: the page of runs that are still running, on this machine only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from stretto._optional import import_optional
from stretto.errors import ConfigError, DataError
from stretto.report.page import build, payload
from stretto.report.page.reading import Reader, newest, read_or_problem, runs_in
from stretto.report.page.series import (
    UNITS,
    Numbers,
    RunData,
    described,
    encoded,
    filled,
    merged,
    shown_event,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
"""The server listens here alone: there is no password."""
HOSTS = ["127.0.0.1", "localhost"]
"""Names that a request may use; another one comes from a page that tries to read runs."""
PORT = 8377
POLL_SECONDS = 0.5
"""How often sizes of files are read, which works on network file systems, too."""
BEAT_SECONDS = 15.0
MOST_READ = 30
"""Of more runs, so many that changed last are read, and others when they are chosen."""
MOST_NEW_POINTS = 400
"""Of a series in one message."""
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@final
class Feed:
    """What one page has to be sent: each run once, then its new rows.

    Args:
        folder: a run folder, or a folder of run folders. New ones are found.
        chosen: names of runs to read besides the newest.
    """

    def __init__(self, folder: Path, chosen: Collection[str] = ()) -> None:
        self._folder = folder
        self._chosen = chosen
        self._paths: list[Path] = []
        self._left: set[Path] | None = None
        """Runs that are not read; None before the first look."""
        self._problems: dict[Path, tuple[Any, ...]] = {}
        """How the files of runs were that cannot be read."""
        self._readers: dict[Path, Reader] = {}
        self._ends: dict[Path, Numbers] = {}
        """The clock that the page has of each run."""

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and data of each message that is due now."""
        before, self._paths = self._paths, runs_in(self._folder, set(self._paths))
        if self._left is None:
            self._left = set(self._paths) - set(newest(self._paths, MOST_READ))
            self._left -= {self._folder / name for name in self._chosen}
        if self._left and self._paths != before:
            yield "others", {"names": [path.name for path in self._paths if path in self._left]}
        paths = dict.fromkeys(path for path in self._paths if path not in self._left)
        self._readers = {path: one for path, one in self._readers.items() if path in paths}
        for path in paths:
            found = self._message(path)
            if found is not None:
                yield found

    def _message(self, path: Path) -> tuple[str, dict[str, Any]] | None:
        if path in self._problems and self._problems[path] == Reader(path).stamp:
            return None
        reader = self._readers.get(path)
        try:
            if reader is not None and not reader.was_cut():
                found = self._rows(path, reader.more()) if reader.has_new() else None
                return None if found is None else ("rows", found)
            self._readers[path] = reader = Reader(path)
            run = reader.read()
        except DataError as error:
            self._readers.pop(path, None)
            self._problems[path] = Reader(path).stamp
            run = RunData(Reader(path).name, "run", problem=str(error.message.why))
        record = encoded(run)
        self._ends[path] = _clock_of(record)
        return "run", record

    def _rows(self, path: Path, run: RunData) -> dict[str, Any] | None:
        """Return new rows, counted on from those of the page; None if there are none."""
        series = [one.thinned(MOST_NEW_POINTS) for one in run.series if len(one.values)]
        if not series and not run.events:
            return None
        # Rows of a plan lie ahead of these: the page sorts them in.
        clocks = [one.clock for one in series] + [event["clock"][None] for event in run.events]
        table, places = merged(clocks)
        before = self._ends[path]
        start, after = len(before), filled(np.concatenate([before, table]))
        events = [
            shown_event(event, int(rows[0]) + start)
            for event, rows in zip(run.events, places[len(series) :], strict=True)
        ]
        self._ends[path] = after
        return {
            "name": run.name,
            "clock": {
                unit: _plain(column) for unit, column in zip(UNITS, after[start:].T, strict=True)
            },
            "series": [
                described(one, (rows + start).tolist(), _plain)
                for one, rows in zip(series, places, strict=False)
            ],
            "events": events,
        }


def _clock_of(record: Mapping[str, Any]) -> Numbers:
    clock = record["clock"]
    table = np.full((clock["n"], len(UNITS)), np.nan)
    for index, unit in enumerate(UNITS):
        if clock[unit] is not None:
            table[:, index] = np.frombuffer(base64.b64decode(clock[unit]), "<f8")
    return table


def _plain(values: Numbers) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def security_policy(page: str) -> str:
    """Return the `content-security-policy` of a page: its own style and script, and nothing else.

    >>> security_policy("<style>a</style>")[:47]
    "default-src 'none'; connect-src 'self'; img-src"
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    parts = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    parts += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    parts += [f"{kind}-src {' '.join(found)}" for kind, found in hashes.items() if found]
    return "; ".join(parts)


def application(folder: Path) -> Starlette:
    """Return the server: `/` is the page, `/events` sends what is new.

    Raises:
        MissingPackageError: starlette is not installed.
    """
    applications = import_optional("starlette.applications", "watch")
    middleware = import_optional("starlette.middleware", "watch")
    trusted = import_optional("starlette.middleware.trustedhost", "watch")
    responses = import_optional("starlette.responses", "watch")
    routing = import_optional("starlette.routing", "watch")
    headers = {
        "cache-control": "no-store",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    def page() -> str:
        return build(payload(map(read_or_problem, newest(runs_in(folder), MOST_READ)), live=True))

    async def index(_: Request) -> Response:
        text = await asyncio.to_thread(page)
        policy = {"content-security-policy": security_policy(text)}
        found: Response = responses.HTMLResponse(text, headers=headers | policy)
        return found

    async def events(request: Request) -> Response:
        kind = "text/event-stream"
        feed = Feed(folder, request.query_params.getlist("run"))
        found: Response = responses.StreamingResponse(
            _stream(feed), headers=headers, media_type=kind
        )
        return found

    app: Starlette = applications.Starlette(
        routes=[
            routing.Route("/", index, methods=["GET"]),
            routing.Route("/events", events, methods=["GET"]),
        ],
        middleware=[
            middleware.Middleware(
                trusted.TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False
            )
        ],
    )
    return app


async def _stream(feed: Feed) -> AsyncIterator[str]:
    """Yield server-sent events as long as the page listens."""
    quiet = 0.0
    while True:
        found = await asyncio.to_thread(lambda: list(feed.messages()))
        for name, data in found:
            yield f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
        quiet = 0.0 if found else quiet + POLL_SECONDS
        if quiet >= BEAT_SECONDS:  # so that a page that was closed is noticed
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_SECONDS)


def serve(folder: Path, port: int) -> None:
    """Serve the page until the process is interrupted.

    Raises:
        ConfigError: the folder does not exist.
        MissingPackageError: starlette or uvicorn is not installed.
    """
    uvicorn = import_optional("uvicorn", "watch")
    if not folder.is_dir():
        raise ConfigError.bad("folder", str(folder), "there is no such folder", "name one of runs")
    build(payload([]))  # a part that is missing is an error here, not in the browser
    uvicorn.run(
        application(folder), host=HOST, port=port, log_level="warning", timeout_graceful_shutdown=1
    )
