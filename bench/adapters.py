"""What stretto adds to a stock trainer of another framework, at equal micro-batches.

Run `python bench/adapters.py`; the last result lies in `bench/results/adapters.json` and `.txt`.
Stock and attached trainers take turns in one process, each with steps of 1 and of 8 micro-batches
of 4 samples, an MLP 16-16-1 on one thread of the CPU. The time is that of the processor over the
steps after the first 50. Beside the median of the differences between neighbouring runs stands
that of the fastest runs, which a busy machine disturbs least. The aim is at most 30 us a step and
10 us a micro-batch: 40 us more in a step of 1 micro-batch, 110 us in one of 8. Lightning and
Composer are also measured with a callback that does nothing, which is a part of what is added.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

RESULTS = Path(__file__).parent / "results"
ENVIRONMENTS = {
    "transformers": "huggingface",
    "accelerate": "huggingface",
    "lightning": "lightning",
    "composer": "composer",
}
MICRO, ACCUMULATION, FIRST, RATE = 4, (1, 8), 50, 1e-3


class Clock:
    """The processor time from step `FIRST` to the last one."""

    def __init__(self) -> None:
        self.steps, self.start, self.seconds = 0, 0.0, 0.0

    def step(self) -> None:
        """Note the end of a step."""
        self.steps += 1
        if self.steps == FIRST:
            self.start = time.process_time()
        self.seconds = time.process_time() - self.start

    @property
    def microseconds(self) -> float:
        """The time of a step."""
        return 1e6 * self.seconds / (self.steps - FIRST)


def make_model() -> Any:
    """Return a model as Hugging Face's trainer takes it."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.layers(x)[:, 0], labels)}

    return Model()


def make_data(number: int) -> Any:
    """Return samples."""
    import torch

    return [{"x": torch.randn(16), "labels": torch.randn(())} for _ in range(number)]


def transformers_run(accumulation: int, steps: int, *, attached: bool) -> float:
    """Train with `transformers.Trainer`; return the microseconds of a step."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stretto.integrations.huggingface import attach

    transformers.logging.set_verbosity_error()
    clock = Clock()

    class Watch(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            dataloader_pin_memory=False,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=1 if attached else accumulation,
            max_steps=steps,
            optim="sgd",
        )
        data = make_data(MICRO * accumulation * 64)
        trainer = Trainer(make_model(), arguments, train_dataset=data, callbacks=[Watch()])
        if attached:
            attach(trainer, MICRO * accumulation)
        trainer.train()
    return clock.microseconds


def accelerate_run(accumulation: int, steps: int, *, attached: bool) -> float:
    """Train with a loop of Accelerate; return the microseconds of a step."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from stretto.integrations.accelerate import attach
    from stretto.schedules import Cosine

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if attached else accumulation)
    clock, model = Clock(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    size = MICRO * accumulation
    loader: Any = DataLoader(make_data(size * 64), batch_size=MICRO, shuffle=True)
    if attached:
        model, optimizer = accelerator.prepare(model, optimizer)
        loader, scheduler = attach(
            accelerator, loader, optimizer, size, {"lr": Cosine()}, max_duration=f"{steps}ba"
        )
    else:
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, schedule
        )
    while clock.steps < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.step()
                if clock.steps == steps:
                    break
    accelerator.free_memory()
    return clock.microseconds


def lightning_run(accumulation: int, steps: int, *, attached: bool, idle: bool = False) -> float:
    """Train with `lightning.Trainer`; return the microseconds of a step."""
    import logging

    import lightning
    import torch
    from torch.utils.data import DataLoader

    from stretto.integrations.lightning import attach

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock, size = Clock(), MICRO * accumulation

    class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

        def on_before_zero_grad(self, *_: Any) -> None:
            clock.step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=1 if attached else accumulation,
        callbacks=[lightning.Callback()] if idle else [],
    )
    loader: Any = DataLoader(make_data(size * 64), batch_size=MICRO, shuffle=True)
    if attached:
        loader = attach(trainer, loader, size)
    trainer.fit(Module(), loader)
    return clock.microseconds


