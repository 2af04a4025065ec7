"""A moving average of the weights, whose half-life is in samples."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import stretto
from stretto.report.pictures import draw
from stretto.training.algorithms import EarlyStopping, ExponentialMovingAverage

torch.manual_seed(0)
inputs = torch.randn(2048, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
folder = Path(tempfile.mkdtemp()) / "averages"

model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
trainer = stretto.Trainer(
    model,
    data,
    optimizer=torch.optim.AdamW(model.parameters(), lr=2e-2),
    loss=nn.MSELoss(),
    max_duration="12ep",
    batch_size="0ep:16 2ep:64",
    evaluate=stretto.Evaluation(data, every="0.5ep"),
    log="256sp",
    callbacks=[
        ExponentialMovingAverage(half_life="2_000sp"),
        EarlyStopping("validation/loss", patience="2ep", min_delta=0.002),
    ],
    folder=folder,
)
trainer.fit()
print(trainer.stop_reason)
if len(sys.argv) > 1:
    draw(folder, Path(sys.argv[1]))
