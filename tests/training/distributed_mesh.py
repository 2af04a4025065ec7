"""One of up to four ranks on a mesh; writes what each run came to."""

from __future__ import annotations

import collections
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset, Subset

from stretto import prepare
from stretto.checkpoint import Shard
from stretto.checkpoint.sharding import HostCopies
from stretto.distributed import Ddp, Mesh
from stretto.errors import StrettoError
from stretto.training import Callback, Checkpointing, Evaluation, Logging, Run, Trainer

NUM, DIM, CUT = 101, 8, 80
MESHES: dict[str, tuple[int, ...]] = {
    "dp": (4, 1),
    "hsdp": (2, 2),
    "tpfsdp": (2, 2),
    "tp": (1, 4),
    "tprep": (2, 2),
    "sp": (2, 2),
    "cp": (2, 2),
}


class Data(Dataset[Any]):
    """Samples with their numbers."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM, DIM, generator=random, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, at: int) -> Any:
        return {"x": self.x[at], "y": self.y[at], "id": torch.tensor(at)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 1)]
    return nn.Sequential(*layers).double()


class OverSequence(nn.Module):
    """Two layers and norms between them, for each pair of numbers in a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(2, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x.unflatten(1, (4, 2))))
        x = self.last(self.down(self.up(x).tanh()))
        out: Tensor = self.head(x)
        return out.mean(dim=(1, 2))[:, None]


class Attention(nn.Module):
    """Attention over the pairs of numbers in a sample, of which a rank may have a part."""

    group: Any = None
    """The ranks that share a sequence."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of keys has a gradient of 0, of which Adam would learn the rounding.
        self.embed, self.qkv = nn.Linear(2, 8), nn.Linear(8, 24, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x.unflatten(1, (4, 2)))
        query, key, value = self.qkv(self.embed(x).tanh()).chunk(3, dim=-1)
        if self.group is not None:
            from torch.distributed.nn.functional import all_gather

            key, value = (torch.cat(all_gather(one, self.group), dim=1) for one in (key, value))
        out: Tensor = self.head(nn.functional.scaled_dot_product_attention(query, key, value))
        return out

    def own(self, sequence: Tensor) -> Tensor:
        """Return this rank's part of a sequence."""
        if self.group is None:
            return sequence
        return sequence.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]


def sequence_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over samples and positions; its gradient is that of this rank's part."""
    assert isinstance(model, Attention)
    target = model.own(batch["x"].unflatten(1, (4, 2)).sin().sum(2, keepdim=True))
    own = nn.functional.mse_loss(model(batch["x"]), target)
    if model.group is None:
        return own
    whole = own.detach().clone()
    dist.all_reduce(whole, group=model.group)
    return own + (whole / dist.get_world_size(model.group) - own.detach())


