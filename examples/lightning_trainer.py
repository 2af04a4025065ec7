"""Train a small network with the trainer of Lightning."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    """Learns the sine of a sum."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
inputs = torch.randn(640, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
loader = DataLoader(data, batch_size=16, shuffle=True)
trainer.fit(Module(), loader)
print(trainer.global_step, "steps, loss", float(trainer.callback_metrics["loss"]))
