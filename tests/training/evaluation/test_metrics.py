from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity

from stretto.batching import Plateau
from stretto.errors import TrainingError
from stretto.training import Callback, Checkpointing, Evaluation, Run, Trainer
from stretto.training.metrics import default_predict

Make = Callable[..., Any]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(5, 4)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.passes += 1
        return self.layer(inputs)


def data(num_samples: int = 61) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (num_samples,), generator=generator))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def right(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def trainer(model: nn.Module, *evaluations: Evaluation, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_duration": "2ep", "batch_size": 8, "loss": loss}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {**defaults, **settings}
    return Trainer(model, data(), optimizer=optimizer, evaluate=evaluations, **settings)


def f1(**settings: Any) -> MulticlassF1Score:
    return MulticlassF1Score(num_classes=4, **settings)


def test_metrics_of_the_whole_data_set() -> None:
    model = Classifier()
    metrics: dict[str, Any] = {
        "f1": f1(),
        "right": right,
        "accuracy": MulticlassAccuracy(num_classes=4),
    }
    measured = trainer(model, Evaluation(data(), metrics=metrics, batch_size=8)).evaluate()
    assert model.passes == 3 * 8  # of the loss, of the function, and one for both objects
    inputs, targets = data().tensors
    outputs = model(inputs)
    assert measured == pytest.approx(
        {
            "validation/loss": nn.functional.cross_entropy(outputs, targets).item(),
            "validation/f1": f1()(outputs, targets).item(),
            "validation/right": (outputs.argmax(1) == targets).double().mean().item(),
            "validation/accuracy": MulticlassAccuracy(num_classes=4)(outputs, targets).item(),
        },
        rel=1e-6,
    )


def test_perplexity_of_tokens_is_that_of_all_of_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.table = nn.Embedding(7, 7)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return SimpleNamespace(logits=self.table(input_ids))

    class Texts(list[dict[str, Tensor]]):
        pass

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (20, 6), generator=generator)
    labels = torch.where(torch.rand(20, 6, generator=generator) < 0.4, -100, ids)
    model = Model()

    def of_tokens(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch).logits[:, :-1]
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])

    texts = Texts({"input_ids": one, "labels": two} for one, two in zip(ids, labels, strict=True))
    evaluation = Evaluation(
        texts, metrics={"perplexity": Perplexity(ignore_index=-100)}, batch_size=3
    )
    run = Trainer(
        model,
        texts,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=of_tokens,
        max_duration="1ep",
        batch_size=4,
        evaluate=evaluation,
    )
    with torch.no_grad():
        expected = of_tokens(model, {"input_ids": ids, "labels": labels}).exp().item()
    assert run.evaluate()["validation/perplexity"] == pytest.approx(expected, rel=1e-5)


