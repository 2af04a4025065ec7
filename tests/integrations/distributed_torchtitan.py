"""torchtitan's own trainer on gloo: `torchrun distributed_torchtitan.py OUT STOP_AT (0: never)`.

The shims are for a CPU alone, and for torch 2.13.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
cpu: Any = torch.cpu
cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34, name="cpu")
cpu.get_device_name = lambda *_: "cpu"
for missing in ("reset_peak_memory_stats", "empty_cache", "memory_stats", "manual_seed_all"):
    setattr(cpu, missing, lambda *_, **__: {})
if not hasattr(dist, "set_timeout"):
    setattr(dist, "set_timeout", lambda *_, **__: None)  # noqa: B010
plain_barrier: Any = dist.barrier


def barrier(*args: Any, device_ids: Any = None, **how: Any) -> Any:
    return plain_barrier(*args, **how)


dist.barrier = dist.distributed_c10d.barrier = barrier

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from stretto import Cosine  # noqa: E402
from stretto.integrations.torchtitan import (  # noqa: E402
    StrettoDataLoader,
    StrettoSchedules,
    StrettoTrainer,
)

LENGTH, NUM_SAMPLES, MICRO, SEED, RATE = 16, 103, 4, 3, 8e-4
SIZES = "0sp:4 50sp:8 110sp:16"
SCHEDULES = {"lr": Cosine(end=0.1, warmup="10%")}


class Rows(torch.utils.data.Dataset[Any]):
    """Random tokens; the first of each row is its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(300, 2048, (NUM_SAMPLES, LENGTH + 1), generator=generator)
        self.rows[:, 0] = torch.arange(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"input": self.rows[index, :-1]}, self.rows[index, 1:]


class NoTokenizer(BaseTokenizer):
    """The rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def configuration(out: str, **more: Any) -> StrettoTrainer.Config:
    llama3.get_attention_config = lambda *_: ScaledDotProductAttention.Config()
    spec = llama3.model_registry("debugmodel", attn_backend="sdpa")
    spec.model.layers = spec.model.layers[:1]
    config = StrettoTrainer.Config(
        model_spec=spec,
        dump_folder=out,
        tokenizer=NoTokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=RATE),
        lr_scheduler=StrettoSchedules.Config(schedules=SCHEDULES),
        training=TrainingConfig(
            local_batch_size=MICRO,
            seq_len=LENGTH,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        dataloader=StrettoDataLoader.Config(
            make_data=lambda tokenizer, seq_len: Rows(),
            batch_size=SIZES,
            max_duration="2ep",
            seed=SEED,
            **more,
        ),
        metrics=MetricsProcessor.Config(log_freq=1000),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(enable=True, interval=1000, last_save_model_only=False),
    )
    config.debug.seed = 5
    return config


def main(out: str, stop_at: int) -> None:
    trainer: Any = configuration(out).build()
    for module in trainer.model_parts[0].modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide in the sum
    rank = dist.get_rank()
    ids: list[int] = []
    prepare, train_step = trainer.post_dataloading_process, trainer.train_step

    def look(inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        firsts = zip(inputs["input"][:, 0], labels[:, 0], strict=True)
        ids.extend(int(one) for one, label in firsts if label != -100)
        return prepare(inputs, labels)

    def step(data: Any) -> None:
        ids.clear()
        loader = trainer.dataloader.loader
        at = loader.timer.sample
        train_step(data)
        lr = trainer.lr_schedulers.optimizers[0].param_groups[0]["lr"]
        line = json.dumps([at, loader.world_size, lr, ids])
        with (Path(out) / f"steps-{rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        if trainer.step == stop_at:
            trainer.checkpointer.save(trainer.step, last_step=True)
            trainer.checkpointer.close()
            os._exit(0)

    trainer.post_dataloading_process, trainer.train_step = look, step
    trainer.train()
    if rank == 0:
        print("DONE", trainer.step, trainer.config.training.steps, flush=True)
    trainer.close()
    sys.stdout.flush()
    os._exit(0)  # gloo of torch 2.13 sometimes aborts at the end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
