"""stretto in the trainer of sentence-transformers, against the real package."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sentence_transformers", reason="needs the package: make test-adapters")

import datasets
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tests.integrations import huggingface_toys as toys

from stretto.errors import TrainingError
from stretto.integrations.huggingface import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package's own modules


def make(loss: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    table = StaticEmbedding(toys.words(), embedding_weights=torch.randn(toys.WORDS, 8))
    model = SentenceTransformer(modules=[table], device="cpu")
    texts = [" ".join(f"w{i}" for i in row["input_ids"]) for row in toys.rows()]
    pairs = {"one": texts, "other": texts[::-1]}
    if loss is CosineSimilarityLoss:
        pairs["score"] = [i % 3 / 2 for i in range(toys.N)]  # type: ignore[misc]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=toys.arguments(SentenceTransformerTrainingArguments, **settings),
        train_dataset=datasets.Dataset.from_dict(pairs),
        loss=loss(model),
    )
    return attach(trainer, toys.SIZES, {"lr": 1.0})


def test_pairs_train_as_one_big_batch() -> None:
    weights = []
    for micro_batch_size in (4, 64):
        trainer = make(CosineSimilarityLoss, per_device_train_batch_size=micro_batch_size)
        trainer.train()
        assert trainer.state.global_step == len(list(toys.planned().batches()))
        weights.append(toys.flat(trainer.model))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_negatives_of_the_batch_need_one_micro_batch() -> None:
    with pytest.raises(TrainingError, match="compares the samples of a batch"):
        make(MultipleNegativesRankingLoss).train()
    make(MultipleNegativesRankingLoss, per_device_train_batch_size=64).train()
