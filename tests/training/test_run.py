"""What callbacks are given: facts, the loss of the step, values to log, collectives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.ada_scale import AdaScale
from tests.training.conftest import squared_error
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.errors import TrainingError
from stretto.schedules import Cosine, Linear
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run, prepare
from stretto.training.algorithms import SequenceLengthWarmup
from stretto.training.callback import EVENTS, Events

Make = Callable[..., Any]


class Do(Callback):
    """Calls a function at the end of each batch."""

    def __init__(self, work: Callable[[Run, Any], None]) -> None:
        self.work = work

    def on_batch_end(self, run: Run, step: Any) -> None:
        self.work(run, step)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what depends on the clock on the wall."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("sec", "samples_per_second", "tokens_per_second", "memory_peak_bytes", "step_seconds")
    return [{key: value for key, value in one.items() if key not in timed} for one in found]


def test_every_event_gets_the_run_of_the_trainer(problem: Make, tmp_path: Path) -> None:
    class Everything(Callback):
        every = "1ep"

    seen: dict[str, set[int]] = {}
    for name in EVENTS:

        def listen(self: Any, run: Any, *details: Any, name: str = name) -> Any:
            seen.setdefault(name, set()).add(id(run))
            return details[0] if name == "transform_batch" else None

        setattr(Everything, name, listen)
    trainer = problem().trainer(
        folder=tmp_path,
        evaluate=Evaluation(problem().data),
        checkpoint=Checkpointing(),
        callbacks=[Everything()],
    )
    trainer.fit()
    assert seen == {name: {id(trainer.run)} for name in EVENTS}
    run = trainer.run
    assert (run.model, run.optimizers) == (trainer.model, (trainer.optimizer,))
    assert (run.timer, run.horizon, run.plan) == (trainer.timer, trainer.run.horizon, trainer.plan)
    assert run.folder == tmp_path
    assert (run.rank, run.world_size, run.is_first_rank) == (0, 1, True)


def test_the_loss_of_a_step_is_the_mean_over_its_samples(problem: Make) -> None:
    """Of micro-batches of different sizes too; before it is computed it is nan."""
    run, found = problem(), []

    class Look(Callback):
        def on_batch_start(self, run: Run, step: Any) -> None:
            assert math.isnan(run.loss)
            assert run.step is step

        def on_gradient(self, run: Run, step: Any) -> None:
            batches = [micro.batch for micro in step]
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss = nn.functional.mse_loss(run.model(inputs), targets)
            found.append((run.loss, loss.item()))

        def on_batch_end(self, run: Run, step: Any) -> None:
            assert run.loss == found[-1][0]

    run.trainer(batch_size=8, micro_batch_size=3, callbacks=[Look()]).fit()
    assert len(found) == 16
    assert [one for one, _ in found] == pytest.approx([other for _, other in found], rel=1e-12)


def test_a_loss_that_nobody_reads_is_not_computed(problem: Make) -> None:
    run = problem().trainer().run
    run.set_loss(lambda: pytest.fail("was read"))
    run.begin()
    assert math.isnan(run.loss)


def test_what_is_logged_stands_on_the_next_line_reduced_over_its_batches(
    problem: Make, tmp_path: Path
) -> None:
    def log(run: Run, step: Any) -> None:
        run.log("mean", step.num_samples)
        run.log("weighted", torch.tensor(float(step.num_samples)), weight=step.num_samples)
        run.log("sum", step.num_samples, reduce="sum")
        run.log("last", run.timer.batch, reduce="last")
        if step.timestamp.batch == 5:
            run.log("once", 1)

    trainer = problem().trainer(
        batch_size="0sp:4 20sp:10", log=Logging("4ba"), folder=tmp_path, callbacks=[Do(log)]
    )
    trainer.fit()
    first, second, *rest = lines(tmp_path)
    assert [first[key] for key in ("mean", "weighted", "sum", "last")] == [4.0, 4.0, 16.0, 4.0]
    assert [second[key] for key in ("mean", "sum", "last", "once")] == [8.5, 34.0, 8.0, 1.0]
    assert second["weighted"] == pytest.approx((4 * 4 + 3 * 100) / 34)
    assert all("once" not in line for line in (first, *rest))


@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_what_was_logged_before_a_checkpoint_survives_a_resume(
    problem: Make, tmp_path: Path, stop_at: int
) -> None:
    def log(run: Run, step: Any) -> None:
        run.log("a", torch.tensor(run.loss), weight=step.num_samples)
        run.log("b", 1, reduce="sum")
        if run.timer.batch % 4 == 1:
            run.log("c", run.timer.batch, reduce="last")

    def stop(run: Run, step: Any) -> None:
        if run.timer.batch == stop_at:
            run.stop("enough", is_final=False)

    settings: dict[str, Any] = {"log": Logging("4ba"), "checkpoint": Checkpointing("1ep")}
    problem().trainer(folder=tmp_path / "whole", callbacks=[Do(log)], **settings).fit()
    problem().trainer(folder=tmp_path / "cut", callbacks=[Do(log), Do(stop)], **settings).fit()
    again = problem().trainer(folder=tmp_path / "cut", callbacks=[Do(log)], **settings)
    again.resume()
    again.fit()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (lambda run: run.log("loss", 1), "cannot log 'loss': a line of metrics has a value"),
        (lambda run: run.log("lr", 1), "cannot log 'lr': a line of metrics has a value"),
        (lambda run: run.log("a", torch.ones(2)), r"cannot log 'a'"),
        (lambda run: run.log("a", "b"), "cannot log 'a'"),
        (lambda run: run.log("a", 1, reduce="max"), "cannot use reduce='max'"),
        (lambda run: [run.log("a", 1), run.log("a", 1, reduce="sum")], "with reduce='sum'"),
    ],
    ids=["loss", "scheduled", "shape", "text", "reduction", "two"],
)
def test_what_cannot_be_logged_is_refused(problem: Make, log: Any, said: str) -> None:
    trainer = problem().trainer(
        schedules={"lr": 1.0}, log=Logging("1ba"), callbacks=[Do(lambda run, _: log(run))]
    )
    with pytest.raises(TrainingError, match=said):
        trainer.fit()


def small(model: nn.Module, batch: Any) -> Tensor:
    """A loss whose gradient does not overflow at the first loss scale."""
    return 0.01 * nn.functional.mse_loss(model(batch[0]), batch[1])


class Gradients(Callback):
    """Notes the norm of the gradient, and the loss scale would be in it."""

    def __init__(self, limit: float = math.inf) -> None:
        self.seen: list[float] = []
        self.limit = limit

    def on_gradient(self, run: Run, step: Any) -> None:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        self.seen.append(float(torch.cat([one.flatten() for one in gradients]).norm()))
        if len(self.seen) == 3:
            gradients[0].mul_(self.limit)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_callbacks_see_gradients_without_the_loss_scale(problem: Make, clip_norm: Any) -> None:
    found = {}
    for precision in ("fp32", "fp16"):
        run, watch = problem(dtype=torch.float32), Gradients(1.0)
        run.trainer(
            max_duration="4ba",
            loss=small,
            device="cpu",
            precision=precision,
            clip_norm=clip_norm,
            callbacks=[watch],
        ).fit()
        found[precision] = watch.seen
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.02)


def test_looking_at_a_scaled_gradient_changes_no_bit(problem: Make) -> None:
    plain, watched = problem(dtype=torch.float32), problem(dtype=torch.float32)
    plain.trainer(precision="fp16").fit()
    watched.trainer(precision="fp16", callbacks=[Gradients(1.0)]).fit()
    assert torch.equal(plain.weights(), watched.weights())


def test_a_gradient_that_a_callback_makes_infinite_is_skipped(problem: Make) -> None:
    run = problem(dtype=torch.float32)
    trainer = run.trainer(
        loss=small,
        device="cpu",
        precision="fp16",
        callbacks=[Gradients(math.inf)],
    )
    trainer.fit()
    assert trainer.run.skipped_steps == 1
    assert run.weights().isfinite().all()


def test_the_start_of_an_evaluation_is_an_event(problem: Make) -> None:
    seen: list[Any] = []

    class Note(Callback):
        def on_evaluation_start(self, run: Run, name: str) -> None:
            seen.append(("start", name, run.timer.batch))

        def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
            seen.append(("end", name, run.timer.batch))

    data = problem().data
    evaluations = [Evaluation(data, "1ep", name="a"), Evaluation(data, "2ep", name="b")]
    trainer = problem().trainer(evaluate=evaluations, callbacks=[Note()])
    trainer.fit()
    first = [("start", "a", 8), ("end", "a", 8)]
    both = [("start", "a", 16), ("end", "a", 16), ("start", "b", 16), ("end", "b", 16)]
    assert seen == first + both
    with pytest.warns(RuntimeWarning, match="evaluating"):
        trainer.run.evaluate()
    assert seen == first + both


def test_looking_is_no_event_and_what_it_changes_is_undone(problem: Make) -> None:
    seen: list[str] = []

    class Zero(Callback):
        @contextmanager
        def evaluating(self, run: Run) -> Iterator[None]:
            seen.append("in")
            weight = next(run.model.parameters())
            kept = weight.detach().clone()
            weight.data.zero_()
            try:
                yield
            finally:
                weight.data.copy_(kept)
                seen.append("out")

    def broken(model: Any, batch: Any) -> Tensor:
        assert not model[0].weight.any()
        raise ZeroDivisionError

    run = problem()
    before = run.weights()
    trainer = run.trainer(
        evaluate=Evaluation(run.data, metrics={"broken": broken}), callbacks=[Zero()]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert seen == ["in", "out"]
    assert torch.equal(run.weights(), before)


def test_collectives_of_one_rank_give_back_what_they_get(problem: Make) -> None:
    run = problem().trainer().run
    for reduce in ("sum", "mean", "max", "min"):
        assert run.all_reduce(2.5, reduce) == 2.5
        assert torch.equal(run.all_reduce(torch.arange(3), reduce), torch.arange(3))
    value: dict[str, Any] = {"tensor": torch.ones(2, dtype=torch.bfloat16), "rest": (1, b"x")}
    for back in (*run.gather(value), run.broadcast(value)):
        assert torch.equal(back["tensor"], value["tensor"])
        assert back["rest"] == value["rest"]
    run.barrier()
    with pytest.raises(TrainingError, match="set"):
        run.gather({1})
    with pytest.raises(TrainingError, match="reduce"):
        run.all_reduce(1.0, "median")


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 5, (16,), generator=generator) for _ in range(24)]


@pytest.mark.filterwarnings("ignore:SequenceLengthWarmup cuts")
def test_callbacks_work_in_a_loop_of_your_own() -> None:
    """Two of stretto's own, with everything that a loop must do for them."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    callbacks: list[Callback] = [SequenceLengthWarmup(Linear(8, 16, over="50%")), AdaScale(4)]
    run = prepare(
        sequences(),
        "0sp:4 12sp:6",
        max_duration="1ep",
        optimizer=optimizer,
        model=model,
        callbacks=callbacks,
    )
    events, lengths, gains = Events(callbacks, run), [], []
    with events.fit():
        for step in run:
            events.tell("on_batch_start", step)
            for micro in step:
                batch = micro.batch
                for transform in events.listeners("transform_batch"):
                    batch = transform(run, batch)
                lengths.append(batch.shape[1])
                (micro.weight * model(batch).square().mean()).backward()
            events.tell("on_gradient", step)
            optimizer.step()
            optimizer.zero_grad()
            run.finish()
            events.tell("on_batch_end", step)
            gains.append(run.take_logged()["gain"])
    assert (lengths[0], lengths[-1]) == (8, 16)
    assert gains == [1.0] * len(lengths)


