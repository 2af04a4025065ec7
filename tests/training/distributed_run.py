"""One rank of a run that a test starts; writes what it saw to a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

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


def problem() -> tuple[TensorDataset, nn.Module]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(61, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (61, 4), generator=generator)
    labels[torch.rand(61, 4, generator=generator) < 0.4] = -100
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 12)).double()
    return TensorDataset(inputs, labels), model


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0]).view(-1, 4, 3).transpose(1, 2)
    return nn.functional.cross_entropy(logits, batch[1])


def sample_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def num_targets(batch: Any) -> int:
    return int((batch[1] != -100).sum())


class Remember(Callback):
    def __init__(self) -> None:
        self.samples: list[list[float]] = []
        self.losses: list[float] = []

    def on_batch_start(self, run: Run, step: Any) -> None:
        for micro in step.micro_batches:
            if micro.weight:
                self.samples += micro.batch[0][:, 0].tolist()

    def on_log(self, run: Run, record: Any) -> None:
        self.losses.append(record["loss"])


def main(settings: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    data, model = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    remember = Remember()
    by_tokens = settings.pop("by_tokens", False)
    last_batch = settings.pop("last_batch", "keep")
    trainer = Trainer(
        model,
        data,
        optimizer=optimizer,
        loss=token_loss if by_tokens else sample_loss,
        device="cpu",
        stepping=Stepping(loss_weight=num_targets if by_tokens else "samples"),
        loading=Loading(last_batch=last_batch),
        evaluate=Evaluation(data, "1ep"),
        checkpoint=Checkpointing("1ep"),
        log=Logging("1ba"),
        callbacks=[remember],
        folder=out / "run",
        **settings,
    )
    trainer.fit()
    rank = int(os.environ.get("RANK", "0"))
    report = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "samples": remember.samples,
        "losses": remember.losses,
        "clock": trainer.timer.state_dict(),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
