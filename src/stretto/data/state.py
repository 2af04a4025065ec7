"""The loader's position as a record that JSON keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from stretto.batching import BatchSizePolicy, BoundPolicy, PolicyState, Signals
from stretto.errors import CheckpointError, cannot
from stretto.ordering import SampleOrder

VERSION = 1


def order_record(order: SampleOrder | None) -> dict[str, Any]:
    """Return what must stay as it is for the order of samples to go on; nothing for iterables."""
    if order is None:
        return {}
    return {"num_samples": order.num_samples, "seed": order.seed, "shuffle": order.shuffle}


def check_order(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on in data of another length or in another order.

    Raises:
        CheckpointError: what was saved belongs to another order.
    """
    if set(saved) != set(present):
        kind = "a map-style data set" if saved else "an iterable"
        raise _other_order(f"it was saved from {kind}, and these are other data", "pass the same")
    for name, what in (
        ("num_samples", "samples in the data set"),
        ("seed", "as the order's seed"),
        ("shuffle", "for shuffle"),
    ):
        if name in saved and saved[name] != present[name]:
            raise _other_order(
                f"it was saved with {saved[name]} {what} and this run has {present[name]}",
                f"pass the data and {name} that the run was saved with, or start a new run",
            )


def policy_record(policy: BatchSizePolicy, state: PolicyState) -> dict[str, Any]:
    """Return the state of a policy, and what kind of policy it belongs to."""
    return {"kind": _kind(policy), "state": dict(state)}


def policy_state(
    policy: BatchSizePolicy, bound: BoundPolicy, saved: Mapping[str, Any]
) -> PolicyState:
    """Return a saved state for a policy of the same kind; another kind starts afresh.

    Args:
        policy: the policy that goes on.
        bound: the same, on its run.
        saved: what `policy_record` returned.
    """
    state: PolicyState = saved["state"]
    return state if saved["kind"] == _kind(policy) and bound.accepts(state) else bound.start()


def signals_record(signals: Signals) -> dict[str, Any]:
    """Return what the last step measured; what is not finite as text."""
    values = dataclasses.asdict(signals)
    return {
        name: value if value is None or math.isfinite(value) else repr(value)
        for name, value in values.items()
    }


def signals_of(saved: Mapping[str, Any]) -> Signals:
    """Return the signals that `signals_record` wrote."""
    values = {name: None if value is None else float(value) for name, value in saved.items()}
    return Signals(**values)


def check_version(state: Mapping[str, Any]) -> None:
    """Refuse a record that this version cannot read.

    Raises:
        CheckpointError: it is no record of a loader, or a newer one.
    """
    version = state.get("version")
    if version != VERSION:
        raise CheckpointError(
            cannot(
                f"read the position in the data of version {version!r}",
                why=f"this version of stretto reads version {VERSION}",
                instead="pass what StepLoader.state_dict() returned",
            )
        )


def _kind(policy: BatchSizePolicy) -> str:
    """The types of a policy and of those inside it: `AtMost(Steps)`."""
    # Policies of ours are dataclasses; one of the user's need not be.
    names = getattr(policy, "__dataclass_fields__", {})
    inner = [_kind(one) for name in names for one in _policies_in(getattr(policy, name))]
    return type(policy).__name__ + (f"({', '.join(inner)})" if inner else "")


def _policies_in(value: object) -> Iterator[BatchSizePolicy]:
    """A policy, or those of a tuple, which may be in pairs with something else."""
    if isinstance(value, BatchSizePolicy):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _policies_in(one)


def _other_order(why: str, instead: str) -> CheckpointError:
    return CheckpointError(cannot("go on from the saved position", why=why, instead=instead))
