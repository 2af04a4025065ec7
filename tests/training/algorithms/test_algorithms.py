from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stretto.data import DataSpec
from stretto.errors import ConversionError, StrettoError, TrainingError
from stretto.examples.text import PythonDocs
from stretto.schedules import Linear
from stretto.timing import Horizon, Time, Timestamp
from stretto.training import Callback, Evaluation, Run, Trainer, prepare
from stretto.training.algorithms import (
    EarlyStopping,
    LayerFreezing,
    SelectiveBackprop,
    SequenceLengthWarmup,
    StochasticDepth,
    drop_layers,
    freeze,
    scale,
    select,
    truncate,
)
from stretto.training.callback import passed_between

IDS = torch.arange(40).reshape(4, 10)
LABELS = torch.where(IDS % 10 < 8, -100, IDS)


class Watch(Callback):
    """Notes something at every batch."""

    def __init__(self, look: Callable[[Run], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        self.seen.append(self.look(run))


def _weight(run: Run, index: int) -> torch.Tensor:
    return run.model.get_submodule(str(index)).get_parameter("weight").detach().clone()


def test_layers_freeze_one_after_the_other(problem: Callable[..., Any]) -> None:
    run = problem()
    freezing = LayerFreezing(["0", "2"], start="4ba", end="8ba")
    first = Watch(lambda trainer: _weight(trainer, 0))
    last = Watch(lambda trainer: _weight(trainer, 2))
    run.trainer(max_duration="10ba", batch_size=6, callbacks=[freezing, first, last]).fit()
    moved = [not torch.equal(a, b) for a, b in zip(first.seen, first.seen[1:], strict=False)]
    assert moved == [True] * 5 + [False] * 4
    moved = [not torch.equal(a, b) for a, b in zip(last.seen, last.seen[1:], strict=False)]
    assert moved == [True] * 7 + [False] * 2
    assert all(parameter.requires_grad for parameter in run.model.parameters())


def test_a_layer_that_is_not_there_is_refused(problem: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match="freeze"):
        problem().trainer(callbacks=[LayerFreezing(["head"])]).fit()


def test_selective_backprop_keeps_the_part_it_says_and_prefers_large_losses(
    problem: Callable[..., Any],
) -> None:
    class Sizes(Callback):
        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.losses: list[float] = []

        def transform_batch(self, run: Run, batch: Any) -> Any:
            self.sizes.append(len(batch[0]))
            self.losses.append(batch[1][:, 0].mean().item())
            return batch

    run, sizes = problem(num_samples=200), Sizes()
    callback = SelectiveBackprop(
        lambda model, batch: batch[1][:, 0], start="40sp", end="160sp", keep=0.25
    )
    trainer = run.trainer(max_duration="1ep", batch_size=20, callbacks=[callback, sizes])
    trainer.fit()
    # Strictly inside the stretch: the batches that start at 60, 80, ..., 140.
    assert sizes.sizes == [20, 20, 20, 5, 5, 5, 5, 5, 20, 20]
    assert trainer.timer.sample == 200
    thinned = sum(sizes.losses[3:8]) / 5
    assert thinned > sum(sizes.losses[:3] + sizes.losses[8:]) / 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5).double()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.linear(hidden)
        return hidden + branch


def test_stochastic_depth_leaves_blocks_out_as_often_as_it_says(
    problem: Callable[..., Any],
) -> None:
    run = problem()
    torch.manual_seed(0)
    run.model = nn.Sequential(Residual(), Residual(), nn.Linear(5, 2).double())
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    calls = [0, 0]
    for index in range(2):
        run.model[index].linear.register_forward_hook(
            lambda *_, index=index: calls.__setitem__(index, calls[index] + 1)
        )
    run.trainer(
        max_duration="400ba", batch_size=1, callbacks=[StochasticDepth(["0", "1"], rate=0.5)]
    ).fit()
    # Binomial(400, 3/4) and (400, 1/2): five standard deviations are 43 and 50.
    assert abs(calls[0] - 300) < 43
    assert abs(calls[1] - 200) < 50
    whole = run.model(run.data.tensors[0])
    assert torch.equal(whole, run.model(run.data.tensors[0]))


def test_stochastic_depth_is_unbiased_in_its_mean(problem: Callable[..., Any]) -> None:
    del problem
    model = nn.Sequential(Residual())
    block = model[0]
    hidden = torch.randn(3, 5, dtype=torch.float64)
    expected = block(hidden)
    restore = drop_layers(model, ["0"], 0.5)
    torch.manual_seed(0)
    mean = torch.stack([block(hidden) for _ in range(4000)]).mean(0)
    restore()
    assert torch.allclose(mean, expected, atol=0.1)
    assert torch.equal(block(hidden), expected)


@pytest.mark.parametrize("own", [False, True])
def test_dropped_layers_come_back_as_they_were(own: bool) -> None:
    model = nn.Sequential(Residual(), Residual())
    forward = model[1].forward
    if own:
        model[1].forward = forward
    before = [dict(vars(one)) for one in model]
    restore = drop_layers(model, ["0", "1"], lambda: 0.9)
    assert "forward" in vars(model[0])
    restore()
    restore()
    assert [dict(vars(one)) for one in model] == before


def test_functions_do_what_the_callbacks_do(problem: Callable[..., Any]) -> None:
    run = problem()
    run.trainer(max_duration="1ba", callbacks=[LayerFreezing(["0", "2"], start="0ba", end="1ba")])
    stopped = freeze(run.model, ["0", "2"], 0.5)
    assert stopped == list(run.model[0].parameters())
    assert freeze(run.model, ["0", "2"]) == []  # the last that learns
    for parameter in stopped:
        parameter.requires_grad = True
    batch = {"input_ids": IDS, "labels": IDS}
    assert truncate(batch, 10) is batch
    assert {name: one.tolist() for name, one in truncate(batch, 3).items()} == {
        "input_ids": IDS[:, :3].tolist(),
        "labels": IDS[:, :3].tolist(),
    }
    torch.manual_seed(0)
    kept = torch.cat([select((IDS, "a"), torch.arange(4.0), 0.5)[0][:, 0] // 10 for _ in range(99)])
    counts = torch.bincount(kept, minlength=4)
    assert counts.sum() == 198
    assert counts[3] > counts[1] > counts[0]
    assert scale("90ep", 0.5) == Time("45ep")


@pytest.mark.parametrize(
    "call",
    [
        lambda model: freeze(model, ["0"], 1.5),
        lambda model: freeze(model, ["nowhere"]),
        lambda model: drop_layers(model, ["nowhere"], 0.5),
        lambda model: drop_layers(model, ["0"], 1.0),
        lambda model: select(IDS, torch.arange(4.0), 0.0),
        lambda model: select(IDS, torch.arange(3.0), 0.5),
        lambda model: truncate({"input_ids": IDS, "labels": IDS[:, 1:]}, 3),
        lambda model: truncate(IDS, 0),
        lambda model: truncate(IDS, 3, count=lambda batch: 7),
    ],
)
def test_functions_refuse_what_would_be_wrong(call: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(TrainingError):
        call(nn.Sequential(nn.Linear(2, 2)))


def test_sequences_grow_in_tokens_and_the_clock_counts_what_is_left() -> None:
    tokens = torch.randint(0, 9, (40, 16))
    model = nn.Embedding(9, 9)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten()
        )

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": tokens[index]}

    warmup = SequenceLengthWarmup(Linear(4, 16, over="200tok"), multiple_of=4)
    lengths = Watch(lambda _: warmup.length)
    clock = Watch(lambda trainer: trainer.timer.token)
    trainer = Trainer(
        model,
        DataSpec(Rows()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        max_duration="1ep",
        batch_size=5,
        callbacks=[warmup, lengths, clock],
    )
    trainer.fit()
    assert lengths.seen[0] == 4
    assert lengths.seen[-1] == 16
    assert lengths.seen == sorted(lengths.seen)
    assert clock.seen == [5 * sum(lengths.seen[: i + 1]) for i in range(8)]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "packaged text"])
def test_the_tokens_of_cut_batches_without_names_are_counted(kind: str) -> None:
    """A batch that names no tokens has those that were stated, less what was cut off."""
    data: Any = torch.randint(0, 9, (40, 16))
    if kind == "tuple":
        data = torch.utils.data.TensorDataset(data, data, torch.zeros(40))
    spec = DataSpec(data, tokens_per_sample=16)
    if kind == "packaged text":
        spec = DataSpec(torch.utils.data.Subset(PythonDocs(16), range(40)), tokens_per_sample=16)
    model = nn.Embedding(256, 2)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        mean: torch.Tensor = model(batch if kind == "tensor" else batch[0]).mean()
        return mean

    warmup = SequenceLengthWarmup(Linear(4, 16, over="200tok"), multiple_of=4)
    lengths = Watch(lambda _: warmup.length)
    clock = Watch(lambda trainer: trainer.timer.token)
    Trainer(
        model,
        spec,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        max_duration="500tok",
        batch_size=5,
        micro_batch_size=3,
        callbacks=[warmup, lengths, clock],
    ).fit()
    assert (lengths.seen[0], lengths.seen[-1]) == (4, 16)
    assert clock.seen == [5 * sum(lengths.seen[: i + 1]) for i in range(len(lengths.seen))]
    assert 500 <= clock.seen[-1] < 500 + 5 * 16


def test_stated_tokens_do_not_hold_where_sequences_are_cut(problem: Callable[..., Any]) -> None:
    """What is counted is what is left, and without a statement there is nothing to count."""
    run = problem()
    warmup = SequenceLengthWarmup("3")
    with pytest.raises(StrettoError, match="tok"):
        run.trainer(callbacks=[warmup], max_duration="100tok")
    run.data = DataSpec(run.data, tokens_per_sample=5)
    trainer = run.trainer(callbacks=[warmup])
    assert trainer.run.horizon.tokens_per_sample is None


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, "shape"),
        ({"input_ids": IDS, "attention_mask": torch.ones(4, 1, 10, 10)}, "shape"),
        ({"input_ids": IDS, "attention_mask": (IDS % 10 > 3).long()}, "left"),
        ({"input_ids": IDS, "attention_mask": IDS % 10 + 1}, "packed"),
        ({"input_ids": IDS, "position_ids": IDS % 5}, "packed"),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "labels": IDS}, "source"),
        ({"input_ids": IDS, "labels": LABELS}, "targets"),
        ((IDS, LABELS), "targets"),
        ((IDS, torch.zeros(4, 3)), "shape"),
    ],
    ids=["labels", "pairs", "left", "mask", "positions", "decoder", "targets", "pair", "classes"],
)
def test_a_batch_whose_loss_would_mean_something_else_is_not_cut(batch: Any, word: str) -> None:
    warmup = SequenceLengthWarmup("0sp:4 1sp:10")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    run = prepare([1, 2], 1, max_duration="1ep", optimizer=optimizer)
    warmup.on_fit_start(run)
    warmup.on_batch_start(run, next(run.loader))
    with pytest.raises(TrainingError, match=word):
        warmup.transform_batch(run, batch)
    warmup.length = 10
    assert warmup.transform_batch(run, batch) is batch


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerFreezing([]),
        lambda: LayerFreezing(["a"], level=0),
        lambda: SelectiveBackprop(lambda m, b: b, keep=1.0),
        lambda: StochasticDepth([], rate=0.1),
        lambda: StochasticDepth(["a"], rate=1.0),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(TrainingError, match="write"):
        make()


