from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from stretto.errors import DataError, MissingPackageError
from stretto.examples.digits import (
    DigitClassifier,
    Digits,
    _images_and_digits,
    accuracy,
    digit_loss,
)


@pytest.fixture
def _nothing_cached() -> Iterator[None]:
    _images_and_digits.cache_clear()
    yield
    _images_and_digits.cache_clear()


def test_the_splits_part_the_images() -> None:
    train, validation = Digits(), Digits("validation")
    assert (len(train), len(validation)) == (1440, 357)
    images = torch.cat([train.get_batch(list(range(1440)))[0], validation.get_batch([0])[0]])
    assert images.shape == (1441, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)


def test_a_batch_is_its_samples_stacked() -> None:
    data = Digits("validation")
    images, digits = data.get_batch([5, 2, 5])
    assert torch.equal(images, torch.stack([data[index][0] for index in (5, 2, 5)]))
    assert digits.tolist() == [int(data[index][1]) for index in (5, 2, 5)]


def test_the_loss_of_a_guess_is_that_of_ten_equal_chances() -> None:
    class Undecided(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(images), 10)

    loss = digit_loss(Undecided(), Digits().get_batch([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(2.302585)


def test_accuracy_is_the_share_that_is_right() -> None:
    images, digits = Digits().get_batch([0, 1, 2, 3])

    class Three(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.tensor([0, 1, 2, 9]), 10)

    assert digits.tolist() == [0, 1, 2, 3]
    assert accuracy(Three(), (images, digits)).item() == 0.75


def test_the_classifier_learns() -> None:
    torch.manual_seed(0)
    model, data = DigitClassifier(8), Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        optimizer.zero_grad()
        loss = digit_loss(model, data.get_batch(list(range(step * 20, step * 20 + 40))))
        torch.autograd.backward(loss)
        optimizer.step()
    assert accuracy(model, data.get_batch(list(range(1440)))).item() > 0.6


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="validation"):
        Digits("test")  # type: ignore[arg-type]


class NoScikitLearn:
    """An import hook for an environment without the package."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError(name, name="sklearn")


@pytest.mark.usefixtures("_nothing_cached")
def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoScikitLearn, *sys.meta_path])
    with pytest.raises(MissingPackageError, match=r"\.\[sklearn\]"):
        Digits()
