"""One rank of a pipeline, or one process with the whole model; writes what each run came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.pipeline import SETTINGS, losses, make_data, make_model, make_trainer

import stretto
from stretto.errors import StrettoError

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Watch(stretto.Callback):
    """Keeps the lines of metrics, and stops the run at a batch."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.lines: list[dict[str, float]] = []

    def on_batch_end(self, run: stretto.Run, step: Any) -> None:
        run.log("seen", step.local_num_samples, reduce="sum")
        if run.timer.batch == self.stop and run.ranks.rank == RANKS - 1:
            run.stop("enough", is_final=False)

    def on_log(self, run: stretto.Run, record: Any) -> None:
        self.lines.append({name: record[name] for name in ("loss", "grad_norm", "seen", "sp")})


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return losses(model(batch[0]), batch[1]).mean()


def trained(stop: int | None = None, resume: Path | None = None, **settings: Any) -> dict[str, Any]:
    watch = Watch(stop)
    given = {"log": stretto.Logging("1ba", console=False), "callbacks": [watch], **settings}
    if RANKS > 1:
        trainer = make_trainer(RANKS // 2, **given)
    else:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = stretto.Trainer(
            model, make_data(), optimizer=optimizer, loss=loss, clip_norm=0.5, **SETTINGS, **given
        )
    trainer.fit(resume=resume)
    named = trainer.model.named_parameters()
    weights = {name: one.flatten().tolist() for name, one in named if not one.is_meta}
    return {"weights": weights, "lines": watch.lines}


def refusal(**settings: Any) -> str:
    try:
        trained(**settings)
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is refused"


def main(out: Path, *resumed: str) -> None:
    found: dict[str, Any] = {"whole": trained()}
    if not resumed:
        trained(8, checkpoint=stretto.Checkpointing("1ep"), folder=out / str(RANKS))
    for name in resumed:
        found[name] = trained(resume=out / name)
    if RANKS == 4:
        found["noise"] = refusal(callbacks=[Noise()])
    rank = os.environ.get("RANK", "0")
    (out / f"{RANKS}-{rank}{'-resumed' if resumed else ''}.json").write_text(json.dumps(found))


class Noise(stretto.Callback):
    def on_noise(self, run: stretto.Run, step: Any, signals: Any) -> None:
        raise AssertionError("it is not measured")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
