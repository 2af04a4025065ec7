"""Metrics over the samples of two ranks, in real processes: gloo through torchrun."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMAP

SCRIPT = Path(__file__).with_name("distributed_metrics.py")

spec = importlib.util.spec_from_file_location("distributed_metrics", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]
) -> list[dict[str, Any]]:
    """What two ranks measured: starting them takes longer than the evaluations."""
    out = tmp_path_factory.mktemp("metrics")
    launch_ranks(SCRIPT, out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples:UserWarning")
@pytest.mark.parametrize("name", script.SIZES)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_they_are_those_of_the_whole_data_set(
    ranks: list[dict[str, Any]], kind: str, name: str
) -> None:
    """Uneven shares, a rank without samples, a second evaluation, models whole and sharded."""
    inputs, targets = script.data(script.SIZES[name]).tensors
    with torch.no_grad():
        outputs = script.model()(inputs)
    each = MulticlassF1Score(num_classes=3, average=None)(outputs, targets).tolist()
    expected = {
        "loss": torch.nn.functional.cross_entropy(outputs, targets).item(),
        "right": (outputs.argmax(1) == targets).double().mean().item(),
        "f1": MulticlassF1Score(num_classes=3)(outputs, targets).item(),
        "auroc": MulticlassAUROC(num_classes=3)(outputs, targets).item(),
        **{f"classes/multiclassf1score_{number}": value for number, value in enumerate(each)},
        "highest/value": outputs.max().item(),
        "highest/count": len(targets),
    }
    for rank in ranks:
        for measured in rank[kind][name][0]:
            own = {key.removeprefix("validation/"): value for key, value in measured.items()}
            assert own == pytest.approx(expected, rel=1e-5)
    assert ranks[0][kind][name][0] == ranks[1][kind][name][0]


def test_all_objects_share_a_pass_on_each_rank(ranks: list[dict[str, Any]]) -> None:
    """Batches of 6 in two evaluations; a sharded model also runs for a rank without samples."""
    for kind, of_second in (("whole", [30, 0, 6]), ("sharded", [36, 6, 12])):
        passes = [[rank[kind][name][1] for name in script.SIZES] for rank in ranks]
        assert passes == [[36, 6, 12], of_second]


def test_what_cannot_be_computed_over_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "give it a method merge_state(others)" in rank["alone"]


def test_ranks_may_have_lists_of_different_lengths(ranks: list[dict[str, Any]]) -> None:
    for name, size in (("as many", 24), ("not as many", 25)):
        inputs, targets = script.data(size).tensors
        with torch.no_grad():
            outputs = script.model()(inputs)[:, 0]
        expected = RetrievalMAP()(outputs, targets > 0, targets).item()
        for rank in ranks:
            assert rank[name]["validation/map"] == pytest.approx(expected)
