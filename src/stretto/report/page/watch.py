"""`stretto watch`: the page of runs that are still running, on this machine only."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, final
from urllib.parse import parse_qs

from stretto.errors import ConfigError
from stretto.report.page import build, runs_payload
from stretto.report.page.reading import name_of, newest, read_or_problem, runs_in, stamp
from stretto.report.page.series import encoded

HOST = "127.0.0.1"
"""The server listens here alone: there is no password."""
HOSTS = (HOST, "localhost")
"""Names that a request may use; another one comes from a page that tries to read runs."""
MOST_READ = 9
"""Of more runs, so many that changed last are shown, and those that are asked for."""
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

    def payload(
        self, after: int = 0, also: Collection[str] = (), new: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the runs that were read after a number, and the last number as `at`.

        Args:
            after: the number; the `names` of all runs are there in any case.
            also: names of runs to read besides the newest ones.
            new: those of `also` that are returned in any case.
        """
        with self._lock:
            paths = newest(runs_in(self._folder, self._read))
            names = [name_of(path) for path in paths]
            chosen = {*paths[:MOST_READ]}
            chosen |= {path for path, name in zip(paths, names, strict=True) if name in also}
            # Those that only another page has asked for stay.
            self._read = {path: self._read[path] for path in paths if path in self._read}
            found, at = [self._now(path) for path in sorted(chosen)], self._count
            shown = [one.record for one in found if one.at > after or one.record["name"] in new]
        return runs_payload(shown, live=True) | {"at": at, "names": names}

    def _now(self, path: Path) -> _Read:
        """Return a run as it is; it is read if it has changed."""
        # Before it is read: what comes meanwhile is read the next time.
        now, known = stamp(path), self._read.get(path)
        if known is None or known.stamp != now:
            self._count += 1
            known = self._read[path] = _Read(now, self._count, encoded(read_or_problem(path)))
        return known


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
    """Return a server that listens: `/` is the page, `/runs?after=` what it asks for each second.

    Raises:
        ConfigError: the folder cannot be read, or the port is taken.
    """
    try:
        os.scandir(folder).close()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError.bad("folder", str(folder), why, "name a folder of runs") from None
    build(runs_payload([]))  # a part that is missing is an error here, not in the browser
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
                asked = parse_qs(query)
                after = asked.get("after", [""])[0]
                also, new = (set(asked.get(key, ())) for key in ("also", "new"))
                number = int(after[:20]) if after.isdecimal() else 0
                found = watched.payload(number, also | new, new)
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

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError.bad("--port", port, why, "choose another one") from None
