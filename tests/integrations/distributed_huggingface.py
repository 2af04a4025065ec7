"""A Hugging Face trainer on one of several ranks, which a test starts; writes what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.integrations import huggingface_toys as toys
from transformers import Trainer

from stretto.batching import NoiseScale
from stretto.integrations.huggingface import attach


def train(
    out: Path,
    name: str,
    *,
    sizes: Any = toys.SIZES,
    resume: str | None = None,
    data: Any = None,
    **options: Any,
) -> None:
    trainer = Trainer(
        model=toys.llama(),
        args=toys.arguments(
            out=str(out / name), save_strategy="steps", save_steps=6, ddp_backend="gloo",
            max_steps=-1 if data is None else 999,
        ),
        train_dataset=toys.rows() if data is None else data,
        data_collator=toys.collate,
    )  # fmt: skip
    attach(trainer, sizes, toys.SCHEDULES, **options)
    recorder = toys.Recorder(trainer)
    trainer.train(resume_from_checkpoint=resume)
    seen = {
        "ids": recorder.ids,
        "rates": recorder.rates,
        "micros": recorder.micros,
        "weights": toys.flat(trainer.model).tolist(),
        "counters": [trainer.state.global_step, trainer.state.epoch, trainer.state.max_steps],
        "noise": trainer.stretto.signals.noise_numerator,
    }
    (out / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(folder, "two")
    train(folder, "resumed", resume=sys.argv[2])
    train(folder, "noise", sizes=NoiseScale(6, 40, window=5))
    import datasets  # after what a machine without it can run
    from datasets.distributed import split_dataset_by_node

    stream = datasets.IterableDataset.from_generator(toys.rows)
    train(folder, "stream", sizes=18, data=stream, max_duration="170sp")
    own = split_dataset_by_node(stream, dist.get_rank(), 2)
    train(folder, "shards", sizes=18, data=own, max_duration="140sp", sharded=True)
    dist.destroy_process_group()
