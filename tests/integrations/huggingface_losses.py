"""Models and losses whose gradients in parts must be those of one big batch, in float64."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from tests.integrations import huggingface_toys as toys
from torch import nn

from stretto.errors import StrettoError
from stretto.integrations.huggingface import attach

N, SIZES, RATE, DOUBLE = 48, "0sp:8 16sp:16 80sp:13", 1e-2, torch.float64
_G = torch.Generator().manual_seed(0)
_IDS = torch.randint(3, 60, (N, 8), generator=_G)
_CLASS = torch.randint(0, 3, (N,), generator=_G)
_TOKENS = _IDS % 3
_TOKENS[:, 5:][torch.rand(N, 3, generator=_G) < 0.5] = -100
_MASKED = _IDS.masked_fill(torch.rand(N, 8, generator=_G) < 0.3, -100)
_SPARSE = _MASKED.clone()  # most micro-batches have no target
_SPARSE[torch.arange(N) % 5 > 1] = -100
_PIXELS = torch.randint(0, 3, (N, 16, 16), generator=_G)
_PIXELS[16:, :8][torch.rand(N - 16, 8, 16, generator=_G) < 0.7] = 255
_RARE = (torch.rand(N, generator=_G) < 0.15).long()
_FLOATS = torch.rand(N, generator=_G, dtype=DOUBLE)
_MULTI = (torch.rand(N, 3, generator=_G) > 0.5).double()
_PICTURES = torch.rand(N, 3, 16, 16, generator=_G, dtype=DOUBLE)

_SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT = _SIZE | {
    "vocab_size": 64, "intermediate_size": 32, "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_LLAMA = _SIZE | {
    "vocab_size": 64, "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_DISTIL = {
    "vocab_size": 64, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0,
    "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "max_position_embeddings": 32,
}  # fmt: skip
_MODERN = _SIZE | {
    "vocab_size": 64, "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_GPT = {
    "vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [8],
    "patch_sizes": [3], "strides": [2], "num_attention_heads": [1], "mlp_ratios": [2],
    "decoder_hidden_size": 8, "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}  # fmt: skip
_VIT = _SIZE | {
    "image_size": 16, "patch_size": 8, "intermediate_size": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Mean(hf.Trainer):
    """A loss of its own, a mean over samples."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        return nn.functional.cross_entropy(logits, inputs["labels"])


class NamedLoss(Mean):
    """The same, with an attribute that the trainer of sentence-transformers has, too."""

    loss = nn.CrossEntropyLoss()


class NotScaled(Mean):
    """The same, as transformers wants to be told."""

    loss_is_scaled_for_ga = False


class Weighted(hf.Trainer):
    """A mean over samples with weights of their classes, so the parts of a batch do not add up."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        weight = torch.tensor([0.5, 5.0], dtype=DOUBLE)
        return nn.functional.cross_entropy(logits, inputs["labels"], weight=weight)


class OfSequences(hf.Trainer):
    """A mean over sequences of the mean over their targets."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        labels = inputs["labels"][:, 1:]
        each = nn.functional.cross_entropy(logits[:, :-1].mT, labels, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1)).mean()


