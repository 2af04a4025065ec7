"""One of up to four ranks on a mesh; writes what each run came to."""

from __future__ import annotations

import collections
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
from torch.utils.data import Dataset

from stretto.checkpoint import HostCopies, Shard
from stretto.distributed import Ddp, Mesh
from stretto.errors import StrettoError
from stretto.training import Callback, Checkpointing, Logging, Run, Trainer

NUM, DIM, CUT = 101, 8, 80
MESHES: dict[str, tuple[int, ...]] = {"dp": (4, 1), "hsdp": (2, 2), "tpfsdp": (2, 2), "tp": (1, 4)}


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


def spread(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model as a kind of mesh has it, and what the Trainer gets beside it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, world_size = make_model(), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return model, {}
    shape = MESHES[kind] if world_size == 4 else {"dp": (2, 1), "tp": (1, 2)}[kind]
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh)
        return model, {"mesh": mesh}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if kind != "dp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if kind != "tp":
        fully_shard(model, mesh=mesh["dp"])
    return model, {"mesh": mesh}


class Watch(Callback):
    """Keeps samples, noise and losses of a run, and stops it at a sample on one rank."""

    def __init__(self, stop: tuple[int, int] | None = None) -> None:
        self.stop = stop
        self.ids: list[list[int]] = []
        self.noise: list[Any] = []
        self.lines: list[dict[str, float]] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        own = [m.batch["id"].tolist() for m in step.micro_batches if m.weight]
        self.ids.append([one for ids in own for one in ids])
        run.log("seen", step.local_num_samples, reduce="sum")
        if self.stop == (run.ranks.rank, run.timer.batch):
            run.stop("enough")

    def on_noise(self, run: Run, step: Any, signals: Any) -> None:
        self.noise.append([signals.noise_numerator, signals.noise_denominator])

    def on_log(self, run: Run, record: Any) -> None:
        self.lines.append({k: record[k] for k in ("loss", "grad_norm", "seen", "sp")})


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of squares."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make(kind: str, folder: Path | None = None, **more: Any) -> tuple[Trainer, Watch]:
    """Return a run through a ramp whose sizes change within epochs."""
    model, parallel = spread(kind)
    watch = Watch(more.pop("stop", None))
    settings: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False),
        "loss": loss,
        "max_duration": "2ep",
        "batch_size": "0sp:6 30sp:11 120sp:17",
        "micro_batch_size": 2,
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
        "group": trainer.run.rank,
        "is_first": trainer.run.is_first_rank,
    }


def cut(kind: str, folder: Path) -> None:
    """Train up to a checkpoint inside the first epoch."""
    trainer, watch = make(kind, folder, max_duration="2ep", checkpoint=Checkpointing("1ep"))
    watch.stop = (trainer.run.ranks.world_size - 1, 8)
    trainer.fit()


def counted(kind: str, folder: Path, batches: int, every: str | None) -> dict[str, Any]:
    """Count the all-reduces over gloo of a run without callbacks, and the bytes that are copied."""
    calls: collections.Counter[int] = collections.Counter()
    copied: list[int] = []
    reduce, take = dist.all_reduce, HostCopies.take

    def all_reduce(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("stretto."):
            calls[tensor.nbytes] += 1
        return reduce(tensor, *arguments, **more)

    def taken(self: HostCopies, tensors: Any) -> Any:
        named = [*tensors["model"].values(), *tensors["optimizer"].values()]
        copied.append(sum((w.local if isinstance(w, Shard) else w).nbytes for w in named))
        return take(self, tensors)

    saving: dict[str, Any] = {"folder": folder, "checkpoint": Checkpointing(every)} if every else {}
    log = Logging("2ep", console=False)
    length = f"{batches}ba"
    trainer, _ = make(kind, log=log, callbacks=[], max_duration=length, batch_size=5, **saving)
    dist.all_reduce, HostCopies.take = all_reduce, taken  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        dist.all_reduce, HostCopies.take = reduce, take  # type: ignore[method-assign]
    whole = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) * 3
    return {"calls": dict(calls), "copied": copied, "whole": whole}


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

    return [
        lambda: trainer(make_model(), mesh=mesh),
        lambda: trainer(make_model(), mesh=mesh, strategy=Ddp()),
        lambda: trainer(sharded(half), mesh=whole),
        lambda: trainer(sharded(mesh["dp"])),
        lambda: trainer(make_model(), mesh=half),
        lambda: trainer(make_model(), mesh=Mesh(mesh, data=("other",))),
        lambda: trainer(make_model(), mesh=mesh["tp"]),
    ]


def main(out: Path, jobs: list[str]) -> None:
    """Do each job, `what:kind` or `what:kind:kind`, and write what came of it."""
    found: dict[str, Any] = {}
    for job in jobs:
        what, kind, *rest = job.split(":")
        if what == "train":
            made = make(kind)
            made[0].fit()
            found[job] = result(*made)
        elif what == "stop":
            made = make(kind, stop=(int(rest[0]), 3))
            made[0].fit()
            found[job] = result(*made)
        elif what == "idle":
            made = make(kind, batch_size="0sp:3 30sp:11", idle_ranks=True)
            made[0].fit()
            found[job] = result(*made)
        elif what == "few":
            found[job] = refusal(few(kind))
        elif what == "refused":
            found[job] = [refusal(one) for one in refused()]
        elif what == "cut":
            cut(kind, out / kind)
        elif what == "resume":
            made = make(kind)
            made[0].fit(resume=out / rest[0])
            found[job] = result(*made)
        else:
            folder = out / "-".join((what, kind, *rest))
            every = f"{rest[1]}ba" if len(rest) > 1 else None
            found[job] = counted(kind, folder, int(rest[0]), every)
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    out.mkdir(exist_ok=True)
    (out / f"{world_size}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
