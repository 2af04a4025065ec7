from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import TrainingError
from stretto.run_folder import locked
from stretto.training import Callback, Checkpointing, Evaluation
from stretto.training.algorithms import LayerFreezing, StochasticDepth
from stretto.training.loop import Stops

Make = Callable[..., Any]


@pytest.fixture
def usual_handler() -> Iterator[Any]:
    """Python's own handler of SIGINT: what is started in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_remembered_and_the_second_is_as_always(
    usual_handler: Any, problem: Make
) -> None:
    with Stops(problem().trainer().run) as stops:
        os.kill(os.getpid(), signal.SIGINT)
        assert stops.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is usual_handler
    with stops:
        assert stops.received is None


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


def ends_at(event: str) -> Callback:
    """Ends the run at an event of batch 8, as early stopping does."""

    def end(self: Callback, run: Any, *_: Any) -> None:
        if run.timer.batch == 8:
            run.stop("not better")

    found: Callback = type("Ends", (Callback,), {event: end})()
    return found


ENDS = ("on_batch_end", "on_log", "on_evaluation_end", "on_epoch_end", "on_checkpoint_start")


@pytest.mark.parametrize("event", ENDS)
@pytest.mark.parametrize("every", ["1ba", "4ba", "1ep", "3ba"])
def test_a_run_that_has_ended_trains_no_more_when_it_is_resumed(
    event: str, every: str, problem: Make, tmp_path: Path
) -> None:
    run = problem()
    settings: dict[str, Any] = {
        "folder": tmp_path,
        "checkpoint": Checkpointing(every),
        "evaluate": Evaluation(run.data, "4ba"),
        "log": "4ba",
    }
    ended = run.trainer(**settings, callbacks=[ends_at(event)])
    ended.fit()
    is_late = event == "on_checkpoint_start" and every == "3ba"
    assert ended.timer.batch == (16 if is_late else 8)
    if is_late:
        return
    for _ in range(2):
        again = problem().trainer(**settings)
        with pytest.warns(RuntimeWarning, match="not better"):
            again.fit(resume="auto")
        assert (again.timer.batch, again.stop_reason) == (8, "not better")
    again.fit()  # in the same program, that is on purpose
    assert (again.timer.batch, again.stop_reason) == (16, None)


def test_a_run_that_has_ended_continues_on_purpose(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}
    problem().trainer(**settings, callbacks=[ends_at("on_batch_end")]).fit()
    whole, again = problem(), problem()
    whole.trainer().fit()
    trainer = again.trainer(**settings)
    trainer.fit(resume="auto", even_if_stopped=True)
    assert trainer.timer.batch == 16
    assert torch.equal(whole.weights(), again.weights())


@pytest.mark.parametrize("ends", [False, True])
def test_a_signal_ends_no_run_but_early_stopping_beside_one_does(
    ends: bool, problem: Make, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}

    class KillAtEnd(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 7:
                os.kill(os.getpid(), signal.SIGTERM)  # it is seen in the next step

    end = [ends_at("on_batch_end")] if ends else []
    stopped = problem().trainer(**settings, callbacks=[KillAtEnd(), *end])
    stopped.fit(on_signal="return")
    assert (stopped.timer.batch, stopped.stop_reason) == (8, "received SIGTERM")
    again = problem().trainer(**settings)
    with nullcontext() if not ends else pytest.warns(RuntimeWarning, match="not better"):
        again.fit(resume="auto")
    assert again.timer.batch == (8 if ends else 16)


def test_a_length_that_has_passed_is_told(problem: Make, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"folder": tmp_path, "checkpoint": Checkpointing("1ep")}
    problem().trainer(**settings).fit()
    problem().trainer(**settings).fit(resume="auto")  # a job that is started again: no warning
    shorter = problem().trainer(**settings, max_duration="1ep")
    with pytest.warns(RuntimeWarning, match="max_duration"):
        shorter.fit(resume="auto")


def test_a_resume_within_training_is_refused(problem: Make, tmp_path: Path) -> None:
    class Again(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            trainer.resume()

    trainer = problem().trainer(folder=tmp_path, callbacks=[Again()])
    with pytest.raises(TrainingError, match="inside of training"):
        trainer.fit()


def test_an_error_of_the_data_is_not_one_of_the_folder(problem: Make, tmp_path: Path) -> None:
    class Gone(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError(2, "no such file", "sample.pt")

    with pytest.raises(FileNotFoundError, match=r"sample\.pt"):
        problem().trainer(train_data=Gone(), folder=tmp_path).fit()


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
