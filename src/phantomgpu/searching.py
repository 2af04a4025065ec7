"""Find the largest number that fits."""

from __future__ import annotations

import math
import select
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, final

from phantomgpu import files, standins
from phantomgpu.child import Settings
from phantomgpu.errors import RunFailedError
from phantomgpu.report import RAN_OUT, Report
from phantomgpu.running import Session, command_of, ended_by_signals, scratch, started, too_long

Trial = Callable[..., Report]
Used = Callable[[int], tuple[int, int]]
TRIAL_SECONDS = 600.0
"""How long a trial may take."""
Method = Literal["predict", "bisect", "halve"]
"""How a search begins: with two small numbers, and then where the line of their bytes leads; in the
middle of the range, and then of what is left; or with the largest, halved until it fits."""
UNMOVED = 32
"""A number so many times larger must take more bytes somewhere."""
MOST_GUESSES = 8
"""From then on, a search halves what is left."""


@final
@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a search may try: multiples, or powers of two, between two bounds.

    >>> eights = Range(5, 40, multiple=8)
    >>> eights.first, eights.last, eights.number(eights.last)
    (1, 5, 40)

    Raises:
        ValueError: There is none.
    """

    smallest: int = 1
    largest: int = 1 << 20
    multiple: int = 1
    powers: bool = False

    def __post_init__(self) -> None:
        odd = self.powers and self.multiple & (self.multiple - 1)
        if min(self.smallest, self.multiple) < 1 or odd or self.first > self.last:
            kind = "a power of two" if self.powers else f"a multiple of {self.multiple}"
            kind += f" and a multiple of {self.multiple}" * (self.powers and self.multiple > 1)
            bounds = f"from {self.smallest} to {self.largest}"
            raise ValueError(f"no number {bounds} is {kind}; widen the range")

    @property
    def first(self) -> int:
        """The index of the first number."""
        if self.powers:
            return (max(self.smallest, self.multiple) - 1).bit_length()
        return -(-self.smallest // self.multiple)

    @property
    def last(self) -> int:
        """The index of the last number."""
        return self.largest.bit_length() - 1 if self.powers else self.largest // self.multiple

    def number(self, index: int) -> int:
        """Return the number with an index."""
        return 1 << index if self.powers else index * self.multiple


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

    @property
    def bound(self) -> str:
        """What ends the range: memory, or a number with which nothing was trained."""
        above = [number for number in self.trials if number > (self.largest or 0)]
        if above and self.trials[min(above)].fits:
            trains = self.trials[min(above)].steps
            what = "took no more memory" if trains else "ended no optimizer step"
            return f"{min(above)} {what}: are there fewer samples?"
        return f"{min(above)} does not fit" if above else "no larger one was asked for"


def search(
    script: Callable[..., Any] | Sequence[str],
    *,
    gpu: str,
    memory: int | str | None = None,
    ranks: int = 1,
    steps: int | None = 3,
    argument: str | None = None,
    smallest: int = 1,
    largest: int = 1 << 20,
    multiple: int = 1,
    powers: bool = False,
    method: Method = "predict",
    details: bool = True,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout_seconds: float = TRIAL_SECONDS,
    seen: Callable[[int, Report], None] | None = None,
    processes: Processes | None = None,
) -> Answer:
    """Find the largest number, such as a batch size, with which a script or a function fits.

    Every number that is tried is run; the answer fits, and the next larger one does not, or it
    trains nothing. Fitting is not monotone: larger ones that may fit are tried, too.

    Args:
        script: A function that takes the number first, or a command.
        gpu: The kind of GPU.
        memory: Another size than that kind's.
        ranks: The number of ranks.
        steps: After how many optimizer steps a trial ends; None: with the script, which need not
            train.
        argument: The option of the command that takes the number, such as "--batch-size".
        smallest: The first number that is tried.
        largest: The last one.
        multiple: Only multiples of this are tried.
        powers: Only powers of two are tried.
        method: How the search begins.
        details: Run the number that `Answer.report` is of once more, for what took the memory.
        args: Further arguments of the function.
        kwargs: Keyword arguments of the function.
        timeout_seconds: How long a trial may take.
        seen: Called with each number and its report.
        processes: Those of other searches of functions, which import torch once for all.

    Raises:
        RunFailedError: A trial failed, but not for lack of memory, or it took too long.
        ValueError: No number is in the range.
    """
    standins.check_system()
    session = Session(gpu, memory, Settings(steps=steps, ranks=ranks, details=False))
    numbers = Range(smallest, largest, multiple, powers)

    def differ(*both: int) -> bool:
        plain, session.settings = session.settings, replace(session.settings, details=True)
        one, other = (trial(number).peaks_by_phase for number in both)
        session.settings = plain
        return one != other

    tried = _Tried(seen, trains=steps is not None, differ=differ)
    trials = tried.reports

    def peaks(index: int) -> tuple[int, int]:
        report = trials[numbers.number(index)]
        return report.peak_allocated, report.peak_reserved

    with ExitStack() as stack:
        command = stack.enter_context(command_of(script, args, kwargs))
        if not callable(script) and argument is None:
            raise ValueError("a command needs the option that takes the number: argument='--size'")

        def started_anew(number: int) -> Report:
            numbered = [*command, str(argument), str(number)]
            return session.start(numbered, timeout_seconds)

        trial: Trial = started_anew
        if callable(script):
            served = processes or stack.enter_context(Processes())
            trial = served.trial(session, command, timeout_seconds)
        trial = partial(as_asked, trial)

        found = bisect(
            lambda index: tried.fits(numbers.number(index), trial),
            peaks,
            session.memory - session.context,
            first=numbers.first,
            last=numbers.last,
            start=downwards(numbers.first, numbers.last, method, powers=powers),
            halves=method == "bisect",
            farthest=(lambda index: index + 5) if powers else (lambda index: 32 * index),
        )
        answer = Answer(None if found is None else numbers.number(found), trials)
        session.settings = replace(session.settings, details=details)
        return _detailed(answer, trial) if details else answer


def as_asked(trial: Trial, number: int) -> Report:
    """Run a number; a script that ran out of memory went on with another one."""
    report = trial(number)
    return replace(report, status="does not fit") if RAN_OUT in report.doubts else report


def _detailed(answer: Answer, trial: Trial) -> Answer:
    """Run the number that the report is of once more.

    Bytes of a forward or backward pass grow with a batch. If they do not, the script has made no
    larger batch: it has fewer samples.
    """
    trials = answer.trials
    number = next(one for one, report in trials.items() if report is answer.report)
    report = trials[number] = trial(number)
    if answer.largest is None or report.phase not in ("forward", "backward", "recomputation"):
        return answer
    peak = report.peak_allocated
    least = min(one for one, two in trials.items() if two.fits and two.peak_allocated == peak)
    # Near numbers are rounded to the same blocks.
    return answer if 2 * least > number else _detailed(Answer(least, trials), trial)


class _Tried:
    """The reports of the numbers that were run."""

    def __init__(
        self,
        seen: Callable[[int, Report], None] | None,
        *,
        trains: bool,
        differ: Callable[[int, int], bool] = lambda *_: True,
    ) -> None:
        self.seen, self.trains, self.differ = seen, trains, differ
        self.reports: dict[int, Report] = {}
        self.idle: int | None = None
        """A number with which nothing was trained, while others trained something."""

    def fits(self, number: int, trial: Trial) -> bool:
        """Run a number."""
        if self.idle is not None and number > self.idle:
            return False
        report = self.reports[number] = trial(number)
        if self.seen is not None:
            self.seen(number, report)
        if report.status == "failed":
            raise RunFailedError(f"the run with {number} failed: {report.problem}")
        first = min(self.reports)
        before = self.reports[first]
        if number >= UNMOVED * first and report.peak_allocated == before.peak_allocated:
            if report.fits and not self.differ(first, number):
                why = f"needs the bytes of {first} in each part of a step: it ignores the number"
                raise RunFailedError(f"the run with {number} {why}, or has fewer samples")
            self.differ = lambda *_: True
        if report.steps or not report.fits or not self.trains:
            return report.fits
        if not any(one.steps for one in self.reports.values()):
            why = "ended without an optimizer step; if the script does not train, run it to its end"
            raise RunFailedError(f"the run with {number} {why} (--whole, or steps=None)")
        self.idle = number
        return False


def downwards(first: int, last: int, method: Method, *, powers: bool = False) -> Iterator[int]:
    """Yield the indices that a search tries until one fits.

    >>> list(downwards(1, 100, "halve")), list(downwards(1, 100, "predict"))
    ([100, 50, 25, 12, 6, 3, 1], [2, 1])

    Args:
        first: The smallest index, with which it ends.
        last: The largest index.
        method: How the search begins.
        powers: The numbers are powers of two, and the indices their exponents.
    """
    small = max(first, min(2, last))  # batch normalisation refuses a single sample
    index = {"predict": small, "bisect": (first + last) // 2, "halve": last}[method]
    yield index
    while index > first:
        halved = index - 1 if powers or method == "predict" else index // 2
        index = (first + index) // 2 if method == "bisect" else max(first, halved)
        yield index


def bisect(
    fits: Callable[[int], bool],
    used: Used,
    available: int,
    *,
    first: int,
    last: int,
    start: Iterable[int] | None = None,
    halves: bool = False,
    farthest: Callable[[int], int] = lambda index: 32 * index,
    within: float = 0.0,
) -> int | None:
    """Return the largest index that was tried and fits, or None. The next one does not fit.

    Peaks are nearly a line of the index. So two small indices say where to look. Fitting is not
    monotone: the allocator may find room for 32 samples and none for 21. So one index above the
    first that does not fit is tried, below where the line of the allocated bytes reaches the limit:
    the one that powers of two divide best, whose blocks leave the fewest fragments.

    >>> bisect(lambda n: n <= 37, lambda n: (10 + n, 10 + n), 47, first=1, last=1000)
    37

    Args:
        fits: Tries an index.
        used: Returns the peaks, allocated and reserved, of an index that fits.
        available: The most that can be reserved.
        first: The smallest index.
        last: The largest index.
        start: The indices that are tried until one fits, downwards; by default two small ones.
        halves: Try the middle of what is left, wherever the line leads.
        farthest: Returns the largest that may be tried after an index that fits.
        within: End so near below the first that does not fit, as a fraction.
    """
    good, bad, hole = list[int](), {last + 1}, None
    for index in downwards(first, last, "predict") if start is None else start:
        if fits(index):
            good.append(index)
            break
        bad.add(index)
    while good:
        high = min(index for index in bad if index > good[-1])
        while high - good[-1] > max(1, within * good[-1]):
            most, known = min(high - 1, farthest(good[-1])), high if high <= last else None
            tries = len(good) + len(bad) - 1
            guess = (good[-1] + high) // 2
            if not halves:
                guess = _guess(good, most, used, available, high=known, tries=tries)
            if fits(guess):
                good.append(guess)
            else:
                high = guess
                bad.add(guess)
        top = min(last, farthest(good[-1]), _line(good, used, available, 0) or 0)
        hole = None if hole else _beyond(good[-1], bad, top)
        if hole is None or not fits(hole):
            return good[-1]
        good.append(hole)
    return None


def _beyond(low: int, bad: set[int], top: int) -> int | None:
    """Return an index above `low`, up to the top, that was not tried.

    It is the one that powers of two divide best: its blocks leave the fewest fragments.
    """
    stride = 1 << max(0, (top - low).bit_length() - 10)
    untried = set(range(-(-(low + 2) // stride) * stride, top + 1, stride)) - bad
    return max(untried, key=lambda index: (index & -index, index), default=None)


def _line(good: list[int], used: Used, available: int, which: int) -> int | None:
    """Return where the line of the allocated (0) or reserved (1) bytes reaches the limit.

    None: there are no two indices that far enough apart, or no more bytes in the larger.
    """
    low = good[-1]
    base = next((index for index in reversed(good) if 2 * index <= low), None)
    if base is None:
        return None
    now, then = used(low)[which], used(base)[which]
    return low + (available - now) * (low - base) // (now - then) if now > then else None


def _guess(
    good: list[int], most: int, used: Used, available: int, *, high: int | None, tries: int
) -> int:
    """Return an index above the largest that fits, up to `most`.

    It is where the line of the reserved bytes reaches the limit: near it is the last that fits.
    Over more than twice as far, a line of two is not exact; a nearer index makes it so.

    Args:
        good: The indices that fit, ascending.
        most: The largest index that may be returned.
        used: Returns the peaks of an index that fits.
        available: The most that can be reserved.
        high: The smallest above that does not fit, if one was tried.
        tries: How many indices were tried.
    """
    low, middle = good[-1], (good[-1] + most + 1) // 2
    full, line = (_line(good, used, available, which) for which in (0, 1))
    if high and (tries > MOST_GUESSES or line is None or not low // 8 > high - low):
        is_inside = line is not None and low < line < high and tries <= MOST_GUESSES
        return line if line is not None and is_inside else middle
    if line is None:  # as far from what is known as from where memory ends if nothing is constant
        reserved = used(low)[1]
        if not reserved and 2 * good[0] <= low:
            return most
        return min(max(2 * low, math.isqrt(low * low * available // max(reserved, 1))), most)
    if line > most:
        return most - (most - low) // 8 if high else most
    if line > low:  # over more than twice as far, a line of two is not exact
        return line if high or line <= 2 * low else line - line // 5
    step = low - good[-2]
    if 1 < step <= low // 16 or 1 not in (after - before for before, after in pairwise(good)):
        return low + 1
    # What is cached and freed again reaches the limit first; the allocated bytes say more.
    if full is not None and low < full <= most:
        return full
    return middle if high else min(low + 1 + tries // 8 * low // 50, most)


class Processes(ExitStack):
    """Processes that run trials of functions, for searches on one GPU with the same steps."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: dict[int, Trial] = {}

    def trial(self, session: Session, command: list[str], seconds: float) -> Trial:
        """Return what runs a trial, with the ranks of the session."""
        ranks = session.settings.ranks
        if ranks not in self.trials:
            self.trials[ranks] = self.enter_context(_served(session, command, seconds))
        return partial(self.trials[ranks], session=session, file=command[-1])


@contextmanager
def _served(
    session: Session, command: list[str], timeout_seconds: float = TRIAL_SECONDS
) -> Iterator[Trial]:
    """Keep a process that has imported torch, and fork it for each trial."""
    with ended_by_signals(), scratch() as folder, files.log_file(Path(folder)) as output:
        # numpy's threads begin with its import; a process that is forked must have none.
        environment = {**session.environment(folder), "OPENBLAS_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
        with started([*command, "--serve"], env=environment, text=True, **pipes) as server:
            asked: Any = server.stdin
            answered: Any = server.stdout

            def trial(number: int, session: Session = session, file: str = command[-1]) -> Report:
                name = f"{number}-details" if session.settings.details else str(number)
                line = ""
                for result in Path(folder).glob(f"{name}-*"):  # of another function
                    result.unlink()
                with suppress(BrokenPipeError):
                    asked.write(f"{name} {file}\n")
                    asked.flush()
                    if not select.select([answered], [], [], timeout_seconds)[0]:
                        raise too_long(f"the run with {number}", timeout_seconds)
                    line = answered.readline()
                log, code = Path(folder, "output.log"), int(line) if line else server.wait()
                return session.report(Path(folder), name if line else "run", code, log)

            with asked, answered:
                yield trial
