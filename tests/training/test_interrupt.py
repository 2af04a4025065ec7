from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import TrainingError
from stretto.training import Callback, Checkpointing, Evaluation
from stretto.training.algorithms import LayerFreezing, StochasticDepth
from stretto.training.checkpointing.records import locked
from stretto.training.loop import Interrupts

Make = Callable[..., Any]


@pytest.fixture
def usual_handler() -> Iterator[Any]:
    """Python's own handler of SIGINT: what is started in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_remembered_and_the_second_is_as_always(usual_handler: Any) -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is usual_handler
    with interrupts:
        assert interrupts.received is None


class Kill(Callback):
    """Sends a signal in an event of choice, once."""

    def __init__(self, number: signal.Signals, event: str) -> None:
        self._left, self.number = 1, number
        setattr(self, event, self._kill)

    def _kill(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self.number)

    def on_batch_end(self, run: Any, step: Any) -> None: ...
    def on_evaluation_end(self, run: Any, name: str, metrics: Any) -> None: ...


RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.mark.parametrize("number", RAISED)
def test_a_signal_ends_the_program_when_the_checkpoint_is_written(
    number: signal.Signals, problem: Make, tmp_path: Path
) -> None:
    """A script's next line would save a model that is not trained."""
    trainer = problem().trainer(
        folder=tmp_path,
        checkpoint=Checkpointing("10ep"),
        callbacks=[Kill(number, "on_batch_end")],
    )
    with pytest.raises(RAISED[number]) as ended:
        trainer.fit()
    assert getattr(ended.value, "code", 143) == 143
    assert trainer.stop_reason == f"received {number.name}"
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert int(path.name[-12:]) == trainer.timer.sample
    with locked(tmp_path):  # nothing is held any more
        pass
    trainer.fit()  # and it goes on
    assert (trainer.timer.sample, trainer.stop_reason) == (120, None)


@pytest.mark.parametrize("number", RAISED)
def test_a_signal_that_comes_after_the_last_batch_is_not_lost(
    number: signal.Signals, problem: Make
) -> None:
    run = problem()
    trainer = run.trainer(
        evaluate=Evaluation(run.data, "2ep"), callbacks=[Kill(number, "on_evaluation_end")]
    )
    with pytest.raises(RAISED[number]):
        trainer.fit()
    assert (trainer.timer.sample, trainer.stop_reason) == (120, None)


@pytest.mark.parametrize("number", RAISED)
def test_whoever_asks_for_it_gets_control_back(number: signal.Signals, problem: Make) -> None:
    trainer = problem().trainer(callbacks=[Kill(number, "on_batch_end")])
    trainer.fit(on_signal="return")
    assert trainer.stop_reason == f"received {number.name}"
    assert trainer.timer.sample < 120
    with pytest.raises(TrainingError, match="return"):
        trainer.fit(on_signal="ignore")


def test_a_run_that_is_stopped_at_its_start_computes_nothing(problem: Make, tmp_path: Path) -> None:
    class Never(Callback):
        is_willing = False

        def on_fit_start(self, run: Any) -> None:
            if not self.is_willing:
                run.stop("not today", is_final=False)

    run, never = problem(), Never()
    trainer = run.trainer(
        folder=tmp_path,
        checkpoint=Checkpointing(),
        evaluate=Evaluation(run.data),
        callbacks=[never],
    )
    trainer.fit()
    assert (trainer.timer.batch, trainer.stop_reason) == (0, "not today")
    never.is_willing = True
    trainer.fit()
    assert (trainer.timer.sample, trainer.stop_reason) == (120, None)


def test_a_stopped_run_goes_on_where_fit_is_called_again(problem: Make) -> None:
    class StopEach(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch % 5 == 0:
                run.stop("a break", is_final=False)

    whole, cut = problem(), problem()
    whole.trainer().fit()
    trainer, seen = cut.trainer(callbacks=[StopEach()]), []
    for _ in range(4):
        trainer.fit()
        seen.append(trainer.timer.batch)
    assert seen == [5, 10, 15, 16]
    assert cut.weights().tolist() == whole.weights().tolist()
    trainer.fit()
    assert trainer.timer.batch == 16


def test_an_error_leaves_the_model_as_it_was(problem: Make) -> None:
    class Fail(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 2:
                assert not run.model[0].weight.requires_grad
                raise ZeroDivisionError

    run = problem()
    run.model[0].bias.requires_grad = False  # by whoever built the model: it stays so
    trainer = run.trainer(
        callbacks=[
            StochasticDepth(["1"], rate=0.5),
            LayerFreezing(["0", "2"], start="0ba", end="1sp"),
            Fail(),
        ],
        max_duration="4ba",
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert "forward" not in vars(run.model[1])
    learns = {name: p.requires_grad for name, p in run.model.named_parameters()}
    assert learns == {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": True}
