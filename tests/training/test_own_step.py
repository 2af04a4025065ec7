"""Steps of your own: what the trainer does for its own step, it does for any."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.steps import GANStep, MuonStep, SAMStep
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.batching import NoiseScale
from stretto.errors import StrettoError, TrainingError
from stretto.memory import find_batch_size
from stretto.memory.step import WholeStep, read_step, step_bytes
from stretto.run_folder import read_ledger
from stretto.runtime import SupervisedStep, TrainStep
from stretto.training import Checkpointing, Evaluation, Loading, Logging, Trainer

Make = Callable[..., Any]
INPUTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = torch.randn(40, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
DATA = TensorDataset(INPUTS, TARGETS)


def net(*sizes: int) -> nn.Sequential:
    first, middle, last = sizes or (5, 8, 2)
    layers = nn.Sequential(nn.Linear(first, middle), nn.Tanh(), nn.Linear(middle, last))
    return layers.double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    # What torch computes `mse_loss` with is kept as long as the loss is.
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def muon_step() -> TrainStep:
    return MuonStep(net(), loss, lr=0.01)


def sam_step() -> TrainStep:
    model = net()
    return SAMStep(model, sgd(model.parameters()), loss, radius=0.05)


def gan_step() -> TrainStep:
    return GANStep(net(3, 8, 5), net(5, 8, 1), sgd, noise=3)


STEPS: dict[str, Callable[[], TrainStep]] = {"Muon": muon_step, "SAM": sam_step, "GAN": gan_step}


def data_of(name: str) -> Any:
    return list(INPUTS) if name == "GAN" else DATA


def trainer_of(name: str, seed: int = 0, **settings: Any) -> Trainer:
    torch.manual_seed(seed)
    step = settings.pop("step", None) or STEPS[name]()
    given: dict[str, Any] = {
        "max_duration": "2ep",
        "batch_size": 8,
        "micro_batch_size": 3,
    } | settings
    return Trainer(step, data_of(name), **given)


def everything(trainer: Trainer) -> list[Tensor]:
    found = list(trainer.model.state_dict().values())
    for optimizer in trainer.step.optimizers:
        for state in optimizer.state.values():
            values = (value for _, value in sorted(state.items()))
            found += [value for value in values if isinstance(value, Tensor)]
    return found


def assert_same(one: Trainer, other: Trainer) -> None:
    pairs = list(zip(everything(one), everything(other), strict=True))
    assert len(pairs) >= 8
    assert all(torch.equal(a, b) for a, b in pairs)


def plain_loop(name: str, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """The same in a loop of torch, a whole batch at a time."""
    for start in [*range(0, 40, 8)] * 2:
        batch = (INPUTS[start : start + 8], TARGETS[start : start + 8])
        loss(model, batch).backward()
        if name == "SAM":
            parameters = list(model.parameters())
            gradients = [p.grad.clone() for p in parameters if p.grad is not None]
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.add_(g, alpha=0.05 / norm.item())
            model.zero_grad()
            loss(model, batch).backward()
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(g, alpha=0.05 / norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["Muon", "SAM"])
def test_it_is_the_plain_loop_of_whole_batches(name: str) -> None:
    trainer = trainer_of(name, loading=Loading(shuffle=False))
    trainer.fit()
    torch.manual_seed(0)
    other = STEPS[name]()
    plain_loop(name, other.model, list(other.optimizers))
    for ours, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_a_run_that_is_resumed_is_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    whole = trainer_of(name, folder=tmp_path / "a", checkpoint=Checkpointing("7ba", keep=9))
    whole.fit()
    torch.manual_seed(9)
    again = trainer_of(name, seed=9)
    again.resume(sorted((tmp_path / "a" / "checkpoints").iterdir())[0])
    assert again.timer.batch == 7
    again.fit()
    assert_same(whole, again)


@pytest.mark.filterwarnings("ignore:memory ran out:RuntimeWarning")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches(name: str) -> None:
    def limited(step: TrainStep) -> None:
        take = step.forward_backward

        def forward_backward(batch: Any, weight: float) -> Tensor:
            found = take(batch, weight)  # leaves a gradient behind, and what the step keeps
            if len(batch if isinstance(batch, Tensor) else batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

        step.forward_backward = forward_backward  # type: ignore[method-assign]

    trainer = trainer_of(name, micro_batch_size=8)
    limited(trainer.step)
    trainer.fit()
    other = trainer_of(name, micro_batch_size=4)
    other.fit()
    net_of_it = trainer._loop.stepper.retry
    assert net_of_it is not None
    assert net_of_it.splits == 1
    assert_same(trainer, other)


def wide(name: str) -> TrainStep:
    """A step with wide layers."""
    if name == "GAN":
        return GANStep(net(64, 300, 64), net(64, 300, 1), sgd, noise=64)
    model = net(64, 300, 64)
    if name == "Muon":
        return MuonStep(model, loss, lr=0.01)
    return SAMStep(model, sgd(model.parameters()), loss, radius=0.05)


@pytest.mark.parametrize("name", STEPS)
def test_its_memory_is_tried_and_it_travels_to_the_phantom(name: str) -> None:
    step = wide(name)

    def make_batch(size: int) -> Any:
        inputs = torch.ones(size, 64, dtype=torch.float64)
        return inputs if name == "GAN" else (inputs, inputs)

    assert find_batch_size(step, make_batch, maximum=16).size == 16
    assert not any(optimizer.state for optimizer in step.optimizers)
    copy: WholeStep = read_step(step_bytes(WholeStep.of(step)), "cpu")
    copy.run(make_batch(4))


def test_schedules_are_those_of_every_optimizer_and_of_one() -> None:
    trainer = trainer_of("Muon", schedules={"lr": 0.5, "weight_decay@1": 0.1})
    built = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    trainer.fit()
    first, second = trainer.optimizer.param_groups
    assert first["lr"] == second["lr"] == 0.005
    assert first["weight_decay"] == built[0]
    assert second["weight_decay"] == pytest.approx(0.1 * built[1])
    # A second run with the same optimizers begins with what they were built with.
    again = trainer_of("Muon", step=trainer.step, schedules={"lr": 0.5})
    again.fit()
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.005, 0.005]


class Plain(TrainStep):
    """The trainer's own step, by hand."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizers = [sgd(self.model.parameters())]

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        found = loss(self.model, batch)
        (found * weight).backward()
        return found

    def update(self) -> Mapping[str, float | Tensor]:
        self.optimizers[0].step()
        return {"steps": 1.0}


