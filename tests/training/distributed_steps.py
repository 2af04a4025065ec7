"""Two ranks: compiled models, steps without a backward pass, groups, all-reduces, local SGD."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.checkpoint import checkpoints, load_weights, read_checkpoint
from stretto.distributed import shard_blocks
from stretto.distributed.strategy import Ddp, Strategy
from stretto.errors import StrettoError, TrainingError
from stretto.runtime import TrainStep
from stretto.training import Callback, Evaluation, Run, Trainer
from stretto.training.algorithms import ExponentialMovingAverage

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
DATA = TensorDataset(
    torch.randn(32, 3, generator=torch.Generator().manual_seed(1)),
    torch.randn(32, 1, generator=torch.Generator().manual_seed(2)),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def trainer(model: Any, **settings: Any) -> Trainer:
    given: dict[str, Any] = {"loss": nn.MSELoss()}
    if not isinstance(model, TrainStep):
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        del given["loss"]
    given |= {"max_duration": "8ba", "batch_size": 8, "device": "cpu", "log": {"console": False}}
    return Trainer(model, DATA, **given | settings)


def whole(model: nn.Module) -> list[Tensor]:
    tensors: list[Any] = list(model.parameters())
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.detach() for one in tensors]


def compiled(make: Callable[[], Any], name: str, **settings: Any) -> list[Tensor]:
    """Train, and resume a plain model from the middle; return the weights."""
    model = make()
    more: dict[str, Any] = {"checkpoint": "4ba", "evaluate": Evaluation(DATA, every="4ba")}
    callbacks = [ExponentialMovingAverage(0.5)]
    made = trainer(model, folder=FOLDER / name, callbacks=callbacks, **more, **settings)
    made.fit()
    middle, last = checkpoints(FOLDER / name / "checkpoints")
    names = read_checkpoint(last).tensors["model"].keys()
    assert names == Model().state_dict().keys(), names
    again = Model()
    resumed = trainer(again, callbacks=[ExponentialMovingAverage(0.5)])
    resumed.resume(middle)
    resumed.fit()
    for one, other in zip(whole(model), whole(again), strict=True):
        torch.testing.assert_close(one, other)
    load_weights(Model(), last, averaged=True)
    return whole(model)


def backend(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_part() -> Any:
    model = Model()
    model.head = backend(model.head)
    return model


def sharded_then_compiled() -> Any:
    return backend(shard_blocks(Model(), device="cpu"))


def compiled_then_sharded() -> Any:
    return shard_blocks(in_part(), device="cpu")


def check_compiled() -> None:
    expected = compiled(Model, "plain")
    forms = {
        "before": lambda: backend(Model()),
        "part": in_part,
        "sharded": lambda: shard_blocks(Model(), device="cpu"),
        "sharded_then_compiled": sharded_then_compiled,
        "compiled_then_sharded": compiled_then_sharded,
    }
    for name, make in forms.items():
        for one, other in zip(compiled(make, name), expected, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(compiled(Model, "by_us", compile=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


class Own(TrainStep):
    """Goes backward on some ranks, through some parameters."""

    def __init__(self, goes_back: bool, *, head_only: bool = False, wrapped: bool = False) -> None:
        self.model, self.goes_back, self.head_only = Model(), goes_back, head_only
        self.inner: Any = self.model
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.5)]
        self.forward_model = self.model if wrapped else None

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        model: Any = self.model if self.forward_model is None else self.forward_model
        loss = model(batch[0]).square().mean()
        if self.head_only:
            loss = self.inner.head(batch[0]).square().mean()
        if self.goes_back:
            torch.autograd.backward(loss * weight)
        found: Tensor = loss.detach()
        return found

    def update(self) -> dict[str, Any]:
        self.optimizers[0].step()
        return {}


def said_by(work: Callable[[], object]) -> str:
    try:
        work()
    except StrettoError as error:
        return str(error)
    return "trained"


def check_backward() -> None:
    for goes_back in (False, RANK == 0, RANK == 1):
        said = said_by(trainer(Own(goes_back)).fit)
        assert "no gradient" in said, said
        assert "backward" in said, said
    said = said_by(trainer(Own(False, wrapped=True)).fit)
    assert "backward" in said, said
    # A weight that no rank has a gradient of is left alone, as in one process.
    one = Own(True, head_only=True)
    before = one.inner.blocks[0].weight.detach().clone()
    trainer(one).fit()
    assert torch.equal(before, one.inner.blocks[0].weight)
    assert not torch.equal(Model().head.weight, one.inner.head.weight)


class Stops(Callback):
    def __init__(self, at: int, rank: int) -> None:
        self.at, self.rank, self.calls = at, rank, 0

    def on_batch_end(self, run: Run, step: Any) -> None:
        self.calls += 1
        if run.timer.batch == self.at and self.rank == RANK:
            run.stop("enough")


def check_exchanges() -> None:
    threads, counts = [], []
    reduce = dist.all_reduce
    for listener in (None, Stops(0, 0), Stops(3, 1)):
        num = 0

        def counted(*given: Any, **named: Any) -> Any:
            nonlocal num
            num += named.get("group") is not None
            return reduce(*given, **named)

        callbacks = [] if listener is None else [listener]
        made = trainer(Model(), callbacks=callbacks, max_duration="100ba", log="100ba")
        dist.all_reduce = counted
        made.fit()
        dist.all_reduce = reduce
        counts.append(num)
        if listener is not None and listener.at:
            assert made.timer.batch == 4, made.timer.batch  # others learn of it in the next batch
        del made
        gc.collect()
        threads.append(len([*Path("/proc/self/task").iterdir()]))
    assert threads[-1] <= threads[0] + 1, threads
    assert counts[1] - counts[0] <= 28, counts  # one at the end of each epoch of 4 batches
    # A run that failed on one rank leaves a group in which the other may still wait.
    for _ in range(2):
        with contextlib.suppress(ValueError, TrainingError):
            trainer(Model(), loss=broken).fit()
        trainer(Model(), max_duration="2ba").fit()


def broken(model: Any, batch: Any) -> Tensor:
    raise ValueError("broken on all ranks")


class LocalSgd(Ddp):
    """Averages weights every second batch, and no gradients."""

    has_equal_weights = False

    def wrap(self, model: nn.Module, *, is_called: bool) -> nn.Module:
        self.averaging = "none"
        return Strategy.wrap(self, model, is_called=is_called)

    def sync(self, *, averages: bool, is_empty: bool) -> Any:
        return Strategy.sync(self, averages=averages, is_empty=is_empty)

    def average(self) -> None:
        """Nothing: weights are averaged."""


class Averages(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        if run.timer.batch % 3 == 0:
            for one in run.model.parameters():
                one.data = run.all_reduce(one.data, "mean")


def check_local_sgd() -> None:
    model = Model()
    settings: dict[str, Any] = {"strategy": LocalSgd(), "callbacks": [Averages()]}
    trainer(model, folder=FOLDER / "local", checkpoint="4ba", **settings).fit()
    saved = read_checkpoint(checkpoints(FOLDER / "local" / "checkpoints")[-1]).tensors["model"]
    own = torch.equal(saved["head.weight"], model.head.weight.detach())
    assert own == (RANK == 0)
    again = trainer(Model(), folder=FOLDER / "local", checkpoint="4ba", **settings)
    again.resume()
    assert torch.equal(saved["head.weight"], again.model.state_dict()["head.weight"])

    class Unsaid(LocalSgd):
        has_equal_weights = True

    made = trainer(
        Model(), folder=FOLDER / "unsaid", checkpoint="4ba", **settings | {"strategy": Unsaid()}
    )
    assert "differ" in said_by(made.fit)


for check in (check_exchanges, check_backward, check_local_sgd, check_compiled):
    check()
    print(f"rank {RANK}: {check.__name__}")
