"""A run of torchtitan that a test starts with torchrun or on a phantom; a rank notes its steps.

torchtitan needs a GPU: what the CPU does not have is replaced here.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import Dataset

torch.set_num_threads(1)
ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    torch._utils._get_available_device_type = lambda: "cpu"
    for _name in ("reset_peak_memory_stats", "empty_cache", "memory_stats", "manual_seed_all"):
        setattr(torch.cpu, _name, lambda *_, **__: {})
    _facts = SimpleNamespace(total_memory=2**34, name="cpu")
    vars(torch.cpu).update(
        get_device_name=lambda *_: "cpu", get_device_properties=lambda *_: _facts
    )
    _barrier = dist.barrier
    dist.barrier = lambda *_, **__: _barrier()  # gloo takes no device_ids

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch.jit
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    from stretto.integrations.torchtitan import RunTrainer, Schedules, StepDataLoader
    from stretto.schedules import Cosine
    from stretto.settings import Loading

# Without a search for the fastest kernels, which a phantom cannot time.
FlexAttention._compiled_flex_attn = torch.compile(flex_attention)
N, LENGTH, MICRO, RATE, SEED = 203, 16, 4, 8e-4, 3
SIZES = "0sp:4 100sp:9 220sp:18"  # 9 on two ranks: one has a dummy
SCHEDULES = {"lr": Cosine(end=0.1, warmup="10%")}


class Rows(Dataset[Any]):
    """Rows of tokens; the first of each is its number."""

    def __init__(self, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(300, 2048, (N, length + 1), generator=generator)
        self.rows[:, 0] = torch.arange(N)

    def __len__(self) -> int:
        return N

    def __getitem__(self, number: int) -> Any:
        return {"input": self.rows[number, :-1]}, self.rows[number, 1:]


class NoTokenizer(BaseTokenizer):
    """Has what torchtitan asks of a tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, _: Any = None, **__: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def configuration(out: Path | str = "", **changed: Any) -> RunTrainer.Config:
    """Return the configuration of a small llama of two layers."""
    if ON_CPU:  # flex attention has no backward pass there
        llama3.get_attention_config = lambda *_: ScaledDotProductAttention.Config()
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    parallelism = changed.pop("parallelism", {})
    lr_scheduler = changed.pop("lr_scheduler", Schedules.Config(schedules=SCHEDULES))
    training, checkpoint = changed.pop("training", {}), changed.pop("checkpoint", {})
    data: dict[str, Any] = {
        "make_data": lambda tokenizer, length: Rows(length),
        "batch_size": SIZES,
        "max_duration": "2ep",
        "loading": Loading(seed=SEED),
    }
    return RunTrainer.Config(
        model_spec=spec,
        dump_folder=str(out),
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=RATE),
        lr_scheduler=lr_scheduler,
        training=TrainingConfig(
            **{
                "local_batch_size": MICRO,
                "seq_len": LENGTH,
                "disable_cuda_graphs": True,
                "mixed_precision_param": "float32",
            }
            | training
        ),
        dataloader=StepDataLoader.Config(**(data | changed)),
        metrics=MetricsProcessor.Config(log_freq=5),
        parallelism=ParallelismConfig(
            **{"spmd_backend": "partial_dtensor", "enable_sequence_parallel": False} | parallelism
        ),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(
            **{"enable": True, "interval": 7, "last_save_model_only": False} | checkpoint
        ),
    )


class Noted(RunTrainer):
    """Notes the samples and the learning rate of each step; is killed after one of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RunTrainer.Config):
        """As that of torchtitan."""

    note: Any
    stop_after: int | None

    def post_dataloading_process(self, inputs: Any, labels: Any) -> Any:
        seen = zip(inputs["input"][:, 0].tolist(), labels[:, 0].tolist(), strict=True)
        self.seen.extend(number for number, label in seen if label != IGNORE_INDEX)
        return super().post_dataloading_process(inputs, labels)

    def train_step(self, data_iterator: Any) -> None:
        self.seen: list[int] = []
        super().train_step(data_iterator)
        run = self.dataloader.run
        (rate,) = {group["lr"] for one in self.optimizers for group in one.param_groups}
        tokens = run.timer.token
        assert run.step is not None, "just finished"
        step, size = run.step, run.step.num_samples
        row = [step.timestamp.sample, len(step), run.world_size, rate, self.seen, tokens, size]
        self.note.write(json.dumps(row) + "\n")
        self.note.flush()
        if self.step == self.stop_after:
            dist.barrier()
            os._exit(0)


def main(out: Path, attempt: str, stop_after: int | None = None, **changed: Any) -> None:
    """Train, or resume."""
    config = configuration(out, **changed)
    config.debug.seed, config.debug.print_config = 5, True
    trainer = Noted(config)
    trainer.stop_after = stop_after
    rank = dist.get_rank()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
    with (out / f"{attempt}-{rank}.jsonl").open("w") as trainer.note:
        trainer.train()
    parts = [
        one.full_tensor() if hasattr(one, "full_tensor") else one
        for one in trainer.model_parts[0].parameters()
    ]
    if rank == 0:
        torch.save(torch.cat([one.detach().flatten() for one in parts]), out / "weights.pt")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
