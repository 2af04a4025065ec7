"""stretto in the trainer of Composer, against the real package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

# Not importorskip: Composer fails to import beside a torch for the CPU, until its operators exist.
pytest.importorskip("torch_optimizer", reason="needs stretto[composer]: make test-adapters")

import tests.integrations.torchvision_operators  # noqa: F401

# isort: split
import torch
from composer.algorithms import EMA, SAM, GradientClipping
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.loggers import InMemoryLogger
from composer.optim import CosineAnnealingScheduler
from tests.integrations import toys
from tests.integrations.composer_toys import Model, Trained
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanSquaredError

from stretto.batching import NoiseScale, Plateau
from stretto.errors import StrettoError, TrainingError
from stretto.integrations.composer import ComposerCallback
from stretto.planning import plan
from stretto.settings import Loading
from stretto.timing import Horizon

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = toys.planned_ids()
MICRO: dict[str, Any] = {"device_train_microbatch_size": 8}
EPOCH, STEPS = 13, 17
"""Steps of the first epoch, and of the run."""
# Composer adds the losses of a micro-batch in float32.
CLOSE = 1e-8


def made_of(kind: type[ComposerCallback]) -> Any:
    return lambda size, schedules, **more: kind(batch_size=size, schedules=schedules, **more)


class Reversed(DistributedSampler[Any]):
    """An order of its own."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def reversed_loader() -> DataLoader[Any]:
    rows = toys.rows()
    return DataLoader(rows, 8, sampler=Reversed(rows, num_replicas=1, rank=0))


