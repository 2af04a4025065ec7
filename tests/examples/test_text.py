from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

from stretto.errors import DataError
from stretto.examples.text import PythonDocs, next_byte_loss, unigram_loss


def text_of(data: PythonDocs) -> bytes:
    """All bytes of a split, put together from its windows."""
    first, _ = data[0]
    targets = b"".join(bytes(data[index][1].tolist()) for index in range(len(data)))
    return bytes(first[:1].tolist()) + targets


@pytest.mark.parametrize(
    ("length", "split", "samples"),
    [(128, "train", 2560), (128, "validation", 256), (64, "train", 5120), (100, "train", 3276)],
)
def test_the_number_of_samples_is_the_same_in_every_python(
    length: int, split: str, samples: int
) -> None:
    data = PythonDocs(length, split=split)  # type: ignore[arg-type]
    assert len(data) == samples
    assert data.tokens_per_sample == length
    assert data.num_tokens == samples * length


def test_targets_are_one_byte_ahead_and_windows_follow_each_other() -> None:
    data = PythonDocs(32)
    for index in (0, 17, len(data) - 2):
        inputs, targets = data[index]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (32,)
        assert torch.equal(inputs[1:], targets[:-1])
        assert data[index + 1][0][0] == targets[-1]


def test_a_batch_is_its_samples_stacked() -> None:
    data = PythonDocs(16)
    indices = [3, 99, 3, 0]
    inputs, targets = data.get_batch(indices)
    assert torch.equal(inputs, torch.stack([data[index][0] for index in indices]))
    assert torch.equal(targets, torch.stack([data[index][1] for index in indices]))


def test_the_validation_text_is_not_in_the_training_text() -> None:
    train, validation = text_of(PythonDocs()), text_of(PythonDocs(split="validation"))
    paragraphs = [part for part in validation.split(b"\n\n")[1:-1] if len(part) > 100]
    assert len(paragraphs) > 50
    assert not [part for part in paragraphs if part in train]


def test_the_text_does_not_depend_on_the_object() -> None:
    assert text_of(PythonDocs(64)) == text_of(PythonDocs(128))


def test_unigram_entropy_is_that_of_the_targets() -> None:
    data = PythonDocs(split="validation")
    counts = Counter(text_of(data)[1:])
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert data.unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_over_the_validation_split_is_its_entropy() -> None:
    data = PythonDocs(64, split="validation")
    parts = [data.get_batch(list(range(start, start + 64))) for start in range(0, len(data), 64)]
    mean = sum(unigram_loss(nn.Identity(), batch).item() for batch in parts) / len(parts)
    assert mean == pytest.approx(data.unigram_entropy(), rel=1e-6)


def test_next_byte_loss_is_the_mean_over_all_bytes() -> None:
    batch = PythonDocs(8).get_batch([0, 1, 2])
    logits = torch.randn(3, 8, 256, generator=torch.Generator().manual_seed(0))

    class Fixed(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return logits

    shares = logits.log_softmax(-1)
    said = [shares[i, j, batch[1][i, j]].item() for i in range(3) for j in range(8)]
    assert next_byte_loss(Fixed(), batch).item() == pytest.approx(-sum(said) / 24, rel=1e-5)


@pytest.mark.parametrize("length", [0, -1, 32_769])
def test_a_length_that_no_sample_has_is_refused(length: int) -> None:
    with pytest.raises(DataError, match="sequence_length"):
        PythonDocs(length, split="validation")


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="validation"):
        PythonDocs(split="test")  # type: ignore[arg-type]
