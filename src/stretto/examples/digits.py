"""Handwritten digits that ship with scikit-learn, and a small network that reads them."""

from __future__ import annotations

from functools import cache
from typing import Literal, final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from stretto._optional import import_optional
from stretto.errors import DataError

NUM_TRAIN = 1440
"""Images of the training split; the other 357 of the 1,797 are for validation."""


@final
class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of 8 by 8 grey pixels, `(1, 8, 8)` in [0, 1], and the digit 0 to 9 that each shows.

    The test half of the UCI "Optical Recognition of Handwritten Digits" set, as scikit-learn
    bundles it. The first 1,440 images are for training, the last 357 for validation. Images by one
    writer lie side by side, so cutting there, without a shuffle, keeps most writers on one side.

    Args:
        split: `train` or `validation`.

    >>> digits = Digits()
    >>> image, digit = digits[3]
    >>> len(digits), image.shape, int(digit)
    (1440, torch.Size([1, 8, 8]), 3)

    Raises:
        DataError: no such split.
        MissingPackageError: scikit-learn is not installed.
    """

    def __init__(self, split: Literal["train", "validation"] = "train") -> None:
        images, digits = _images_and_digits()
        if split == "train":
            kept = slice(None, NUM_TRAIN)
        elif split == "validation":
            kept = slice(NUM_TRAIN, None)
        else:
            raise DataError.bad("split", split, "it has no digits", "write 'train' or 'validation'")
        self.split = split
        self._images, self._digits = images[kept], digits[kept]

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._images[index], self._digits[index]

    def get_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples as one batch: images `(n, 1, 8, 8)` and digits `(n,)`.

        >>> images, digits = Digits().get_batch([4, 0])
        >>> images.shape, digits.tolist()
        (torch.Size([2, 1, 8, 8]), [4, 0])
        """
        return self._images[indices], self._digits[indices]


@final
class DigitClassifier(nn.Module):
    """A small convolutional network: images `(n, 1, 8, 8)` to logits `(n, 10)`.

    Two 3 by 3 convolutions, the second halving the image to 4 by 4, then two linear layers.

    Args:
        width: channels of the first convolution; the second has twice as many.

    >>> DigitClassifier(width=4)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits for each image."""
        logits: torch.Tensor = self.layers(images)
        return logits


def digit_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the batch's digits under `model`, in nats.

    >>> loss = digit_loss(DigitClassifier(), Digits().get_batch([0, 1, 2]))
    >>> loss.shape
    torch.Size([])
    """
    images, digits = batch
    return functional.cross_entropy(model(images), digits)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the share of the batch's images whose digit has the largest logit, in [0, 1].

    >>> sure_of_three = lambda images: functional.one_hot(torch.full((len(images),), 3), 10)
    >>> accuracy(sure_of_three, Digits().get_batch([3, 13, 4, 14])).item()
    0.5
    """
    images, digits = batch
    is_right: torch.Tensor = model(images).argmax(dim=-1) == digits
    return is_right.float().mean()


@cache
def _images_and_digits() -> tuple[torch.Tensor, torch.Tensor]:
    bundle = import_optional("sklearn.datasets", "sklearn").load_digits()
    images = torch.tensor(bundle.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(bundle.target, dtype=torch.int64)
