"""A proxy in front of an S3 server that injects faults; one request for each connection."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Collection

CODES = {
    "500": "InternalError",
    "503": "SlowDown",
    "403": "AccessDenied",
    "507": "InsufficientStorage",
}
KINDS = (*CODES, "refuse", "cut", "lost", "delay")
"""Answers with an error; closes at once; cuts a body; loses an answer; waits."""
WRITES = ("PUT", "POST", "DELETE")


class Proxy:
    """Passes requests on; some of them fail."""

    def __init__(self, backend: int, seed: int) -> None:
        self.backend = backend
        self.chance = random.Random(seed)
        self.on_put: Callable[[], None] | None = None
        self.fault(None)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def fault(self, kind: str | None, rate: float = 1.0, methods: Collection[str] = WRITES) -> None:
        self.kind, self.rate, self.methods, self.hits = kind, rate, methods, 0

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                self._pass_on(client)
        except OSError:
            pass

    def _pass_on(self, client: socket.socket) -> None:
        head, body = read_head(client)
        if not head:
            return
        first, *lines = head.split(b"\r\n")
        method = first.split()[0].decode()
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        is_hit = method in self.methods and self.chance.random() < self.rate
        kind = self.kind if is_hit else None
        self.hits += kind is not None
        if kind == "refuse":
            return
        if b"100-continue" in fields.get(b"expect", b"").lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(fields.get(b"content-length", 0))
        if kind == "cut" and method != "GET":
            length = self.chance.randrange(length) if length else 0
        while len(body) < length:
            more = client.recv(65536)
            if not more:
                break
            body += more
        if kind in CODES:
            client.sendall(failure(kind, is_head=method == "HEAD"))
            return
        if kind == "delay":
            time.sleep(self.chance.choice([0.3, 1.5]))
        if method == "PUT" and self.on_put:
            self.on_put()
        skipped = (b"connection", b"expect")
        keep = [line for line in lines if line.partition(b":")[0].strip().lower() not in skipped]
        with socket.create_connection(("127.0.0.1", self.backend)) as server:
            server.sendall(b"\r\n".join([first, *keep, b"Connection: close"]) + b"\r\n\r\n")
            server.sendall(body[:length] if kind == "cut" else body)
            if kind == "cut" and method != "GET":
                return
            answer = b"".join(iter(lambda: server.recv(65536), b""))
        if kind == "lost":  # the server has it, and the client does not know
            return
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = [one for one in head.split(b"\r\n") if not one.lower().startswith(b"connection:")]
        head = b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"
        client.sendall(head + (body[: len(body) // 2] if kind == "cut" else body))


def read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def failure(kind: str, *, is_head: bool) -> bytes:
    text = f"<Error><Code>{CODES[kind]}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {kind} injected\r\nContent-Type: application/xml\r\n"
    head += f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if is_head else text)
