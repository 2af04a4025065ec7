"""One rank of runs whose model is fully sharded; writes what it saw. A test starts two."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from stretto.checkpoint import Shard, pack_optimizer
from stretto.checkpoint.sharding import to_shard
from stretto.data import Step
from stretto.errors import TrainingError
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Loading,
    Logging,
    Run,
    Stepping,
    Trainer,
)
from stretto.training.algorithms import ExponentialMovingAverage

Outcome = dict[str, Any]


class Net(nn.Module):
    """Rows that two ranks cannot share evenly, and a last layer of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7, momentum=0.5))
        self.head = nn.Linear(7, 3)
        self.scale = nn.Linear(3, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(inputs))
        return out + self.scale(out)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(61, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (61,), generator=generator)
    # Many micro-batches have no target at all: their mean loss is nan, and its gradient.
    labels[torch.rand(61, generator=generator) < 0.6] = -100
    return TensorDataset(inputs, labels)


def model(*, has_statistics: bool = False) -> Net:
    torch.manual_seed(2)
    net = Net().double()
    if not has_statistics:
        net.body[2] = nn.Identity()
    return net


def sharded(net: Net, **settings: Any) -> Net:
    for child in net.children():
        fully_shard(child, **settings)
    fully_shard(net, **settings)
    return net


def square(net: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (net(batch[0]) - 1).square().mean()
    return loss


def masked_square(net: nn.Module, batch: Any) -> Tensor:
    is_target = batch[1] != -100
    losses = (net(batch[0]) - batch[1].unsqueeze(1)).square().mean(dim=1)
    return (losses * is_target).sum() / is_target.sum()


def num_targets(batch: Any) -> int:
    return int((batch[1] != -100).sum())


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, run: Run, record: Any) -> None:
        self.seen.append(record["loss"])


