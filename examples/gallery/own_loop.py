"""A loop of your own: nothing but torch, and steps of sizes that change. Draws its plan."""

import sys
from pathlib import Path

import torch
from torch import nn

import stretto
from stretto.report import draw

torch.manual_seed(0)
inputs = torch.randn(2048, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = stretto.prepare(
    data,
    "0ep:16 1ep:48 2ep:128",
    max_duration="4ep",
    optimizer=optimizer,
    schedules={"lr": stretto.WSD("25%", warmup="10%")},
    micro_batch_size=32,
)
for step in run:
    for micro in step:
        loss = nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1])
        (loss * micro.weight).backward()
    optimizer.step()
    optimizer.zero_grad()
    run.finish()
print(run.timer.batch, "batches")
if len(sys.argv) > 1:
    draw(run.plan, Path(sys.argv[1]))
