"""A convolutional U-Net in fp16."""

import sys, torch
from torch import nn

B = int(sys.argv[1])


def double(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1),
        nn.BatchNorm2d(o),
        nn.ReLU(True),
        nn.Conv2d(o, o, 3, padding=1),
        nn.BatchNorm2d(o),
        nn.ReLU(True),
    )


class UNet(nn.Module):
    def __init__(self, w=32):
        super().__init__()
        self.a, self.b, self.c = double(3, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.pool = nn.MaxPool2d(2)
        self.u1, self.d1 = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), double(4 * w, 2 * w)
        self.u2, self.d2 = nn.ConvTranspose2d(2 * w, w, 2, 2), double(2 * w, w)
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(self.pool(a))
        c = self.c(self.pool(b))
        y = self.d1(torch.cat([b, self.u1(c)], 1))
        y = self.d2(torch.cat([a, self.u2(y)], 1))
        return self.out(y)


model = UNet().to("cuda", memory_format=torch.channels_last)
opt = torch.optim.RMSprop(model.parameters(), foreach=True)
scaler = torch.amp.GradScaler()
for step in range(10):
    x = torch.randn(B, 3, 128, 128).to("cuda", memory_format=torch.channels_last)
    mask = (torch.rand(B, 1, 128, 128) > 0.5).float().cuda()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), mask)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    print(step, loss.item())
