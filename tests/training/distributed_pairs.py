"""One of four ranks, of which two each have the same samples; writes what a run came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.distributed import Ddp, Mesh
from stretto.run_folder import read_ledger
from stretto.runtime import Ranks
from stretto.training import Callback, Evaluation, Run, Trainer


class Pairs(Ddp):
    """Ranks 0 and 1 share their samples, and so do ranks 2 and 3, as if they shared a model."""

    def of(self, ranks: Ranks, mesh: Mesh | None = None) -> Self:
        """Share samples out over the pairs."""
        pair, is_second = divmod(ranks.rank, 2)
        ranks.share_samples(pair, ranks.world_size // 2, is_loss_rank=not is_second)
        return super().of(ranks, mesh)


class Heard(Callback):
    """Keeps the sums and the noise of a run."""

    def __init__(self) -> None:
        self.noise: list[float | None] = []

    def on_batch_end(self, run: Run, step: Any) -> None:
        """Log a sum over ranks: of the samples of those that count."""
        run.log("seen", sum(micro.num_samples for micro in step.micro_batches), reduce="sum")

    def on_noise(self, run: Run, step: Any, signals: Any) -> None:
        """Keep the variance."""
        self.noise.append(signals.noise_numerator)


def units(batch: Any) -> Tensor:
    """Count some samples twice."""
    return 1.0 + (batch[0][:, :1] > 0).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over units."""
    errors = (model(batch[0]) - batch[1]).square()
    return (units(batch) * errors).sum() / units(batch).sum()


def run(folder: Path) -> dict[str, Any]:
    """Train with masked samples; return what came of it."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1, dtype=torch.float64)
    x = torch.randn(61, 5, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    heard = Heard()
    pairs = Pairs() if int(os.environ.get("WORLD_SIZE", "1")) == 4 else None
    trainer = Trainer(
        model,
        data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=loss,
        max_duration="3ep",
        batch_size="0ep:5 1ep:12",
        micro_batch_size=3,
        stepping={"loss_weight": lambda batch: int(units(batch).sum())},
        evaluate=Evaluation(data, "1ep", {"mean": lambda model, batch: model(batch[0]).mean()}),
        log="4ba",
        callbacks=[heard],
        strategy=pairs,
        folder=folder,
    )
    trainer.fit()
    if os.environ.get("RANK", "0") != "0":
        return {}  # the first rank writes the files
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "validation/loss", "validation/mean", "seen", "sp", "batch_size")
    return {
        "weights": torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(),
        "metrics": [{key: line[key] for key in keys if key in line} for line in metrics],
        "noise": heard.noise,
        "ledger": repr(list(read_ledger(folder))),
    }


def main(out: Path) -> None:
    """Train, and write what came of it on the first rank."""
    out.mkdir(exist_ok=True)
    found = run(out / "run")
    if os.environ.get("RANK", "0") == "0":
        (out / "pairs.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
