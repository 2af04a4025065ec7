"""A causal language model of transformers, from its `config.json`: `find-batch-size --model`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto._location import read_plain
from stretto._optional import import_optional
from stretto.errors import ConfigError, StrettoError, first_line
from stretto.runtime import SupervisedStep

CLIP_NORM = 1.0


class CausalModel(NamedTuple):
    """What a model is trained with. It has no weights: it is built without memory."""

    file: Path
    """A `config.json`, or the folder that holds it."""
    optimizer: str = "adamw"
    weights: str = "fp32"
    """`fp32`: 32-bit weights, computed in bf16. `bf16`: weights, gradients and state are bf16."""
    lora: int | None = None
    """The rank of LoRA on all linear layers; None: all weights are trained."""

    def checked(self, length: int) -> str:
        """Return what it is in one line.

        Args:
            length: tokens of each sequence.

        Raises:
            ConfigError: the file is not the configuration of a model, or an option is wrong.
        """
        _chosen("--optimizer", self.optimizer, _OPTIMIZERS)
        _chosen("--weights", self.weights, _DTYPES)
        config = self._config()
        longest = config.get("max_position_embeddings", length)
        if length > longest:
            raise ConfigError.bad(
                "--sequence-length",
                length,
                f"max_position_embeddings is {longest} in {self.file}",
                "write a shorter length, or change the file",
            )
        in_bf16 = self.weights == "bf16"
        numbers = "bf16 weights" if in_bf16 else "fp32 weights, computed in bf16"
        trained = "" if self.lora is None else f", LoRA of rank {self.lora} on all linear layers"
        name = (config.get("architectures") or [config["model_type"]])[0]
        return (
            f"{name}, {numbers}{trained}, {self.optimizer}, gradients clipped at {CLIP_NORM}, "
            "one micro-batch a step, no padding"
        )

    def step(self, length: int, *, checkpointing: bool) -> SupervisedStep:
        """Return a training step.

        Args:
            length: tokens of each sequence.
            checkpointing: whether each block is computed again in the backward pass.

        Raises:
            ConfigError: the file is not the configuration of a causal language model, or an
                option is wrong.
            MissingPackageError: transformers, peft or bitsandbytes is not installed.
        """
        self.checked(length)
        with torch.device("meta"):
            model = self._build(checkpointing=checkpointing)
        optimizer = _OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        return SupervisedStep(
            model,
            optimizer,
            next_token,
            precision="fp32" if self.weights == "bf16" else "bf16",
            clip_norm=CLIP_NORM,
        )

    def _config(self) -> dict[str, Any]:
        file = self.file / "config.json" if self.file.is_dir() else self.file
        try:
            named = json.loads(read_plain(file))
            if not isinstance(named, dict) or "model_type" not in named:
                raise ValueError("it has no 'model_type'")
        except (OSError, ValueError) as error:
            raise self._cannot(first_line(error)) from error
        return named

    def _build(self, *, checkpointing: bool) -> Any:
        transformers = import_optional("transformers", "huggingface")
        try:
            config = transformers.AutoConfig.from_pretrained(self.file)
            dtype = _DTYPES[self.weights]
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            name = type(model).__name__
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            if self.lora is not None:
                peft = import_optional("peft", "huggingface")
                kind = peft.LoraConfig(
                    r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM"
                )
                model = peft.get_peft_model(model, kind)
        except StrettoError:
            raise
        except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
            raise self._cannot(first_line(error)) from error
        architectures = self._config().get("architectures") or [name]
        if name not in architectures:
            raise self._cannot(f"its architectures are {architectures}, not {name}")
        return model.train()

    def _cannot(self, why: str) -> ConfigError:
        instead = "name a config.json of a causal language model"
        return ConfigError.cannot(f"use the model of {self.file}", why=why, instead=instead)


def next_token(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss as transformers computes it, without a cache of keys and values."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _chosen(option: str, name: str, table: dict[str, Any]) -> None:
    if name not in table:
        raise ConfigError.bad(option, name, "there is no such", f"write one of {', '.join(table)}")


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with its fused kernel, the default of transformers."""
    optimizer = torch.optim.AdamW(parameters)
    for group in optimizer.param_groups:  # the constructor refuses parameters on meta
        group["fused"], group["foreach"] = True, False
    return optimizer


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adamw8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = import_optional("bitsandbytes", "huggingface").optim.AdamW8bit(
        parameters
    )
    return made


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": torch.optim.Adafactor,
    "adamw8bit": _adamw8bit,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