def composer_run(accumulation: int, steps: int, *, attached: bool, idle: bool = False) -> float:
    """Train with `composer.Trainer`; return the microseconds of a step."""
    import torch
    from step_cost_peers import define_torchvision_operators
    from torch.utils.data import DataLoader

    define_torchvision_operators()
    from composer import Callback, ComposerModel, Trainer

    from stretto.integrations.composer import Stretto

    clock, size = Clock(), MICRO * accumulation

    class Model(ComposerModel):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, batch: Any) -> Any:
            return self.model(**batch)

        def loss(self, outputs: Any, *_: Any, **__: Any) -> Any:
            return outputs["loss"]

    class Watch(Callback):  # type: ignore[misc,unused-ignore]
        def batch_end(self, *_: Any) -> None:
            clock.step()

    model = Model()
    # Stock, a batch of the loader is a step; with stretto, it is a micro-batch.
    data = DataLoader(make_data(size * 64), batch_size=MICRO if attached else size, shuffle=True)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=RATE),
        max_duration=f"{steps}ba",
        device="cpu",
        device_train_microbatch_size=MICRO,
        progress_bar=False,
        callbacks=[*([Stretto(size)] if attached else [Callback()] if idle else []), Watch()],
    )
    trainer.fit()
    trainer.close()
    return clock.microseconds


RUNS: dict[str, Callable[..., float]] = {
    "transformers": transformers_run,
    "accelerate": accelerate_run,
    "lightning": lightning_run,
    "composer": composer_run,
}


SIDES: dict[str, dict[str, bool]] = {
    "stock": {"attached": False},
    "ours": {"attached": True},
    "idle": {"attached": False, "idle": True},
}
"""What is measured: the trainer, the same with stretto, and with a callback that does nothing."""


def measure(name: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of a step, by accumulation and side."""
    import torch

    torch.set_num_threads(1)
    sides = list(SIDES) if ENVIRONMENTS[name] == name else ["stock", "ours"]
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        turn = number % len(sides)
        for accumulation in ACCUMULATION:
            for side in (*sides[turn:], *sides[:turn]):
                time = RUNS[name](accumulation, FIRST + steps // accumulation, **SIDES[side])
                if number:  # after one to warm up
                    found.setdefault(f"{accumulation} {side}", []).append(time)
    return found


def costs(found: dict[str, list[float]]) -> dict[str, float]:
    """Return the stock step, what is added to it with its quartiles, and the ratio."""
    row: dict[str, float] = {}
    for number in ACCUMULATION:
        stock = found[f"{number} stock"]
        row[f"stock {number}"] = statistics.median(stock)
        for side in ("ours", "idle"):
            times = found.get(f"{number} {side}")
            if times is None:
                continue
            pairs = list(zip(times, stock, strict=True))
            quartiles = statistics.quantiles([one - other for one, other in pairs], n=4)
            for key, value in zip(("low", "added", "high"), quartiles, strict=True):
                row[f"{key} {side} {number}"] = value
            row[f"fastest {side} {number}"] = min(times) - min(stock)
            row[f"ratio {side} {number}"] = statistics.median(one / other for one, other in pairs)
    return row


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute, and nothing is saved")
    parser.add_argument("--measure", help="in the environment of an adapter")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    steps, rounds = (200, 3) if options.quick else (600, 15)
    if options.measure:
        print(json.dumps(measure(options.measure, steps, rounds)))
        return
    from machine import processor
    from test_adapters import python_for

    rows: dict[str, dict[str, float]] = {}
    for name in options.only:
        done = subprocess.run(
            [str(python_for(ENVIRONMENTS[name])), __file__, "--measure", name]
            + ["--quick"] * options.quick,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )
        rows[name] = costs(json.loads(done.stdout.splitlines()[-1]))
    text = table(rows)
    print(text)
    if options.quick or len(rows) < len(RUNS):
        return
    result = {
        "what": "microseconds that stretto adds to stock trainers at equal micro-batches",
        "rows": {
            name: {key: round(one, 3) for key, one in row.items()} for name, row in rows.items()
        },
        "aim": {f"added ours {number}": 30 + 10 * number for number in ACCUMULATION},
        "python": platform.python_version(),
        "processor": processor(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    (RESULTS / "adapters.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "adapters.txt").write_text(text + "\n")


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the results as text."""
    head = f"{'us a step':22}{'micro-batches':>14}{'stock':>9}"
    lines = [head + f"{'added (quartiles)':>26}{'fastest':>9}{'ratio':>8}"]
    for trainer, row in rows.items():
        for side, what in (("ours", ""), ("idle", ", idle callback")):
            for number in ACCUMULATION:
                if f"added {side} {number}" not in row:
                    continue
                added, low, high = (
                    row[f"{key} {side} {number}"] for key in ("added", "low", "high")
                )
                lines.append(
                    f"{trainer + what:26}{number:>10}{row[f'stock {number}']:>9.0f}"
                    f"{f'{added:+.0f} ({low:+.0f} to {high:+.0f})':>26}"
                    f"{row[f'fastest {side} {number}']:>+9.0f}"
                    f"{row[f'ratio {side} {number}']:>8.3f}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
