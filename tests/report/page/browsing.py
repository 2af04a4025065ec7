"""A headless Chromium for tests of the run page, and a small server of live rows."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from stretto.report.page import build

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """Return the path of a browser; None if this machine has none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, or skip the test."""
    path = chromium()
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as driver:
        # As root, Chromium starts only without its sandbox; it opens nothing but our pages.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@final
class Seen:
    """A page that is open, with what it asked for and complained about."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        """Open an empty page."""
        self.page: Page = browser.new_page(**options)
        self.page.set_default_timeout(10_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("console", lambda message: self.complaints.append(message.text))

    def show(self, payload: dict[str, Any], folder: Path, fragment: str = "") -> Page:
        """Show a payload from a file."""
        file = folder / "page.html"
        file.write_text(build(payload), "utf-8")
        return self.go(file.as_uri() + fragment)

    def go(self, address: str) -> Page:
        """Open an address, and wait until the page is drawn."""
        self.page.goto(address)
        self.until("globalThis.strettoPage !== undefined")
        return self.page

    def until(self, claim: str) -> None:
        """Wait until a claim in JavaScript is true, and the page is drawn."""
        # Not `wait_for_function`: it evaluates text in the page, which the page forbids.
        end = time.monotonic() + 10
        while not self.page.evaluate(claim):
            assert time.monotonic() < end, claim
            time.sleep(0.02)
        self.frames()

    def frames(self) -> None:
        """Wait until what was asked for is on the screen."""
        script = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        self.page.evaluate(script)


@final
class LiveServer:
    """Serves one page at `/`, and at `/runs` the runs that were put into `changed`."""

    def __init__(self, payload: dict[str, Any]) -> None:
        """Listen on a free port of this machine."""
        self.changed: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.queries: list[dict[str, list[str]]] = []
        text, changed = build(payload | {"at": 0}).encode(), self.changed
        queries, more = self.queries, self.more

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                is_page = self.path == "/"
                kind = "text/html; charset=utf-8" if is_page else "application/json"
                self.send_header("content-type", kind)
                self.end_headers()
                asked = parse_qs(self.path.partition("?")[2])
                queries.append(asked)
                after = int(asked.get("after", ["0"])[0])
                found = {"runs": changed[after:], "at": len(changed)} | more
                self.wfile.write(text if is_page else json.dumps(found, allow_nan=False).encode())

            def log_message(self, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
