"""stretto in the trainers of TRL, against the real packages."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl", reason="needs stretto[huggingface] and trl: make test-adapters")

import datasets
import torch
from tests.integrations import huggingface_toys as toys
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from stretto.errors import TrainingError
from stretto.integrations.huggingface import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL's own modules


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=toys.words(), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sft(**settings: Any) -> tuple[Any, toys.Recorder]:
    trainer = SFTTrainer(
        model=toys.llama(),
        args=toys.arguments(SFTConfig, max_length=32, **settings),
        train_dataset=toys.dataset(),
        processing_class=tokenizer(),
    )
    attach(trainer, toys.SIZES, toys.SCHEDULES)
    return trainer, toys.Recorder(trainer)


PRECISE = {"bf16": False, "gradient_checkpointing": False}


def test_supervised_fine_tuning_is_one_big_batch() -> None:
    trainer, recorder = sft(**PRECISE)
    trainer.train()
    assert recorder.ids == toys.planned_ids()
    weights, _ = toys.train_by_hand(toys.llama())
    torch.testing.assert_close(toys.flat(trainer.model), weights, rtol=0, atol=1e-7)


def test_checkpointed_activations_in_half_precision_see_the_same_samples() -> None:
    trainer, recorder = sft(bf16=True, gradient_checkpointing=True)
    trainer.train()
    assert recorder.ids == toys.planned_ids()
    weights, _ = toys.train_by_hand(toys.llama())
    torch.testing.assert_close(toys.flat(trainer.model), weights, rtol=0, atol=1e-3)


def test_fine_tuning_in_tokens_is_one_big_batch() -> None:
    found = []
    for budget in ("40tok", "10Ktok"):
        trainer = SFTTrainer(
            model=toys.llama(),
            args=toys.arguments(SFTConfig, max_length=32, **PRECISE),
            train_dataset=toys.dataset(),
            processing_class=tokenizer(),
        )
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
        sizes = "0tok:60tok 700tok:150tok"
        attach(trainer, sizes, toys.SCHEDULES, micro_batch_size=budget, lengths=lengths)
        recorder = toys.Recorder(trainer)
        trainer.train()
        found.append((recorder, toys.flat(trainer.model)))
    (small, weights), (whole, big) = found
    assert small.ids == whole.ids
    assert max(map(len, small.micros)) > 1
    assert max(map(len, whole.micros)) == 1
    torch.testing.assert_close(weights, big, rtol=0, atol=1e-7)


def test_adapters_train_as_one_big_batch() -> None:
    peft = pytest.importorskip("peft", reason="needs peft: make test-adapters")
    weights = []
    for micro_batch_size in (4, 64):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            model=toys.llama(),
            args=toys.arguments(
                SFTConfig, max_length=32, per_device_train_batch_size=micro_batch_size, **PRECISE
            ),
            train_dataset=toys.dataset(),
            processing_class=tokenizer(),
            peft_config=config,
        )
        attach(trainer, toys.SIZES, toys.SCHEDULES)
        trainer.train()
        trained = [one for one in trainer.model.parameters() if one.requires_grad]
        weights.append(torch.cat([one.detach().flatten() for one in trained]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)


def test_samples_are_counted_where_several_make_one_row() -> None:
    """Padding-free batches have one row, whatever their samples."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    trainer = SFTTrainer(
        model=toys.llama(attn_implementation="sdpa"),
        args=toys.arguments(SFTConfig, max_length=32, **PRECISE),
        train_dataset=toys.dataset(),
        processing_class=tokenizer(),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )
    attach(trainer, toys.SIZES, toys.SCHEDULES)
    rows: list[int] = []

    def note(model: Any, _: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():  # not while the loss is measured
            rows.append(len(inputs["input_ids"]))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert set(rows) == {1}
    assert len(rows) == sum(step.accumulation or 0 for step in STEPS_OF_FOUR)
    assert trainer.stretto.run.timer.sample == 2 * toys.N
    assert trainer.state.global_step == len(STEPS_OF_FOUR)


STEPS_OF_FOUR = list(toys.planned(4).batches())


def pairs() -> Any:
    """Prompts with a better and a worse completion."""
    words = [" ".join(f"w{i}" for i in row["input_ids"]) for row in toys.rows(60)]
    return datasets.Dataset.from_list(
        [
            {"prompt": one, "chosen": " " + words[-1 - i], "rejected": " " + words[(7 * i) % 60]}
            for i, one in enumerate(words)
        ]
    )


def dpo(**changes: Any) -> Any:
    return DPOTrainer(
        model=toys.llama(),
        ref_model=toys.llama(),
        args=toys.arguments(DPOConfig, max_length=32, num_train_epochs=1, **PRECISE, **changes),
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )


def test_preferences_are_counted_in_pairs() -> None:
    """A batch of pairs has two rows for each sample; the step is that of one big batch."""
    weights = []
    for micro_batch_size in (4, 64):
        trainer = dpo(per_device_train_batch_size=micro_batch_size)
        attach(trainer, "0sp:8 20sp:18", {"lr": 1.0})
        trainer.train()
        assert trainer.stretto.run.timer.sample == 60
        assert trainer.state.global_step == 5
        weights.append(toys.flat(trainer.model))
    assert not torch.equal(weights[0], toys.flat(toys.llama()))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)


def test_a_mean_over_samples_and_tokens_needs_one_micro_batch() -> None:
    """ORPO adds a mean over tokens to one over samples."""
    orpo = pytest.importorskip("trl.experimental.orpo")
    for micro_batch_size in (4, 64):
        trainer = orpo.ORPOTrainer(
            model=toys.llama(),
            args=toys.arguments(
                orpo.ORPOConfig, max_length=32, num_train_epochs=1, **PRECISE,
                per_device_train_batch_size=micro_batch_size,
            ),
            train_dataset=pairs(),
            processing_class=tokenizer(),
        )  # fmt: skip
        attach(trainer, "0sp:8 20sp:18", {"lr": 1.0})
        if micro_batch_size == 64:
            trainer.train()
            continue
        with pytest.raises(TrainingError, match="micro-batches"):
            trainer.train()
        assert trainer.state.global_step == 0
