"""A causal language model of transformers, trained from its `config.json`: `phantomgpu model`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM  # takes 3 s: once, before trials fork

from phantomgpu.errors import PhantomError

CLIP_NORM = 1.0
STEPS = 3
"""The first creates the state of the optimizer between blocks that it frees later; the third
allocates as all later ones do."""


@final
@dataclass(frozen=True, slots=True)
class CausalModel:
    """What a model is trained with. It has no weights: it is built without memory."""

    file: Path
    """A `config.json`, or the folder that holds it."""
    optimizer: str = "adamw"
    """adamw, sgd, adafactor or adamw8bit."""
    weights: str = "fp32"
    """`fp32`: 32-bit weights, computed in bf16. `bf16`: weights, gradients and state are bf16."""
    lora: int | None = None
    """The rank of LoRA on all linear layers; None: all weights are trained."""

    def checked(self, length: int) -> str:
        """Return what it is in one line.

        Args:
            length: tokens of the longest sequence.

        Raises:
            PhantomError: the file is not the configuration of a model with such sequences.
        """
        file = self.file / "config.json" if self.file.is_dir() else self.file
        try:
            config = json.loads(file.read_bytes())
            name = (config.get("architectures") or [config["model_type"]])[0]
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise PhantomError(f"{file} is no config.json of a model: {error!r}") from error
        longest = config.get("max_position_embeddings", length)
        if length > longest:
            raise PhantomError(f"sequences of {length}: max_position_embeddings is {longest}")
        numbers = "bf16 weights" if self.weights == "bf16" else "fp32 weights, computed in bf16"
        trained = "" if self.lora is None else f", LoRA of rank {self.lora} on all linear layers"
        return (
            f"{name}, {numbers}{trained}, {self.optimizer}, gradients clipped at {CLIP_NORM}, "
            "one micro-batch a step, no padding"
        )

    def build(self, *, checkpointing: bool) -> Any:
        """Return the model on the meta device."""
        dtype = torch.bfloat16 if self.weights == "bf16" else torch.float32
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(self.file)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if type(model).__name__ not in (config.architectures or [type(model).__name__]):
                raise PhantomError(
                    f"it is no causal language model: its architectures are {config.architectures}"
                )
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            if self.lora is not None:
                import peft

                linear = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
                model = peft.get_peft_model(model, peft.LoraConfig(r=self.lora, **linear))
        return model.train()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the weights that are trained."""
        trained = [one for one in model.parameters() if one.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, fused=True)  # the default of transformers
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(trained)
        import bitsandbytes

        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(trained)
        return made


def train(size: int, causal: CausalModel, length: int, ranks: int, *, checkpointing: bool) -> None:
    """Train on micro-batches of one size, on rank 0 of so many; called on the phantom."""
    model = causal.build(checkpointing=checkpointing)
    computes_bf16 = causal.weights == "fp32"
    if ranks > 1:
        _shard(model, ranks, computes_bf16=computes_bf16)
    model.to_empty(device="cuda")
    optimizer = causal.optimizer_of(model)
    casts = torch.autocast("cuda", torch.bfloat16) if computes_bf16 and ranks == 1 else None
    tokens = torch.zeros(size, length, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        with casts or nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()


def _shard(model: nn.Module, ranks: int, *, computes_bf16: bool) -> None:
    """Shard each block of a `ModuleList`, then the rest, with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (ranks,))
    narrow, wide = (torch.bfloat16, torch.float32) if computes_bf16 else (None, None)
    inner = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide)
    outer = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, output_dtype=wide)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (one for blocks in lists for one in blocks):
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)
