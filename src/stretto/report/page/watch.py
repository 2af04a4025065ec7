"""`stretto watch`: the page of runs that are still running, on this machine only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from stretto._optional import import_optional
from stretto.errors import ConfigError
from stretto.report.page import build, payload
from stretto.report.page.reading import newest, read_or_problem, runs_in, stamp
from stretto.report.page.series import encoded

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
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@final
class Feed:
    """What one page has to be sent: each run, and again when its files have changed.

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
        self._stamps: dict[Path, object] = {}
        """How the files of each run were when it was sent."""

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and data of each message that is due now."""
        before, self._paths = self._paths, runs_in(self._folder, set(self._paths))
        if self._left is None:
            self._left = set(self._paths) - set(newest(self._paths, MOST_READ))
            self._left -= {self._folder / name for name in self._chosen}
        if self._left and self._paths != before:
            yield "others", {"names": [path.name for path in self._paths if path in self._left]}
        sent, self._stamps = self._stamps, {}
        for path in self._paths:
            if path not in self._left:
                # Before it is read: what comes meanwhile is sent the next time.
                self._stamps[path] = now = stamp(path)
                if sent.get(path) != now:
                    yield "run", encoded(read_or_problem(path))


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
        began = monotonic()
        found = await asyncio.to_thread(lambda: list(feed.messages()))
        for name, data in found:
            yield f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
        quiet = 0.0 if found else quiet + POLL_SECONDS
        if quiet >= BEAT_SECONDS:  # so that a page that was closed is noticed
            quiet = 0.0
            yield ": still here\n\n"
        # Long runs take long to read: half of the time is left to others.
        await asyncio.sleep(max(POLL_SECONDS, monotonic() - began))


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
