"""A sharded run that fetches its checkpoint: `torchrun sharded_run.py OUT first|second|whole`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from tests.scale import Waves, loss, make_model
from torch.distributed.fsdp import fully_shard

import stretto
from stretto.checkpoint import UrlStore


class Counted:
    """A store that notes what this rank fetches."""

    def __init__(self, url: Path) -> None:
        self.inner, self.files = UrlStore(str(url)), list[str]()

    def write(self, name: str, folder: Path) -> None:
        self.inner.write(name, folder)

    def list(self) -> list[str]:
        return self.inner.list()

    def open(self, name: str, file: str, target: Path) -> None:
        self.files.append(file)
        self.inner.open(name, file, target)

    def keep(self, names: Collection[str]) -> None:
        self.inner.keep(names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, is_first = Path(sys.argv[1]), sys.argv[2] == "first"
    dist.init_process_group("gloo")
    model = make_model()
    fully_shard(model)
    store = Counted(out / ("empty" if sys.argv[2] == "whole" else "bucket"))
    trainer = stretto.Trainer(
        model,
        Waves(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=loss,
        max_duration="10ba" if is_first else "20ba",
        batch_size=8,
        device="cpu",
        checkpoint=stretto.Checkpointing(every="10ba", upload=store),
        folder=out / sys.argv[2],
        log=stretto.Logging(console=False),
    )
    trainer.resume("auto")
    began, fetched = trainer.timer.batch, sorted(store.files)
    trainer.fit()
    whole = [one.full_tensor().flatten() for one in model.state_dict().values()]
    rank = os.environ["RANK"]
    torch.save(torch.cat(whole), out / f"{sys.argv[2]}{rank}.pt")
    (out / f"fetched{rank}.json").write_text(json.dumps([began, fetched]))
    dist.destroy_process_group()
