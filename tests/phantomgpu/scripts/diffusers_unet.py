"""The U-Net of diffusers, as its training example."""

import sys, torch
from diffusers import UNet2DModel, DDPMScheduler
import torch.nn.functional as F

B = int(sys.argv[1])
model = UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    block_out_channels=(64, 128, 128),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
).cuda()
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
opt = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(B, 3, 32, 32).cuda()
    noise = torch.randn_like(x)
    t = torch.randint(0, 1000, (B,), device="cuda").long()
    with torch.autocast("cuda", torch.float16):
        loss = F.mse_loss(
            model(noise_scheduler.add_noise(x, noise, t), t, return_dict=False)[0].float(), noise
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
