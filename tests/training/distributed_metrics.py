"""One of two ranks that measure a model; writes what it saw. A test starts it through torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMAP
from torchmetrics.wrappers import ClasswiseWrapper

from stretto.errors import TrainingError
from stretto.training import Evaluation, Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.head(self.body(inputs))
        return out


class Highest:
    """A metric that can be merged, as those of torcheval."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(outputs.max().item())
        self.count += len(targets)

    def compute(self) -> dict[str, float]:
        return {"value": max(self.seen), "count": self.count}

    def reset(self) -> None:
        self.seen: list[float] = []
        self.count = 0

    def merge_state(self, others: list[Highest]) -> None:
        for other in others:
            self.seen += other.seen
            self.count += other.count


class Alone:
    """A metric that cannot be merged."""

    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (num_samples,), generator=generator))


def model() -> Net:
    torch.manual_seed(2)
    return Net()


def loss(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def right(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch[0]).argmax(1) == batch[1]).double().mean()


def metrics() -> dict[str, Any]:
    return {
        "right": right,
        "f1": MulticlassF1Score(num_classes=3),
        "auroc": MulticlassAUROC(num_classes=3),
        "classes": ClasswiseWrapper(MulticlassF1Score(num_classes=3, average=None)),
        "highest": Highest(),
    }


def trainer(net: nn.Module, evaluation: Evaluation) -> Trainer:
    return Trainer(
        net,
        data(61),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=loss,
        max_duration="1ep",
        batch_size=8,
        device="cpu",
        evaluate=evaluation,
    )


SIZES = {"many": 61, "one for the first rank": 1, "an uneven end": 13}


def measured(*, is_sharded: bool) -> dict[str, Any]:
    """What is measured over some numbers of samples, and how many passes it took."""
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        net = model()
        if is_sharded:
            fully_shard(net.body)
            fully_shard(net)
        run = trainer(net, Evaluation(data(size), metrics=metrics(), batch_size=6))
        found[name] = [[run.evaluate(), run.evaluate()], net.passes]
    return found


def refused(make: Any) -> str:
    try:
        make()
    except TrainingError as error:
        return str(error)
    return "nothing"


def lists(size: int) -> dict[str, float]:
    """A metric that keeps a list of batches, of which the ranks may have different numbers."""
    evaluation = Evaluation(
        data(size),
        metrics={"map": RetrievalMAP()},
        batch_size=6,
        predict=lambda net, batch: (net(batch[0])[:, 0], batch[1] > 0, batch[1]),
    )
    return trainer(model(), evaluation).evaluate()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {
        "whole": measured(is_sharded=False),
        "sharded": measured(is_sharded=True),
        "alone": refused(lambda: trainer(model(), Evaluation(data(8), metrics={"a": Alone()}))),
        "as many": lists(24),
        "not as many": lists(25),
    }
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