class Divided(hf.Trainer):
    """A loss that is divided by the number of targets, without the factor of the ranks."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, inputs["labels"].flatten(), reduction="sum")
        known = (inputs["labels"] != -100).sum()
        return loss / (known if num_items_in_batch is None else num_items_in_batch)


def mean_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return nn.functional.cross_entropy(outputs.logits, labels)


def divided_function(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    logits = outputs.logits.flatten(0, 1)
    return (
        nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch
    )


_RANKS = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True}
Case = tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]


def case(model: str, settings: dict[str, Any], columns: dict[str, Any], **more: Any) -> Case:
    kind = getattr(hf, model)
    return lambda: kind(kind.config_class(**settings)), columns, more


def segformer() -> Any:
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**_SEGFORMER, num_labels=3))
    model.decode_head.batch_norm = nn.Identity()  # it would compare the samples of a batch
    return model


_TEXT = {"input_ids": _IDS}
_CLASSES = _TEXT | {"labels": _CLASS}
_SEQ2SEQ = {"kind": hf.Seq2SeqTrainer, "arguments": hf.Seq2SeqTrainingArguments}
_THREE = {"num_labels": 3}
CASES: dict[str, Case] = {
    "bert": case("BertForSequenceClassification", _BERT | _THREE, _CLASSES),
    "bert-regression": case(
        "BertForSequenceClassification", _BERT | {"num_labels": 1}, _TEXT | {"labels": _FLOATS}
    ),
    "bert-multi": case(
        "BertForSequenceClassification",
        _BERT | _THREE | {"problem_type": "multi_label_classification"},
        _TEXT | {"labels": _MULTI},
    ),
    "bert-tokens": case("BertForTokenClassification", _BERT | _THREE, _TEXT | {"labels": _TOKENS}),
    "bert-questions": case(
        "BertForQuestionAnswering",
        _BERT,
        _TEXT | {"start_positions": _CLASS, "end_positions": _CLASS + 2},
    ),
    "bert-mlm": case("BertForMaskedLM", _BERT, _TEXT | {"labels": _MASKED}),
    "distilbert": case("DistilBertForSequenceClassification", _DISTIL | _THREE, _CLASSES),
    "roberta": case("RobertaForSequenceClassification", _BERT | _THREE, _CLASSES),
    "modernbert": case("ModernBertForSequenceClassification", _MODERN | _THREE, _CLASSES),
    "gpt2": case("GPT2ForSequenceClassification", _GPT | _THREE, _CLASSES),
    "llama-classes": case("LlamaForSequenceClassification", _LLAMA | _THREE, _CLASSES),
    "llama": case("LlamaForCausalLM", _LLAMA, _TEXT | {"labels": _MASKED}),
    "t5": case("T5ForConditionalGeneration", _T5, _TEXT | {"labels": _MASKED}, **_SEQ2SEQ),
    "bart": case("BartForConditionalGeneration", _BART, _TEXT | {"labels": _MASKED}, **_SEQ2SEQ),
    "vit": case(
        "ViTForImageClassification", _VIT | _THREE, {"pixel_values": _PICTURES, "labels": _CLASS}
    ),
    "smoothed": case(
        "BertForTokenClassification", _BERT | _THREE, _TEXT | {"labels": _TOKENS}, smooth=0.1
    ),
    "own": case("BertForSequenceClassification", _BERT | _THREE, _CLASSES, kind=Mean),
    "own-named": case("BertForSequenceClassification", _BERT | _THREE, _CLASSES, kind=NamedLoss),
    "own-not-scaled": case(
        "GPT2ForSequenceClassification", _GPT | _THREE, _CLASSES, kind=NotScaled
    ),
    "own-divided": case(
        "BertForTokenClassification", _BERT | _THREE, _TEXT | {"labels": _TOKENS}, kind=Divided
    ),
    "segformer": (segformer, {"pixel_values": _PICTURES, "labels": _PIXELS}, {}),
    "mlm-sparse": case("BertForMaskedLM", _BERT, _TEXT | {"labels": _SPARSE}),
    "llama-sparse": case("LlamaForCausalLM", _LLAMA, _TEXT | {"labels": _SPARSE}),
    "own-of-sequences": case(
        "LlamaForCausalLM", _LLAMA, {}, kind=OfSequences, data=toys.rows(N), collate=toys.collate
    ),
    "function": case(
        "BertForSequenceClassification", _BERT | _THREE, _CLASSES, function=mean_function
    ),
    "function-divided": case(
        "BertForTokenClassification",
        _BERT | _THREE,
        _TEXT | {"labels": _TOKENS},
        function=divided_function,
    ),
}


class Rare(hf.Trainer):
    """A mean with weights of samples, of which few are not one."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        each = nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
        return (inputs["weight"] * each).sum() / inputs["weight"].sum()


class Changes(hf.Trainer):
    """A mean over samples; from the fourth step on, a sum."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        how = "mean" if self.state.global_step < 3 else "sum"
        return nn.functional.cross_entropy(logits, inputs["labels"], reduction=how)


_WEIGHTS = torch.ones(N, dtype=DOUBLE)
_WEIGHTS[::7] = 30.0
RARE = case(
    "BertForSequenceClassification",
    _BERT | _THREE,
    _CLASSES | {"weight": _WEIGHTS},
    kind=Rare,
)
CHANGES = case("BertForSequenceClassification", _BERT | _THREE, _CLASSES, kind=Changes)
CAUSAL = {
    "gpt2": case("GPT2LMHeadModel", _GPT, _TEXT | {"labels": _IDS}),
    "bert": case("BertLMHeadModel", _BERT | {"is_decoder": True}, _TEXT | {"labels": _IDS}),
    "llama": case("LlamaForCausalLM", _LLAMA, _TEXT | {"labels": _IDS}),
}
WEIGHTED = case(
    "BertForSequenceClassification",
    _BERT | {"num_labels": 2},
    _TEXT | {"labels": _RARE},
    kind=Weighted,
)
MIXTRAL = case(
    "MixtralForCausalLM",
    _LLAMA
    | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"output_router_logits": True, "router_aux_loss_coef": 0.01},
    _TEXT | {"labels": _MASKED},
)


def train(name: str | Case, micro_batch_size: int) -> tuple[list[float], list[float]]:
    """Return weights and logged losses."""
    make, columns, more = CASES[name] if isinstance(name, str) else name
    data = [{key: value[i] for key, value in columns.items()} for i in range(N)]
    data = more.get("data", data)
    torch.manual_seed(0)
    model = make().to(torch.float32 if name is MIXTRAL else DOUBLE)
    arguments = toys.arguments(
        more.get("arguments", hf.TrainingArguments), learning_rate=RATE, max_grad_norm=0.0,
        per_device_train_batch_size=micro_batch_size, remove_unused_columns=False,
        label_smoothing_factor=more.get("smooth", 0.0), num_train_epochs=2,
        **(_RANKS if "RANK" in os.environ else {}),
    )  # fmt: skip
    trainer = more.get("kind", hf.Trainer)(
        model, arguments, train_dataset=data, data_collator=more.get("collate", stacked),
        compute_loss_func=more.get("function"),
    )  # fmt: skip
    attach(trainer, SIZES, {"lr": 1.0})
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    flat = torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()])
    return flat.tolist(), losses


def stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


if __name__ == "__main__":
    folder, found = Path(sys.argv[1]), {}
    for name in CASES:
        found[name] = {size: train(name, size) for size in (2, 8)}
    refused = []
    for size in (2, 8):
        try:
            train(MIXTRAL, size)
        except StrettoError as error:
            refused.append(type(error).__name__)
    rank = dist.get_rank()
    (folder / f"losses-{rank}.json").write_text(json.dumps({"found": found, "refused": refused}))
    dist.destroy_process_group()
