"""Train ResNet-20 on the digits that scikit-learn ships: pip install '.[sklearn]'.

The network is that of arXiv 1512.03385, section 4.2, for images of one colour. Half a minute on one
core. With torch 2.13 it prints:

    269,434 parameters
    276 steps: validation loss 0.240, accuracy 0.952
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

import stretto
from stretto.examples.digits import Digits, accuracy, digit_loss


class Block(nn.Module):
    """Two convolutions, added to their input. Between stages the input is thinned and padded."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride = width // before
        self.more = width - before
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 3, self.stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        thinned = images[:, :, :: self.stride, :: self.stride]
        padded = functional.pad(thinned, (0, 0, 0, 0, self.more // 2, self.more // 2))
        return functional.relu(padded + self.layers(images))


def resnet(blocks: int = 3) -> nn.Sequential:
    widths = [16] + [width for width in (16, 32, 64) for _ in range(blocks)]
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Block(before, width) for before, width in pairwise(widths)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main(duration: str = "12ep", blocks: int = 3) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = resnet(blocks)
    trainer = stretto.Trainer(
        model,
        Digits(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
        loss=digit_loss,
        max_duration=duration,
        batch_size=stretto.DoublingRamp(32, 128, over="50%"),
        schedules={"lr": stretto.Cosine(warmup="10%")},
        evaluate=stretto.Evaluation(
            Digits("validation"), every="25%", metrics={"accuracy": accuracy}
        ),
        log=stretto.Logging(console=False),
    )
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters")
    trainer.fit()
    found = trainer.evaluate()
    loss, correct = found["validation/loss"], found["validation/accuracy"]
    print(f"{trainer.timer.batch} steps: validation loss {loss:.3f}, accuracy {correct:.3f}")


if __name__ == "__main__":
    main()
