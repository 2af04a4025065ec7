"""Ranks with different memory look for one answer, on a wrapped model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.memory import find_batch_size
from stretto.runtime import Ranks, SupervisedStep


class Capacity(nn.Module):
    """Runs out of memory where a batch has more samples than there is room for on this rank."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        result: Tensor = self.norm(self.layer(x))
        return result


def main() -> None:
    """Look for the answer in two ways, train on, and write down what was seen."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    # The third rank, where there is one, has the least memory.
    inner = Capacity((40, 23, 11)[rank])
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = SupervisedStep(model, optimizer, lambda m, x: m(x).square().mean() + m(x).sum())
    before = [value.clone() for value in inner.state_dict().values()]
    seen: dict[str, object] = {}
    for way, powers in (("try", False), ("powers", True)):
        answer = find_batch_size(
            step,
            torch.ones(2, 2),
            power_of_two=powers,
            maximum=64,
            ranks=Ranks(),
        )
        seen[way] = [answer.size, answer.too_large]
    after = inner.state_dict().values()
    seen["same"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # The reducer has seen nothing of all that.
    torch.manual_seed(rank)
    for _ in range(3):
        step.forward_backward(torch.randn(8, 2), 1.0)
        step.update()
        step.clear()
    seen["weights"] = inner.layer.weight.tolist()
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
    # gloo of torch 2.13 sometimes aborts while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
