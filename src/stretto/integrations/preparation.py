"""`prepare`: a run for a training loop that is not stretto's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto._foreign import knows_foreign
from stretto.batching import PolicyLike, RuleLike
from stretto.batching.coupled.coupling import Coupling
from stretto.batching.coupled.seesaw import paired
from stretto.data import DataSpec
from stretto.errors import DataError, shown
from stretto.integrations.run import ExternalRun
from stretto.optim.reading import as_one_schedule, check_names
from stretto.planning import bind_run
from stretto.settings import Loading
from stretto.timing import TimeLike, Trigger


@knows_foreign
def prepare(
    data: Any,
    batch_size: PolicyLike | Coupling,
    *,
    max_duration: TimeLike,
    schedules: Mapping[str, Any] | None = None,
    rule: RuleLike | None = None,
    evaluate: Trigger | TimeLike | None = None,
    checkpoint: Trigger | TimeLike | None = None,
    log: Trigger | TimeLike | None = None,
    micro_batch_size: int | None = None,
    loading: Loading | None = None,
) -> ExternalRun:
    """Prepare a run for a training loop that is not stretto's.

    Everything is checked and bound to the run here, without ranks and optimizers.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(12, 1))
    >>> run = prepare(data, "0sp:2 4sp:4", max_duration="1ep", schedules={"lr": 1.0})
    >>> for step in run.bind(optimizer).steps():
    ...     for micro, weight in zip(step, run.weights(step), strict=True):
    ...         (weight * model(micro.batch[0]).square().mean()).backward()
    ...     optimizer.step(); optimizer.zero_grad()
    ...     _ = run.finish()
    >>> run.timer.batch, run.num_steps.exact
    (4, 4)

    Args:
        data: what `StepLoader` takes.
        batch_size: samples of one step over all ranks: a number, a text, a policy.
        max_duration: how long the run is.
        schedules: by hyper-parameter, a schedule or several that multiply.
        rule: how learning rates follow the batch size.
        evaluate: when `finish` returns "evaluate".
        checkpoint: when `finish` returns "checkpoint".
        log: when `finish` returns "log".
        micro_batch_size: the most samples of one micro-batch; None: a rank's whole share.
        loading: how data are loaded.

    Raises:
        StrettoError: the arguments do not fit; the message says what to write instead.
    """
    schedules, loading = schedules or {}, loading or Loading()
    check_names(schedules)
    if not isinstance(loading, Loading):
        raise DataError.cannot(
            f"load data with {shown(loading)}",
            why="it is not a Loading",
            instead="write Loading(seed=1), for example",
        )
    spec = DataSpec.of(data)
    batch_size, schedules = paired(batch_size, schedules, rule)
    wanted = {"evaluate": evaluate, "checkpoint": checkpoint, "log": log}
    prepared = bind_run(
        spec.horizon(max_duration, loading.last_batch),
        batch_size,
        schedules={name: as_one_schedule(one) for name, one in schedules.items()},
        triggers={name: one for name, one in wanted.items() if one is not None},
        rule=rule,
    )
    return ExternalRun(spec, prepared, loading, micro_batch_size)
