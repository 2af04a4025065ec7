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
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tests.integrations import huggingface_toys as toys

from stretto.errors import TrainingError
from stretto.integrations.huggingface import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package's own modules


def make(loss: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    weights = torch.randn(toys.WORDS, 8, dtype=torch.float64)
    table = StaticEmbedding(toys.words(), embedding_weights=weights)
    model = SentenceTransformer(modules=[table], device="cpu").double()
    texts = [" ".join(f"w{i}" for i in row["input_ids"]) for row in toys.rows()]
    columns: dict[str, Any] = {"one": texts, "other": texts[::-1]}
    made = loss(model)
    if isinstance(made, losses.TripletLoss):
        columns["third"] = texts[7:] + texts[:7]
    elif isinstance(made, losses.SoftmaxLoss):
        columns["label"] = [int(i % 9 == 0) for i in range(toys.N)]
    elif not isinstance(getattr(made, "loss", made), losses.MultipleNegativesRankingLoss):
        columns["score"] = [float(i % 2) for i in range(toys.N)]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=toys.arguments(SentenceTransformerTrainingArguments, max_grad_norm=0.0, **settings),
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=made,
    )
    return attach(trainer, toys.SIZES, {"lr": 1.0})


MEANS: dict[str, Any] = {
    "cosine": losses.CosineSimilarityLoss,
    "contrastive": losses.ContrastiveLoss,
    "triplet": losses.TripletLoss,
    "matryoshka": lambda model: losses.MatryoshkaLoss(
        model, losses.CosineSimilarityLoss(model), matryoshka_dims=[8, 4]
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_pairs_train_as_one_big_batch(name: str) -> None:
    weights = []
    for micro_batch_size in (4, 64):
        trainer = make(MEANS[name], per_device_train_batch_size=micro_batch_size)
        trainer.train()
        assert trainer.state.global_step == len(list(toys.planned().batches()))
        weights.append(toys.flat(trainer.model))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-10)


class Own(losses.CosineSimilarityLoss):
    """A loss of the user, of which nothing is known."""


OTHERS: dict[str, Any] = {
    "negatives": losses.MultipleNegativesRankingLoss,
    "matryoshka": lambda model: losses.MatryoshkaLoss(
        model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[8, 4]
    ),
    "dimensions by chance": lambda model: losses.MatryoshkaLoss(
        model, losses.CosineSimilarityLoss(model), matryoshka_dims=[8, 4], n_dims_per_step=1
    ),
    "weights of classes": lambda model: losses.SoftmaxLoss(
        model, 8, 2, loss_fct=torch.nn.CrossEntropyLoss(weight=torch.tensor([0.5, 5.0]))
    ),
    "cosent": losses.CoSENTLoss,
    "angle": losses.AnglELoss,
    "online": losses.OnlineContrastiveLoss,
    "summed": lambda model: losses.ContrastiveLoss(model, size_average=False),
    "own": Own,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_need_one_micro_batch(name: str) -> None:
    trainer = make(OTHERS[name])
    with pytest.raises(TrainingError, match="micro-batches"):
        trainer.train()
    assert trainer.state.global_step == 0
    make(OTHERS[name], per_device_train_batch_size=64).train()
