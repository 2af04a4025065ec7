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


LABELS = torch.tensor([[5, 6, 7, -100], [9, -100, -100, 0]])
SHIFTED = torch.tensor([[6, 7, 8, 4], [3, -100, -100, 2]])
CLASSES = torch.tensor([[1, 0, 2, -100], [1, 1, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": LABELS}, 3),
        ({"input_ids": IDS, "labels": SHIFTED}, 6),
        ({"input_ids": IDS, "labels": CLASSES}, 5),
        ({"input_ids": IDS, "labels": torch.tensor([[-100] * 3 + [8], [-100] * 4])}, 1),
        ({"input_ids": IDS, "labels": torch.tensor([[-100] * 3 + [9], [-100] * 4])}, 1),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "labels": LABELS}, 5),
        ({"input_ids": IDS[:, :3], "labels": LABELS}, 5),
        ({"labels": torch.tensor([1, -100, 3])}, 2),
        ((IDS, SHIFTED), 6),
        ((IDS, LABELS), 3),
        ((IDS, CLASSES), 5),
        ([torch.zeros(2, 7), torch.tensor([1, 2])], 2),
        ([torch.tensor([1, 2]), torch.tensor([1, 2])], 2),
        ({"a": {"input_ids": IDS, "labels": LABELS}, "b": {"labels": LABELS}}, 8),
        ({"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()}, 6),
        ({"input_ids": IDS, "labels": torch.full((2, 4), -100)}, 0),
    ],
    ids=[
        "shifted in the model",
        "shifted already",
        "a class for each token",
        "one target, shifted in the model",
        "one target, shifted already",
        "decoder",
        "other shape",
        "no inputs",
        "pair, shifted already",
        "pair, shifted in the model",
        "pair, a class for each token",
        "pair, a class for each sample",
        "pair, one dimension",
        "several",
        "may be either",
        "none",
    ],
)
def test_targets_are_the_labels_that_the_loss_is_a_mean_over(batch: Any, count: int) -> None:
    assert count_target_tokens(batch) == count


@pytest.mark.parametrize("labels", [LABELS, SHIFTED, CLASSES], ids=["ids", "shifted", "classes"])
def test_whether_the_model_shifts_labels_may_be_stated(labels: torch.Tensor) -> None:
    counts = int((labels != -100).sum()), int((labels[:, 1:] != -100).sum())
    for batch in ({"input_ids": IDS, "labels": labels}, (IDS, labels)):
        assert count_target_tokens(batch, shifts_labels=False) == counts[0]
        assert count_target_tokens(batch, shifts_labels=True) == counts[1]


@pytest.mark.parametrize("batch", [IDS, {"input_ids": IDS}, (IDS, torch.zeros(2)), (IDS,), "text"])
def test_a_batch_without_targets_is_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="labels"):
        count_target_tokens(batch)