def sequence_plan() -> dict[str, Any]:
    """Return how the layers of `OverSequence` share out the sequence and their rows."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    return {
        "embed": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def spread(kind: str, dropout: float | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model as a kind of mesh has it, and what the Trainer gets beside it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, world_size = make_model(), int(os.environ.get("WORLD_SIZE", "1"))
    if kind.startswith("sp"):
        model = OverSequence().double()
    more: dict[str, Any] = {}
    if kind.startswith("cp"):
        model, more = Attention().double(), {"loss": sequence_loss}
    if dropout is not None:
        assert isinstance(model, nn.Sequential)
        model.insert(3, nn.Dropout(dropout))
    if world_size == 1:
        return model, more
    shape = MESHES[kind] if world_size == 4 else (1, 2) if kind == "tp" else (2, 1)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh)
        return model, {"mesh": mesh}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp" if kind == "cp" else "tp"))
    if kind == "cp":
        assert isinstance(model, Attention)
        model.group = mesh.get_group("cp")
        fully_shard(model)  # gradients are averaged over the parts of a sequence, too
        return model, {"mesh": mesh, **more}
    if kind not in ("dp", "spdp", "cpdp"):
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], sequence_plan() if kind == "sp" else plan)
    if kind == "tprep":
        # Of torch 2.13, where it is FSDP2 without cuts; nothing public has it.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(model, mesh=mesh["dp"])
    elif kind != "tp":
        fully_shard(model, mesh=mesh["dp"])
    return model, {"mesh": mesh, **more}


class Watch(Callback):
    """Keeps samples, noise and losses of a run, and stops it at a batch on one rank."""

    def __init__(self, stop: tuple[int, int] | None = None, *, signals: bool = False) -> None:
        self.stop, self.signals = stop, signals
        self.ids: list[list[int]] = []
        self.noise: list[Any] = []
        self.lines: list[dict[str, float]] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        own = [m.batch["id"].tolist() for m in step.micro_batches if m.weight]
        self.ids.append([one for ids in own for one in ids])
        run.log("seen", step.local_num_samples, reduce="sum")
        if self.stop == (run.ranks.rank, run.timer.batch):
            if self.signals:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                run.stop("enough", is_final=False)

    def on_noise(self, run: Run, step: Any, signals: Any) -> None:
        self.noise.append([signals.noise_numerator, signals.noise_denominator])

    def on_log(self, run: Run, record: Any) -> None:
        self.lines.append(
            {k: record[k] for k in ("loss", "grad_norm", "seen", "sp") if k in record}
        )


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of squares."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make(kind: str, folder: Path | None = None, **more: Any) -> tuple[Trainer, Watch]:
    """Return a run through a ramp whose sizes change within epochs."""
    model, parallel = spread(kind, more.pop("dropout", None))
    watch = Watch(more.pop("stop", None), signals=more.pop("signals", False))
    settings: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False),
        "loss": loss,
        "max_duration": "2ep",
        "batch_size": "0sp:6 30sp:11 120sp:17",
        "micro_batch_size": 4,
        "clip_norm": 0.5,
        "loading": {"seed": 7},
        "log": Logging("1ba", console=False),
        "callbacks": [watch],
        "device": "cpu",
        "folder": folder,
    }
    return Trainer(model, Data(), **settings | parallel | more), watch


def weights(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([one.detach().flatten() for one in whole]).tolist()


def result(trainer: Trainer, watch: Watch) -> dict[str, Any]:
    return {
        "weights": weights(trainer.model),
        "ids": watch.ids,
        "noise": watch.noise,
        "lines": watch.lines,
        "batch": trainer.timer.batch,
        "why": trainer.stop_reason,
        "group": trainer.run.rank,
        "is_first": trainer.run.is_first_rank,
    }


def cut(kind: str, folder: Path) -> None:
    """Train up to a checkpoint inside the first epoch."""
    trainer, watch = make(kind, folder, max_duration="2ep", checkpoint=Checkpointing("1ep"))
    watch.stop = (trainer.run.ranks.world_size - 1, 8)
    trainer.fit()


class Count:
    """A metric object: the samples that were seen, and the sum of their targets."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen, self.sum = 0, 0.0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        assert len(predictions) == len(targets)
        self.seen += len(targets)
        self.sum += float(targets.sum())

    def merge_state(self, others: Any) -> None:
        for other in others:
            self.seen += other.seen
            self.sum += other.sum

    def compute(self) -> dict[str, float]:
        return {"seen": self.seen, "sum": self.sum}


