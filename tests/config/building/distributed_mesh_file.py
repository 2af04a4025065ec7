"""One rank of runs whose files have a mesh; writes what each came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from stretto.config.run import RunConfig
from stretto.config.training import build_trainer
from stretto.errors import StrettoError

NAME = Path(__file__).stem
RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "model": {"target": f"{NAME}:Blocks"},
    "data": {"target": f"{NAME}:samples"},
    "optimizer": {"target": "torch.optim:AdamW", "lr": 0.01, "foreach": False},
    "batch_size": {"0sp": 3, "20sp": 7},
    "idle_ranks": True,
    "micro_batch_size": 2,
    "device": "cpu",
    "log": {"loggers": []},
}
TENSORS = {"mesh": {"dp": 2, "tp": 2}, "parallel": {"target": f"{NAME}:spread"}}
FILES: dict[str, dict[str, Any]] = {
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "parallel": "fsdp"},
    "fsdp": {"mesh": {"dp": 4}, "parallel": "fsdp"},
    "ddp": {"mesh": {"dp": 4}},
    "tp": TENSORS,
    "other ranks": {"mesh": {"dp": 8}},
    "parts and then copies": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "parallel": "fsdp"},
    "no idle ranks": {"mesh": {"dp": 4}, "idle_ranks": False},
    "no mesh": {"parallel": {"target": f"{NAME}:spread_nothing"}},
}


class Blocks(nn.Module):
    """Two blocks in a list, of which FSDP2 shards each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        out: Tensor = second(first(x).tanh())
        return out

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def samples() -> TensorDataset:
    x = torch.randn(51, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sin())


def spread(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


def spread_nothing(model: nn.Module) -> nn.Module:
    return model


def trained(**more: Any) -> Any:
    try:
        trainer = build_trainer(RunConfig.parse(RUN | more))
        seed = torch.initial_seed()
        trainer.fit()
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    whole = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()
    ]
    weights = torch.cat([one.detach().flatten() for one in whole]).tolist()
    return {"weights": weights, "group": trainer.run.rank, "seed": seed}


def main(out: Path, *names: str) -> None:
    found = {name: trained(**FILES[name]) for name in names} if names else {"one": trained()}
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
