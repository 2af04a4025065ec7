"""English text that ships with Python, as sequences of bytes, and losses over them."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import Literal, final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from stretto.errors import DataError

Split = Literal["train", "validation"]

TRAIN_BYTES = 2560 * 128
"""Predicted bytes of the training split: the same number in every version of Python."""

VALIDATION_BYTES = 256 * 128
"""Predicted bytes of the validation split."""


@final
class PythonDocs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The reference manual of the running Python (`pydoc_data.topics`) as windows of bytes.

    Sample `i` is a pair `(inputs, targets)` of int64 tensors of `sequence_length` bytes, the
    targets one byte ahead. Windows do not overlap: each byte of a split is predicted once in an
    epoch, and the two splits share none.

    The text is made of the topics in the order of their names. Topics quote each other at length,
    so a paragraph is kept only where it first occurs (spacing aside): else a fifth of the text
    would come twice, and the validation text would be read in training. The first 327,681 bytes
    are for training, the next 32,769 for validation, the rest is left out. So the number of
    samples is the same constant in Python 3.11 to 3.14, 2,560 and 256 at a length of 128, while
    the words follow the version.

    Args:
        sequence_length: bytes of a sample; a split's last bytes that do not fill one are left out.
        split: `train` or `validation`.

    >>> text = PythonDocs(sequence_length=128)
    >>> len(text), text.num_tokens, len(PythonDocs(split="validation"))
    (2560, 327680, 256)
    >>> inputs, targets = text[0]
    >>> bytes(inputs[:22].tolist())
    b'The "assert" statement'
    >>> bool((inputs[1:] == targets[:-1]).all())
    True

    Raises:
        DataError: no such split, or a length that no sample has.
    """

    def __init__(self, sequence_length: int = 128, *, split: Split = "train") -> None:
        text = _split_bytes(split)
        if not 1 <= sequence_length < len(text):
            why, instead = (
                f"the text has {len(text) - 1} bytes",
                "write at least 1 and at most that",
            )
            raise DataError.bad("sequence_length", sequence_length, why, instead)
        self.split = split
        self.tokens_per_sample = sequence_length
        """Bytes that one sample predicts."""
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        # A view: each window shares its last byte with the first of the next.
        self._windows = values.unfold(0, sequence_length + 1, sequence_length)

    @property
    def num_tokens(self) -> int:
        """Bytes that the whole split predicts in one epoch."""
        return len(self) * self.tokens_per_sample

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._windows[index]
        return window[:-1], window[1:]

    def get_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples as one batch: two tensors `(len(indices), sequence_length)`.

        >>> inputs, targets = PythonDocs(sequence_length=16).get_batch([5, 0, 7])
        >>> inputs.shape, targets.dtype
        (torch.Size([3, 16]), torch.int64)
        """
        windows = self._windows[indices]
        return windows[:, :-1], windows[:, 1:]

    def unigram_entropy(self) -> float:
        """Return the entropy of the bytes that this split predicts, in nats per byte.

        `-sum_b q(b) log q(b)` with `q(b)` the share of byte `b` among all targets of this very
        split: the lowest mean loss of any model that looks at no context, even one that knows the
        split's own byte frequencies. A loss below it was reached by reading the context.

        >>> 2.5 < PythonDocs(split="validation").unigram_entropy() < 3.5
        True
        """
        shares = _shares(self._windows[:, 1:])
        return -float(torch.xlogy(shares, shares).sum())


def next_byte_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the batch's targets under `model`, in nats per byte.

    >>> from stretto.examples.tiny_gpt import TinyGPT
    >>> batch = PythonDocs(sequence_length=8).get_batch([0, 1])
    >>> 5.4 < next_byte_loss(TinyGPT(1, 16), batch).item() < 5.7  # all bytes equally likely
    True
    """
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def unigram_loss(
    model: nn.Module,  # noqa: ARG001 (a metric is called with the model, this one needs none)
    batch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the mean cross-entropy of the batch's targets under their overall frequencies.

    For batches of the validation split, as a metric to print beside the validation loss: its mean
    over the split is `PythonDocs.unigram_entropy`, the frequencies being the split's own.

    >>> validation = PythonDocs(split="validation")
    >>> everything = validation.get_batch(list(range(len(validation))))
    >>> mean = unigram_loss(nn.Identity(), everything).item()
    >>> abs(mean - validation.unigram_entropy()) < 1e-5
    True
    """
    targets = batch[1]
    return -_validation_log_shares().to(targets.device)[targets].mean()


@cache
def _document() -> bytes:
    """Return every paragraph of the manual once, in the order of the topics' names."""
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(text for words, text in paragraphs.items() if words).encode()


def _split_bytes(split: Split) -> bytes:
    """Return the bytes of a split: those it predicts, and the one before them."""
    document = _document()
    validation_start = TRAIN_BYTES + 1
    end = validation_start + VALIDATION_BYTES + 1
    if len(document) < end:  # Python 3.11.2 has 374,000 bytes; later versions have more
        raise DataError.cannot(
            "read the packaged text",
            why=f"this Python's pydoc_data.topics has {len(document)} bytes, {end} are needed",
            instead="use another Python from 3.11 on",
        )
    if split == "train":
        return document[:validation_start]
    if split == "validation":
        return document[validation_start:end]
    raise DataError.bad("split", split, "it has no text", "write 'train' or 'validation'")


def _shares(values: torch.Tensor) -> torch.Tensor:
    """Return the share of each of the 256 bytes among `values`, in float64."""
    return torch.bincount(values.flatten(), minlength=256).double() / values.numel()


@cache
def _validation_log_shares() -> torch.Tensor:
    values = torch.frombuffer(bytearray(_split_bytes("validation")[1:]), dtype=torch.uint8)
    return _shares(values.long()).log().float()
