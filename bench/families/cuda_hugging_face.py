"""Models of transformers (and LoRA of peft) whose memory on CUDA is measured and predicted.

Nothing is downloaded: configurations are written here. Both packages are imported when a model is
made, so that the other families do without them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Recipe = tuple[Callable[[], nn.Module], Any, Callable[[int], Any], Any, dict[str, Any]]
"""Model, loss, batches, optimizer, and the keywords of a family."""

ADAMW = torch.optim.AdamW
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 2048,
}


def build(
    name: str,
    auto: str,
    *,
    recompute: bool = False,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Return a model with random weights.

    Args:
        name: the class of the configuration, without `Config`.
        auto: what it is for, as the class that transformers chooses by: `AutoModelFor<auto>`.
        recompute: whether activations are computed again in the backward pass.
        settings: keywords of `from_config`.
        options: keywords of the configuration.
    """
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    make = getattr(transformers, f"AutoModelFor{auto}").from_config
    model: nn.Module = make(config, **(settings or {}))
    if recompute:
        enable: Any = model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def llama(**options: Any) -> Callable[[], nn.Module]:
    """Return what makes a small Llama with grouped queries."""
    given = {**SMALL, "intermediate_size": 704, "num_key_value_heads": 2, **options}
    return functools.partial(build, "Llama", "CausalLM", **given)


def low_rank_llama() -> nn.Module:
    """Return a Llama with LoRA from peft."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear")
    model: nn.Module = peft.get_peft_model(llama(use_cache=False)(), config)
    return model


def language(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def with_mask(model: Any, batch: Any) -> Tensor:
    """Return the loss of padded tokens."""
    tokens, mask, labels = batch
    loss: Tensor = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    return loss


def of_pictures(model: Any, batch: Any) -> Tensor:
    """Return the loss of a classifier of pictures."""
    loss: Tensor = model(pixel_values=batch[0], labels=batch[1]).loss
    return loss


def tokens(length: int) -> Callable[[int], Tensor]:
    """Return what makes sequences of tokens."""
    return lambda size: torch.zeros(size, length, dtype=torch.long)


def padded(length: int, *, has_one_label: bool = False) -> Callable[[int], Any]:
    """Return what makes tokens, their masks and labels."""

    def make(size: int) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.zeros(size, length, dtype=torch.long)
        return made, torch.ones_like(made), made[:, 0].clone() if has_one_label else made.clone()

    return make


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Return pictures in colour, and classes."""
    return torch.zeros(size, 3, 96, 96), torch.zeros(size, dtype=torch.long)


BERT: dict[str, Any] = {**SMALL, "intermediate_size": 1024, "max_position_embeddings": 256}
MOE: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "use_cache": False}
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "use_cache": False,
}

RECIPES: dict[str, Recipe] = {
    "Llama": (llama(use_cache=False), language, tokens(256), ADAMW, {}),
    "Llama, bf16, cache, clipping": (
        llama(),
        language,
        tokens(256),
        ADAMW,
        {"precision": "bf16", "clip_norm": 1.0},
    ),
    "Llama, checkpointing, bf16": (
        llama(num_hidden_layers=8, use_cache=False, recompute=True),
        language,
        tokens(256),
        ADAMW,
        {"precision": "bf16"},
    ),
    "Llama, LoRA of peft, bf16": (
        low_rank_llama,
        language,
        tokens(256),
        ADAMW,
        {"precision": "bf16"},
    ),
    "Llama, 1.1B, checkpointing, bf16, clipping": (
        llama(**LLAMA_1B, recompute=True),
        language,
        tokens(1024),
        functools.partial(ADAMW, fused=True),
        {"precision": "bf16", "clip_norm": 1.0, "memories": (40, 80)},
    ),
    "Mixtral, batched experts": (
        functools.partial(
            build,
            "Mixtral",
            "CausalLM",
            **MOE,
            num_local_experts=4,
            intermediate_size=256,
            settings={"experts_implementation": "batched_mm"},
        ),
        language,
        tokens(32),
        ADAMW,
        {"memories": (4, 16)},
    ),
    "Qwen MoE, grouped experts, bf16": (
        functools.partial(
            build,
            "Qwen3Moe",
            "CausalLM",
            **MOE,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            output_router_logits=True,
            settings={"experts_implementation": "grouped_mm"},
        ),
        language,
        tokens(256),
        ADAMW,
        {"precision": "bf16"},
    ),
    "BERT, fp16, mask": (
        functools.partial(build, "Bert", "MaskedLM", **BERT),
        with_mask,
        padded(128),
        ADAMW,
        {"precision": "fp16"},
    ),
    "BERT-base, bf16, mask, accumulation 2": (
        functools.partial(build, "Bert", "MaskedLM"),
        with_mask,
        padded(512),
        ADAMW,
        {"precision": "bf16", "accumulation": 2, "memories": (16, 80)},
    ),
    "RoBERTa, clipping, momentum": (
        functools.partial(build, "Roberta", "SequenceClassification", **BERT),
        with_mask,
        padded(128, has_one_label=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        {"clip_norm": 1.0},
    ),
    "T5, Adafactor, mask": (
        functools.partial(
            build,
            "T5",
            "Seq2SeqLM",
            d_model=256,
            d_ff=1024,
            num_layers=3,
            d_kv=32,
            vocab_size=2048,
            decoder_start_token_id=0,
        ),
        with_mask,
        padded(128),
        torch.optim.Adafactor,
        {},
    ),
    "ModernBERT, bf16, mask": (
        functools.partial(
            build,
            "ModernBert",
            "MaskedLM",
            **SMALL,
            intermediate_size=512,
            local_attention=64,
            reference_compile=False,
            pad_token_id=0,
        ),
        with_mask,
        padded(256),
        ADAMW,
        {"precision": "bf16"},
    ),
    "GPT-2, accumulation 2": (
        functools.partial(
            build, "GPT2", "CausalLM", n_layer=4, n_head=8, n_embd=256, vocab_size=2048
        ),
        language,
        tokens(256),
        ADAMW,
        {"accumulation": 2},
    ),
    "GPT-2, 124M, bf16, checkpointing": (
        functools.partial(build, "GPT2", "CausalLM", recompute=True, use_cache=False),
        language,
        tokens(1024),
        functools.partial(ADAMW, fused=True),
        {"precision": "bf16", "clip_norm": 1.0, "memories": (16, 80)},
    ),
    "ViT of transformers, without cuDNN": (
        functools.partial(
            build,
            "ViT",
            "ImageClassification",
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=1024,
            image_size=96,
        ),
        of_pictures,
        pictures,
        ADAMW,
        {"precision": "bf16", "uses_cudnn": False},
    ),
    "Mamba": (
        functools.partial(
            build, "Mamba", "CausalLM", hidden_size=128, num_hidden_layers=2, vocab_size=1024
        ),
        language,
        tokens(64),
        ADAMW,
        {"uses_cudnn": False},
    ),
}
