"""`Periods`: one schedule after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, final

from stretto.errors import ScheduleError, StrettoError
from stretto.schedules.fields import Timed, checked_interval, checked_length, fill
from stretto.schedules.schedule import Schedule, ScheduleLike, as_schedule
from stretto.schedules.scope import END, BoundSchedule, Mark, Scope, counted
from stretto.timing import Time, TimeLike, TimeUnit

Rest: TypeAlias = Literal["rest"]
"""The duration of the period that takes what the others leave of the run."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Until(Timed):
    """The end of a period on the clock of the whole run; written as the text `"until 10Ttok"`."""

    time: Time
    error = ScheduleError

    def __str__(self) -> str:
        return f"until {self.time}"

    def __repr__(self) -> str:
        return repr(str(self))


Span: TypeAlias = Time | Rest | Until
"""How long a period is."""


@final
class Period:
    """A period in the words of a run file.

    Args:
        duration: a time, `until` and a time, or `rest`.
        schedule: what the period follows.
        scheduler: the same, as the design of periods calls it.

    Raises:
        ScheduleError: there is no schedule, or there are two.
    """

    def __init__(
        self,
        duration: TimeLike | Rest,
        schedule: ScheduleLike | None = None,
        scheduler: ScheduleLike | None = None,
    ) -> None:
        if (schedule is None) is (scheduler is None):
            why, instead = "a period has one schedule", "write 'schedule: {Cosine: {}}'"
            raise ScheduleError.bad("schedule", schedule, why, instead)
        self.pair = duration, scheduler if schedule is None else schedule


Pair: TypeAlias = tuple[TimeLike | Rest, ScheduleLike]
Named: TypeAlias = Mapping[str, Pair | Period]
"""Periods by name."""


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Periods(Schedule):
    """One schedule after another, each for a duration; one may take the rest.

    Times inside a period are relative to it: `0.5dur` is half of the period and `3ep` is three
    epochs after its start. Lengths are exact: 5% of 90 epochs are 4.5 epochs, never 4. The rest may
    be at any place; the periods after it are measured back from the end. After the last period its
    last value stays.

    Instead of a duration, `"until 10Ttok"` says where a period ends on the clock of the whole run,
    also in periods inside a period.

    >>> from stretto.schedules import Linear, MultiStep
    >>> from stretto.timing import Horizon, Timestamp
    >>> factor = Periods(
    ...     [("5%", Linear(0, 1)), ("rest", MultiStep(["0.5dur", "0.75dur"]))]
    ... ).bind(Horizon("90ep", dataset_num_samples=100))
    >>> [round(factor(Timestamp(sample=s)), 4) for s in (0, 225, 450, 4724, 4725, 6863)]
    [0.0, 0.5, 1.0, 1.0, 0.1, 0.01]

    Periods may have names, which the plan and the log show:
    `Periods({"warmup": ("5%", Linear(0, 1)), "main": ("rest", Cosine())})`.

    Source: the pull request discussion on time in Composer (mosaicml/composer issue 146), where
    whole-epoch periods lost half an epoch.

    Args:
        periods: pairs of a duration (a time; `"until"` and a time; or `"rest"` at most once) and a
            schedule (or a number, or a callable), or these by name.

    Raises:
        ScheduleError: there is no period, one is not a pair, a duration is negative, the rest is
            given twice, or an `until` comes after it; at binding, the periods are longer than the
            run or period around them, or one would end before it begins.
        TimeError: a text is not a time.
    """

    periods: tuple[tuple[Span, Schedule], ...]
    names: tuple[str, ...]
    """The names of the periods; none if they were given without."""

    def __init__(self, periods: Named | Sequence[Pair | Named]) -> None:
        names, pairs = _with_names(periods)
        read = read_periods(pairs, checked_length, as_schedule, ScheduleError)
        fill(self, periods=read, names=names)

    def times(self) -> tuple[Time, ...]:
        """Return the times that must be placed on one axis."""
        times: list[Time] = []
        for duration, schedule in self.periods:
            inner = schedule.times()
            if duration == "rest":
                times += inner
            else:
                # A fraction inside is one of this period, whose length is already placed.
                own = duration.time if isinstance(duration, Until) else duration
                times += [own, *(time for time in inner if time.unit is not TimeUnit.DURATION)]
        # Periods after the rest are measured back from the end.
        is_around = any(duration == "rest" for duration, _ in self.periods[:-1])
        return (*times, END) if is_around else tuple(times)

    def within(self, scope: Scope) -> BoundSchedule:
        """Return the factor over `scope` as a function of the timestamp.

        Raises:
            ConversionError: a time needs a fact that is not known; the message names it.
            ScheduleError: the periods are longer than the scope, or one does not fit.
        """
        parts = self._parts(scope)
        pairs = zip(self.periods, parts, strict=True)
        factors = [schedule.within(part) for (_, schedule), part in pairs]
        # Only the last period of length 0 is read: its value stays.
        lasting = [at for at, (duration, _) in enumerate(self.periods[:-1]) if duration]
        lasting.append(len(parts) - 1)
        factors = [factors[at] for at in lasting]
        begun = counted([parts[at].first for at in lasting[1:]])
        return lambda timestamp: factors[begun(timestamp)](timestamp)

    def borders(self, scope: Scope) -> list[Mark]:
        """Return where each period begins, where its schedule changes, and the end of the last."""
        parts = self._parts(scope)
        found = [parts[-1].last]
        for number, ((_, schedule), part) in enumerate(zip(self.periods, parts, strict=True)):
            inside, name = schedule.borders(part), "".join(self.names[number : number + 1])
            begin = replace(part.first, period=name)
            found += [begin, *(mark for mark in inside if part.covers(mark))]
        return found

    def _parts(self, scope: Scope) -> list[Scope]:
        """Return the scope of each period: forward from the start, backward from the end."""
        durations = [duration for duration, _ in self.periods]
        rest = durations.index("rest") if "rest" in durations else len(durations)
        head, tail = durations[:rest], durations[rest + 1 :]
        starts, ends = [scope.first], [scope.last]
        for duration in head:
            starts.append(_end(scope, starts[-1], duration))
        for duration in reversed(tail):
            ends.append(scope.moved(ends[-1], -Time(duration)))  # type: ignore[arg-type]
        # The last mark from the start, against the first one from the end.
        known, first = starts[-1], ends[-1]
        own = scope.on(first.axis if tail else known.axis)
        limit = first.tick if tail else own.end
        if limit is not None and own.place(known) > limit:
            around = own.place(scope.last) - own.start
            listed = ", ".join(f"'{duration}'" for duration in durations)
            what = f"fit the periods {listed} into '{own.show(around)}'"
            instead = "write shorter durations, or 'rest' for one of them"
            raise ScheduleError.cannot(what, why="they are longer", instead=instead)
        marks = [*starts, *reversed(ends)] if rest < len(durations) else starts
        # A length is counted by its own unit, as the mark that it leads to; the rest as the scope.
        axes = [*(mark.axis for mark in starts[1:]), None, *(mark.axis for mark in ends[:0:-1])]
        return [
            scope.part(first, last, axis)
            for axis, (first, last) in zip(axes, pairwise(marks), strict=False)
        ]

    def __repr__(self) -> str:
        named = dict(zip(self.names, self.periods, strict=False))
        return f"Periods({named or list(self.periods)!r})"


