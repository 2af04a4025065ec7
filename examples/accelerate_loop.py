"""Train a small network in a loop of Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(640, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=16, shuffle=True)
scheduler = CosineAnnealingLR(optimizer, T_max=80)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
steps = 0
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
print(steps, "steps, loss", float(loss))
