"""The models, and the ways to shard them, that `bench/sharded_memory.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tests.families import llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stretto.memory.prediction.cuda.data_parallel import replicate
from stretto.memory.prediction.cuda.sharding import Shard, fully_shard_blocks
from stretto.runtime import SupervisedStep

LOCAL = 8
"""Ranks of a machine: those that tensor parallelism and hybrid sharding spread over."""


class Case(NamedTuple):
    """One model on one number of ranks."""

    model: str
    ranks: int
    mode: str
    samples: int = 1
    checkpoints: bool = False
    clips: bool = False
    length: int = 2048

    def __str__(self) -> str:
        text = f"{self.model}, {self.ranks} ranks, {self.mode}, {self.samples} x {self.length}"
        return text + ", checkpointing" * self.checkpoints + ", clipping" * self.clips


def _policy() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _blocks(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    layers: Sequence[nn.Module] = model.layers  # type: ignore[assignment]
    for block in layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _with_policy(model: nn.Module, mesh: DeviceMesh) -> None:
    _blocks(model, mesh, mp_policy=_policy())


def _kept_whole(model: nn.Module, mesh: DeviceMesh) -> None:
    _blocks(model, mesh, mp_policy=_policy(), reshard_after_forward=False)


def _hybrid(model: nn.Module, mesh: DeviceMesh) -> None:
    shape = (mesh.size() // LOCAL, LOCAL)
    names = ("replicate", "shard")
    both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
    _blocks(model, both, mp_policy=_policy())


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {"out": ColwiseParallel(output_layouts=Replicate())}
    layers: Sequence[nn.Module] = model.layers  # type: ignore[assignment]
    for number in range(len(layers)):
        for name in ("attention.wq", "attention.wk", "attention.wv"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        plan[f"layers.{number}.attention.wo"] = RowwiseParallel()
        plan[f"layers.{number}.feed_forward.w1"] = ColwiseParallel()
        plan[f"layers.{number}.feed_forward.w3"] = ColwiseParallel()
        plan[f"layers.{number}.feed_forward.w2"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def _two_ways(model: nn.Module, mesh: DeviceMesh) -> None:
    shape = (mesh.size() // LOCAL, LOCAL)
    both = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("data", "tensor"))
    _tensor_parallel(model, both["tensor"])
    _blocks(model, both["data"], mp_policy=_policy())


MODES: dict[str, Shard] = {
    "FSDP": fully_shard_blocks,
    "FSDP, bf16 policy": _with_policy,
    "FSDP, not resharded": _kept_whole,
    "HSDP": _hybrid,
    "TP": _tensor_parallel,
    "TP and FSDP": _two_ways,
}
"""How the model is sharded; DDP is no sharding, so it has no function."""
AUTOCAST = {"FSDP", "TP", "DDP", "DDP, views"}
"""Modes that compute in bf16 by autocast; the others by FSDP's policy."""
SEPARATE = {"TP"}
"""Modes whose optimizer updates one parameter at a time: some are sharded, some are not."""


def model_of(case: Case) -> nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return llama.Llama(llama.SIZES[case.model], checkpoints=case.checkpoints)


def step_of(
    case: Case, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor] = llama.loss
) -> SupervisedStep:
    """Return the step that trains a model."""
    foreach = False if case.mode in SEPARATE else None
    return SupervisedStep(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach),
        loss,
        precision="bf16" if case.mode in AUTOCAST else "fp32",
        clip_norm=1.0 if case.clips else None,
    )


def data_parallel(case: Case) -> Any:
    """Return DDP with its final buckets from the start, as the truth has it."""

    def shard(model: nn.Module, _mesh: DeviceMesh) -> None:
        replicate(model, as_views=case.mode.endswith("views"), finds_unused=True)

    return shard
