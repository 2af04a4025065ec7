"""Optimizers that keep other weights in the model for training than for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.checkpoint import load_weights
from stretto.training import Callback, Checkpointing, Evaluation, Run
from stretto.training.algorithms import ExponentialMovingAverage
from stretto.training.evaluate import is_switched

Make = Callable[..., Any]


class Free(torch.optim.SGD):
    """Trains at another point than it is evaluated at, and rounds on the way; as `schedulefree`."""

    def __init__(self, parameters: Any, *, keeps_mode: bool) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self._mode: dict[str, Any] = self.param_groups[0] if keeps_mode else {}
        self._mode["trains"] = False

    def _group(self) -> dict[str, Any]:
        return self.param_groups[0] if "trains" in self.param_groups[0] else self._mode

    def _move(self, factor: float) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.data.mul_(factor)

    def train(self) -> None:
        if not self._group()["trains"]:
            self._group()["trains"] = True
            self._move(3.0)

    def eval(self) -> None:
        if self._group()["trains"]:
            self._group()["trains"] = False
            self._move(1 / 3)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self._group()["trains"], "a step with the weights for evaluation"
        super().step(closure)


class Look(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        run.evaluate()


class Stop(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_batch_end(self, run: Run, step: Any) -> None:
        if run.timer.batch == self.at:
            run.stop("enough", is_final=False)


def trained(problem: Make, *callbacks: Callback, mode: bool = True, **settings: Any) -> Any:
    run = problem()
    return run.trainer(
        optimizer=Free(run.model.parameters(), keeps_mode=mode),
        evaluate=Evaluation(run.data, "3ba", metrics={"size": size}),
        callbacks=callbacks,
        **settings,
    )


def size(model: Any, batch: Any) -> Tensor:
    del batch
    return torch.as_tensor(sum(float(one.detach().abs().sum()) for one in model.parameters()))


def test_evaluations_and_checkpoints_have_the_weights_for_evaluation(
    problem: Make, tmp_path: Path
) -> None:
    trainer = trained(problem, folder=tmp_path, checkpoint=Checkpointing("4ba"))
    trainer.fit()
    measured = trainer.evaluate()["validation/size"]
    assert measured == pytest.approx(float(size(trainer.model, None)))
    loaded = problem().model
    load_weights(loaded, sorted((tmp_path / "checkpoints").iterdir())[-1])
    assert float(size(loaded, None)) == pytest.approx(measured, rel=1e-12)
    assert trainer.evaluate()["validation/size"] == measured
    trainer.optimizer.train()
    assert float(size(trainer.model, None)) == pytest.approx(3 * measured)


@pytest.mark.parametrize("mode", [True, False], ids=["in its groups", "in an attribute"])
def test_looks_and_resumes_change_no_bit(problem: Make, tmp_path: Path, mode: bool) -> None:
    whole = trained(problem, mode=mode)
    whole.fit()
    expected = [one.tolist() for one in whole.model.parameters()]
    looked = trained(problem, Look(), mode=mode)
    looked.fit()
    assert [one.tolist() for one in looked.model.parameters()] == expected
    for at in (1, 3, 8):
        settings: dict[str, Any] = {
            "folder": tmp_path / str(at),
            "checkpoint": Checkpointing("4ba"),
            "mode": mode,
        }
        trained(problem, Stop(at), **settings).fit()
        again = trained(problem, **settings)
        again.fit(resume="auto")
        assert [one.tolist() for one in again.model.parameters()] == expected


class Switch(Callback):
    """What users write where nothing is switched for them."""

    def __init__(self) -> None:
        self.optimizer: Any = None

    def on_evaluation_start(self, run: Run, name: str) -> None:
        self.optimizer.eval()

    def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
        self.optimizer.train()


def test_a_callback_that_switches_already_does_no_harm(problem: Make) -> None:
    plain, switch = trained(problem), Switch()
    plain.fit()
    trainer = trained(problem, switch)
    switch.optimizer = trainer.optimizer
    trainer.fit()
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_averages_of_switched_weights_are_evaluated(problem: Make) -> None:
    average = ExponentialMovingAverage(0.9)
    trainer = trained(problem, average, Look())
    trainer.fit()
    with average.averaged():
        expected = float(size(trainer.model, None))
    assert trainer.evaluate()["validation/size"] == pytest.approx(expected)


def test_only_methods_without_arguments_are_the_protocol() -> None:
    class Other(torch.optim.SGD):
        def train(self, closure: Any) -> None: ...

        def eval(self, metric: Any) -> None: ...

    class WithDefault(torch.optim.SGD):
        def train(self, mode: bool = True) -> None: ...

        def eval(self) -> None: ...

    weights = [nn.Parameter(torch.zeros(2))]
    kinds = (torch.optim.SGD, Other, WithDefault)
    assert [is_switched(kind(weights, lr=0.1)) for kind in kinds] == [False, False, True]
