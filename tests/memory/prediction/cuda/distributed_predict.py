"""Two ranks predict the memory of their sharded model, and train on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from stretto.memory import predict
from stretto.memory.prediction.cuda.sharding import fully_shard_blocks
from stretto.runtime import SupervisedStep


class Mlp(nn.Module):
    """Blocks of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def main() -> None:
    """Predict, take a step, and predict again."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Mlp()
    fully_shard_blocks(model, init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).square().mean(), clip_norm=1.0)
    seen: dict[str, object] = {}
    for name in ("before", "after a step"):
        prediction = predict(step, lambda size: torch.ones(size, 64), device="cuda")
        seen[name] = [prediction.peak(4), prediction.allocated(4)]
        step.forward_backward(torch.ones(4, 64), 1.0)
        norm = step.update()["grad_norm"]
        step.clear()
    seen["norm"] = float(norm)
    total = torch.ones(())
    dist.all_reduce(total)
    seen["sum"] = float(total)
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
    # gloo of torch 2.13 sometimes aborts while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
