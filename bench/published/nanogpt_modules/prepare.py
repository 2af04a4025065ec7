"""What `train.py` of karpathy/autoresearch imports from its `prepare.py`, with made-up tokens.

The buffers of the loader and of the evaluation have the sizes of the original; the training ends
after 12 steps, the evaluation after 2 batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_SEQ_LEN = 2048
TIME_BUDGET = 1e-6
VOCABULARY = 8192
BATCHES = 2


class Tokenizer:
    """A vocabulary of the size of the original."""

    @classmethod
    def from_directory(cls) -> Tokenizer:
        """Return the tokenizer; it needs no files."""
        return cls()

    def get_vocab_size(self) -> int:
        """Return how many tokens there are."""
        return VOCABULARY


def make_dataloader(
    tokenizer: Tokenizer, rows: int, length: int, split: str
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield inputs, targets and the epoch: views of one buffer on the device."""
    del tokenizer, split
    host = torch.randint(VOCABULARY, (2 * rows * length,), dtype=torch.long).pin_memory()
    device = torch.empty_like(host, device="cuda")
    inputs, targets = device.view(2, rows, length)
    while True:
        device.copy_(host, non_blocking=True)
        yield inputs, targets, 1


@torch.no_grad()
def evaluate_bpb(model: Any, tokenizer: Tokenizer, rows: int) -> float:
    """Evaluate two batches as the original does."""
    sizes = torch.ones(VOCABULARY, dtype=torch.int32).to("cuda")
    loader = make_dataloader(tokenizer, rows, MAX_SEQ_LEN, "val")
    nats, total = 0.0, 0.0
    for _ in range(BATCHES):
        x, y, _ = next(loader)
        losses = model(x, y, reduction="none").view(-1)
        found = sizes[y.view(-1)]
        mask = found > 0
        nats += (losses * mask).sum().item()
        total += found.sum().item()
    return nats / max(total, 1.0)