def evaluated(kind: str) -> dict[str, float]:
    """Return what is measured before training: a loss, a function and an object."""

    def largest(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean()

    evaluation = Evaluation(
        Subset(Data(), range(30)),
        "1ep",
        {"square": largest, "count": Count()},
        batch_size=4,
        predict=lambda model, batch: (model(batch["x"]), batch["y"]),
    )
    return make(kind, evaluate=evaluation)[0].evaluate()


def not_finite(kind: str, rank: int, non_finite: str) -> dict[str, Any]:
    """Train with a loss that is nan on one rank, once, whose gradient is finite on all."""
    calls = 0

    def broken(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        own = loss(model, batch)
        return own + torch.nan if calls == 4 and os.environ["RANK"] == str(rank) else own

    trainer, _ = make(kind, loss=broken, stepping={"non_finite": non_finite}, max_duration="1ep")
    text = refusal(trainer.fit)
    at = trainer.timer.batch
    return {"batch": at, "skipped": trainer.run.skipped_steps, "text": text}


def dropped(kind: str, folder: Path) -> dict[str, Any]:
    """Return the masks of dropout of a run, and of one that is cut inside an epoch and resumed."""

    def train(seed: int, *, resume: Path | None = None, **more: Any) -> dict[str, Any]:
        trainer, watch = make(kind, dropout=0.3, **more)
        masks: list[str] = []

        def see(module: nn.Module, _: Any, output: Tensor) -> None:
            if module.training:
                masks.append("".join(map(str, (output != 0).int().flatten().tolist())))

        dropout = next(one for one in trainer.model.modules() if isinstance(one, nn.Dropout))
        dropout.register_forward_hook(see)
        torch.manual_seed(seed + trainer.run.ranks.rank)  # also of ranks that share a model
        trainer.fit(resume=resume)
        return {"masks": masks, **result(trainer, watch)}

    whole = train(100)
    train(100, checkpoint=Checkpointing("1ep"), folder=folder, stop=(0, 8))
    return {"whole": whole, "resumed": train(900, resume=folder)}


def own_loop(kind: str) -> dict[str, Any]:
    """Train in a loop of `prepare(mesh=)`, with a clock that runs faster on each further rank."""
    model, parallel = spread(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    run = prepare(
        Data(),
        "0sp:6 30sp:11 120sp:17",
        max_duration="2ep",
        optimizer=optimizer,
        every={"look": "7s"},
        micro_batch_size=4,
        loading={"seed": 7},
        **parallel,
    )
    run.timer.clock = itertools.count(0, 10**9 * (1 + run.ranks.rank)).__next__
    run.timer.start()
    ids: list[int] = []
    looks, seen = [], 0.0
    for step in run:
        for number, micro in enumerate(step):
            ids += micro.batch["id"].tolist() if micro.weight else []
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == len(step) - 1)  # type: ignore[operator]
            (loss(model, micro.batch) * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log("seen", step.local_num_samples, reduce="sum")
        if "look" in run.finish():
            looks.append(run.timer.batch)
            seen += run.take_logged()["seen"]
    return {
        "weights": weights(model),
        "ids": ids,
        "looks": looks,
        "seen": seen + run.take_logged().get("seen", 0.0),
        "sum": run.all_reduce(1.0),
        "group": run.rank,
        "is_first": run.is_first_rank,
    }


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "gather_object", "broadcast"),
    *("broadcast_object_list", "scatter_object_list", "barrier", "reduce", "monitored_barrier"),
)


def counted(kind: str, folder: Path, batches: int, every: str | None) -> dict[str, Any]:
    """Count the collectives of a run without callbacks, and the bytes that are copied."""
    calls: collections.Counter[str] = collections.Counter()
    copied: list[int] = []
    before, take = {name: getattr(dist, name) for name in COLLECTIVES}, HostCopies.take

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("stretto."):
                is_small = name == "all_reduce"
                calls[f"{name} {arguments[0].nbytes}" if is_small else name] += 1
            return before[name](*arguments, **more)

        return call

    def taken(self: HostCopies, tensors: Any) -> Any:
        named = [*tensors["model"].values(), *tensors["optimizer"].values()]
        copied.append(sum((w.local if isinstance(w, Shard) else w).nbytes for w in named))
        return take(self, tensors)

    saving: dict[str, Any] = {"folder": folder, "checkpoint": Checkpointing(every)} if every else {}
    log = Logging("2ep", console=False)
    length = f"{batches}ba"
    trainer, _ = make(kind, log=log, callbacks=[], max_duration=length, batch_size=5, **saving)
    for name in before:
        setattr(dist, name, counting(name))
    HostCopies.take = taken  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        HostCopies.take = take  # type: ignore[method-assign]
    whole = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) * 3
    written = sorted(folder.rglob("state.json"))
    state_bytes = written[-1].stat().st_size if written else None
    return {"calls": dict(calls), "copied": copied, "whole": whole, "state_bytes": state_bytes}


