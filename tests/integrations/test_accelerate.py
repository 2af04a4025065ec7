"""stretto in loops of Accelerate, against the real package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs stretto[accelerate]: make test-adapters")

import torch
from accelerate import Accelerator
from tests.integrations import accelerate_loop as loop
from torch.utils.data import DataLoader, TensorDataset

from stretto.batching import BatchSizePolicy, Bound, NoiseScale, Signals
from stretto.errors import StrettoError, TrainingError
from stretto.integrations.accelerate import attach
from stretto.ordering import SampleOrder
from stretto.planning import plan
from stretto.timing import Horizon

PLAN = plan(
    Horizon("2ep", dataset_num_samples=loop.N),
    loop.SIZES,
    schedules=loop.SCHEDULES,
    base={"lr": 0.05},
)
STEPS = list(PLAN.batches())
ORDER = SampleOrder(loop.N, loop.SEED)
IDS = [
    sorted(ORDER[place] for place in range(one.timestamp.sample, one.timestamp.sample + one.size))
    for one in STEPS
]


def by_hand(*, is_weighted: bool) -> torch.Tensor:
    """Train on one big batch for each step; return the weights."""
    model = loop.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, ids in zip(STEPS, IDS, strict=True):
        optimizer.param_groups[0]["lr"] = step.values["lr"]
        batch = (loop.X[ids], loop.Y[ids], torch.tensor(ids))
        loop.loss_of(model, batch, is_weighted=is_weighted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def close(found: dict[str, Any], weights: Any) -> None:
    ours = torch.tensor(found["weights"], dtype=torch.float64)
    theirs = torch.as_tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return loop.train()


@pytest.mark.small
def test_a_stock_loop_follows_the_plan(whole: dict[str, Any]) -> None:
    assert whole["ids"] == IDS
    assert whole["rates"] == [step.values["lr"] for step in STEPS]
    assert whole["clock"] == [len(STEPS), 2 * loop.N]
    assert len(whole["evaluations"]) == 4
    close(whole, by_hand(is_weighted=False))


def test_losses_can_be_weighed_by_what_a_function_counts() -> None:
    close(loop.train(is_weighted=True), by_hand(is_weighted=True))


@pytest.mark.small
@pytest.mark.parametrize("at", [1, 6, 12, 13, 16])
def test_a_state_saved_in_the_loop_resumes_after_that_step(
    at: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    loop.train(save=(at, tmp_path))
    rest = loop.train(load=tmp_path)
    assert rest["ids"] == whole["ids"][at:]
    assert rest["rates"] == whole["rates"][at:]
    close(rest, whole["weights"])


def test_the_length_is_that_of_the_epoch() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    loader, _ = attach(
        accelerator, "0sp:8 20sp:5", data=range(20), optimizer=optimizer, max_duration="2ep"
    )
    for steps in (3, 4):
        assert len(loader) == steps
        assert len(list(loader)) == steps


def test_sizes_follow_the_noise() -> None:
    found = loop.train(sizes=NoiseScale(6, 40, window=5))
    assert found["clock"][1] == 2 * loop.N
    assert len({len(ids) for ids in found["ids"]}) > 2


class Listens(BatchSizePolicy):
    """Batches of 10; keeps the losses that it is given."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def bind(self, horizon: Any) -> Bound:
        return Bound(decide=self.decide, bounds=(10, 10), reads=frozenset({"loss"}))

    def decide(self, timestamp: Any, state: Any, signals: Signals) -> tuple[int, Any]:
        if signals.loss is not None:
            self.losses.append(signals.loss)
        return 10, state


def test_a_policy_hears_the_loss_of_the_batch() -> None:
    policy = Listens()
    found = loop.train(sizes=policy)
    ids = found["ids"][0]
    batch = (loop.X[ids], loop.Y[ids], torch.tensor(ids))
    first = loop.loss_of(loop.make_model(), batch, is_weighted=False).item()
    assert policy.losses[0] == pytest.approx(first, rel=1e-12)
    assert len(policy.losses) == len(found["ids"]) - 1  # none decides after the last


