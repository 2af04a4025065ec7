"""The state of a loader as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, final

from stretto.batching import BatchSizePolicy, Bound, PeriodSizes, PolicyState, Signals
from stretto.batching.wrappers import SizeMap
from stretto.errors import CheckpointError, DataError, StrettoError
from stretto.timing import Timestamp


# Not frozen, as `Step`.
@dataclass(slots=True)
class MicroBatch:
    """The input of one forward and backward pass on one rank.

    >>> MicroBatch(batch=[7, 8, 9], num_samples=3, num_tokens=0, weight=0.375).weight
    0.375
    """

    batch: Any
    """The collated samples."""
    num_samples: int
    """Its samples; 0 for a dummy."""
    num_tokens: int
    """Its tokens; 0 if tokens are not counted."""
    weight: float
    """The factor of its mean loss: `num_samples * world_size / step.num_samples`.

    Gradients summed over micro-batches and averaged over ranks are then those of the mean over the
    whole batch. 0 for a dummy, which keeps the ranks in step.
    """

    def __iter__(self) -> NoReturn:
        """Refuse: unpacking a micro-batch would lose its weight.

        Raises:
            DataError: always.
        """
        raise DataError.cannot(
            "unpack a micro-batch",
            why="its weight would be lost",
            instead="write 'inputs, targets = micro.batch', and multiply the loss by micro.weight",
        )


# Not frozen: that would cost 1 us per step, a tenth of the loader's time.
@final
@dataclass(slots=True, eq=False)
class Step:
    """One optimizer step on this rank; iterates over its micro-batches.

    All ranks have the same number of micro-batches.

    >>> step = Step(Timestamp(), 3, 4, [MicroBatch([7, 8, 9], 3, 0, 1.0)])
    >>> [micro.num_samples for micro in step]
    [3]
    """

    timestamp: Timestamp
    """The clock before the step, at which schedules are read."""
    num_samples: int
    """Samples of the batch, over all ranks."""
    batch_size: int
    """The size that the policy decided; `num_samples` is smaller if the epoch or the run
    ends inside the batch. Learning rate rules use this one."""
    micro_batches: list[MicroBatch]
    """This rank's share."""
    around_dummy: Callable[[], AbstractContextManager[None]] | None = None
    """What iterating opens while a dummy is in use, so that it leaves the model's buffers alone."""

    @property
    def local_num_samples(self) -> int:
        """Samples of this rank."""
        return sum(micro.num_samples for micro in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank; 0 if they are not counted."""
        return sum(micro.num_tokens for micro in self.micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches) if self.around_dummy is None else self._around()

    def _around(self) -> Iterator[MicroBatch]:
        assert self.around_dummy is not None, "checked"
        for micro in self.micro_batches:
            with nullcontext() if micro.weight else self.around_dummy():
                yield micro

    def __len__(self) -> int:
        return len(self.micro_batches)


VERSION = 1
_LOUD = Signals(loss=1.0, metric=1.0, noise_numerator=1.0, noise_denominator=1.0)
"""Something of all that a policy may read."""


def check_order(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to resume with data of another length or in another order.

    Raises:
        CheckpointError: the saved state belongs to another order.
    """
    if "sharded" in (*saved, *present) and set(saved) != set(present):
        has = "has" if "sharded" in saved else "does not have"
        raise _other_order(f"the saved run {has} sharded=True", "pass the same DataSpec")
    if set(saved) != set(present):
        kind = "a map-style data set" if saved else "an iterable"
        raise _other_order(f"it was saved from {kind}, and these are other data", "pass the same")
    for name in saved:
        if saved[name] != present[name]:
            why = f"it was saved with {name}={saved[name]} and this run has {present[name]}"
            raise _other_order(why, "pass the same, or start a new run")


def policy_record(policy: BatchSizePolicy, state: PolicyState) -> dict[str, Any]:
    """Return the state of a policy and its kind."""
    return {"kind": _kind(policy, state), "state": dict(state)}


def policy_state(
    policy: BatchSizePolicy, bound: Bound, saved: Mapping[str, Any]
) -> PolicyState | None:
    """Return a saved state for a policy of the same kind; None: another kind starts anew.

    Args:
        policy: the policy of the resumed run.
        bound: the same policy, bound to its run.
        saved: what `policy_record` returned.
    """
    state: PolicyState = saved["state"]
    is_same = saved["kind"] == _kind(policy, state) and bound.accepts(state)
    return state if is_same else None


def past_of(state: Mapping[str, Any], now: Timestamp) -> list[tuple[int, int]] | None:
    """Return the batch sizes so far; None if the record does not say them.

    Raises:
        ValueError: they are damaged.
    """
    saved = state.get("past")
    if saved is None:
        return [] if now.batch == 0 else None
    past = [(first, size) for first, size in saved]
    firsts = [first for first, _ in past]
    is_whole = all(type(one) is int for pair in past for one in pair)
    in_order = sorted(set(firsts)) == firsts and firsts[:1] in ([], [0])
    if not (is_whole and in_order and all(size >= 1 for _, size in past)) or bool(past) != bool(
        now.batch
    ):
        raise ValueError(f"{saved!r} are no batch sizes")
    return past


def check_state(bound: Bound, now: Timestamp, state: PolicyState) -> None:
    """Refuse a damaged state of a built-in policy.

    Raises:
        CheckpointError: it is damaged.
    """
    with read():
        sizes = [size for size in bound.sizes(state) if size is not None] if state else []
        if not sizes:
            return
        for size in sizes:
            if type(size) is not int or size < 1:
                raise TypeError(f"{size!r} is no size")
        if bound.reads and "loss" not in bound.reads:  # read by a user's function
            bound.decide(now, state, _LOUD)


@contextmanager
def read() -> Iterator[None]:
    """Turn errors from reading a record into "the checkpoint is damaged".

    Raises:
        CheckpointError: it is.
    """
    try:
        yield
    except StrettoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"the record is damaged ({type(error).__name__}: {error})"
        raise _other_order(why, "pass what StepLoader.state_dict() returned") from error


def signals_record(signals: Signals) -> dict[str, Any]:
    """Return the last signals as JSON; values that are not finite become text."""
    values = dataclasses.asdict(signals)
    return {
        name: value if value is None or math.isfinite(value) else repr(value)
        for name, value in values.items()
    }


def signals_of(saved: Mapping[str, Any]) -> Signals:
    """Return the signals that `signals_record` wrote."""
    known = {one.name: saved.get(one.name) for one in dataclasses.fields(Signals)}
    return Signals(**{k: None if value is None else float(value) for k, value in known.items()})


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse a record that this version cannot read.

    Raises:
        CheckpointError: it is no record of a loader, or a newer one.
    """
    version = state.get("version")
    if version != VERSION:
        why = f"this version of stretto reads {VERSION}"
        raise CheckpointError.bad("version", version, why, "pass what state_dict() returned")


def _kind(policy: BatchSizePolicy, state: PolicyState) -> str:
    """The types of a policy and of those inside it: `Monotone(Steps)`.

    Of several periods only the present one counts, since only its policy has a state. Wrappers
    without state are left out, so you can add or remove them.
    """
    if isinstance(policy, SizeMap):
        return _kind(policy.policy, state)
    values: list[object]
    if isinstance(policy, PeriodSizes):
        number = state.get("period")
        values = [one for place, (_, one) in enumerate(policy.periods) if place == number]
    else:
        # Built-in policies are dataclasses; a user's policy need not be one.
        names = getattr(policy, "__dataclass_fields__", {})
        values = [getattr(policy, name) for name in names]
    # A wrapper without a state of its own passes on that of the policy inside.
    is_own = "inner" in state and ("period" not in state or isinstance(policy, PeriodSizes))
    inside = state["inner"] if is_own else state
    within = inside if isinstance(inside, Mapping) else {}  # a user's policy may store anything
    inner = [_kind(one, within) for one in values if isinstance(one, BatchSizePolicy)]
    return type(policy).__name__ + (f"({', '.join(inner)})" if inner else "")


def _other_order(why: str, instead: str) -> CheckpointError:
    return CheckpointError.cannot("continue from the saved position", why=why, instead=instead)