class Largest:
    """A metric of one's own; draws, as some do, and remembers what it was called with."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.most = -math.inf

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.sizes.append(len(outputs))
        self.most = max(self.most, outputs.max().item() + 0 * torch.rand(()).item())

    def compute(self) -> Any:
        return {"most": self.most, "of": torch.tensor([float(sum(self.sizes))])}

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def test_a_dict_is_logged_by_its_keys_and_chance_goes_on_as_it_was() -> None:
    model, metric = Classifier(), Largest()
    run = trainer(model, Evaluation(data(), metrics={"largest": metric}, batch_size=25))
    torch.manual_seed(7)
    for _ in range(2):
        measured = run.evaluate()
        assert metric.sizes == [25, 25, 11]
        assert measured["validation/largest/of"] == 61
        most = model(data().tensors[0]).max().item()
        assert measured["validation/largest/most"] == pytest.approx(most, rel=1e-6)
    after = torch.rand(())
    torch.manual_seed(7)
    assert torch.rand(()) == after


def test_a_collection_may_be_the_metrics_or_one_of_them() -> None:
    model = Classifier()
    collection = MetricCollection({"f1": f1(), "accuracy": MulticlassAccuracy(num_classes=4)})
    measured = trainer(
        model,
        Evaluation(data(), metrics=collection),  # type: ignore[arg-type]
        Evaluation(data(), metrics={"both": collection.clone()}, name="test"),
    ).evaluate()
    for key in ("f1", "accuracy"):
        assert measured[f"validation/{key}"] == measured[f"test/both/{key}"] > 0


def test_a_batch_in_pieces_counts_once() -> None:
    model, metric, expected = Classifier(), f1(), f1()

    def scarce(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch)

    evaluation = Evaluation(data(), metrics={"f1": metric}, batch_size=20, loss=scarce)
    measured = trainer(model, evaluation).evaluate()
    assert measured["validation/f1"] == expected(model(data().tensors[0]), data().tensors[1])
    assert int(metric.tp.sum() + metric.fn.sum()) == 61  # type: ignore[union-attr]


@pytest.mark.parametrize("monitor", ["validation/f1", "validation/largest/most"])
def test_the_best_checkpoint_and_a_plateau_may_follow_an_object(
    monitor: str, tmp_path: Path
) -> None:
    """Resumed, the run goes on as the one that was not cut."""

    class Stop(Callback):
        def on_batch_end(self, run: Run, step: Any) -> None:
            if run.timer.batch == 9:
                run.stop("enough", is_final=False)

    def run(folder: str, *callbacks: Callback) -> Trainer:
        metrics: dict[str, Any] = {"f1": f1(), "largest": Largest()}
        return trainer(
            Classifier(),
            Evaluation(data(), every="20sp", metrics=metrics),
            batch_size=Plateau(monitor, start=4, maximum=16, patience=1, mode="max"),
            checkpoint=Checkpointing("1ep", monitor=monitor, mode="max"),
            folder=tmp_path / folder,
            callbacks=callbacks,
        )

    whole = run("whole")
    whole.fit()
    run("cut", Stop()).fit()
    rest = run("cut")
    rest.resume("latest")
    rest.fit()
    assert rest.evaluate() == whole.evaluate()
    assert rest.timer.state_dict()["batch"] == whole.timer.state_dict()["batch"]
    assert rest._loop.evaluations.best.state_dict() == whole._loop.evaluations.best.state_dict()
    assert rest._loop.evaluations.best.sample is not None


@pytest.mark.parametrize("monitor", ["largest", "largest/mots", "f1/most"])
def test_a_key_that_is_not_computed_is_told_at_the_first_evaluation(
    monitor: str, tmp_path: Path
) -> None:
    run = trainer(
        Classifier(),
        Evaluation(data(), metrics={"f1": f1(), "largest": Largest()}),
        checkpoint=Checkpointing("1ep", monitor=f"validation/{monitor}"),
        folder=tmp_path,
    )
    with pytest.raises(TrainingError, match="validation"):
        run.fit()


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(TrainingError, match="MulticlassF1Score"):
        Evaluation(data(), metrics={"f1": MulticlassF1Score})  # type: ignore[dict-item]
    with pytest.raises(TrainingError, match="compute"):
        Evaluation(data(), metrics={"f1": "f1"})  # type: ignore[dict-item]
    classes = Evaluation(data(), metrics={"f1": f1(average="none")})
    with pytest.raises(TrainingError, match="returned"):
        trainer(Classifier(), classes).evaluate()
    single = Evaluation(data(), metrics={"f1": f1()}, predict=lambda m, b: m(b[0]))
    with pytest.raises(TrainingError, match="arguments"):
        trainer(Classifier(), single).evaluate()


def test_batches_that_say_nothing_of_targets_need_predict_before_the_run() -> None:
    def square(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    inputs = TensorDataset(data().tensors[0])
    with pytest.raises(TrainingError, match="function"):
        trainer(Classifier(), Evaluation(inputs, metrics={"f1": f1()}, loss=square))
    batches: Any = DataLoader([(data().tensors[0],)], batch_size=None)  # type: ignore[arg-type]
    run = trainer(Classifier(), Evaluation(batches, metrics={"f1": f1()}, loss=square))
    with pytest.raises(TrainingError, match="function"):
        run.evaluate()


def test_what_is_predicted_by_default() -> None:
    logits, ids = torch.arange(24.0).view(2, 3, 4), torch.tensor([[5, 6, 7], [8, 9, 2]])
    masked = torch.tensor([[5, -100, 1], [-100, 9, 1]])

    def model(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=logits) if kwargs else logits

    def predicted(batch: Any) -> Any:
        return default_predict(model, batch)

    outputs, targets = predicted((ids, ids[:, 0]))
    assert (outputs is logits, targets.tolist()) == (True, [5, 8])
    for labels in (ids, masked):
        outputs, targets = predicted(UserDict({"input_ids": ids, "labels": labels}))
        is_moved = labels is ids
        assert outputs.equal(logits[:, :-1] if is_moved else logits)
        assert targets.equal(labels[:, 1:] if is_moved else labels)
    with pytest.raises(TrainingError, match="logits"):
        default_predict(lambda **_: {"scores": 1}, {"labels": ids})
