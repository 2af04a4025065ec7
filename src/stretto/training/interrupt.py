"""A polite stop: SIGINT and SIGTERM end the run at the end of the batch."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, final

SIGNALS = ("SIGTERM", "SIGINT")
"""Those that end a run; where ranks have received several, the first of these counts."""


@final
class Interrupts:
    """While open, the first SIGINT or SIGTERM is remembered; the second one is as always.

    >>> with Interrupts() as interrupts:
    ...     interrupts.received is None
    True
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self.received = None
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def raise_for(received: str | None) -> None:
    """Raise what Python raises when a signal ends a program, if one was received.

    >>> raise_for(None)

    Raises:
        KeyboardInterrupt: it was SIGINT.
        SystemExit: it was SIGTERM; its code is 143.
    """
    if received == "SIGINT":
        raise KeyboardInterrupt
    if received is not None:
        raise SystemExit(exit_code(received))


def exit_code(reason: str) -> int:
    """Return what a shell expects of a run that stopped so: 0 where no signal has ended it.

    >>> exit_code("received SIGTERM"), exit_code("the loss is low enough")
    (143, 0)
    """
    return next((128 + n for n in (signal.SIGINT, signal.SIGTERM) if n.name in reason), 0)