def refusal(work: Callable[[], object]) -> str:
    """Return the error of `work`."""
    try:
        work()
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is refused"


def few(kind: str) -> Callable[[], object]:
    """Return a run with a stage of fewer samples than ranks."""
    return lambda: make(kind, batch_size="0sp:11 30sp:3 60sp:2")[0].fit()  # noqa: PLW0108  made when called


def refused() -> list[Callable[[], object]]:
    """Return what does not fit a mesh of 2 x 2."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))["dp_shard"]
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    def trainer(model: nn.Module, **more: Any) -> Trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(
            model, Data(), optimizer=optimizer, loss=loss, max_duration="1ep", batch_size=8, **more
        )

    def sharded(over: Any) -> nn.Module:
        model = make_model()
        fully_shard(model, mesh=over)
        return model

    def swapped(dp: str, tp: str, over: Any, **more: Any) -> Trainer:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = nn.Sequential(nn.Linear(DIM, 16)).double()
        parallelize_module(model, over[tp], {"0": ColwiseParallel()})
        fully_shard(model, mesh=over[dp])
        return trainer(model, mesh=Mesh(over, **more))

    def left_out() -> Trainer:
        from torch.distributed.tensor import Replicate, distribute_tensor

        model = make_model()
        first = model[0]  # type: ignore[index]
        first.weight = nn.Parameter(distribute_tensor(first.weight, mesh, [Replicate()] * 2))
        fully_shard(model, mesh=mesh["dp"], ignored_params={first.weight})
        return trainer(model, mesh=mesh)

    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    return [
        lambda: swapped("a", "b", other, data=("b",)),
        lambda: swapped("dp", "tp", inner),
        left_out,
        lambda: trainer(make_model(), mesh=mesh),
        lambda: trainer(make_model(), mesh=mesh, strategy=Ddp()),
        lambda: trainer(sharded(half), mesh=whole),
        lambda: trainer(sharded(mesh["dp"])),
        lambda: trainer(make_model(), mesh=half),
        lambda: trainer(make_model(), mesh=Mesh(mesh, data=("other",))),
        lambda: trainer(make_model(), mesh=mesh["tp"]),
    ]


def trained(kind: str, resume: Path | None = None, **more: Any) -> dict[str, Any]:
    """Return what a run came to."""
    trainer, watch = make(kind, **more)
    trainer.fit(resume=resume, on_signal="return")
    return result(trainer, watch)


def done(out: Path, what: str, kind: str, *rest: str) -> Any:
    """Do one job and return what came of it."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    folder = out / "-".join((what, kind, *rest, world_size))
    works: dict[str, Callable[[], Any]] = {
        "train": lambda: trained(kind),
        "signal": lambda: trained(kind, stop=(int(rest[0]), 3), signals=True),
        "nan": lambda: not_finite(kind, int(rest[0]), rest[1]),
        "evaluate": lambda: evaluated(kind),
        "own": lambda: own_loop(kind),
        "drop": lambda: dropped(kind, folder),
        "idle": lambda: trained(kind, batch_size="0sp:3 30sp:11", idle_ranks=True),
        "few": lambda: refusal(few(kind)),
        "refused": lambda: [refusal(one) for one in refused()],
        "cut": lambda: cut(kind, out / kind),
        "resume": lambda: trained(kind, out / rest[0]),
        "count": lambda: counted(
            kind, folder, int(rest[0]), f"{rest[1]}ba" if len(rest) > 1 else None
        ),
    }
    return works[what]()


def main(out: Path, jobs: list[str]) -> None:
    """Do each job, `what:kind` or `what:kind:kind`, and write what came of it."""
    found = {job: done(out, *job.split(":")) for job in jobs}
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    out.mkdir(exist_ok=True)
    (out / f"{world_size}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
