"""What the loss of a Hugging Face trainer is a mean over: as it trains, or as it is said."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers", reason="needs stretto[huggingface]")

import transformers as hf

from stretto.errors import TrainingError
from stretto.integrations.huggingface import attach

pytestmark = pytest.mark.filterwarnings("ignore")
N = 48
_SIZE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@cache
def classifier(*, has_dropout: bool = False) -> Any:
    torch.manual_seed(0)
    chance = {} if has_dropout else _NO_DROPOUT
    config = hf.BertConfig(**_SIZE, **chance, intermediate_size=32, num_labels=3)
    return hf.BertForSequenceClassification(config)


@cache
def causal() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZE, intermediate_size=32))


@cache
def rows(*, is_causal: bool = False) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(N):
        ids = torch.randint(3, 60, (8,), generator=random)
        label = torch.randint(3, (), generator=random)
        weight = 1 + 9 * torch.rand((), generator=random).double()
        row = {"input_ids": ids, "labels": ids if is_causal else label}
        found.append(row if is_causal else row | {"weight": weight})
    return found


def train(
    kind: type, model: Any, path: Any, *, micro_batch_size: int = 4, steps: int = 2, **options: Any
) -> torch.Tensor:
    arguments = hf.TrainingArguments(
        str(path), per_device_train_batch_size=micro_batch_size, max_steps=steps, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1,
        max_grad_norm=0, remove_unused_columns=False,
    )  # fmt: skip
    data = rows(is_causal=isinstance(model, hf.LlamaForCausalLM))
    trainer = kind(copy.deepcopy(model), arguments, train_dataset=data)
    attach(trainer, "16", {"lr": 1.0}, **options)
    trainer.train()
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


class Each(hf.Trainer):
    """The mean loss of samples; what a subclass makes of them, it does while training alone."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        each = functional.cross_entropy(logits, inputs["labels"], reduction="none")
        return self.reduced(each, inputs) if model.training else each.mean()

    def reduced(self, each: Any, inputs: Any) -> Any:
        return each.mean()


class Hard(Each):
    def reduced(self, each: Any, inputs: Any) -> Any:
        return each.topk(len(each) // 2).values.mean()


class Weighted(Each):
    def reduced(self, each: Any, inputs: Any) -> Any:
        return (each * inputs["weight"]).sum() / inputs["weight"].sum()


class Sum(Each):
    def reduced(self, each: Any, inputs: Any) -> Any:
        return each.sum()


class Beside(hf.Trainer):
    """A trainer whose loss cannot be computed beside the run."""

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        if self.stretto.weight is None:
            raise RuntimeError("no step")
        return super().compute_loss(*given, **options)


class Needs(Each):
    """A loss that cannot be computed without gradients, as one with a penalty on them."""

    def reduced(self, each: Any, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("no gradients")
        return each.mean()


class Twice(hf.Trainer):
    """A second loss in each pass, as of adversarial training."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.backward(self.compute_loss(model, self._prepare_inputs(inputs)))
        return loss


class Unseen(hf.Trainer):
    """A training step that calls the model, and no `compute_loss`."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


class Pops(hf.Trainer):
    """A loss that needs gradients, and takes its labels out of the batch."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        loss = functional.cross_entropy(model(input_ids=inputs["input_ids"]).logits, labels)
        if not torch.is_grad_enabled():
            raise RuntimeError("no gradients")
        return loss


@pytest.mark.parametrize("has_dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", [Hard, Weighted])
def test_a_loss_that_is_another_one_in_training_is_refused(
    kind: type, has_dropout: bool, tmp_path: Any
) -> None:
    model = classifier(has_dropout=has_dropout).double()
    with pytest.raises(TrainingError, match="units="):
        train(kind, model, tmp_path)


def test_dropout_is_no_reason_to_refuse(tmp_path: Any) -> None:
    train(Each, classifier(has_dropout=True).double(), tmp_path)


def test_what_the_loss_is_a_mean_over_may_be_said(tmp_path: Any) -> None:
    model = classifier().double()

    def units(batch: Any) -> float:
        return float(batch["weight"].sum())

    found, whole = (
        train(Weighted, model, tmp_path, micro_batch_size=size, units=units) for size in (4, 16)
    )
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    train(Hard, model, tmp_path, units="samples")  # he says so


def test_a_sum_is_no_mean_over_what_is_said(tmp_path: Any) -> None:
    with pytest.raises(TrainingError, match="a sum over the samples"):
        train(Sum, classifier(), tmp_path, units="samples")


def test_targets_may_be_said(tmp_path: Any) -> None:
    model = causal().double()
    found, whole = (
        train(hf.Trainer, model, tmp_path, micro_batch_size=size, units="tokens")
        for size in (4, 16)
    )
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "classifier"])
def test_a_second_loss_of_a_training_step_has_its_share(name: str, tmp_path: Any) -> None:
    model = (causal() if name == "causal" else classifier()).double()
    found, whole = (train(Twice, model, tmp_path, micro_batch_size=size) for size in (4, 16))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("units", [None, "tokens"])
def test_a_training_step_without_compute_loss_is_refused(units: Any, tmp_path: Any) -> None:
    with pytest.raises(TrainingError, match=r"self\.compute_loss\(model, inputs\)"):
        train(Unseen, causal(), tmp_path, units=units)
    train(Unseen, causal(), tmp_path, micro_batch_size=16)


@pytest.mark.filterwarnings("error:cannot check")
def test_a_trial_has_a_batch_of_its_own(tmp_path: Any) -> None:
    train(Pops, classifier(), tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_a_classifier_in_bfloat16_trains(seed: int, tmp_path: Any) -> None:
    torch.manual_seed(seed)
    config = hf.BertConfig(**_SIZE, intermediate_size=32, num_labels=3)
    model = hf.BertForSequenceClassification(config).to(torch.bfloat16)
    train(Each, model, tmp_path, steps=4)


@pytest.mark.filterwarnings("default")
def test_a_measurement_that_fails_ends_no_run(tmp_path: Any) -> None:
    model = causal().double()
    with pytest.warns(RuntimeWarning, match="units="):
        found = train(Beside, model, tmp_path)
    torch.testing.assert_close(found, train(hf.Trainer, model, tmp_path), rtol=0, atol=1e-12)


def test_a_loss_that_needs_gradients_is_measured(tmp_path: Any) -> None:
    model = classifier().double()
    found, whole = (train(Needs, model, tmp_path, micro_batch_size=size) for size in (4, 16))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
