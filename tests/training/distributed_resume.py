"""One rank of a run that is cut and goes on: plain, averaged (DDP) or fully sharded (FSDP2)."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from stretto.checkpoint import pack_optimizer
from stretto.distributed import shard_blocks
from stretto.training import (
    Callback,
    Checkpointing,
    Evaluation,
    Logging,
    Run,
    Trainer,
)

RANK = int(os.environ.get("RANK", "0"))
IS_FIRST_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Net(nn.Module):
    """Rows that no number of ranks shares evenly, and a layer of one row, which not all have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.ModuleList([nn.Linear(5, 7)]), nn.Linear(7, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.body[0](inputs).tanh())
        return out


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


def whole(tensor: Tensor) -> list[float]:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    values: list[float] = full.detach().flatten().tolist()
    return values


class Watch(Callback):
    """Sees the samples, and the state as a run begins and ends; ends it as it is told."""

    def __init__(self, *, stop: list[int] | None, kill: list[int] | None) -> None:
        self.samples: list[float] = []
        self.states: list[dict[str, list[float]]] = []
        self.stop = stop
        self.kill = kill

    def on_fit_start(self, run: Run) -> None:
        self.look(run)

    def on_fit_end(self, run: Run) -> None:
        self.look(run)

    def look(self, run: Run) -> None:
        state = pack_optimizer(run.optimizers[0])
        own = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
        tensors = {**run.model.state_dict(), **own}
        self.states.append({name: whole(tensor) for name, tensor in tensors.items()})

    def on_batch_start(self, run: Run, step: Any) -> None:
        if self.kill == [RANK, step.timestamp.batch] and IS_FIRST_ATTEMPT:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stop == [RANK, step.timestamp.batch]:
            os.kill(os.getpid(), signal.SIGTERM)
        for micro in step.micro_batches:
            if micro.weight:
                self.samples += micro.batch[0][:, 0].tolist()


def train(
    out: Path,
    *,
    parallel: str = "plain",
    stop: list[int] | None = None,
    kill: list[int] | None = None,
    checkpoint_every: str = "1ep",
    micro_batch_size: int | Literal["auto"] = 3,
) -> dict[str, Any]:
    """Go on with the run in a folder, or begin it, and return what was seen.

    Args:
        out: where the folder of the run is.
        parallel: "plain", "ddp", "fsdp" or "hsdp".
        stop: the rank that gets SIGTERM, and the batch in which it does.
        kill: the rank that gets SIGKILL, and the batch, if torchrun starts it for the first time.
        checkpoint_every: when a checkpoint is due.
        micro_batch_size: of each pass.
    """
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(61, 5, generator=generator, dtype=torch.float64),
        torch.randn(61, 1, generator=generator, dtype=torch.float64),
    )
    torch.manual_seed(2)
    model = Net().double()
    if parallel == "hsdp" and not dist.is_initialized():
        dist.init_process_group("gloo")
    if parallel == "fsdp":
        shard_blocks(model, device="cpu")
    if parallel == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        fully_shard(model.body[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    watch = Watch(stop=stop, kill=kill)
    trainer = Trainer(
        model,
        data,
        # Such an epsilon keeps a difference of 1e-16 in a gradient from becoming one in a weight.
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-2),
        loss=square,
        max_duration="3ep",
        batch_size="0sp:7 50sp:13",
        micro_batch_size=micro_batch_size,
        device="cpu",
        evaluate=Evaluation(data, "1ep"),
        log=Logging("3ba"),
        callbacks=[watch],
        checkpoint=Checkpointing(checkpoint_every),
        folder=out / "run",
    )
    resumed = trainer.resume("auto")
    started = trainer.timer.state_dict()
    trainer.fit(on_signal="return")
    return {
        "samples": watch.samples,
        "states": watch.states,
        "resumed": resumed is not None,
        "started": started,
        "clock": trainer.timer.state_dict(),
        "stop_reason": trainer.stop_reason,
    }


def main(settings: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    report = train(out, **settings)
    (out / f"rank{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
