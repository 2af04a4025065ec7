"""Texts of unequal length, and a model of them in float64: what the gradient tests learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Text = dict[str, Tensor]
WORDS = 11


def texts(number: int, *, seed: int = 0, longest: int = 9) -> list[Text]:
    """Return texts of 2 to `longest` tokens; of every fifth, no token is a target."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for one in range(number):
        length = int(torch.randint(2, longest + 1, (1,), generator=generator))
        ids = torch.randint(1, WORDS, (length,), generator=generator)
        prompt = (
            length if one % 5 == 2 else int(torch.randint(length - 1, (1,), generator=generator))
        )
        labels = torch.where(torch.arange(length) < prompt, -100, ids)
        found.append({"input_ids": ids, "labels": labels, "number": torch.tensor(one)})
    return found


def pad(rows: Sequence[Text]) -> dict[str, Tensor]:
    """Collate texts: padding on the right."""

    def padded(name: str, value: int) -> Tensor:
        each = [row[name] for row in rows]
        return nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=value)

    ids = padded("input_ids", 0)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": padded("labels", -100),
        "number": torch.stack([row["number"] for row in rows]),
    }


class Causal(nn.Module):
    """Says the next token after each; shifts the labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden = nn.Embedding(WORDS, 4), nn.Linear(4, 8)
        self.head = nn.Linear(8, WORDS)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(self.embed(ids)).tanh())
        return out


def token_loss(model: Any, batch: Any, *, reduction: str = "mean") -> Tensor:
    """Return the mean over target tokens: nan if there are none."""
    logits = model(batch["input_ids"])[:, :-1]
    targets = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(logits.flatten(0, 1), targets, reduction=reduction)


def sample_loss(model: Any, batch: Any) -> Tensor:
    """Return the mean over samples of the sum over their target tokens."""
    return token_loss(model, batch, reduction="sum") / len(batch["input_ids"])


LOSSES = {"tokens": token_loss, "samples": sample_loss}


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters."""
    grads: list[Any] = [one.grad for one in model.parameters()]
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in grads]
    return torch.cat([one.flatten() for one in whole])


def whole_gradient(rows: Sequence[Text], unit: str) -> Tensor:
    """Return the gradient of one big batch."""
    model = Causal()
    LOSSES[unit](model, pad(rows)).backward()
    return gradient(model)
