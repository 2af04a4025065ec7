"""Hugging Face trainers: whatever a loss is a mean over, parts of a batch train as the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs stretto[huggingface]")

from tests.integrations import huggingface_losses as losses
from tests.integrations import huggingface_toys as toys
from tests.integrations.huggingface_losses import CASES, MIXTRAL, WEIGHTED

from stretto.errors import TrainingError
from stretto.ordering import SampleOrder

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def whole(name: str) -> tuple[list[float], list[float]]:
    return losses.train(name, 16)  # each step is one micro-batch


def check(name: str, found: Any) -> None:
    for values, expected, bound in zip(found, whole(name), (1e-10, 1e-4), strict=True):
        assert values == pytest.approx(expected, rel=0, abs=bound)


@pytest.mark.parametrize("name", ["llama", "mlm-sparse", "llama-sparse", "own-of-sequences"])
def test_micro_batches_may_be_single_samples(name: str) -> None:
    check(name, losses.train(name, 1))


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_train_as_one_big_batch(name: str) -> None:
    check(name, losses.train(name, 4))


@pytest.mark.parametrize("made", [MIXTRAL, WEIGHTED], ids=["router", "weights of classes"])
def test_a_loss_that_is_no_mean_is_refused_in_parts_only(made: losses.Case) -> None:
    for size in (1, 4):
        with pytest.raises(TrainingError, match="router"):
            losses.train(made, size)
    losses.train(made, 16)


@pytest.mark.parametrize("made", [losses.RARE, losses.CHANGES], ids=["rare weights", "changes"])
def test_a_loss_that_looks_like_a_mean_at_first_is_refused_later(made: losses.Case) -> None:
    losses.train(made, 16)
    with pytest.raises(TrainingError, match="micro-batches"):
        losses.train(made, 4)


@pytest.mark.parametrize("name", losses.CAUSAL)
def test_the_loss_of_a_causal_model_is_the_mean_over_its_targets(name: str) -> None:
    make, columns, _ = losses.CAUSAL[name]
    torch.manual_seed(0)
    model = make().double().train()
    order = SampleOrder(losses.N, seed=toys.SEED)
    first = [order[at] for at in range(8)]
    expected = model(**{key: value[first] for key, value in columns.items()}).loss.item()
    for size in (4, 16):
        weights, logged = losses.train(losses.CAUSAL[name], size)
        assert logged[0] == pytest.approx(expected, rel=1e-5)
        assert weights == pytest.approx(losses.train(losses.CAUSAL[name], 8)[0], rel=0, abs=1e-10)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_ranks_train_as_one_big_batch(launch_ranks: Callable[..., Any], tmp_path: Path) -> None:
    launch_ranks(Path(losses.__file__), tmp_path)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        for name in CASES:
            for found in seen["found"][name].values():
                check(name, found)
        assert seen["refused"] == ["TrainingError"] * 2
