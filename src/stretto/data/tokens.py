"""How many tokens a batch has, and how many of them are targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from stretto.data.containers import named, opened
from stretto.errors import DataError, cannot

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out."""


def count_tokens(batch: Any) -> int | None:
    """Return the tokens in a batch: padding is none. None where the batch does not tell.

    What counts are the ones of `attention_mask`, else all of `input_ids`, wherever in the batch
    a mapping, a named tuple or a dataclass has them; several add up.

    >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    >>> count_tokens({"input_ids": ids, "attention_mask": (ids > 0).long()})
    4
    >>> count_tokens({"input_ids": ids}), count_tokens(ids)
    (6, None)
    """
    counts = [_tokens(part) for part in _named_parts(batch)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def count_target_tokens(batch: Any) -> int:
    """Return how many tokens the loss of a language model is a mean over: labels that are not -100.

    - `labels` of the shape of `input_ids` are shifted inside the model, as Hugging Face's are:
      the first label of each sequence predicts nothing. Not so where the batch has a decoder's
      own inputs.
    - other `labels` all count.
    - in a pair `(inputs, targets)` of tensors the integer targets count, as they are.

    >>> labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    >>> count_target_tokens({"input_ids": labels, "labels": labels})
    3
    >>> count_target_tokens((torch.zeros(2, 3), labels))
    5

    Raises:
        DataError: the batch has no labels.
    """
    counts = [_targets(part) for part in _named_parts(batch) if _is_tensor(part.get("labels"))]
    if counts:
        return sum(counts)
    targets = batch[1] if isinstance(batch, Sequence) and len(batch) == 2 else None
    if _is_tensor(targets) and not targets.is_floating_point():
        return _labelled(targets)
    raise DataError(
        cannot(
            f"count the target tokens of a batch of type {type(batch).__name__}",
            why="it has no 'labels', and is no pair of inputs and integer targets",
            instead="pass a function that counts them as loss_weight",
        )
    )


def longest_sequence(batch: Any) -> int | None:
    """Return the largest second dimension of the tensors in a batch; None if there is none.

    >>> longest_sequence((torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(2)))
    5
    """
    if isinstance(batch, Tensor):
        return batch.size(1) if batch.dim() > 1 else None
    container = opened(batch)
    lengths = map(longest_sequence, container.items if container else ())
    return max((length for length in lengths if length is not None), default=None)


def _targets(part: Mapping[str, Any]) -> int:
    labels, inputs = part["labels"], part.get("input_ids")
    is_decoder_separate = "decoder_input_ids" in part or "decoder_attention_mask" in part
    if _is_tensor(inputs) and inputs.shape == labels.shape and not is_decoder_separate:
        labels = labels[..., 1:]
    return _labelled(labels)


def _labelled(labels: Tensor) -> int:
    return int(torch.count_nonzero(labels != IGNORED_LABEL))


def _tokens(part: Mapping[str, Any]) -> int | None:
    mask, inputs = part.get("attention_mask"), part.get("input_ids")
    if _is_tensor(mask) and mask.dim() <= 2:  # a mask of pairs of tokens has more dimensions
        # Packed sequences are numbered 1, 2, ... in some masks, so what is not 0 counts once.
        return int(torch.count_nonzero(mask))
    return inputs.numel() if _is_tensor(inputs) else None


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _named_parts(node: Any) -> Iterator[Mapping[str, Any]]:
    """All the containers in a batch whose items have names."""
    if isinstance(node, Tensor):
        return
    part = named(node)
    if part:
        yield part
    container = opened(node)
    for item in container.items if container else ():
        if not isinstance(item, (Tensor, str, int, float)):
            yield from _named_parts(item)
