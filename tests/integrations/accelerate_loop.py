"""A loop with Accelerate's own `accumulate`, as its documentation writes it; also one of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from stretto.batching import NoiseScale
from stretto.integrations.accelerate import attach
from stretto.schedules import Cosine
from stretto.settings import Loading

N, SEED = 150, 3
SIZES = "0sp:8 65sp:18 125sp:31 200sp:64"  # grows inside epochs; 18 and 31 split unevenly
SCHEDULES = {"lr": Cosine(end=0.1, warmup="60sp", warmup_start=0)}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR, dtype=torch.float64)
Y = X.sum(1, keepdim=True).tanh()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weight_of(batch: Any) -> int:
    return int((batch[2] % 5 + 1).sum())


def loss_of(model: nn.Module, batch: Any, *, is_weighted: bool) -> torch.Tensor:
    x, y, i = batch
    if not is_weighted:
        return functional.mse_loss(model(x), y)
    weights = (i % 5 + 1)[:, None]
    return (weights * (model(x) - y) ** 2).sum() / weights.sum()


def train(
    *,
    sizes: Any = SIZES,
    save: tuple[int, Path] | None = None,
    load: Path | None = None,
    is_weighted: bool = False,
    is_sharded: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train; return what each optimizer step saw."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if is_sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if is_sharded:  # on the CPU, Accelerate would take DDP instead
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model, seen = make_model(), list[list[int]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
    rates: list[float] = []
    data = TensorDataset(X, Y, torch.arange(N))
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)

    model, optimizer = accelerator.prepare(model, optimizer)
    assert is_sharded == (type(next(model.parameters())) is not nn.Parameter)
    loader, scheduler = attach(
        accelerator, sizes, SCHEDULES, data=loader, optimizer=optimizer,
        max_duration="2ep", every={"evaluate": "70sp"}, loading=Loading(seed=SEED), model=model,
        units=weight_of if is_weighted else "samples", **options,
    )  # fmt: skip

    if load is not None:
        accelerator.load_state(str(load))
    ids: list[int] = []
    evaluations = []
    for _ in range(loader.run.timer.epoch, 2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch, is_weighted=is_weighted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.gradient_accumulation_steps != float("inf"):
                ids += batch[2].tolist()
            if accelerator.sync_gradients:
                seen.append(sorted(ids))
                ids = []
                if "evaluate" in loader.due:
                    evaluations.append(len(seen))
                if save is not None and len(seen) == save[0]:
                    accelerator.save_state(str(save[1]))
    each = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    weights = torch.cat([one.detach().flatten() for one in each])
    accelerator.free_memory()
    return {
        "ids": seen,
        "rates": rates,
        "evaluations": evaluations,
        "weights": weights.tolist(),
        "noise": loader.run.loader.state_dict()["signals"]["noise_numerator"],
        "clock": [loader.run.timer.batch, loader.run.timer.sample],
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    found = {
        "two": train(save=(6, out / "saved")),
        "weighted": train(is_weighted=True),
        "sharded": train(is_sharded=True),
        "sharded noise": train(is_sharded=True, sizes=NoiseScale(6, 40, window=5)),
        "noise": train(sizes=NoiseScale(6, 40, window=5)),
        "resumed": train(load=out / "saved"),
    }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
