"""`bind_run`: each part of a run is bound once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from stretto import (
    Checkpointing,
    Cosine,
    Evaluation,
    Every,
    Horizon,
    NoiseScale,
    PiecewiseConstant,
    StepLoader,
    Trainer,
    plan,
)
from stretto.errors import BatchSizeError, ConversionError, PlanError
from stretto.planning import PlannedSizes, bind_run

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
SIZES = "0ep:8 1ep:16"
HORIZON = Horizon("2ep", dataset_num_samples=64)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is bound, and how many horizons and planned sizes are made."""
    found: Counter[str] = Counter()

    def count(owner: type, method: str, name: str) -> None:
        original: Callable[..., object] = getattr(owner, method)

        def counted(self: object, *args: object, **kwargs: object) -> object:
            found[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, counted)

    count(PiecewiseConstant, "bind", "policy")
    count(Cosine, "within", "schedule")
    count(Every, "bind", "trigger")
    count(Horizon, "__init__", "horizon")
    count(PlannedSizes, "__init__", "sizes")
    return found


def trainer(folder: Path) -> Trainer:
    model = torch.nn.Linear(4, 1)

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return Trainer(
        model,
        DATA,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        max_duration="2ep",
        batch_size=SIZES,
        schedules={"lr": Cosine()},
        evaluate=Evaluation(DATA, every="1ep"),
        checkpoint=Checkpointing("1ep"),
        folder=folder,
    )


def test_a_trainer_binds_each_part_once(counts: Counter[str], tmp_path: Path) -> None:
    trainer(tmp_path)
    assert counts == {
        "policy": 1,
        "schedule": 1,
        "trigger": 4,  # of the evaluation, checkpoints, the log and its flushes
        "sizes": 2,  # the evaluation reads its data as a run of its own
        "horizon": 4,  # of both, with and without batch sizes
    }


def test_a_trainer_that_resumes_binds_nothing_again(counts: Counter[str], tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.fit()
    counts.clear()
    made.resume()
    assert not counts


def test_a_plan_binds_each_part_once(counts: Counter[str]) -> None:
    plan(
        HORIZON, PiecewiseConstant(SIZES), schedules={"lr": Cosine()}, triggers={"evaluate": "1ep"}
    )
    assert counts == {"policy": 1, "schedule": 1, "sizes": 1, "trigger": 1, "horizon": 1}


def test_a_loader_binds_its_sizes_once(counts: Counter[str]) -> None:
    loader = StepLoader(DATA, SIZES, max_duration="2ep")
    next(loader)
    loader.load_state_dict(loader.state_dict(again=True))
    assert counts == {"policy": 1, "sizes": 1, "horizon": 2}


def test_a_loader_takes_a_run_that_is_bound() -> None:
    run = bind_run(HORIZON, SIZES)
    loader = StepLoader(DATA, run)
    assert loader.horizon is run.horizon
    assert len(loader) == 12


def test_sizes_that_only_the_run_knows() -> None:
    run = bind_run(HORIZON, NoiseScale(8, 64))
    assert run.sizes is None
    assert run.decided_between == (8, 64)
    with pytest.raises(PlanError, match="measures"):
        run.planned_sizes()
    with pytest.raises(ConversionError, match="measures"):
        run.horizon.convert("1ep", "ba")


def test_too_many_stages_are_refused_before_they_are_planned() -> None:
    with pytest.raises(BatchSizeError, match="times"):
        bind_run(HORIZON, "0ep:8 1ep:16 100sp:32", most_stages=1)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"policy": 0}, ("batch_size",)),
        ({"schedules": {"lr": Cosine(warmup="3ep")}}, ("schedules", "lr")),
        ({"horizon": Horizon("2ep"), "triggers": {"log": "0.5ep"}}, ("triggers", "log")),
    ],
)
def test_an_error_can_say_where_it_comes_from(
    arguments: dict[str, object], place: tuple[str, ...]
) -> None:
    open_places: list[tuple[str, ...]] = []

    @contextmanager
    def at(*path: str) -> Iterator[None]:
        open_places.append(path)
        yield
        open_places.pop()

    given: dict[str, object] = {"horizon": HORIZON, "policy": 8, **arguments}
    with pytest.raises(ValueError):  # noqa: PT011  which one it is, the parts' own tests say
        bind_run(at=at, **given)  # type: ignore[arg-type]
    assert open_places == [place]