def refused(**settings: Any) -> None:
    accelerator = Accelerator(cpu=True, **settings.pop("accelerator", {}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    data: Any = DataLoader(TensorDataset(loop.X), batch_size=4)
    if settings.pop("is_prepared", False):
        data = accelerator.prepare(data)
    attach(
        accelerator, settings.pop("sizes", 8), data=data, optimizer=optimizer, max_duration="1ep"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"accelerator": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps=2"),
        ({"is_prepared": True}, "DataLoaderShard"),
        ({"sizes": NoiseScale(6, 40)}, "model=model"),
    ],
    ids=["accumulation", "prepared", "noise"],
)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        refused(**settings)


def own_loop(every: int, *, micro_batch_size: int = 4, skips: bool = False) -> Any:
    """Train without `accumulate`, as the quick tour does, or with accumulation by hand."""
    accelerator, model = Accelerator(cpu=True), loop.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = TensorDataset(loop.X, loop.Y)
    loader, _ = attach(
        accelerator,
        16,
        data=data,
        optimizer=optimizer,
        max_duration="1ep",
        micro_batch_size=micro_batch_size,
    )
    for number, (x, y) in enumerate(loader):
        accelerator.backward((model(x) - y).square().mean())
        if (number + 1) % every == 0 and not (skips and number == 3):
            optimizer.step()
            optimizer.zero_grad()
    return loader.run.timer.batch


def mean_loss(model: Any, x: Any, y: Any) -> Any:
    return (model(x) - y).square().mean()


def zero_first(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    accelerator.backward(mean_loss(model, x, y))
    optimizer.step()


def plain_backward(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    mean_loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def of_loss(loss_of: Any) -> Any:
    def body(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()

    return body


def contrastive(model: Any, x: Any, y: Any) -> Any:
    rows = torch.nn.functional.normalize(torch.cat([model(x), x], 1))
    others = torch.nn.functional.normalize(torch.cat([model(x.flip(1)), x], 1))
    return torch.nn.functional.cross_entropy(rows @ others.T / 0.1, torch.arange(len(x)))


def average_of_sum(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y, reduction="sum") / len(x)


def half(model: Any, x: Any, y: Any) -> Any:
    return mean_loss(model, x, y) / 2


def average_of_terms(model: Any, x: Any, y: Any) -> Any:
    return (mean_loss(model, x, y) + model(x).abs().mean()) / 2


def of_rows(model: Any, x: Any, y: Any) -> Any:
    return sum(mean_loss(model, *one) for one in zip(x, y, strict=True)) / len(x)


def of_product(model: Any, x: Any, y: Any) -> Any:
    found = (model(x) - y).flatten()
    return found @ found / len(x)


def with_penalty(model: Any, x: Any, y: Any) -> Any:
    first = model[0].weight
    return mean_loss(model, x, y) + 0.01 * first.square().sum() + (first.T @ first).sum()


def of_sum(model: Any, x: Any, y: Any) -> Any:
    return 0.5 * (model(x) - y).square().sum()


def masked(model: Any, x: Any, y: Any) -> Any:
    each, mask = (model(x) - y).square(), y > 0
    return (each * mask).sum() / mask.sum()


def by_class(model: Any, x: Any, y: Any) -> Any:
    scores, weight = torch.cat([model(x), x[:, :2]], 1), torch.tensor([1.0, 5.0, 9.0])
    return torch.nn.functional.cross_entropy(scores, (y[:, 0] > 0).long(), weight=weight.double())


def distances(model: Any, x: Any, y: Any) -> Any:
    return torch.cdist(model(x), model(x)).mean()


def train_with(body: Any, **settings: Any) -> torch.Tensor:
    accelerator, model = Accelerator(cpu=True), loop.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    settings = {"data": DataLoader(TensorDataset(loop.X, loop.Y), batch_size=4), **settings}
    loader, _ = attach(accelerator, 16, optimizer=optimizer, max_duration="1ep", **settings)
    for batch in loader:
        with accelerator.accumulate(model):
            body(accelerator, model, optimizer, *batch)
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.small
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (zero_first, "zero_grad"),
        (plain_backward, "accelerator.backward"),
        (of_loss(lambda *given: mean_loss(*given) / 4), "divided by 4"),
        (of_loss(lambda *given: 0.5 * (mean_loss(*given) / 4.0)), "divided by 4"),
        (of_loss(lambda *given: average_of_sum(*given) / 4), "divided by 4"),
        (of_loss(masked), "units="),
        (of_loss(of_sum), "a sum"),
        (of_loss(by_class), "weights of the classes"),
        (of_loss(contrastive), "compares the samples"),
        (of_loss(distances), "compares the samples"),
    ],
    ids=[
        "zero_grad first",
        "loss.backward",
        "divided",
        "divided and scaled",
        "divided twice",
        "masked",
        "sum",
        "weights of classes",
        "contrastive",
        "distances",
    ],
)
def test_common_mistakes_are_refused_in_the_first_step(body: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        train_with(body)


@pytest.mark.small
@pytest.mark.parametrize(
    "loss_of",
    [mean_loss, half, average_of_sum, average_of_terms, of_rows, of_product, with_penalty],
)
def test_losses_that_are_means_are_not_refused(loss_of: Any) -> None:
    whole = train_with(of_loss(loss_of), micro_batch_size=16)
    torch.testing.assert_close(train_with(of_loss(loss_of)), whole, rtol=0, atol=1e-12)


@pytest.mark.small
def test_weights_of_classes_may_be_counted() -> None:
    def units(batch: Any) -> int:
        return int((1 + 4 * (batch[1] > 0)).sum())

    whole = train_with(of_loss(by_class), micro_batch_size=16)
    found = train_with(of_loss(by_class), units=units)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.small
def test_what_a_masked_mean_is_over_may_be_counted() -> None:
    whole = train_with(of_loss(masked), micro_batch_size=16)
    found = train_with(of_loss(masked), units=lambda batch: (batch[1] > 0).sum())
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.small
@pytest.mark.parametrize("micro_batch_size", [3, 4])
def test_a_loss_that_is_divided_by_the_accelerator_and_the_loop_is_refused(
    micro_batch_size: int,
) -> None:
    def body(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss = mean_loss(model, x, y) + model(x).abs().mean()
        accelerator.backward(loss / accelerator.gradient_accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(TrainingError, match="remove that"):
        train_with(body, micro_batch_size=micro_batch_size)


@pytest.mark.small
def test_a_step_that_the_loop_left_inside_does_not_count_twice() -> None:
    accelerator, model = Accelerator(cpu=True), loop.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = DataLoader(TensorDataset(loop.X, loop.Y), batch_size=4)
    loader, _ = attach(accelerator, 16, data=data, optimizer=optimizer, max_duration="1ep")
    for batch in loader:
        with accelerator.accumulate(model):
            of_loss(mean_loss)(accelerator, model, optimizer, *batch)
        break
    with pytest.raises(TrainingError, match="sync_gradients"):
        next(iter(loader))
    model.zero_grad()
    assert len(next(iter(loader))[0]) == 4


@pytest.mark.small
def test_what_a_loss_over_tokens_is_a_mean_of_must_be_said() -> None:
    labels = torch.arange(loop.N).remainder(3)[:, None].expand(-1, 2).clone()
    labels[::5, 1] = -100
    body = of_loss(lambda model, x, y: torch.nn.functional.cross_entropy(
        torch.cat([model(x), model(x), x[:, :1]], 1)[:, :, None].expand(-1, -1, 2), y
    ))  # fmt: skip
    data = DataLoader(TensorDataset(loop.X, labels), batch_size=4)
    with pytest.raises(TrainingError, match="units='tokens'"):
        train_with(body, data=data)
    whole = train_with(body, data=data, micro_batch_size=16)
    found = train_with(body, data=data, units="tokens")
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.small
def test_an_accelerator_may_be_attached_to_again() -> None:
    accelerator, model = Accelerator(cpu=True), loop.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for size, steps in ((16, 10), (8, 19)):
        data = DataLoader(TensorDataset(loop.X, loop.Y), batch_size=4)
        loader, _ = attach(accelerator, size, data=data, optimizer=optimizer, max_duration="1ep")
        for batch in loader:
            with accelerator.accumulate(model):
                of_loss(mean_loss)(accelerator, model, optimizer, *batch)
        assert loader.run.timer.batch == steps


@pytest.mark.small
def test_a_loop_without_accumulate_is_refused_where_it_is_wrong() -> None:
    for every, size in ((1, 4), (3, 4), (8, 4), (2, 16)):
        with pytest.raises(TrainingError, match="accumulate"):
            own_loop(every, micro_batch_size=size)
    # The passes of each step, then one update: right without it, too.
    assert own_loop(1, micro_batch_size=16) == 10
    with pytest.raises(TrainingError, match="accumulate"):
        own_loop(1, micro_batch_size=16, skips=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one(
    whole: dict[str, Any], launch_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    launch_ranks(Path(__file__).with_name("accelerate_loop.py"), tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]

    def ids_of(name: str) -> list[list[int]]:
        pairs = zip(ranks[0][name]["ids"], ranks[1][name]["ids"], strict=True)
        return [sorted(one + other) for one, other in pairs]

    assert ids_of("two") == ids_of("sharded") == IDS
    assert ids_of("resumed") == IDS[6:]
    for name in ("noise", "sharded noise"):
        assert sum(map(len, ids_of(name))) == 2 * loop.N
        assert ranks[0][name]["noise"] == ranks[1][name]["noise"] is not None
    for rank in ranks:
        assert rank["two"]["rates"] == whole["rates"]
        close(rank["two"], whole["weights"])
        close(rank["resumed"], whole["weights"])
        close(rank["sharded"], whole["weights"])
        close(rank["weighted"], by_hand(is_weighted=True))
    alone = loop.train(load=tmp_path / "saved", micro_batch_size=7)
    assert alone["ids"] == IDS[6:]
    close(alone, whole["weights"])
