"""Muon for the matrices and AdamW for the rest: a step of your own."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import stretto
from stretto.report.pictures import draw

torch.manual_seed(0)
inputs = torch.randn(2048, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
folder = Path(tempfile.mkdtemp()) / "muon"


class MuonAndAdamW(stretto.TrainStep):
    """Two optimizers over one model."""

    def __init__(self, model):
        self.model, self.loss = model, self.mean_loss
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]

    @staticmethod
    def mean_loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def forward_backward(self, batch, weight):
        loss = self.loss(self.model, batch)
        (loss * weight).backward()
        return loss

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
        return {}


model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
trainer = stretto.Trainer(
    MuonAndAdamW(model),
    data,
    max_duration="4ep",
    batch_size=stretto.DoublingRamp(16, 128, over="60%"),
    schedules={"lr": stretto.Cosine(end=0.1, warmup="5%")},
    evaluate=stretto.Evaluation(data, every="1ep"),
    log="256sp",
    folder=folder,
)
trainer.fit()
print(trainer.timer.batch, "batches")
if len(sys.argv) > 1:
    draw(folder, Path(sys.argv[1]))
