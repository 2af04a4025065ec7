"""Ranks with loops of their own, given different things; prints what each says, as JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from stretto import StepLoader, StrettoError, prepare
from stretto.batching import SizeFunction

Case = Callable[[int], dict[str, Any]]


def made(number: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(number, 3, generator=torch.Generator().manual_seed(seed)))


def sizes_of(rank: int) -> Any:
    def size_at(timestamp: Any, current: int) -> int:
        del current
        return 8 + rank * bool(timestamp.batch)

    return SizeFunction(size_at)


SETTINGS: dict[str, Case] = {
    "seed": lambda rank: {"loading": {"seed": rank}},
    "batch_size": lambda rank: {"batch_size": 8 + 2 * rank},
    "max_duration": lambda rank: {"max_duration": f"{1 + rank}ep"},
    "data.num_samples": lambda rank: {"data": made(96 - 16 * rank)},
    "first, middle and last sample": lambda rank: {"data": made(96, rank)},
    "micro_batch_size": lambda rank: {"micro_batch_size": 2 + rank},
    "every.evaluate": lambda rank: {"every": {"evaluate": f"{10 + rank}%"}},
    "schedules.lr": lambda rank: {"schedules": {"lr": 1.0 / (1 + rank)}},
    "lr of parameter group 0 of 1": lambda rank: {"lr": 0.1 * (1 + rank)},
    "samples so far": lambda rank: {"resumes": rank},
    "batch size in batch 10": lambda rank: {"batch_size": sizes_of(rank)},
}
"""What differs, and the settings of a rank."""
WEIGHTS: dict[str, Case] = {
    "right": lambda rank: {},
    "workers": lambda rank: {"loading": {"num_workers": 0, "prefetch_factor": None}},
    "not wrapped": lambda rank: {"wraps": False},
    "not wrapped and not seeded": lambda rank: {"wraps": False, "seed": rank},
    "own experts": lambda rank: {"expert": rank},
    "nothing is trained": lambda rank: {"factor": 0.0},
}


def trained(given: dict[str, Any]) -> int:
    """Train in a loop of your own; return the batches."""
    settings: dict[str, Any] = {"data": made(96), "batch_size": 8, "max_duration": "1ep"} | given
    take = settings.pop
    wraps, seed, lr = take("wraps", True), take("seed", 0), take("lr", 0.1)
    factor, expert, resumes = take("factor", 1.0), take("expert", None), take("resumes", 0)
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(3, 1)
    parameters = [*model.parameters()]
    if expert is not None:
        parameters.append(nn.Parameter(torch.full((2,), float(expert))))
    optimizer = torch.optim.SGD(parameters, lr=lr)
    called = DistributedDataParallel(model) if wraps else model
    data, sizes = take("data"), take("batch_size")
    run = prepare(data, sizes, optimizer=optimizer, model=model, **settings)
    if resumes:
        other = prepare(data, sizes, optimizer=optimizer, **settings)
        other.loader.ranks.world_size = 1  # not part of the run
        next(iter(other))
        other.finish()
        run.load_state_dict(other.state_dict())
    for step in run:
        for micro in step:
            (called(micro.batch[0]).square().mean() * micro.weight * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.finish()
    return run.timer.batch


def said(work: Callable[[], object]) -> str:
    """Return the error or the warnings of what a rank does, or what it returns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            answer = work()
        except StrettoError as error:
            return str(error)
    return " ".join(str(one.message) for one in found) or str(answer)


def loaded(rank: int) -> int:
    loader = StepLoader(made(96), 8, max_duration="1ep", loading={"seed": rank})
    return sum(1 for _ in loader)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = {
        name: said(lambda case=case: trained(case(rank)))  # type: ignore[misc]
        for name, case in {**SETTINGS, **WEIGHTS}.items()
    }
    own["StepLoader"] = said(lambda: loaded(rank))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, own)
    if rank == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()
