"""A ResNet of transformers."""

import sys, torch
from transformers import ResNetConfig, ResNetForImageClassification

B = int(sys.argv[1])
model = ResNetForImageClassification(ResNetConfig(num_labels=100)).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for i in range(10):
    with torch.autocast("cuda", torch.bfloat16):
        out = model(
            torch.randn(B, 3, 224, 224).cuda(non_blocking=True),
            labels=torch.randint(0, 100, (B,)).cuda(),
        )
    opt.zero_grad()
    out.loss.backward()
    opt.step()
    print((out.logits.argmax(1) == 1).float().mean().item())
