"""How many tokens a batch has, and how many of them are targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from stretto.data.containers import mapped, named, nodes
from stretto.errors import DataError

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out."""


def count_tokens(batch: Any) -> int | None:
    """Return the tokens in a batch, without padding; None if the batch has no token ids.

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


def counts_padding(batch: Any) -> bool:
    """Return whether `count_tokens` counts padding, too: a part of the batch has no mask.

    >>> counts_padding({"input_ids": torch.tensor([[5, 0]])})
    True
    """
    return any("input_ids" in part and "attention_mask" not in part for part in _named_parts(batch))


_COLUMNS = (
    *("input_ids", "attention_mask", "labels"),
    *("position_ids", "token_type_ids", "special_tokens_mask"),
)
"""Tensors of a batch with one column for each token."""


def tokens_of_rows(batch: Any, num_rows: int, *, is_padded: bool = False) -> list[int] | None:
    """Return the tokens of each row of a batch, as `count_tokens` counts them, or with padding.

    None: the batch must be cut to tell.

    >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    >>> tokens_of_rows({"input_ids": ids, "attention_mask": (ids > 0).long()}, 2)
    [3, 1]
    """
    total: Tensor | None = None
    for part in _named_parts(batch):
        if _tokens(part) is None:
            continue
        mask = part.get("attention_mask")
        is_mask = _is_tensor(mask) and mask.dim() <= 2
        rows: Any = mask if is_mask else part["input_ids"]
        if rows.is_nested or rows.dim() != 2 or len(rows) != num_rows:
            return None
        counts = (
            rows != 0 if is_mask and not is_padded else torch.ones_like(rows, dtype=torch.int64)
        ).sum(1)
        total = counts if total is None else total + counts
    return None if total is None else total.tolist()


def used_columns(batch: Any, num_rows: int) -> list[int] | None:
    """Return how many columns of each row hold more than padding; None: none can be cut off.

    None may be if there is no `attention_mask`, or something unknown has as many columns.

    >>> mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    >>> used_columns({"attention_mask": mask, "input_ids": mask}, 2)
    [2, 1]
    >>> used_columns({"attention_mask": mask, "images": torch.zeros(2, 4)}, 2)
    """
    part = named(batch)
    mask, labels = part.get("attention_mask"), part.get("labels")
    if not _is_tensor(mask) or mask.is_nested or mask.dim() != 2 or len(mask) != num_rows:
        return None
    known, width = {id(part.get(name)) for name in _COLUMNS}, mask.size(1)
    if not width or any(_has_columns(one, width) and id(one) not in known for one in nodes(batch)):
        return None
    used = mask != 0
    if _is_tensor(labels) and labels.shape == mask.shape:
        used = used | (labels != IGNORED_LABEL)
    places = torch.arange(1, width + 1, dtype=torch.int32, device=mask.device)
    return (used * places).amax(1).clamp(min=1).tolist()


def narrowed(batch: Any, columns: int) -> Any:
    """Return a batch with its first columns, of which `used_columns` says how many it needs.

    >>> narrowed({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, 2)
    {'attention_mask': tensor([[1, 1]])}
    """
    width = named(batch)["attention_mask"].size(1)
    return mapped(lambda one: one[:, :columns] if _has_columns(one, width) else one, batch)


def _has_columns(node: Any, width: int) -> bool:
    return _is_tensor(node) and not node.is_nested and node.dim() > 1 and node.size(1) == width


def count_target_tokens(batch: Any, *, shifts_labels: bool | None = None) -> int:
    """Return how many tokens the loss of a language model is a mean over: labels that are not -100.

    Labels are those of `labels` beside `input_ids`, or the integer targets of a pair
    `(inputs, targets)`. A causal model of Hugging Face's gets labels that are its inputs and shifts
    them inside, so the first label of each sequence predicts nothing and does not count.

    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 2]])
    >>> count_target_tokens({"input_ids": ids, "labels": ids})
    4
    >>> count_target_tokens((ids[:, :-1], ids[:, 1:]))
    4

    Args:
        batch: the batch.
        shifts_labels: whether the model shifts labels of the shape of its inputs. None:
            decided from the batch (see `needs_label_shift`); yes if that is undecided.

    Raises:
        DataError: the batch has no labels.
    """
    pairs = list(_labels_and_inputs(batch))
    if not pairs:
        raise DataError.cannot(
            f"count the target tokens of a batch of type {type(batch).__name__}",
            why="it has no 'labels', and is no pair of inputs and integer targets",
            instead="pass a function that counts them as loss_weight",
        )
    if shifts_labels is None:
        shifts_labels = needs_label_shift(batch) is not False
    targets = [
        labels[..., 1:] if shifts_labels and inputs is not None else labels
        for labels, inputs in pairs
    ]
    return sum(int(torch.count_nonzero(one != IGNORED_LABEL)) for one in targets)


def needs_label_shift(batch: Any) -> bool | None:
    """Return whether the model must shift the labels of a batch; None if undecided.

    - Labels that equal the inputs, except for -100: yes.
    - Labels that equal the inputs one place further: no, they are shifted already.
    - Other labels of that shape, as in masked language models or token classification: no.

    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 2]])
    >>> needs_label_shift((ids, ids)), needs_label_shift((ids[:, :-1], ids[:, 1:]))
    (True, False)
    """
    num_targets, num_other, num_moved = compare_labels(batch)
    return (not num_other) if num_targets and (num_other or num_moved) else None


def compare_labels(batch: Any) -> tuple[int, int, int]:
    """Return the targets of a batch with a label for each input, and how many are no copies.

    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 2]])
    >>> compare_labels((ids, ids))
    (6, 0, 4)

    Returns:
        The labels that are not -100; those of them that are not their input; those that are not
        the next input, without the last of each sequence.
    """
    totals = [0, 0, 0]
    for labels, inputs in _labels_and_inputs(batch):
        if inputs is not None:
            is_target = labels != IGNORED_LABEL
            is_other = (labels != inputs) & is_target
            is_moved = (labels[..., :-1] != inputs[..., 1:]) & is_target[..., :-1]
            # Read in one transfer: on an accelerator each one waits for the device.
            found = torch.stack([one.sum() for one in (is_target, is_other, is_moved)]).tolist()
            totals = [total + one for total, one in zip(totals, found, strict=True)]
    return totals[0], totals[1], totals[2]


def not_cut_alike(batch: Any, length: int, *, looks_at_values: bool = True) -> str | None:
    """Return why a batch whose sequences are cut to `length` would mean something else, or None.

    >>> not_cut_alike((torch.zeros(2, 8), torch.zeros(2, 7)), 4)
    'a tensor of the shape [2, 7] is not as long as sequences of 8'

    Args:
        batch: the batch.
        length: tokens that are kept.
        looks_at_values: whether masks, positions and labels are read, which waits for the device.
    """
    tensors = [one for one in nodes(batch) if isinstance(one, Tensor) and one.dim() > 1]
    longest = longest_sequence(batch)
    other = next((one for one in tensors if one.size(1) != longest), None)
    if other is not None:
        return f"a tensor of the shape {[*other.shape]} is not as long as sequences of {longest}"
    for part in _named_parts(batch) if looks_at_values else ():
        if "decoder_input_ids" in part:
            return "source and target sequences would be cut alike"
        mask, places = part.get("attention_mask"), part.get("position_ids")
        if _is_tensor(mask) and (mask[:, 0] == 0).any():
            return "it is padded on the left"
        numbers_samples = _is_tensor(mask) and (mask > 1).any()
        if numbers_samples or (_is_tensor(places) and (places[:, 1:] == 0).any()):
            return "it is packed, so whole samples would be cut off"
    for labels, _ in _labels_and_inputs(batch) if looks_at_values else ():
        kept = labels != IGNORED_LABEL
        if labels.dim() > 1 and (kept.any(1) & ~kept[:, :length].any(1)).any():
            return f"all targets of a sample come after its first {length} tokens"
    return None


def longest_sequence(batch: Any) -> int | None:
    """Return the largest second dimension of the tensors in a batch; None if there is none.

    >>> longest_sequence((torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(2)))
    5
    """
    tensors = (node for node in nodes(batch) if isinstance(node, Tensor))
    return max((tensor.size(1) for tensor in tensors if tensor.dim() > 1), default=None)


def _labels_and_inputs(batch: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield all labels in a batch, with the inputs of the same shape, if any."""
    has_names = False
    for part in _named_parts(batch):
        labels, inputs = part.get("labels"), part.get("input_ids")
        if _is_tensor(labels):
            has_names = True
            is_decoder_separate = "decoder_input_ids" in part or "decoder_attention_mask" in part
            is_alike = _is_tensor(inputs) and inputs.shape == labels.shape
            yield labels, inputs if is_alike and not is_decoder_separate else None
    if has_names or not isinstance(batch, Sequence) or len(batch) != 2:
        return
    inputs, labels = batch
    if _is_tensor(labels) and not labels.is_floating_point():
        is_alike = _is_tensor(inputs) and inputs.shape == labels.shape and labels.dim() > 1
        yield labels, inputs if is_alike and not inputs.is_floating_point() else None


def _tokens(part: Mapping[str, Any]) -> int | None:
    mask, inputs = part.get("attention_mask"), part.get("input_ids")
    if _is_tensor(mask) and mask.dim() <= 2:  # a mask of pairs of tokens has more dimensions
        # Some masks number packed sequences 1, 2, ..., so each nonzero entry counts once.
        return int(torch.count_nonzero(mask))
    return inputs.numel() if _is_tensor(inputs) else None


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _named_parts(batch: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all containers in a batch whose items have names."""
    return (named(node) for node in nodes(batch) if not isinstance(node, Tensor))