def train(net: nn.Module, **settings: Any) -> Outcome:
    """Train, and return weights and losses, by now the same on all ranks."""
    losses = Losses()
    tokens = settings.pop("by_tokens", False)
    trainer = Trainer(
        net,
        data(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=masked_square if tokens else square,
        device="cpu",
        stepping=Stepping(loss_weight=num_targets if tokens else "samples"),
        log=Logging("1ba"),
        callbacks=[losses],
        **{"max_duration": "2ep", "batch_size": 8, **settings},
    )
    trainer.fit()
    return {"weights": weights(net), "losses": losses.seen, "metrics": trainer.evaluate()}


def weights(net: nn.Module) -> dict[str, Any]:
    whole = {}
    for name, tensor in net.state_dict().items():
        whole[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()
    return whole


RAMP = {"batch_size": "0sp:7 50sp:13", "micro_batch_size": 3}
RUNS: dict[str, Outcome] = {
    "samples": RAMP,
    "tokens": RAMP
    | {"by_tokens": True, "micro_batch_size": 1, "loading": Loading(last_batch="carry")},
    "clipped": RAMP | {"clip_norm": 0.05},
    "an empty share": {"batch_size": 3, "micro_batch_size": 1},
    # 61 samples in steps of 12: of the last one a rank gets nothing.
    "evaluated": {"evaluate": Evaluation(data(), "30sp", {"root": square}, batch_size=6)},
}


def refusals() -> dict[str, str]:
    """Models that are spread over ranks in ways that cannot be trained."""
    found = {}
    parts, half, left_out = model(), model(), model()
    fully_shard(parts.body)
    fully_shard(left_out, ignored_params=set(left_out.scale.parameters()))
    # Every rank has a mesh of its own.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))["inner"]
    sharded(half, mesh=mesh)
    for name, net in {"parts": parts, "left out": left_out, "half": half}.items():
        try:
            train(net)
        except TrainingError as error:
            found[name] = str(error)
    return found


def pieces() -> Outcome:
    """What this rank would write of the weights and of Adam's state."""
    net = sharded(model())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    square(net, data().tensors).backward()
    optimizer.step()
    state = pack_optimizer(optimizer)
    own = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    tensors = {**net.state_dict(), **own}
    found: Outcome = {}
    for name, tensor in tensors.items():
        piece = to_shard(tensor)
        if isinstance(piece, Shard):
            found[name] = [0, piece.offset[0], piece.shape[0], len(piece.local)]
        else:
            found[name] = None
    return found


def statistics() -> Outcome:
    """What batch normalisation has seen differs between ranks; they measure with the first's."""
    net = sharded(model(has_statistics=True))
    measured = train(net, evaluate=Evaluation(data()))
    return {"measured": measured["metrics"], "weights": measured["weights"]}


def scaled() -> Outcome:
    """Half precision with loss scaling: an overflow on one rank alone is one on all."""
    net = sharded(model().float())
    trainer = Trainer(
        net,
        data(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=overflowing,
        batch_size=8,
        max_duration="6ba",
        device="cpu",
        precision="fp16",
    )
    trainer.fit()
    found = torch.cat([torch.tensor(v).flatten() for v in weights(net).values()])
    return {"is_finite": bool(found.isfinite().all()), "weights": found.tolist()}


def overflowing(net: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = net(batch[0].float()).float().square().mean()
    return loss * 1e38 if dist.get_rank() == 1 and overflowing_calls() == 2 else loss


class Poison(Callback):
    """Puts an infinity into a row of a gradient that one rank alone has."""

    def on_gradient(self, run: Run, step: Step) -> None:
        """The first row is the first rank's."""
        gradient = dict(run.model.named_parameters())["body.0.weight"].grad
        assert gradient is not None
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if step.timestamp.batch == 3 and run.is_first_rank:
            own[0, 0] = torch.inf


HALF: dict[str, Outcome] = {"plain": {}, "clipped": {"clip_norm": 0.05}}


def half(
    net: Net, *callbacks: Callback, clip_norm: float | None = None, micro_batch_size: int = 3
) -> Outcome:
    """Train with loss scaling; what this rank knows of it afterwards."""
    trainer = Trainer(
        net.float(),
        data(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=lambda model, batch: (model(batch[0].float()).float() - 1).square().mean(),
        batch_size="0sp:7 30sp:8",
        micro_batch_size=micro_batch_size,
        max_duration="7ba",
        device="cpu",
        precision="fp16",
        clip_norm=clip_norm,
        callbacks=callbacks,
    )
    trainer.fit()
    scaler = trainer._loop.stepper.scaler
    assert scaler is not None
    # The scale as this rank has it: ranks that did not agree on a step differ in it.
    return {
        "weights": weights(net),
        "skipped": trainer.run.skipped_steps,
        "scale": scaler.get_scale(),
    }


def halves() -> Outcome:
    """Half precision where one rank alone has what overflows."""
    return {name: half(sharded(model()), Poison(), **run) for name, run in HALF.items()}


class StopAt(Callback):
    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def on_batch_end(self, run: Run, step: Step) -> None:
        if run.timer.batch == self.batch:
            run.stop("enough", is_final=False)


def average(net: nn.Module, folder: Path | None = None, *, stop_at: int | None = None) -> Outcome:
    """Train with averaged weights, on from a checkpoint if there is one; return them whole."""
    averages = ExponentialMovingAverage(half_life="20sp", start="8sp")
    trainer = Trainer(
        net,
        data(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=square,
        max_duration="8ba",
        batch_size="0sp:7 28sp:8",
        micro_batch_size=3,
        device="cpu",
        evaluate=Evaluation(data(), "3ba"),
        checkpoint=None if folder is None else Checkpointing("1ep"),
        callbacks=[averages, StopAt(stop_at)],
        folder=folder,
    )
    if folder is not None:
        trainer.resume("auto")
    trainer.fit()
    kept = averages.state_dict()["average"]
    whole = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).tolist()
        for name, one in kept.items()
    }
    kinds = {type(one).__name__ for one in kept.values()}
    return {"averages": whole, "kinds": sorted(kinds), "metrics": trainer.evaluate()}


def averaged(out: Path) -> Outcome:
    """With fully sharded and with replicated models, in one piece and resumed."""
    found: Outcome = {}
    makes: dict[str, Callable[[], Net]] = {"sharded": lambda: sharded(model()), "replicated": model}
    for name, make in makes.items():
        found[name] = average(make())
        average(make(), out / name, stop_at=5)
        found[f"{name}, resumed"] = average(make(), out / name)
    return found


_CALLS = [0]


def overflowing_calls() -> int:
    _CALLS[0] += 1
    return _CALLS[0]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    report: Outcome = {name: train(sharded(model()), **run) for name, run in RUNS.items()}
    others: list[Callable[[], Outcome]] = [refusals, pieces, statistics, scaled, halves]
    report |= {other.__name__: other() for other in others}
    report["averaged"] = averaged(out)
    (out / f"rank{rank}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
