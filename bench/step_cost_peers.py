"""The same run with each peer, written as its own documentation writes it.

Everything that can be switched off is: progress bars, logging, checkpoints, clipping, summaries.
Each peer gets the bare loop's `DataLoader`, optimizer and a cosine learning rate in its own way.
A peer is imported where it is used, in its own environment.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from step_cost_setting import (
    BATCH,
    LEARNING_RATE,
    Batch,
    Rows,
    Stopwatch,
    as_it_is,
    data_loader,
    network,
    sgd,
    torch_cosine,
)
from torch import nn
from torch.nn import functional


def run_accelerate(data: Rows, stopwatch: Stopwatch) -> None:
    """Accelerate's prepared objects in a loop of one's own."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = network(stopwatch)
    optimizer = sgd(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, data_loader(data), torch_cosine(optimizer, stopwatch.last)
    )
    for rows, labels in loader:
        loss = functional.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def run_ignite(data: Rows, stopwatch: Stopwatch) -> None:
    """Ignite's supervised trainer with its handler for the learning rate."""
    engine: Any = importlib.import_module("ignite.engine")
    handlers: Any = importlib.import_module("ignite.handlers")
    model = network(stopwatch)
    optimizer = sgd(model)
    trainer = engine.create_supervised_trainer(model, optimizer, functional.cross_entropy)
    scheduler = handlers.CosineAnnealingScheduler(
        optimizer, "lr", LEARNING_RATE, 0.0, cycle_size=2 * stopwatch.last
    )
    trainer.add_event_handler(engine.Events.ITERATION_STARTED, scheduler)
    trainer.run(data_loader(data), max_epochs=1)


def run_lightning(data: Rows, stopwatch: Stopwatch) -> None:
    """Lightning's Trainer with automatic optimization."""
    lightning: Any = importlib.import_module("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]  # untyped where it is checked
        def __init__(self) -> None:
            super().__init__()
            self.network = network(stopwatch)

        def training_step(self, batch: Batch) -> torch.Tensor:
            return functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = sgd(self)
            scheduler = {"scheduler": torch_cosine(optimizer, stopwatch.last), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), data_loader(data))


def run_transformers(data: Rows, stopwatch: Stopwatch) -> None:
    """Hugging Face's Trainer on a module of one's own."""
    transformers: Any = importlib.import_module("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(stopwatch)

        def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.network(rows)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=as_it_is,
            optimizers=(sgd(model), None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def run_composer(data: Rows, stopwatch: Stopwatch) -> None:
    """Composer's Trainer with its own cosine."""
    define_torchvision_operators()
    composer: Any = importlib.import_module("composer")
    optim: Any = importlib.import_module("composer.optim")

    class Model(composer.ComposerModel):  # type: ignore[misc]  # untyped where it is checked
        def __init__(self) -> None:
            super().__init__()
            self.network = network(stopwatch)

        def forward(self, batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = self.network(batch[0])
            return logits

        def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
            return functional.cross_entropy(outputs, batch[1])

    model = Model()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=data_loader(data),
        max_duration="1ep",
        optimizers=sgd(model),
        schedulers=optim.CosineAnnealingScheduler(),
        device="cpu",
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    trainer.close()


def define_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch built for the CPU.

    Composer imports `torchvision.transforms`, which registers shapes for two operators of its
    compiled half; that half is built for CUDA and does not load here. No loop calls them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


# A torch library forgets its operators when it is collected.
_KEPT: list[torch.library.Library] = []

LOOPS: dict[str, Callable[[Rows, Stopwatch], None]] = {
    "accelerate": run_accelerate,
    "ignite": run_ignite,
    "lightning": run_lightning,
    "transformers": run_transformers,
    "composer": run_composer,
}
"""By the name of the environment."""
