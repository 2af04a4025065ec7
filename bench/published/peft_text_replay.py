"""What a GPU holds in one row of PEFT's MetaMathQA comparison; runs on a phantom GPU.

    phantomgpu run --whole --gpu l40s -- python peft_text_replay.py

Our own code, in the order of `method_comparison/MetaMathQA/run.py` of PEFT, without weights and
data: the model from its configuration, loaded as transformers 5.13 does, the adapter, one batch of
the evaluation before training, steps, and for some rows the evaluation after them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from importlib.util import find_spec
from typing import Any

import peft
import torch
import transformers
from peft import optimizers as of_peft
from peft.tuners.boft import layer as boft

BATCH, TEXT, VOCABULARY = 4, 768, 128256
WEIGHTS = 3_212_749_824
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}


def base_model(layers: int) -> Any:
    """Return Llama 3.2 3B in bf16 as `from_pretrained` leaves it on the GPU."""
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": layers})
    # transformers takes one block for all weights first, then puts them into it.
    torch.empty(WEIGHTS, dtype=torch.float16, device="cuda")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if module is not model.lm_head:
                real = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                setattr(module, name, torch.nn.Parameter(real))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def adapted(model: Any, settings: dict[str, Any]) -> Any:
    """Return the model with the adapter of a row."""
    if settings["adapter"] is None:
        return model
    config = peft.PeftConfig.from_peft_type(**settings["adapter"])
    if settings["adapter"]["peft_type"] == "SHIRA":
        config.mask_fn = first_weights
    leave_frod_out()
    boft.get_fbd_cuda = lambda: None  # what PEFT gets where its CUDA code cannot be built
    to_float = settings["train"].get("autocast_adapter_dtype", True)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=to_float)


def first_weights(layer: Any, r: int, **options: Any) -> torch.Tensor:
    """Return SHiRA's mask, made on the CPU: a phantom does not know large float tensors."""
    del options
    mask = torch.zeros(layer.weight.shape, dtype=layer.weight.dtype)
    mask.view(-1)[: r * sum(mask.shape)] = 1
    return mask


