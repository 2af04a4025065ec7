"""One finder on one model under the limit, in a process of its own; prints what it found as JSON.

Run by `finder.py`, each peer in its own environment.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from finder_setting import CASES, Case, Counter, optimizer_of, set_limit, take_step
from torch import Tensor, nn

STEPS = 3
"""Steps of a size that fits: what Lightning takes unless told otherwise."""


def fits(case: Case, size: int) -> dict[str, Any]:
    """Return whether a plain loop of torch has memory for steps of that size."""
    model = case.make_model()
    optimizer = optimizer_of(model)
    set_limit()
    try:
        # A small step first, as every finder takes one: some buffers are kept for good.
        for count in (2, size, size, size):
            take_step(case, model, optimizer, case.make_batch(count))
    except (RuntimeError, MemoryError) as error:
        return {"fits": False, "error": str(error).splitlines()[0][:120]}
    return {"fits": True}


def stretto(case: Case, method: str) -> dict[str, Any]:
    """Ask `stretto.find_batch_size`."""
    from stretto import SupervisedStep, find_batch_size

    model = case.make_model()
    counter = Counter(model)
    step = SupervisedStep(model, optimizer_of(model), case.loss)
    set_limit()
    answer = find_batch_size(step, case.make_batch(2), method=method)  # type: ignore[arg-type]
    return {
        "size": answer.size,
        "says": answer.certainty,
        "trials": len(counter.sizes),
        "out_of_memory": answer.cost.num_out_of_memory,
        "fake_steps": answer.cost.fake_steps,
        "samples": counter.samples,
    }


def lightning(case: Case, mode: str) -> dict[str, Any]:
    """Ask Lightning's `BatchSizeFinder` through its `Tuner`."""
    import logging

    import lightning as pl
    from lightning.pytorch.tuner import (
        Tuner,
        batch_size_scaling,
    )

    class Batches:
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return 10**7

        def __iter__(self) -> Any:
            while True:
                yield case.make_batch(self.size)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = case.make_model()
            self.batch_size = 2

        def training_step(self, batch: Tensor, _index: int) -> Tensor:
            return case.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

        def train_dataloader(self) -> Batches:
            return Batches(self.batch_size)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    counter = Counter(module.model)
    failures = counted(batch_size_scaling, "is_oom_error")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp/lightning-finder",  # noqa: S108  it keeps the state of the model there
    )
    set_limit()
    # As it comes, but for the largest size: 8192 would be less than what fits.
    size = Tuner(trainer).scale_batch_size(module, mode=mode, max_val=2**20)
    return {
        "size": size,
        "trials": len(counter.sizes),
        "out_of_memory": failures(),
        "samples": counter.samples,
    }


def accelerate(case: Case, start: str) -> dict[str, Any]:
    """Ask Accelerate's `find_executable_batch_size`."""
    from accelerate.utils import memory

    failures = counted(memory, "should_reduce_batch_size")
    counters: list[Counter] = []

    def train(batch_size: int) -> int:
        model = case.make_model()
        counters.append(Counter(model))
        optimizer = optimizer_of(model)
        for _ in range(STEPS):
            take_step(case, model, optimizer, case.make_batch(batch_size))
        return batch_size

    # One step first, so that what the limit is measured from holds a model, as for the others.
    model = case.make_model()
    set_limit()
    del model
    size = memory.find_executable_batch_size(train, starting_batch_size=int(start))()
    return {
        "size": size,
        "trials": len({size for counter in counters for size in counter.sizes}),
        "out_of_memory": failures(),
        "samples": sum(counter.samples for counter in counters),
    }


def counted(module: Any, name: str) -> Callable[[], int]:
    """Count how often a function of a module says yes."""
    original, times = getattr(module, name), [0]

    def count(error: BaseException) -> bool:
        says: bool = original(error)
        times[0] += says
        return says

    setattr(module, name, count)
    return lambda: times[0]


def main() -> None:
    """Run the finder that the command line names."""
    who, case_name, argument = sys.argv[1:4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[case_name]
    if who == "fits":
        print(json.dumps(fits(case, int(argument))))
        return
    ask: dict[str, Callable[[Case, str], dict[str, Any]]] = {
        "stretto": stretto,
        "lightning": lightning,
        "accelerate": accelerate,
    }
    warm = nn.Linear(2, 2)  # so that starting autograd is nobody's cost
    warm(torch.ones(1, 2)).sum().backward()
    start, processor = time.perf_counter(), time.process_time()
    try:
        found = ask[who](case, argument)
    except Exception as error:  # noqa: BLE001  a finder that fails has an answer, too
        found = {"size": None, "error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    found["seconds"] = round(time.perf_counter() - start, 2)
    found["processor_seconds"] = round(time.process_time() - processor, 2)
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
