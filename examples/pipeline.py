"""Pipeline parallelism: each rank has one stage of the model, and torch's 1F1B runs the passes.

    torchrun --nproc-per-node 4 examples/pipeline.py

The mesh is `("dp", "pp")`. All ranks build the whole model; stages of other ranks are then moved to
the meta device, where they take no memory. So names and the optimizer's groups are the same on all
ranks, and each rank writes its own stage to the same checkpoint, which any other mesh can read.
Torch wants micro-batches of one shape: the last one of a step is padded with samples of weight 0.
The gradient noise of a pipeline, and evaluations, which call the whole model, are not supported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import stretto
from stretto.checkpoint import Shard
from stretto.distributed import Strategy
from stretto.errors import TrainingError
from stretto.runtime import TrainStep


@final
class Stages(nn.Sequential):
    """The stages of a model, of which this rank has one; the others are on the meta device."""

    def keep(self, number: int) -> None:
        """Keep one stage; build the optimizer afterwards."""
        for other, stage in enumerate(self):
            if other != number:
                stage.to("meta")

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: object, **__: object) -> Any:
        """Load the stage of this rank."""
        own = {name for name, one in self.state_dict().items() if not one.is_meta}
        found = {name: one for name, one in state_dict.items() if name in own}
        if missing := own - found.keys():
            raise KeyError(f"the checkpoint lacks {', '.join(sorted(missing))}")
        return super().load_state_dict(found, strict=False)


@final
class PipelineStep(TrainStep):
    """Runs the micro-batches of a share through the stages, then updates that of this rank.

    Args:
        model: the stages; each takes one tensor and returns one.
        optimizer: an optimizer of all parameters.
        losses: `losses(output, target)`, one for each sample.
        mesh: has the dimensions `dp` and `pp`.
        size: samples of a micro-batch of the pipeline.
        clip_norm: the largest norm of the gradient of all stages.
    """

    def __init__(
        self,
        model: Stages,
        optimizer: Optimizer,
        losses: Callable[[Tensor, Tensor], Tensor],
        *,
        mesh: DeviceMesh,
        size: int,
        clip_norm: float,
    ) -> None:
        self.model, self.optimizers = model, [optimizer]
        self._losses, self._size, self._clip_norm = losses, size, clip_norm
        self._group, number = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self._last = len(model) - 1
        self._is_first, self._is_last = number == 0, number == self._last
        self._own = list(model[number].parameters())
        device = self._own[0].device
        self._stage = PipelineStage(
            model[number], number, len(model), device=device, group=self._group
        )
        self._schedule: tuple[int, Schedule1F1B] | None = None

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add the gradient of this rank's samples, a whole share, to its stage."""
        inputs, targets = batch
        count = len(inputs)
        chunks = max(self._last + 1, -(-count // self._size))
        padding = chunks * self._size - count
        weights = torch.full((count,), weight / count, dtype=inputs.dtype, device=inputs.device)
        inputs, targets, weights = (
            torch.cat([one, one[:1].expand(padding, *one.shape[1:]) * factor])
            for one, factor in ((inputs, 1), (targets, 1), (weights, 0))
        )
        if self._schedule is None or self._schedule[0] != chunks:
            made = Schedule1F1B(self._stage, chunks, self._weighted, scale_grads=False)
            self._schedule = chunks, made
        schedule = self._schedule[1]
        given = (inputs,) if self._is_first else ()
        if self._is_last:
            found: list[Tensor] = []
            # A schedule cuts one tensor of targets, so the weights are a column of it.
            schedule.step(*given, target=torch.cat([targets, weights[:, None]], 1), losses=found)
            loss = torch.stack(found).detach().sum() / weight
        else:
            schedule.step(*given)
            loss = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
        dist.broadcast(loss, group=self._group, group_src=self._last)
        return loss

    def update(self) -> Mapping[str, float | Tensor]:
        """Clip by the norm over all stages, and update this one."""
        gradients = [one.grad for one in self._own if one.grad is not None]
        norm = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(norm, group=self._group)
        norm = norm.sqrt()
        nn.utils.clip_grads_with_norm_(self._own, self._clip_norm, norm)
        self.optimizers[0].step()
        return {"grad_norm": norm}

    def _weighted(self, output: Tensor, packed: Tensor) -> Tensor:
        return (self._losses(output, packed[:, :-1]) * packed[:, -1]).sum()


@final
class Pipeline(Strategy):
    """Averages the gradients of a stage over its data ranks, and saves each stage once."""

    averaging = "after"
    is_sharded = True

    def __init__(self, mesh: DeviceMesh, step: PipelineStep) -> None:
        self._group, self._size = mesh.get_group("dp"), mesh["dp"].size()
        self._is_writer = mesh.get_local_rank("dp") == 0
        self._step = step

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model: its stages are where they belong."""
        return model

    def average(self) -> None:
        """Average the gradients of this rank's stage; those of a rank without samples are 0."""
        for one in self._step.parameters:
            if not one.is_meta:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
                dist.all_reduce(one.grad, group=self._group)
                one.grad /= self._size

    def attach(self, gradients: object) -> NoReturn:
        """Refuse to measure noise: each rank sees the gradient of one stage."""
        raise TrainingError.cannot(
            "measure the gradient noise of a pipeline",
            why="each rank has the gradient of one stage",
            instead="use a batch size that is known before the run",
        )

    def part_of_state(self, tensor: Tensor) -> Tensor | Shard:
        """Return a tensor of this rank's stage as its own to write; nothing of other stages."""
        state = self._step.optimizers[0].state
        parameters = self._step.parameters
        owners: dict[int, Tensor] = {p.data_ptr(): p for p in parameters if not p.is_meta}
        owners |= {
            value.data_ptr(): one
            for one, values in state.items()
            for value in values.values()
            if isinstance(value, Tensor) and not value.is_meta
        }
        owner = None if tensor.is_meta else owners.get(tensor.data_ptr())
        shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
        if tensor.is_meta or (owner is not None and (owner.is_meta or not self._is_writer)):
            return Shard(torch.empty(0, dtype=tensor.dtype), shape, offset)
        return tensor if owner is None else Shard(tensor.detach(), shape, offset)


SETTINGS: dict[str, Any] = {
    "max_duration": "2ep",
    "batch_size": "0sp:6 30sp:11 120sp:17",
    "loading": {"seed": 7},
    "device": "cpu",
}
"""A ramp whose sizes change within epochs."""


def make_model() -> Stages:
    """Return a model of two stages."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.LayerNorm(12))
    return Stages(first, nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))).double()


def make_data() -> Dataset[tuple[Tensor, ...]]:
    """Return 101 samples."""
    x = torch.randn(101, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def losses(output: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of each sample."""
    return (output - target).square().mean(1)


def make_trainer(
    data_ranks: int, callbacks: Sequence[stretto.Callback] = (), **settings: Any
) -> stretto.Trainer:
    """Return the run."""
    model = make_model()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (data_ranks, len(model)), mesh_dim_names=("dp", "pp"))
    model.keep(mesh.get_local_rank("pp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = PipelineStep(model, optimizer, losses, mesh=mesh, size=2, clip_norm=0.5)
    return stretto.Trainer(
        step,
        make_data(),
        mesh=mesh,
        strategy=Pipeline(mesh, step),
        callbacks=callbacks,
        **SETTINGS,
        **settings,
    )


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    checkpoint = None if given.folder is None else "1ep"
    trainer = make_trainer(given.data_ranks, folder=given.folder, checkpoint=checkpoint)
    trainer.fit(resume="auto" if given.folder else None)
    if trainer.run.is_first_rank:
        print(trainer.timer.sample, "samples, batches:", trainer.timer.batch)


if __name__ == "__main__":
    main()
