"""Train a small network with the trainer of Composer."""

import torch
from composer import ComposerModel, Trainer
from composer.utils.dist import get_sampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(ComposerModel):
    """Learns the sine of a sum."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])


torch.manual_seed(0)
inputs = torch.randn(640, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = Model()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=16, sampler=get_sampler(data, shuffle=True)),
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
    max_duration="2ep",
    progress_bar=False,
)
trainer.fit()
print(int(trainer.state.timestamp.batch), "steps, loss", float(trainer.state.loss))