def _end(scope: Scope, begin: Mark, span: Span) -> Mark:
    """Return where a period ends that begins at a mark; not of the rest."""
    if not isinstance(span, Until):
        return scope.moved(begin, Time(span))
    end = Scope.of(scope.horizon).after(span.time)
    own = scope.on(end.axis)
    if own.place(begin) >= end.tick:
        why = f"the period begins at '{own.show(own.place(begin))}' of the run"
        raise ScheduleError.bad("period", str(span), why, "write a later time, or a duration")
    return end


def _with_names(periods: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of periods, none if they have none, and the periods as pairs.

    Raises:
        ScheduleError: only some have a name, or two have the same.
    """
    items: list[tuple[Any, Any]] = []
    for one in [periods] if isinstance(periods, Mapping) else periods:
        items += one.items() if isinstance(one, Mapping) else [(None, one)]
    names = tuple(name for name, _ in items if isinstance(name, str) and name)
    if len({*names}) != len(items) and any(name is not None for name, _ in items):
        why = "each needs a name of its own, or none has one"
        instead = "write {'warmup': ('5%', Linear(0, 1)), 'main': ('rest', Cosine())}"
        raise ScheduleError.bad("periods", periods, why, instead)
    return names, [one.pair if isinstance(one, Period) else one for _, one in items]


Inside = TypeVar("Inside")


def read_periods(
    periods: Iterable[Any],
    duration_of: Callable[[Any, str, type[StrettoError]], Time],
    read: Callable[[object], Inside],
    error: type[StrettoError],
) -> tuple[tuple[Span, Inside], ...]:
    """Return pairs of a duration and what it is the duration of, each as it is read.

    Raises:
        StrettoError: there are none, one is not a pair, two take the rest, or where an `until`
            begins cannot be known.
    """
    found: list[tuple[Span, Inside]] = []
    for period in periods:
        if not isinstance(period, (tuple, list)) or len(period) != 2:
            raise error.bad("period", period, "it is not a pair", "write for example ('5%', 8)")
        duration, inside = period
        if str(duration) in ("-1", "-1.0"):  # how other libraries write it
            raise error.bad("duration", duration, "it is no duration", "write 'rest'")
        found.append((_span(duration, duration_of, error), read(inside)))
    if not found:
        raise error.bad("periods", periods, "there are none", "write one period")
    if sum(duration == "rest" for duration, _ in found) > 1:
        why, instead = "only one of them can take the rest", "write durations for the others"
        raise error.bad("periods", periods, why, instead)
    spans = [span for span, _ in found]
    for span in spans[spans.index("rest") :] if "rest" in spans else []:
        if isinstance(span, Until):
            why = "it follows the rest, so nothing says where it begins"
            instead = "write a duration, or put the rest after it"
            raise error.bad("period", str(span), why, instead)
    return tuple(found)


def _span(
    given: Any,
    duration_of: Callable[[Any, str, type[StrettoError]], Time],
    error: type[StrettoError],
) -> Span:
    """Return how long a period is."""
    if isinstance(given, str) and given == "rest":
        return "rest"
    word, _, time = str(given).strip().partition(" ")
    if word == "until":
        return Until(checked_interval(time, word, error))
    return duration_of(given, "duration", error)
