"""Sizes that are found before the run, by what fits into memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stretto.batching import IncreaseFunction, NoiseScale, NormTest, PeriodSizes
from stretto.errors import TrainingError
from stretto.schedules import Cosine, Linear
from stretto.training import Callback, Checkpointing
from stretto.training.algorithms import NoiseReport

Make = Callable[..., Any]

FITTED = """
import json, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import stretto

torch.set_num_threads(1)
width, layers, share = 256, 24, 4096
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))
data = TensorDataset(torch.randn(share, width))
optimizer = torch.optim.AdamW(model.parameters())
loss = lambda model, batch: model(batch[0]).square().mean()
# A step first, so that what libraries allocate once is there.
loss(model, [data.tensors[0][:2]]).backward()
optimizer.zero_grad()
needed = share * width * 4 * layers  # bytes of the activations of a whole share
leave(needed // 3 + 5 * sum(p.nbytes for p in model.parameters()))
size = sys.argv[1]
settings = {"batch_size": share, "micro_batch_size": "auto"}
if size == "largest":
    grow = stretto.batching.IncreaseFunction(lambda epoch, size: 64, 64, "auto")
    settings = {"batch_size": grow}
trainer = stretto.Trainer(
    model, data, optimizer=optimizer, loss=loss, max_duration="2ep", **settings
)
trainer.fit()
print(json.dumps({
    "found": trainer.run.loader.micro_batch_size,
    "sizes": sorted({stage.size for stage in trainer.plan.stages}),
    "policy": repr(trainer.run.loader.prepared.policy),
    "batches": trainer.timer.batch,
    "samples": trainer.timer.sample,
    "splits": trainer._loop.stepper.retry.splits,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_micro_batch_is_found_that_fits_into_a_real_limit(limited: Make) -> None:
    """The batch of the optimizer stays 4,096, of which less than a third fits at once."""
    run = json.loads(limited(FITTED, "micro"))
    assert (run["batches"], run["samples"], run["sizes"]) == (2, 8192, [4096])
    assert 200 < run["found"] < 1700
    assert run["splits"] == 0


@pytest.mark.long  # the search is the one above
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_grows_to_what_fits_into_a_real_limit(limited: Make) -> None:
    run = json.loads(limited(FITTED, "largest"))
    assert run["samples"] == 8192
    found = int(run["policy"].rpartition(" ")[2].rstrip(")"))
    assert 400 < found < 2500
    assert max(run["sizes"]) <= found


def test_where_there_is_room_the_share_is_taken_whole(problem: Make) -> None:
    run, plain = problem(), problem()
    trainer = run.trainer(micro_batch_size="auto", batch_size="0ep:8 1ep:12")
    assert (trainer.run.loader.micro_batch_size, trainer.fitting.size) == (12, 12)
    assert trainer.plan.micro_batch_size == 12
    trainer.fit()
    plain.trainer(batch_size="0ep:8 1ep:12").fit()
    assert torch.equal(run.weights(), plain.weights())  # and nothing left a trace


def test_sizes_that_are_measured_need_no_more_than_their_largest(problem: Make) -> None:
    trainer = problem().trainer(micro_batch_size="auto", batch_size=NoiseScale(4, 12))
    assert trainer.fitting.size == 12


class Silent(Callback):
    """Listens to nothing."""


class Asked:
    """What the finder is asked, in place of the finder; answers with a size for each question."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = iter(sizes)
        self.steps: list[tuple[int, bool, int]] = []

    def __call__(
        self,
        step: Any,
        batch: Any,
        *,
        accumulation: int,
        measures_noise: bool,
        maximum: int,
        **_: Any,
    ) -> Any:
        self.steps.append((accumulation, measures_noise, maximum))
        return SimpleNamespace(size=next(self.sizes), certainty="tried", peak=None)


@pytest.mark.parametrize(
    ("settings", "measures"),
    [
        ({"batch_size": 8}, False),
        ({"batch_size": NoiseScale(4, 8)}, True),
        ({"batch_size": NormTest(4, 8)}, True),
        ({"batch_size": 8, "callbacks": [NoiseReport()]}, True),
        ({"batch_size": 8, "callbacks": [NoiseReport(), Silent()]}, True),
        ({"batch_size": 8, "callbacks": [Silent()]}, False),
    ],
)
def test_the_gradient_that_measuring_keeps_is_asked_for(
    problem: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], measures: bool
) -> None:
    asked = Asked(3, 3)
    monkeypatch.setattr("stretto.memory.find_batch_size", asked)
    run = problem()
    run.model.append(nn.LayerNorm(2).double())
    optimizer = torch.optim.SGD(run.model.parameters())
    run.trainer(micro_batch_size="auto", optimizer=optimizer, **settings)
    assert set(asked.steps) == {(2, measures, 8)}


@pytest.mark.parametrize(
    ("halves", "largest"), [(20, 32), (16, 32), (11, 22)], ids=["roomy", "just", "short"]
)
@pytest.mark.parametrize("reads", ["callback", "another period"])
def test_a_pass_that_is_cut_in_two_to_measure_it_fits_in_halves(
    problem: Make, monkeypatch: pytest.MonkeyPatch, reads: str, halves: int, largest: int
) -> None:
    asked = Asked(32, halves)
    monkeypatch.setattr("stretto.memory.find_batch_size", asked)
    grows = IncreaseFunction(lambda epoch, size: 1000, 4, "auto")
    if reads == "callback":
        trainer = problem().trainer(batch_size=grows, callbacks=[NoiseReport()])
        found = trainer.run.loader.prepared.policy
    else:
        periods = PeriodSizes([("1ep", grows), ("rest", NoiseScale(4, 8))])
        trainer = problem().trainer(batch_size=periods, max_duration="2ep")
        found = trainer.run.loader.prepared.policy.periods[0][1]
    assert found.max_batch_size == largest
    assert [step[:2] for step in asked.steps] == [(1, False), (2, True)]
    assert asked.steps[-1][2] == 16


@pytest.mark.parametrize(
    ("given", "micro"), [({}, 5), ({"micro_batch_size": 3}, 3)], ids=["found", "given"]
)
@pytest.mark.parametrize("asks", [{"batch_size": "auto"}, {"use_maximum_batch_size": True}])
def test_as_many_samples_as_fit(
    problem: Make,
    monkeypatch: pytest.MonkeyPatch,
    asks: dict[str, Any],
    given: dict[str, Any],
    micro: int,
) -> None:
    asked = Asked(5)
    monkeypatch.setattr("stretto.memory.find_batch_size", asked)
    trainer = problem().trainer(**{"batch_size": None, **asks}, **given)
    assert trainer.plan.stages[0].size == trainer.found_maximum.size == 5
    assert trainer.run.loader.micro_batch_size == micro
    assert asked.steps == [(1, False, 60)]  # in one pass, at most all samples
    trainer.fit()
    assert (trainer.timer.batch, trainer.timer.sample) == (24, 120)


def test_a_resumed_run_keeps_the_number_that_was_found(
    problem: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stretto.memory.find_batch_size", Asked(12, 5, 20))
    settings = {"batch_size": "auto", "checkpoint": "1ep", "max_duration": "3ep"}
    first = problem().trainer(folder=tmp_path / "a", **settings)
    first.fit()
    for folder, path in (("b", tmp_path / "a"), ("c", tmp_path / "a")):
        again = problem().trainer(folder=tmp_path / folder, **{**settings, "max_duration": "4ep"})
        again.resume(path)
        assert not [one for one in again.changes if "batch_size" in one]
        assert [(one.size, one.batches) for one in again.plan.stages] == [(12, 20)]
        again.fit()
        assert (again.timer.batch, again.timer.sample) == (20, 240)
        assert again.run.loader.micro_batch_size == again.found_maximum.size in (5, 20)


def test_a_number_takes_the_place_of_one_that_was_found(
    problem: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stretto.memory.find_batch_size", Asked(12, 5))
    settings = {"checkpoint": "1ep", "max_duration": "1ep"}
    problem().trainer(folder=tmp_path, batch_size="auto", **settings).fit()
    again = problem().trainer(folder=tmp_path, batch_size=6, **{**settings, "max_duration": "2ep"})
    again.fit(resume="latest")
    assert [one for one in again.changes if "batch_size: AsManyAsFit() -> Fixed(6)" in one]
    assert again.timer.batch == 15


@pytest.mark.parametrize("schedules", [{"lr": Cosine(warmup="4ba")}, {"lr": Linear(1, 0)}])
def test_times_in_batches_of_a_size_that_is_found(
    problem: Make, monkeypatch: pytest.MonkeyPatch, schedules: dict[str, Any]
) -> None:
    monkeypatch.setattr("stretto.memory.find_batch_size", Asked(12))
    trainer = problem().trainer(batch_size="auto", max_duration="8ba", schedules=schedules)
    trainer.fit()
    assert trainer.timer.sample == 96


def test_torchtunes_word_finds_the_micro_batch_of_a_size(
    problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.memory.find_batch_size", Asked(3))
    trainer = problem().trainer(batch_size=8, use_maximum_batch_size=True)
    assert (trainer.plan.stages[0].size, trainer.run.loader.micro_batch_size) == (8, 3)
    with pytest.raises(TrainingError, match="leave one of them out"):
        problem().trainer(batch_size=8, micro_batch_size=4, use_maximum_batch_size=True)


def test_finding_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    from stretto import Trainer

    optimizer = torch.optim.AdamW(model.parameters())
    Trainer(
        model,
        torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randn(64, 2)),
        optimizer=optimizer,
        loss=lambda model, batch: model(batch[0]).sub(batch[1]).square().mean(),
        max_duration="1ep",
        batch_size=16,
        micro_batch_size="auto",
        clip_norm=1.0,
    )
    assert len(optimizer.state) == 0
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert model[0].weight.grad is None


def test_a_resumed_run_goes_on_with_the_size_that_was_found(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("2ba")}
    first = problem().trainer(micro_batch_size="auto", max_duration="4ba", batch_size=8, **settings)
    first._loop.stepper.retry.size = 4  # as if memory had run out
    first._loop.stepper.retry.splits = 1
    first.fit()
    # Planned with larger batches, it would find a larger size for itself.
    again = problem().trainer(
        micro_batch_size="auto", max_duration="8ba", batch_size="0sp:8 32sp:16", **settings
    )
    assert again.run.loader.micro_batch_size == 16
    again.resume()
    net = again._loop.stepper.retry
    assert (again.run.loader.micro_batch_size, net.size, net.splits) == (8, 4, 1)
    assert not any("micro_batch_size" in line for line in again.changes)
    again.fit()
    assert again.timer.batch == 8


def test_an_iterable_has_nothing_to_look_at(problem: Make) -> None:
    class Stream:
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(4, 5).double(), torch.zeros(4, 2).double()

    run = problem()
    run.data = Stream()
    with pytest.raises(TrainingError, match="iterable"):
        run.trainer(micro_batch_size="auto", max_duration="2ba", batch_size=4)
    with pytest.raises(TrainingError, match="iterable"):
        run.trainer(
            batch_size=IncreaseFunction(lambda epoch, size: 1, 4, "auto"), max_duration="2ba"
        )