def test_noise_is_measured_as_with_the_own_step_of_the_trainer(tmp_path: Path) -> None:
    policy = NoiseScale(4, 16)
    trainer = trainer_of("", step=Plain(), batch_size=policy, folder=tmp_path / "own")
    trainer.fit()
    torch.manual_seed(0)
    model = net()
    torch.manual_seed(0)
    model = net()
    other = Trainer(
        model,
        DATA,
        optimizer=sgd(model.parameters()),
        loss=loss,
        max_duration="2ep",
        batch_size=policy,
        micro_batch_size=3,
        folder=tmp_path / "other",
    )
    other.fit()
    lines = [list(read_ledger(tmp_path / folder)) for folder in ("own", "other")]
    assert lines[0] == lines[1]


class Hesitant(Plain):
    """Does nothing in every second step."""

    calls = 0

    def update(self) -> Mapping[str, float | Tensor]:
        self.calls += 1
        return self.SKIPPED if self.calls % 2 else super().update()


def test_steps_that_left_the_weights_alone_are_counted() -> None:
    trainer = trainer_of("", step=Hesitant())
    trainer.fit()
    assert trainer.run.skipped_steps == 5


class Counting(Plain):
    """Keeps state of its own: a number and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.average = 0, torch.zeros(2)

    def update(self) -> Mapping[str, float | Tensor]:
        self.seen, self.average = self.seen + 1, self.average + 1
        return super().update()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.average = state["seen"], state["average"]


def test_state_of_its_own_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_of("", step=Counting(), folder=tmp_path, checkpoint=Checkpointing("3ba"))
    trainer.fit()
    step = Counting()
    trainer_of("", step=step).resume(sorted((tmp_path / "checkpoints").iterdir())[-1])
    assert (step.seen, step.average.tolist()) == (10, [10.0, 10.0])


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_norm_of_the_gradient_is_logged_as_the_mean_since_the_last_line(
    problem: Make, tmp_path: Path
) -> None:
    norms: list[float] = []

    def keep(*arguments: Any, **options: Any) -> Tensor:
        norms.append(float(clip(*arguments, **options)))
        return torch.tensor(norms[-1])

    clip = nn.utils.clip_grad_norm_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", keep)
        problem().trainer(
            folder=tmp_path,
            clip_norm=0.5,
            log=Logging("4ba", console=False),
            max_duration="8ba",
        ).fit()
    lines = [line["grad_norm"] for line in metrics(tmp_path)]
    means = [sum(norms[at : at + 4]) / 4 for at in (0, 4)]
    assert lines == pytest.approx(means, rel=1e-6)


def test_means_go_on_where_a_checkpoint_was_between_two_lines(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"log": Logging("4ba", console=False), "max_duration": "8ba"}
    checkpoint = Checkpointing("3ba", keep=9)
    trainer_of("SAM", folder=tmp_path / "a", checkpoint=checkpoint, **settings).fit()
    again = trainer_of("SAM", folder=tmp_path / "b", **settings)
    again.resume(sorted((tmp_path / "a" / "checkpoints").iterdir())[0])
    again.fit()
    lines = [line["grad_norm"] for line in metrics(tmp_path / "a")]
    assert [line["grad_norm"] for line in metrics(tmp_path / "b")] == lines[-2:]


class Loud(Plain):
    """Has the name of another value on the line."""

    def update(self) -> Mapping[str, float | Tensor]:
        return {"loss": 1.0}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: trainer_of("", step=Plain(), clip_norm=1.0),
            "clip_norm",
        ),
        (
            lambda: trainer_of("", step=Plain(), precision="bf16"),
            "precision",
        ),
        (lambda: trainer_of("", step=Plain(), loss=loss), "loss"),
        (
            lambda: trainer_of("", step=Plain(), evaluate=Evaluation(DATA)),
            "evaluate",
        ),
        (lambda: trainer_of("", step=Loud()).fit(), "cannot log 'loss'"),
    ],
)
def test_what_a_step_decides_itself_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        make()


def test_a_step_without_optimizers_says_what_is_missing() -> None:
    step = Plain()
    del step.optimizers
    with pytest.raises(TrainingError, match="optimizers"):
        trainer_of("", step=step)


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer_of("Muon", folder=tmp_path, checkpoint=Checkpointing("1ep")).fit()
    step = MuonStep(net(), loss, lr=0.01)
    step.optimizers = [*step.optimizers[::-1]]
    with pytest.raises(StrettoError, match="optimizer"):
        trainer_of("", step=step).resume(tmp_path)


def test_the_own_step_of_the_trainer_may_be_given_as_one() -> None:
    runs = []
    for given in (True, False):
        torch.manual_seed(0)
        model = net()
        optimizer = sgd(model.parameters())
        settings: dict[str, Any] = {"max_duration": "2ep", "batch_size": 8}
        if given:
            step = SupervisedStep(model, optimizer, loss, clip_norm=0.5)
            trainer = Trainer(step, DATA, evaluate=Evaluation(DATA), **settings)
        else:
            settings |= {"optimizer": optimizer, "loss": loss, "evaluate": Evaluation(DATA)}
            trainer = Trainer(model, DATA, clip_norm=0.5, **settings)
        trainer.fit()
        runs.append(trainer)
    assert_same(*runs)
