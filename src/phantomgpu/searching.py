"""Find the largest number that fits."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from phantomgpu import standins
from phantomgpu.child import Settings
from phantomgpu.errors import RunFailedError
from phantomgpu.report import Report
from phantomgpu.running import Session, command_of

Trial = Callable[[int], Report]


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The largest number that fits.

    Attributes:
        largest: That number, or None if not even the smallest fits.
        trials: The report of each number that was run.
    """

    largest: int | None
    trials: dict[int, Report]

    @property
    def report(self) -> Report:
        """The report of the largest that fits, or of the smallest."""
        return self.trials[min(self.trials) if self.largest is None else self.largest]


def search(
    script: Callable[..., Any] | Sequence[str],
    *,
    gpu: str,
    memory: int | str | None = None,
    ranks: int = 1,
    steps: int = 3,
    argument: str | None = None,
    smallest: int = 1,
    largest: int = 1 << 20,
    multiple: int = 1,
    powers: bool = False,
    details: bool = True,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    seen: Callable[[int, Report], None] | None = None,
) -> Answer:
    """Find the largest number, such as a batch size, with which a script or a function fits.

    Every number that is tried is run; the answer fits, and the next larger one does not.

    Args:
        script: A function that takes the number first, or a command.
        gpu: The kind of GPU.
        memory: Another size than that kind's.
        ranks: The number of ranks.
        steps: After how many optimizer steps a trial ends.
        argument: The option of the command that takes the number, such as "--batch-size".
        smallest: The first number that is tried.
        largest: The last one.
        multiple: Only multiples of this are tried.
        powers: Only powers of two are tried.
        details: Run the number that `Answer.report` is of once more, for what took the memory.
        args: Further arguments of the function.
        kwargs: Keyword arguments of the function.
        seen: Called with each number and its report.

    Raises:
        RunFailedError: A trial failed, but not for lack of memory.
    """
    standins.check_system()
    session = Session(gpu, memory, ranks)
    settings = Settings("", steps=steps, ranks=ranks, details=False)
    trials: dict[int, Report] = {}

    def number_of(index: int) -> int:
        return 1 << index if powers else index * multiple

    def fits(number: int, trial: Trial) -> bool:
        trials[number] = trial(number)
        if seen is not None:
            seen(number, trials[number])
        if trials[number].status == "failed":
            raise RunFailedError(f"the run with {number} failed: {trials[number].problem}")
        return trials[number].fits

    def peaks(index: int) -> tuple[int, int]:
        report = trials[number_of(index)]
        return report.peak_allocated, report.peak_reserved

    with ExitStack() as stack:
        command = stack.enter_context(command_of(script, args, kwargs))
        if callable(script):
            trial = stack.enter_context(_served(session, settings, command))
        elif argument is None:
            raise ValueError("a command needs the option that takes the number: argument='--size'")
        else:

            def trial(number: int) -> Report:
                numbered = [*command, argument, str(number)]
                return session.start(numbered, settings, None, None, quiet=True)

        found = bisect(
            lambda index: fits(number_of(index), trial),
            peaks,
            session.memory - session.context,
            first=(smallest - 1).bit_length() if powers else -(-smallest // multiple),
            last=largest.bit_length() - 1 if powers else largest // multiple,
            farthest=(lambda index: index + 5) if powers else (lambda index: 32 * index),
        )
        answer = Answer(None if found is None else number_of(found), trials)
        if details:
            number = next(one for one, report in trials.items() if report is answer.report)
            settings.details = True
            trials[number] = trial(number)
    return answer


def bisect(
    fits: Callable[[int], bool],
    used: Callable[[int], tuple[int, int]],
    available: int,
    *,
    first: int,
    last: int,
    farthest: Callable[[int], int] = lambda index: 32 * index,
) -> int | None:
    """Return the largest index that fits, or None. It was tried, and so was the next one.

    Peaks are nearly a line of the index. So two small indices say where to look.

    >>> bisect(lambda n: n <= 37, lambda n: (10 + n, 10 + n), 47, first=1, last=1000)
    37

    Args:
        fits: Tries an index.
        used: Returns the peaks, allocated and reserved, of an index that fits.
        available: The most that can be reserved.
        first: The smallest index.
        last: The largest index.
        farthest: Returns the largest that may be tried after an index that fits.
    """
    start = max(first, min(2, last))  # batch normalisation refuses a single sample
    if not fits(start):
        return next((index for index in range(start - 1, first - 1, -1) if fits(index)), None)
    good, high = [start], last + 1
    while high - good[-1] > 1:
        most = min(high - 1, farthest(good[-1]))
        guess = _guess(good, most, used, available, is_open=high > last)
        if fits(guess):
            good.append(guess)
        else:
            high = guess
    return good[-1]


def _guess(
    good: list[int],
    most: int,
    used: Callable[[int], tuple[int, int]],
    available: int,
    *,
    is_open: bool,
) -> int:
    """Return an index above the largest that fits, up to `most`.

    The allocator frees what it caches before it runs out of memory. So an index whose reserved
    bytes would reach the limit usually fits, and one whose allocated bytes would does not.

    Args:
        good: The indices that fit, ascending.
        most: The largest index that may be returned.
        used: Returns the peaks of an index that fits.
        available: The most that can be reserved.
        is_open: Whether none was tried that does not fit.
    """
    low = good[-1]
    base = next((index for index in reversed(good) if 2 * index <= low), None)
    if base is None:
        return min(2 * low, most) if is_open else (low + most + 1) // 2
    allocated, reserved = (
        low + (available - now) * (low - base) // (now - then) if now > then else most
        for now, then in zip(used(low), used(base), strict=True)
    )
    if is_open and reserved > low + low // 50:
        return min(reserved, most)
    if not is_open and most >= 4 * low:
        return math.isqrt(low * most)
    if allocated <= low and low - good[-2] > 1:
        return low + 1
    # If the next one did fit and yet there is no room, the line is wrong.
    top = allocated if allocated > low else 2 * low if is_open else most
    return (low + min(top, most) + 1) // 2


@contextmanager
def _served(session: Session, settings: Settings, command: list[str]) -> Iterator[Trial]:
    """Keep a process that has imported torch, and fork it for each trial."""
    with tempfile.TemporaryDirectory(prefix="phantomgpu-") as folder:
        settings.folder = folder
        log = Path(folder, "output.log")
        with log.open("wb") as output:
            server = subprocess.Popen(  # noqa: S603
                [*command, "--serve"],
                env=session.environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        asked, answered = server.stdin, server.stdout
        assert asked is not None
        assert answered is not None

        def trial(number: int) -> Report:
            name = f"{number}-details" if settings.details else str(number)
            line = ""
            with suppress(BrokenPipeError):
                asked.write(f"{name}\n")
                asked.flush()
                line = answered.readline()
            if not line:
                return session.report(Path(folder), "run", server.wait(), log)
            return session.report(Path(folder), name, int(line), log)

        try:
            yield trial
        finally:
            asked.close()
            server.wait()
            answered.close()
