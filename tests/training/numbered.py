"""Runs on an accelerator whose memory is known, and whose samples have numbers.

A number stays on the host when a batch is moved, so it is right on a device that computes nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from tests.accelerator import DEVICE, MIB, leave
from torch import Tensor, nn

from stretto.training import Callback, Trainer

NUM_SAMPLES = 64
BATCH_SIZE = 16
EACH = 32 * MIB
"""What a sample may take; a batch then takes 512 MiB."""
ROOM = 150 * MIB
"""Enough for 4 such samples, and not for 8."""


class Numbered:
    """A data set whose samples know their number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.ones(8), "number": str(index)}


class Taking(torch.autograd.Function):
    """Allocates so many bytes for each sample in each pass, and gives them back."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward: int, backward: int) -> Tensor:
        ctx.bytes = backward
        torch.empty(len(inputs), forward, dtype=torch.uint8, device=inputs.device)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        torch.empty(len(gradient), ctx.bytes, dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


class Model(nn.Module):
    """A layer, dropout, and a pass that takes memory."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
        self.bytes = forward, backward

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = Taking.apply(self.layers(inputs), *self.bytes)  # type: ignore[no-untyped-call]
        return outputs


class Limits(Callback):
    """Leaves so many bytes free from some batches on; None: no limit."""

    def __init__(self, rooms: dict[int, int | None]) -> None:
        self.rooms = rooms

    def on_batch_start(self, run: Any, step: Any) -> None:
        if step.timestamp.batch in self.rooms:
            leave(self.rooms[step.timestamp.batch])


class Listener(Callback):
    """Keeps the passes that became part of a batch; those before them were repeated."""

    def __init__(self, started: list[list[int]]) -> None:
        self.started = started
        self.passes: list[list[int]] = []

    def on_batch_end(self, run: Any, step: Any) -> None:
        share = sum(micro.num_samples for micro in step.micro_batches)
        parts: list[list[int]] = []
        while sum(map(len, parts)) < share:
            parts.insert(0, self.started.pop())
        self.passes += parts
        self.started.clear()


class NumberedRun:
    """A run on an accelerator that keeps the numbers of its samples.

    Args:
        where: the pass in which a sample takes `EACH` bytes; None: neither does.
        rooms: see `Limits`.
        settings: of the trainer.
    """

    def __init__(
        self,
        where: Literal["forward", "backward"] | None = None,
        *,
        rooms: dict[int, int | None] | None = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        started: list[list[int]] = []
        self._listener = Listener(started)

        def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            started.append([int(number) for number in batch["number"]])
            return model(batch["inputs"]).square().mean()

        model = Model(*(EACH if where == one else 0 for one in ("forward", "backward")))
        defaults: dict[str, Any] = {
            "optimizer": torch.optim.AdamW(model.parameters()),
            "loss": loss,
            "max_duration": "8ba",
            "batch_size": BATCH_SIZE,
            "device": DEVICE,
        }
        callbacks = [*settings.pop("callbacks", ()), Limits(rooms or {}), self._listener]
        self.trainer = Trainer(model, Numbered(), **{**defaults, **settings}, callbacks=callbacks)

    @property
    def passes(self) -> list[list[int]]:
        """The samples of each pass, in order; without passes that were repeated."""
        return self._listener.passes

    @property
    def samples(self) -> list[int]:
        """The samples in the order in which they were trained on."""
        return [number for numbers in self.passes for number in numbers]

    @property
    def sizes(self) -> list[int]:
        """The samples of each pass."""
        return [len(numbers) for numbers in self.passes]

    @property
    def splits(self) -> int:
        """How often memory ran out."""
        net = self.trainer._loop.stepper.retry
        assert net is not None
        return net.splits

    @property
    def size(self) -> int | None:
        """The most samples of a pass now."""
        net = self.trainer._loop.stepper.retry
        assert net is not None
        return net.size
