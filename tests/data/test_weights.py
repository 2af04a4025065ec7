"""Weights of micro-batches: any cut of a batch has the gradient of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.texts import LOSSES, Causal, gradient, pad, texts, token_loss, whole_gradient
from tests.threaded_ranks import on_threads
from torch import Tensor, nn

from stretto import prepare
from stretto.batching import Tokens
from stretto.data import DataSpec, MicroBatch, Step, StepLoader, count_target_tokens
from stretto.data.weights import LossWeights, TargetTokens, unit_counter, units_of
from stretto.errors import ConfigError, StrettoError, TrainingError
from stretto.ordering import SampleOrder
from stretto.runtime import Ranks
from stretto.timing import Timestamp

SCRIPT = Path(__file__).with_name("distributed_weights.py")
TEXTS = texts(31)
LOADING = {"collate_fn": pad, "seed": 3, "last_batch": "carry"}


CUTS = st.one_of(st.integers(1, 12), st.integers(9, 40).map(Tokens))
"""Samples of a micro-batch, or tokens."""


def spec_of(rows: list[Any]) -> DataSpec:
    return DataSpec(rows, lengths=[len(row["input_ids"]) for row in rows])


def of_samples(batch: Any) -> int:
    return len(batch["input_ids"])


def own_loop(unit: Any, **options: Any) -> Any:
    """Return a run over the texts, and its model."""
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = prepare(
        spec_of(TEXTS),
        options.pop("batch_size", 10),
        max_duration=options.pop("max_duration", "1ep"),
        optimizer=optimizer,
        loading=LOADING,
        loss_weight=unit,
        **options,
    )
    return run, model


@pytest.mark.parametrize("unit", ["tokens", "samples"])
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(7, 20), min_size=1, max_size=3), micro=CUTS)
def test_a_loop_of_your_own_has_the_gradient_of_one_big_batch(
    unit: str, sizes: list[int], micro: int
) -> None:
    words = " ".join(f"{number}ba:{size}" for number, size in enumerate(sizes))
    run, model = own_loop(unit, batch_size=words, max_duration="3ba", micro_batch_size=micro)
    order = SampleOrder(len(TEXTS), 3)
    for step in run:
        for one in step:
            (one.weight * LOSSES[unit](model, one.batch)).backward()
        start = step.timestamp.sample
        rows = [TEXTS[order[place]] for place in range(start, start + step.num_samples)]
        whole = whole_gradient(rows, unit)
        assert (gradient(model) - whole).norm() <= 1e-12 * whole.norm()
        run.optimizers[0].step()
        model.zero_grad()
        run.finish()


@pytest.mark.parametrize("world", [2, 4])
@settings(max_examples=15)
@given(size=st.integers(7, 31), micro=CUTS, seed=st.integers(0, 99))
def test_any_cut_over_ranks_has_the_gradient_of_one_big_batch(
    world: int, size: int, micro: int, seed: int
) -> None:
    data, models = texts(31, seed=seed), [Causal() for _ in range(world)]

    def rank_of(ranks: Ranks) -> list[Tensor]:
        ranks.share_samples(ranks.rank, world)
        loading: Any = {"collate_fn": pad, "shuffle": False}
        loader = StepLoader(
            spec_of(data),
            size,
            max_duration=f"{size}sp",
            micro_batch_size=micro,
            loading=loading,
            ranks=ranks,
        )
        weights, model = LossWeights(unit_counter("tokens")), models[ranks.rank]
        for step in loader:
            weights.set(step, ranks)
            for one in step:
                (one.weight / world * token_loss(model, one.batch)).backward()
            loader.finish(tokens=0, seconds=0.0)
        return [gradient(model)]

    whole = whole_gradient(data[:size], "tokens")
    found = on_threads([rank_of] * world)
    for one in found:
        if not isinstance(one, list):
            raise one
    total = sum(one for (one,) in found)
    # A rank whose first batch has no target at all has nothing to put in its place.
    if total.isfinite().all():
        assert (total - whole).norm() <= 1e-12 * whole.norm()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_wrapped_models_have_the_gradient_of_one_big_batch(
    world: int, launch_ranks: Callable[..., Any]
) -> None:
    launch_ranks(SCRIPT, ranks=world)


@pytest.mark.parametrize(
    "count",
    [
        of_samples,
        lambda batch: torch.tensor(of_samples(batch)),
        lambda batch: np.int64(of_samples(batch)),
        lambda batch: 0.5 * of_samples(batch),
    ],
    ids=["int", "tensor", "numpy", "float"],
)
def test_a_function_may_return_any_number(count: Any) -> None:
    run, _ = own_loop(count, micro_batch_size=4)
    step = run.begin()
    assert [type(one.weight) for one in step] == [float] * 3
    assert [one.weight for one in step] == [one.num_samples / 10 for one in step]


@pytest.mark.parametrize(
    "count",
    [lambda batch: batch["labels"].ne(-100).sum(1), lambda _: None, lambda _: -1, lambda _: "3"],
    ids=["a tensor of several", "nothing", "negative", "text"],
)
def test_what_is_no_count_is_refused(count: Any) -> None:
    run, _ = own_loop(count)
    with pytest.raises(TrainingError, match="not a count"):
        run.begin()


def test_a_batch_without_units_is_refused() -> None:
    run, _ = own_loop(lambda _: 0)
    with pytest.raises(TrainingError, match="units"):
        run.begin()


@pytest.mark.parametrize("words", [{"loss_weight": "words"}, {"shifts_labels": True}])
def test_settings_are_checked_before_the_run(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        prepare(TEXTS, 4, max_duration="1ep", **words)


@pytest.mark.parametrize(("shifts", "targets"), [(None, 4), (True, 4), (False, 6)])
def test_it_is_the_models_word_whether_labels_are_shifted(
    shifts: bool | None, targets: int
) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 2]])
    count = unit_counter("tokens", shifts_labels=shifts)
    assert count is not None
    if shifts is False:
        with pytest.warns(RuntimeWarning, match="shifts_labels"):
            assert count({"input_ids": ids, "labels": ids}) == targets
    else:
        assert count({"input_ids": ids, "labels": ids}) == targets


IDS = torch.arange(1, 65).reshape(2, 32)
TAGS = {"input_ids": IDS, "labels": IDS % 7}
CAUSAL = {"input_ids": IDS, "labels": IDS}
BY_CHANCE = {"input_ids": IDS, "labels": torch.where(IDS == 40, IDS, -100)}


def test_ranks_decide_together_whether_labels_are_shifted() -> None:
    """One target that is its input, by chance the only one of a rank, decides nothing alone."""

    def targets(batch: Any) -> Callable[[Ranks], Any]:
        counter = unit_counter("tokens")

        def found(ranks: Ranks) -> Any:
            ranks.dp_world_size = ranks.world_size
            return units_of(steps_of(batch), counter, ranks)[0]

        return found

    assert on_threads([targets(BY_CHANCE), targets(TAGS)]) == [[1], [64]]
    assert on_threads([targets(CAUSAL), targets(CAUSAL)]) == [[62], [62]]


def test_few_labels_that_were_inputs_by_chance_end_the_run() -> None:
    counter, ranks = unit_counter("tokens"), Ranks()
    assert units_of(steps_of(BY_CHANCE), counter, ranks)[0] == [1]
    with pytest.raises(TrainingError, match="shifts_labels=False"):
        units_of(steps_of(TAGS), counter, ranks)
    stated = unit_counter("tokens", shifts_labels=False)
    assert stated is not None
    with pytest.warns(RuntimeWarning, match="shifts_labels"):
        assert stated(BY_CHANCE) == 1
    assert stated(TAGS) == 64


def test_enough_labels_decide_and_are_looked_at_no_more() -> None:
    counter = TargetTokens(shifts_labels=None)
    units_of(steps_of(CAUSAL), counter, Ranks())
    assert not counter.is_open
    decoder = TargetTokens(shifts_labels=None)
    units_of(steps_of({"input_ids": IDS, "labels": IDS[:, :9]}), decoder, Ranks())
    assert not decoder.is_open


def test_ranks_that_cannot_add_up_are_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    run = prepare(TEXTS, 10, max_duration="1ep", loading=LOADING, loss_weight="tokens")
    run.bind(optimizer, rank=0, world_size=2)
    with pytest.raises(TrainingError, match="init_process_group"):
        run.begin()


def steps_of(*batches: Any) -> Step:
    return Step(Timestamp(), 2, 2, [MicroBatch(one, 1, 0, 0.5) for one in batches])


def test_a_batch_without_targets_gets_one_with_targets_and_weighs_nothing() -> None:
    weights, ranks = LossWeights(unit_counter("tokens")), Ranks()
    full = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}
    empty = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[-100, -100]])}
    step = steps_of(empty, full)
    weights.set(step, ranks)
    first, second = step.micro_batches
    assert (first.weight, second.weight) == (0.0, 1.0)
    assert torch.equal(first.batch["labels"], full["labels"])
    first.batch.pop("labels")  # as a loop may
    assert "labels" in second.batch


def test_weights_of_samples_cost_nothing_and_stay_those_of_the_loader() -> None:
    run, _ = own_loop("samples", micro_batch_size=4)
    assert run.loss_weights.count is None
    assert [one.weight for one in run.begin()] == [0.4, 0.3, 0.3]


def test_a_step_that_is_taken_back_comes_with_the_same_weights() -> None:
    run, _ = own_loop("tokens", micro_batch_size=4)
    before = [one.weight for one in run.begin()]
    run.take_back()
    assert [one.weight for one in run.begin()] == before


def test_a_loop_that_does_not_read_the_weights_is_warned() -> None:
    run, model = own_loop("tokens", batch_size=16, micro_batch_size=4)
    step = run.begin()
    for one in step:
        token_loss(model, one.batch).backward()
    run.optimizers[0].step()
    with pytest.warns(UserWarning, match="weights of micro-batches"):
        run.finish()


def test_views_of_micro_batches_have_these_weights() -> None:
    run, _ = own_loop("tokens", micro_batch_size=4)
    steps, views = own_loop("tokens", micro_batch_size=4)[0].begin(), []
    for view in run.micro_batches():
        views.append(view.weight)
        if view.is_last:
            break
    assert views == [one.weight for one in steps]
    assert sum(views) == pytest.approx(1.0)


class Renamed(dict[str, Any]):
    """A mapping of another kind, as Hugging Face's are."""


@pytest.mark.parametrize("kind", [dict, Renamed], ids=["dict", "subclass"])
def test_labels_are_found_in_any_mapping(kind: type[dict[str, Any]]) -> None:
    batch = kind(pad(TEXTS[:4]))
    assert count_target_tokens(batch) == count_target_tokens(pad(TEXTS[:4]))


def test_a_batch_without_labels_is_refused() -> None:
    run = prepare([{"x": torch.ones(2)}] * 4, 2, max_duration="1ep", loss_weight="tokens")
    run.bind(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    with pytest.raises(StrettoError, match="labels"):
        run.begin()