def close(model: torch.nn.Module, weights: Tensor) -> None:
    torch.testing.assert_close(toys.flat(model), weights, rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def big_batches() -> Tensor:
    return toys.one_big_batch()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    """A run that nothing interrupts, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return Trained(save_folder=str(folder), save_interval="1ba", save_filename="{batch}.pt"), folder


def test_a_trainer_follows_the_plan(whole: Any, big_batches: Tensor) -> None:
    run, _ = whole
    assert run.ids == IDS
    assert run.watch.rates == toys.planned_rates()
    assert max(run.model.micro_sizes) == 8
    close(run.model, big_batches)


def test_the_clocks_agree(whole: Any) -> None:
    run, _ = whole
    assert run.clocks == [(2, STEPS, 2 * toys.N, 0)] * 2
    assert run.watch.epochs == [(1, EPOCH), (2, STEPS)]
    assert run.watch.evaluated == [(EPOCH, 1), (STEPS, 2)]


# In the first and the second epoch, and where one ends.
@pytest.mark.parametrize("at", [1, 9, EPOCH, EPOCH + 1, 16])
@pytest.mark.parametrize("size", [8, 5])
def test_a_run_resumes_exactly(whole: Any, big_batches: Tensor, at: int, size: int) -> None:
    run = Trained(load_path=str(whole[1] / f"{at}.pt"), size=size)
    assert run.ids == IDS[at:]
    assert run.watch.rates == toys.planned_rates()[at:]
    close(run.model, big_batches)
    assert run.clocks == [(2, STEPS, 2 * toys.N, 0)] * 2


def test_algorithms_and_callbacks_stay(big_batches: Tensor) -> None:
    clip = GradientClipping(clipping_type="norm", clipping_threshold=1e6)  # clips nothing
    kept, logged = EMA(half_life="10ba"), InMemoryLogger()
    run = Trained(LRMonitor(), SpeedMonitor(), algorithms=[clip, kept], loggers=[logged])
    assert run.ids == IDS
    assert [rate for _, rate in logged.data["lr-AdamW/group0"]] == toys.planned_rates()
    assert [size for _, size in logged.data["batch_size"]][:9] == [8] * 9
    close(run.model, big_batches)


def test_schedulers_of_the_trainer_stay() -> None:
    settings: dict[str, Any] = {"schedules": None, "schedulers": CosineAnnealingScheduler()}
    run = Trained(max_duration="300sp", **settings)
    assert run.ids == IDS
    # Composer asks with the clock before the step that it has finished.
    starts = [0, 0, *(sum(map(len, IDS[:step])) for step in range(1, STEPS - 1))]
    rates = [toys.RATE * (1 + math.cos(math.pi * start / 300)) / 2 for start in starts]
    assert run.watch.rates == pytest.approx(rates)
    with pytest.raises(TrainingError, match="samples"):
        Trained(**settings)
    with pytest.raises(TrainingError, match="schedules"):
        Trained(schedulers=CosineAnnealingScheduler())


@pytest.mark.parametrize(
    ("length", "clock"),
    [
        ("200sp", (1, None, 205, None)),
        ("300sp", (2, STEPS, 300, 0)),
        ("14ba", (1, 14, None, 1)),
        ("1ep", (1, EPOCH, toys.N, 0)),
    ],
)
def test_a_run_may_end_inside_an_epoch_or_with_one(length: str, clock: Any) -> None:
    run = Trained(max_duration=length)
    theirs, ours = run.clocks
    assert theirs == ours
    assert run.run.is_done
    pairs = zip(theirs, clock, strict=True)
    assert length == "200sp" or all(known in (None, seen) for seen, known in pairs)


def test_sizes_follow_the_noise_and_a_rule() -> None:
    run = Trained(policy=NoiseScale(8, 32, c=3), schedules=None, rule={"sqrt": 8})
    steps = run.watch.steps
    assert max(map(len, steps)) > 8
    assert sorted(chain(*steps)) == sorted([*range(toys.N)] * 2)
    assert run.clocks[0] == run.clocks[1]
    assert max(run.watch.rates) > toys.RATE


@pytest.mark.parametrize("size", [8, 3])
def test_the_noise_is_that_of_the_micro_batches(size: int) -> None:
    """A step of one micro-batch is cut in two; both ways measure the same kind of number."""
    seen: list[Any] = []

    class Look(ComposerCallback):
        def batch_end(self, state: Any, logger: Any) -> None:
            super().batch_end(state, logger)
            assert self.noise is not None
            seen.append((self.noise.signals, state.device_train_microbatch_size))

    run = Trained(policy=NoiseScale(8, 9), schedules=None, size=size, callback=made_of(Look))
    first, most = seen[0]
    assert most == size
    assert first.num_samples == 8
    expected = noise_of(run, [3, 3, 2] if size == 3 else [4, 4])
    assert (first.noise_numerator, first.noise_denominator) == pytest.approx(expected)


def noise_of(run: Trained, sizes: list[int]) -> tuple[float, float]:
    """Return S and G2 of McCandlish et al. for the first step, from gradients of parts."""
    rows = toys.rows()[run.watch.steps[0]]
    model, at, gradients = toys.network(), 0, []
    for size in sizes:
        part = [one[at : at + size] for one in rows]
        loss = toys.mean_loss(model, part)
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([one.flatten() for one in found]))
        at += size
    total = sum(sizes)
    pairs = list(zip(sizes, gradients, strict=True))
    mean = torch.stack([size / total * one for size, one in pairs]).sum(0)
    weighted = sum(size / total * float(one.square().sum()) for size, one in pairs)
    square = float(mean.square().sum())
    variance = (weighted - square) * total / (len(sizes) - 1)
    return variance, square - variance / total


def test_sizes_follow_a_metric() -> None:
    class Measured(Model):
        def get_metrics(self, is_train: bool = False) -> Any:
            return {} if is_train else {"MeanSquaredError": MeanSquaredError()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(outputs.float(), batch[1].float())

    policy = Plateau("eval/MeanSquaredError", start=8, maximum=64, patience=1, mode="max")
    run = Trained(policy=policy, schedules=None, eval_interval="3ba", model=Measured())
    assert max(map(len, run.watch.steps)) == 64


def test_a_plain_data_loader_and_a_stream() -> None:
    assert Trained(dataloader=DataLoader(toys.rows(), 8, shuffle=True)).ids == IDS
    batches = [toys.rows()[start : start + 30] for start in range(0, toys.N, 30)]
    stream = Stream(batches)
    run = Trained(dataloader=stream, device_train_microbatch_size=8, max_duration="300sp")
    assert sorted(chain(*run.ids)) == sorted([*range(toys.N)] * 2)
    assert [len(step) for step in run.ids][:9] == [8] * 9


def test_a_finished_trainer_and_a_foreign_checkpoint_are_refused(tmp_path: Path) -> None:
    run = Trained(max_duration="1ep")
    with pytest.raises(TrainingError, match="reset_time=True"):
        run.trainer.fit(reset_time=True)
    Trained(save_folder=str(tmp_path), save_interval="5ba", save_filename="{batch}.pt")
    settings: dict[str, Any] = {"load_path": str(tmp_path / "5.pt")}
    with pytest.raises(TrainingError, match="stretto"):
        Trained(load_ignore_keys=["state/callbacks"], **settings)
    assert Trained(load_weights_only=True, **settings).ids == IDS


def test_the_noise_beside_sam_is_refused() -> None:
    with pytest.raises(TrainingError, match="SAM"):
        Trained(policy=NoiseScale(8, 32), schedules=None, algorithms=[SAM()])


def test_parts_that_split_batch_counts_otherwise_are_noticed() -> None:
    from composer import DataSpec

    def split(batch: Any, _: Any) -> list[Any]:
        return [batch]

    loader = DataSpec(DataLoader(toys.rows(), 8, shuffle=True), split_batch=split)
    with pytest.raises(TrainingError, match="batches"):
        Trained(dataloader=loader, policy=NoiseScale(8, 32), schedules=None)


class Stream:
    """Batches of a number that only their end tells."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_noise_of_steps_in_several_pieces(workers: int) -> None:
    """Workers and iterables give a step in pieces, which are joined."""
    loader = DataLoader(toys.rows(), 8, shuffle=True, num_workers=workers)
    settings: dict[str, Any] = {"policy": NoiseScale(8, 32, c=3), "schedules": None}
    run = Trained(dataloader=loader, **settings)
    assert run.ids == Trained(**settings).ids
    batches = [toys.rows()[start : start + 30] for start in range(0, toys.N, 30)]
    run = Trained(dataloader=Stream(batches), max_duration="300sp", **MICRO, **settings)
    assert max(map(len, run.ids)) > 8


@pytest.mark.parametrize("length", ["2ep", "15ba"])
@pytest.mark.parametrize("policy", [8, toys.SIZES, "0sp:8 100sp:31"])
def test_samples_may_be_dropped_at_the_end_of_an_epoch(policy: Any, length: str) -> None:
    dropped = Loading(seed=toys.SEED, last_batch="drop")
    run = Trained(policy=policy, loading=dropped, max_duration=length)
    planned = plan(Horizon(length, dataset_num_samples=toys.N, last_batch="drop"), policy)
    assert [len(step) for step in run.ids] == [one.size for one in planned.batches()]
    assert int(run.trainer.state.timestamp.batch) == planned.num_batches
    if length == "2ep":
        assert int(run.trainer.state.timestamp.epoch) == 2


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("length", ["3ep", "45ba"])
def test_a_checkpoint_of_the_last_step_of_an_epoch(
    length: str, last_batch: Any, tmp_path: Path
) -> None:
    """Composer saves it before it ends the epoch; after a resume, the epoch ends at once."""
    settings: dict[str, Any] = {
        "policy": 10 if last_batch == "keep" else 9,
        "loading": Loading(seed=toys.SEED, last_batch=last_batch),
        "max_duration": length if last_batch == "keep" else length.replace("45", "48"),
    }
    steps = 15 if last_batch == "keep" else 16
    names: dict[str, Any] = {"save_folder": str(tmp_path), "save_filename": "{batch}.pt"}
    whole = Trained(**settings, **names, save_interval=f"{steps}ba")
    rest = Trained(**settings, load_path=str(tmp_path / f"{steps}.pt"))
    assert rest.ids == whole.ids[steps:]
    ends = [(1, steps), (2, 2 * steps), (3, 3 * steps)]
    assert (rest.watch.epochs, whole.watch.epochs) == (ends, ends)
    assert rest.watch.evaluated == whole.watch.evaluated
    assert rest.clocks[0][:3] == whole.clocks[0][:3]


def test_a_length_that_is_not_known_is_not_shown() -> None:
    seen = set()

    class Look(ComposerCallback):
        def batch_start(self, state: Any, logger: Any) -> None:
            super().batch_start(state, logger)
            seen.add(state.dataloader_len)

    run = Trained(policy=NoiseScale(8, 32, c=3), schedules=None, callback=made_of(Look))
    assert seen == {None}
    assert run.clocks[0] == run.clocks[1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"train_subset_num_batches": 3}, "train_subset_num_batches=3"),
        ({"max_duration": None, "fit": {"duration": "1ep"}}, "no max_duration"),
        ({"fit": {"duration": "3ep"}}, "what fit"),
        ({"fit": {"train_subset_num_batches": 3}}, "what fit"),
        ({"fit": {"schedulers": CosineAnnealingScheduler()}}, "two schedules"),
        ({"loading": Loading(last_batch="drop"), "max_duration": "300sp"}, "drop the last"),
        ({"schedules": "cosine"}, "a mapping such as"),
        ({"dataloader": reversed_loader()}, "dealt to the ranks"),
        ({"max_duration": "2iter"}, "train for"),
        ({"policy": "0sp:8 1ep:oops"}, "oops"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_what_cannot_work_is_refused(settings: Any, why: str) -> None:
    with pytest.raises(StrettoError, match=why):
        Trained(**settings)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.__version__", "1.0.0")
    with pytest.raises(TrainingError, match="Composer"):
        Trained()


def test_samples_that_composer_counts_otherwise_are_noticed() -> None:
    from composer import DataSpec

    loader = DataLoader(toys.rows(), 8, shuffle=True)
    twice = DataSpec(loader, get_num_samples_in_batch=lambda batch: 2 * len(batch[0]))
    with pytest.raises(TrainingError, match="get_num_samples_in_batch"):
        Trained(dataloader=twice)


def test_the_hooks_that_composer_does_not_document_exist() -> None:
    """If this fails, the adapter must be checked against the new version of Composer."""
    run = Trained(max_duration="1ep")
    state = run.trainer.state
    assert state.dataset_resumption == {"train": True}
    assert "loss/train/total" in state.total_loss_dict
    assert state.train_dataloader is state.dataloader
    assert int(state.dataloader_len) == EPOCH


def test_two_ranks(launch_ranks: Callable[..., Any], tmp_path: Path, big_batches: Tensor) -> None:
    script = Path(__file__).with_name("distributed_composer.py")
    launch_ranks(script, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ids"] == IDS
    assert result["rates"] == toys.planned_rates()
    assert result["clocks"] == [[2, STEPS, 2 * toys.N, 0]] * 2
    assert result["evaluated"] == [[EPOCH, 1], [STEPS, 2]]
    weights = torch.tensor(result["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, big_batches, rtol=0, atol=CLOSE)
    assert "2 ranks" in result["refused"]
    # With one rank instead of two, and other micro-batches.
    run = Trained(load_path=str(tmp_path / "saved" / "11.pt"), size=5)
    assert run.ids == IDS[11:]
    close(run.model, big_batches)
