from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.training import Callback, Checkpointing, Evaluation
from stretto.training.algorithms import LayerFreezing, StochasticDepth
from stretto.training.interrupt import Interrupts

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


def test_one_that_is_open_around_another_hears_of_it_too(usual_handler: Any) -> None:
    with Interrupts() as around, Interrupts() as within:
        os.kill(os.getpid(), signal.SIGINT)
        assert (around.received, within.received) == ("SIGINT", "SIGINT")
        with pytest.raises(KeyboardInterrupt):  # the second is as before them both
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is usual_handler
    with Interrupts() as around:
        with Interrupts() as within:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert (around.received, within.received) == ("SIGINT", None)


def test_a_run_that_is_stopped_at_its_start_computes_nothing(problem: Make, tmp_path: Path) -> None:
    class Never(Callback):
        is_willing = False

        def on_fit_start(self, trainer: Any) -> None:
            if not self.is_willing:
                trainer.stop("not today")

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
        def on_batch_end(self, trainer: Any, step: Any) -> None:
            if trainer.timer.batch % 5 == 0:
                trainer.stop("a break")

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
        def on_batch_end(self, trainer: Any, step: Any) -> None:
            if trainer.timer.batch == 2:
                assert not trainer.model[0].weight.requires_grad
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
