"""Lightning with half precision and workers."""

import sys, torch, lightning as L
from torch import nn

B = int(sys.argv[1])


class M(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def training_step(self, b, i):
        loss = nn.functional.mse_loss(self.net(b[0]), b[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, b, i):
        self.log("val", nn.functional.mse_loss(self.net(b[0]), b[0]))

    def configure_optimizers(self):
        o = torch.optim.AdamW(self.parameters())
        return {"optimizer": o, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, 100)}


data = torch.utils.data.TensorDataset(torch.randn(8192, 512))
dl = torch.utils.data.DataLoader(data, B, num_workers=2, pin_memory=True)
L.Trainer(
    max_epochs=1,
    precision="16-mixed",
    accelerator="gpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    gradient_clip_val=1.0,
).fit(M(), dl, dl)
