from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stretto.data import count_target_tokens, count_tokens
from stretto.errors import DataError

IDS = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
MASK = (IDS > 0).long()


@dataclasses.dataclass
class Batch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS}, 8),
        ({"input_ids": IDS, "attention_mask": MASK}, 6),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, 6),
        ({"input_ids": IDS, "attention_mask": 2 * MASK}, 6),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, 8),
        ({"attention_mask": MASK}, 6),
        (({"input_ids": IDS, "attention_mask": MASK}, torch.zeros(2)), 6),
        ({"chosen": {"input_ids": IDS}, "rejected": {"attention_mask": MASK}}, 14),
        (Batch(IDS, MASK), 6),
        ((IDS, IDS), None),
        ({"input_ids": [[1, 2]]}, None),
        (IDS, None),
    ],
)
def test_padding_is_no_token(batch: Any, count: int | None) -> None:
    assert count_tokens(batch) == count


LABELS = torch.tensor([[5, 6, 7, -100], [9, -100, -100, 4]])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": LABELS}, 3),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "labels": LABELS}, 5),
        ({"input_ids": IDS[:, :3], "labels": LABELS}, 5),
        ({"labels": torch.tensor([1, -100, 3])}, 2),
        ((IDS, LABELS), 5),
        ([torch.zeros(2, 7), torch.tensor([1, 2])], 2),
        ({"a": {"input_ids": IDS, "labels": LABELS}, "b": {"labels": LABELS}}, 8),
    ],
)
def test_targets_are_labels_that_count_after_the_shift(batch: Any, count: int) -> None:
    assert count_target_tokens(batch) == count


@pytest.mark.parametrize("batch", [IDS, {"input_ids": IDS}, (IDS, torch.zeros(2)), (IDS,), "text"])
def test_a_batch_without_targets_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="no 'labels'"):
        count_target_tokens(batch)
