"""Steps of your own on several ranks, which print their weights; one process gives the same."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.steps import GANStep, MuonStep, SAMStep

from stretto.runtime import TrainStep
from stretto.training import Stepping, Trainer

RANK = int(os.environ.get("RANK", "0"))
INPUTS = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(INPUTS, torch.arange(40) % 3)


def net(last: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, last)).double()


def square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - 1).square().mean()
    return loss


def masked(model: nn.Module, batch: Any) -> Tensor:
    is_target = batch[1] != 0
    losses = (model(batch[0]) - batch[1].unsqueeze(1)).square().mean(dim=1)
    return (losses * is_target).sum() / is_target.sum()


def num_targets(batch: Any) -> int:
    return int((batch[1] != 0).sum())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def sam(loss: Callable[..., Tensor]) -> TrainStep:
    model = net()
    return SAMStep(model, sgd(model.parameters()), loss, radius=0.05)


class Noiseless(nn.Module):
    """A generator whose samples do not depend on chance, which each rank has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(5)

    def forward(self, noise: Tensor) -> Tensor:
        made: Tensor = self.net(torch.ones_like(noise))
        return made


def train(step: TrainStep, data: Any = DATA, **settings: Any) -> list[float]:
    trainer = Trainer(
        step, data, max_duration="2ep", batch_size="0sp:7 20sp:9", micro_batch_size=3, **settings
    )
    trainer.fit()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made: dict[str, Callable[[], list[float]]] = {
        "SAM": lambda: train(sam(square)),
        "SAM, by tokens": lambda: train(sam(masked), stepping=Stepping(loss_weight=num_targets)),
        "Muon": lambda: train(MuonStep(net(), square, lr=0.01)),
        "GAN": lambda: train(GANStep(Noiseless(), net(1), sgd, noise=5), list(INPUTS)),
    }
    report = {}
    for name, work in made.items():
        torch.manual_seed(0)
        report[name] = work()
    (out / f"rank{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
    sys.stdout.flush()
    # torch 2.13 with gloo sometimes aborts while the interpreter exits; everything is written.
    os._exit(0)
