"""`stretto watch`: the page of runs that are still running, on this machine only."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, final

from stretto.errors import ConfigError
from stretto.report.page import build, runs_payload
from stretto.report.page.reading import newest, read_or_problem, runs_in, stamp
from stretto.report.page.series import encoded

HOST = "127.0.0.1"
"""The server listens here alone: there is no password."""
HOSTS = (HOST, "localhost")
"""Names that a request may use; another one comes from a page that tries to read runs."""
MOST_READ = 30
"""Of more runs, so many that changed last are shown."""
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class _Read(NamedTuple):
    """A run as the page reads it."""

    stamp: object
    """How its files were before they were read."""
    at: int
    """The number of this reading; runs that were read later have larger ones."""
    record: dict[str, Any]


@final
class WatchedRuns:
    """The runs in a folder. Each is read again when its files have changed, for all pages once.

    Args:
        folder: a run folder, or a folder of run folders. New ones are found.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        # A server that starts again goes on with larger numbers, so open pages are told everything.
        self._count = time.time_ns() // 1_000_000
        self._read: dict[Path, _Read] = {}

    def payload(self, after: int = 0) -> dict[str, Any]:
        """Return the runs that were read after a number, and the last number as `at`."""
        with self._lock:
            before, self._read = self._read, {}
            for path in newest(runs_in(self._folder, set(before)), MOST_READ):
                # Before it is read: what comes meanwhile is read the next time.
                now, known = stamp(path), before.get(path)
                if known is None or known.stamp != now:
                    self._count += 1
                    known = _Read(now, self._count, encoded(read_or_problem(path)))
                self._read[path] = known
            found, at = self._read.values(), self._count
            shown = [one.record for one in found if one.at > after]
        return runs_payload(shown, live=True) | {"at": at}


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


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return the server: `/` is the page, and `/runs?after=` what it asks for again and again.

    Raises:
        OSError: the port is taken.
    """
    watched = WatchedRuns(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            host = self.headers.get("host", "")
            if (host.rpartition(":")[0] or host) not in HOSTS:
                self.send_error(400, "no such host")
            elif path == "/":
                text = build(watched.payload())
                self._answer("text/html; charset=utf-8", text, security_policy(text))
            elif path == "/runs":
                after = query.removeprefix("after=")
                found = watched.payload(int(after) if after.isdecimal() else 0)
                self._answer("application/json", json.dumps(found, allow_nan=False))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str, policy: str = "default-src 'none'") -> None:
            content = text.encode()
            self.send_response(200)
            for name, value in (
                ("content-type", kind),
                ("content-length", str(len(content))),
                ("content-security-policy", policy),
                ("cache-control", "no-store"),
                ("cross-origin-resource-policy", "same-origin"),
                ("referrer-policy", "no-referrer"),
                ("x-content-type-options", "nosniff"),
            ):
                self.send_header(name, value)
            with suppress(ConnectionError):  # the page was closed meanwhile
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    return ThreadingHTTPServer((HOST, port), Handler)


def opened(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens; requests wait until it serves them.

    Raises:
        ConfigError: the folder does not exist, or the port is taken.
    """
    if not folder.is_dir():
        raise ConfigError.bad("folder", str(folder), "there is no such folder", "name one of runs")
    build(runs_payload([]))  # a part that is missing is an error here, not in the browser
    try:
        return server(folder, port)
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError.bad("--port", port, why, "choose another one") from None