def leave_frod_out() -> None:
    """Let FRoD make its tensors without the decompositions, which run on the CPU for minutes."""
    if find_spec("peft.tuners.frod") is None:  # before 0.20
        return
    from peft.tuners import frod

    def projection(matrices: list[torch.Tensor], regularization_alpha: float) -> torch.Tensor:
        del regularization_alpha
        return torch.eye(matrices[0].shape[1], dtype=matrices[0].dtype)

    def factors(
        layer: torch.nn.Module, projection: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del layer, projection
        weight.detach().to(torch.float64)  # this copy is on the GPU
        return torch.zeros(weight.shape), torch.zeros(weight.shape[1])

    frod.model._projection_from_weights = projection
    frod.layer.FrodLayer._calculate_frod_u_and_lambda = factors


def optimizer_of(model: Any, train: dict[str, Any]) -> Any:
    """Return the optimizer of a row."""
    options = train.get("optimizer_kwargs", {"lr": 1e-4, "weight_decay": 0.1})
    if train.get("optimizer_type") == "lora-fa":
        return of_peft.create_lorafa_optimizer(model, **options)
    return torch.optim.AdamW(model.parameters(), **options)


class Words:
    """A tokenizer of one text, of 64 tokens."""

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        """Return tokens."""
        del text, options
        return {"input_ids": torch.full((1, 64), 7)}


def tokens(rows: int, length: int, *, left: bool = False) -> dict[str, torch.Tensor]:
    """Return a padded batch on the GPU, whose rows have somewhat different lengths."""
    ids, mask = torch.full((rows, length), 7), torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        less = min(4 * row, length // 2)
        mask[row, slice(0, less) if left else slice(length - less, None)] = 0
    return {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}


@torch.inference_mode()
def loss_of_text(model: Any) -> None:
    """Take the loss of each token of one batch, as the evaluation does before training."""
    batch = {"input_ids": torch.full((BATCH, TEXT), 7).to("cuda")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    outputs = model(**batch)
    for logit, target in zip(outputs.logits, batch["input_ids"], strict=True):
        torch.nn.functional.cross_entropy(logit[-TEXT:][:-1], target[1:], reduction="none")


class Training:
    """The steps of a row, and the bytes after them."""

    def __init__(self, model: Any, settings: dict[str, Any], before: int) -> None:
        self.model, self.before = model, before
        self.optimizer = optimizer_of(model, settings["train"])
        of = transformers.get_cosine_schedule_with_warmup
        self.scheduler = of(self.optimizer, num_warmup_steps=500, num_training_steps=5000)
        kind = (settings["adapter"] or {}).get("peft_type")
        self.reallocates = kind in ("ADALORA", "ADAMSS")
        self.groups = settings["groups"]
        self.lines: list[dict[str, int]] = []

    def run(self) -> None:
        """Run all steps; names as `train` in the script has them: what they hold lives as long."""
        for group in self.groups:
            for length in group:
                batch = tokens(BATCH, length)
                labels = batch["input_ids"].clone()
                for row in range(1, BATCH):
                    labels[row, length - 4 * row + 1 :] = -100
                batch["labels"] = labels
                count = batch["attention_mask"].sum().item()
                self.optimizer.zero_grad()
                outputs = self.model(**batch, num_items_in_batch=count)
                loss = outputs.loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                if self.reallocates:
                    self.model.base_model.update_and_allocate(len(self.lines) + 1)
                loss.item()
                self.note(length)
            torch.cuda.empty_cache()

    def note(self, length: int) -> None:
        """Note the bytes after a step."""
        self.lines.append(
            {
                "length": length,
                "allocated": torch.cuda.memory_allocated() - self.before,
                "reserved": torch.cuda.memory_reserved() - self.before,
                "most reserved": torch.cuda.max_memory_reserved() - self.before,
            }
        )


def replay(settings: dict[str, Any]) -> dict[str, Any]:
    """Run a row, and return what the GPU held."""
    torch.manual_seed(0)
    torch.nn.Linear(1, 1).to("cuda")
    torch.cuda.memory._record_memory_history(enabled=None)  # nobody reads it here
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_reserved()
    model = adapted(base_model(settings.get("layers", 28)), settings)
    training = Training(model, settings, before)
    prefix = settings["train"].get("init_kv_cache_prefix")
    if prefix is not None:
        peft.initialize_kv_prefix_from_text(model, Words(), text=prefix)
    trainable = sum(one.numel() for one in model.parameters() if one.requires_grad)
    model.eval()
    with contextlib.nullcontext() if settings["adapter"] is None else model.disable_adapter():
        loss_of_text(model)
    model.train()
    training.run()
    return {
        "trainable": trainable,
        "steps": training.lines,
        "reserved": torch.cuda.max_memory_reserved() - before,
        "versions": [torch.__version__, transformers.__version__, peft.__version__],
    }


def answer(settings: dict[str, Any], to: int) -> None:
    """Replay a row and write what was found to a pipe."""
    try:
        found = replay(settings)
    except Exception as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        found = {"problem": f"{type(error).__name__}: {error}"}
    found["seconds"] = round(time.process_time(), 1)
    with os.fdopen(to, "w") as pipe:
        json.dump(found, pipe)


def main() -> None:
    """Answer each line of standard input, settings, with a line; each in a process of its own.

    A fork before CUDA starts is a fresh process that need not import torch and transformers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    for line in sys.stdin:
        here, there = os.pipe()
        if (child := os.fork()) == 0:
            os.close(here)
            answer(json.loads(line), there)
            sys.stderr.flush()
            os._exit(0)
        os.close(there)
        with os.fdopen(here) as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        print(found or '{"problem": "the process was killed"}', file=answers, flush=True)


if __name__ == "__main__":
    main()