def test_a_run_without_optimizers_model_or_evaluations_says_so() -> None:
    run = prepare([1, 2], 1, max_duration="1ep")
    for read in (lambda: run.hyperparameters, lambda: run.loader, lambda: run.model, run.evaluate):
        with pytest.raises(TrainingError, match="cannot"):
            read()


def test_a_loop_of_your_own_trains_as_the_trainer(problem: Make) -> None:
    """The same batches, schedules, events and weights, to the last bit; with a resume between."""
    sizes, schedules = "0sp:8 24sp:12", {"lr": Cosine(warmup="10%"), "momentum": 0.5}
    seen: list[int] = []

    class Note(Callback):
        def on_evaluation_end(self, run: Run, name: str, metrics: Any) -> None:
            seen.append(run.timer.sample)

    trained = problem()
    trainer = trained.trainer(
        batch_size=sizes,
        micro_batch_size=5,
        schedules=schedules,
        evaluate=Evaluation(trained.data, every="30%"),
        callbacks=[Note()],
    )
    trainer.fit()
    own, due, state = problem(), [], None
    for _ in range(2):
        run = prepare(
            own.data,
            sizes,
            max_duration="2ep",
            optimizer=own.optimizer,
            schedules=schedules,
            every={"evaluate": "30%"},
            micro_batch_size=5,
        )
        if state is not None:
            run.load_state_dict(state)
        for step in run:
            for micro in step:
                (squared_error(own.model, micro.batch) * micro.weight).backward()
            own.optimizer.step()
            own.optimizer.zero_grad()
            if "evaluate" in run.finish():
                due.append(run.timer.sample)
            if state is None and run.timer.batch == 4:
                state = json.loads(json.dumps(run.state_dict()))
                break
    assert run.is_done
    assert run.plan is not None
    assert trainer.plan is not None
    assert run.plan.num_batches == trainer.plan.num_batches == run.timer.batch
    assert due == seen[: len(due)]
    assert set(seen) - set(due) <= {run.timer.sample}  # the trainer evaluates at the end, too
    for one, other in zip(own.weights(), trained.weights(), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_step_that_is_not_finished_is_an_error() -> None:
    run = prepare([1, 2, 3, 4], 2, max_duration="1ep").bind(torch.optim.SGD([torch.zeros(1)], lr=1))
    with pytest.raises(TrainingError, match="finish"):
        list(run)


@pytest.mark.filterwarnings("ignore:a micro-batch of one sample")
def test_dummies_leave_the_buffers_of_a_model_alone_in_a_loop_of_your_own() -> None:
    data, model = TensorDataset(torch.arange(9.0)[:, None]), nn.BatchNorm1d(1)
    run = prepare(data, 3, max_duration="9sp", micro_batch_size=1, model=model)
    run.bind(torch.optim.SGD(model.parameters(), lr=0.1), rank=0, world_size=2)
    model.eval()
    tracked = model.num_batches_tracked
    assert tracked is not None
    real = passes = 0
    for step in run:
        for micro in step:
            tracked += 1  # as a forward pass in training does
            real, passes = real + (micro.weight > 0), passes + 1
        run.finish(tokens=0, seconds=0.0)
    assert (int(tracked), passes) == (real, 6)
    assert real == 5