def test_a_stretch_of_epochs_of_unknown_size_is_refused() -> None:
    """Within them it would stand still: in a run of one epoch, no layer would ever freeze."""
    with pytest.raises(ConversionError, match="dataset_num_samples"):
        passed_between(Horizon("1ep"), Time("0ep"), Time("1ep"))
    assert passed_between(Horizon("1ep"), Time("0ba"), Time("4ba"))(Timestamp(batch=1)) == 0.25


def test_early_stopping_counts_no_look(problem: Callable[..., Any]) -> None:
    class Look(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            run.evaluate()

    def stopped(*callbacks: Callback) -> int:
        run = problem()
        stopping = EarlyStopping(patience="3ba", min_delta=1e9)
        trainer = run.trainer(
            evaluate=Evaluation(run.data, "4ba"), callbacks=[stopping, *callbacks]
        )
        trainer.evaluate()
        trainer.fit()
        return int(trainer.timer.batch)

    assert stopped() == stopped(Look()) == 8


@pytest.mark.parametrize(
    ("length", "found"),
    [("0sp:4 10sp:8 50%:12", [4, 4, 8, 8, 12, 12, 12, 12]), (Linear(16, 8), [16, 16, 16, 16, 12])],
    ids=["steps", "falling"],
)
def test_the_plan_shows_the_length_that_sequences_are_cut_to(length: Any, found: list[int]) -> None:
    warmup = SequenceLengthWarmup(length, multiple_of=4)
    lengths = Watch(lambda _: warmup.length)
    model = nn.Embedding(9, 2)
    trainer = Trainer(
        model,
        DataSpec(torch.randint(0, 9, (40, 16)), tokens_per_sample=16),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).mean(),
        max_duration="1ep",
        batch_size=5,
        callbacks=[warmup, lengths],
    )
    trainer.fit()
    assert lengths.seen[: len(found)] == found
    assert trainer.plan is not None
    planned = [batch.values["sequence_length"] for batch in trainer.plan.batches()]
    assert planned == lengths.seen
