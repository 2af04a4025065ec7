"""Models that are sharded over ranks, predicted in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.families.sharded import MODES, Case, data_parallel, model_of, step_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from stretto.errors import FitError
from stretto.memory import CudaPrediction, predict
from stretto.memory.prediction.cuda.fake_ranks import fake_ranks
from stretto.runtime import SupervisedStep

DISTRIBUTED = Path(__file__).with_name("distributed_predict.py")
MIB = 2**20

# Allocated and reserved bytes after three steps of torch 2.13's CUDA build on the fake process
# group, as `bench/sharded_truth.py` prints them for these cases.
TRUE = {
    Case("tiny", 8, "FSDP", 2, clips=True, length=256): (107999744, 153092096),
    Case("tiny", 12, "FSDP, bf16 policy", 3, checkpoints=True, length=256): (89744896, 127926272),
    Case("tiny", 8, "FSDP, not resharded", 2, length=256): (100020224, 144703488),
    Case("tiny", 16, "HSDP", 2, clips=True, length=256): (95200256, 140509184),
    Case("tiny", 8, "TP", 2, length=256): (90641408, 109051904),
    Case("tiny", 16, "TP and FSDP", 2, length=256): (82766848, 104857600),
    Case("tiny", 8, "DDP", 2, clips=True, length=256): (146245632, 169869312),
    Case("tiny", 8, "DDP, views", 2, checkpoints=True, length=256): (125996032, 153092096),
}


class Mlp(nn.Module):
    """Blocks of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make_batch(size: int) -> Tensor:
    return torch.ones(size, 64)


def mlp_step(make: Callable[[nn.Module], torch.optim.Optimizer], **kwargs: Any) -> SupervisedStep:
    with torch.device("meta"):
        model = Mlp()
    return SupervisedStep(model, make(model), mean, **kwargs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def of_category(prediction: CudaPrediction, name: Any) -> int:
    return prediction.at(4).by_category.get(name, 0)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("case", TRUE, ids=str)
def test_as_torch_allocates(case: Case) -> None:
    prediction = predict(
        step_of(case, model_of(case)),
        lambda size: torch.zeros(size, case.length, dtype=torch.long),
        device="cuda",
        world_size=case.ranks,
        shard=MODES.get(case.mode) or data_parallel(case),
    )
    allocated, reserved = TRUE[case]
    assert prediction.allocated(case.samples) == allocated
    # With tensor parallelism, a segment of 2 MiB is sometimes too much.
    off = 2 * MIB if case.mode.startswith("TP") else 0
    assert reserved <= prediction.peak(case.samples) <= reserved + off


def test_names_of_strategies() -> None:
    case = Case("tiny", 16, "FSDP", length=64)

    def parameters(shard: Any) -> int:
        step = step_of(case, model_of(case))
        made = predict(
            step,
            lambda size: torch.zeros(size, case.length, dtype=torch.long),
            device="cuda",
            world_size=16,
            shard=shard,
        )
        return made.at(1).by_category["parameters"]

    whole = sum(4 * one.numel() for one in model_of(case).parameters())
    sharded = whole // 16
    assert parameters("fsdp") == sharded
    assert parameters("hsdp:4") == 4 * sharded
    assert parameters("ddp") == parameters("ddp:views") == whole


def test_buckets_of_ddp_are_one_copy_of_the_gradients() -> None:
    alone = predict(mlp_step(sgd), make_batch, device="cuda")
    step = mlp_step(sgd)
    both = [
        predict(step, make_batch, device="cuda", world_size=4, shard=shard).allocated(4)
        for shard in ("ddp", "ddp:views")
    ]
    count = sum(4 * one.numel() for one in step.model.parameters())
    # Blocks are multiples of 512 bytes.
    assert count <= both[0] - alone.allocated(4) < count + 512
    assert both[1] < both[0]


def test_a_function_shards_as_it_likes() -> None:
    seen = []

    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Mlp)
        assert type(model.head.weight.detach()).__name__ == "FakeTensor"
        both = init_device_mesh("cuda", (2, 4), mesh_dim_names=("outer", "inner"))
        seen.append((mesh.size(), both["inner"].size(), both.get_local_rank("outer")))
        for block in model.blocks:
            fully_shard(block, mesh=both["inner"], reshard_after_forward=False)
        fully_shard(model, mesh=both["inner"])
        return model

    step = mlp_step(sgd)
    prediction = predict(step, make_batch, device="cuda", world_size=8, shard=shard)
    assert seen[0] == (8, 4, 0)
    count = sum(4 * one.numel() for one in step.model.parameters())
    assert of_category(prediction, "parameters") == pytest.approx(count / 4, rel=0.05)
    assert prediction.communication_bytes == 3 * 384 * MIB


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (sgd, 0),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False), 1),
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True), 2),
        (
            lambda m: torch.optim.AdamW(
                [
                    {"params": m.blocks.parameters(), "lr": 0.1},
                    {"params": m.head.parameters(), "weight_decay": 0.0},
                ]
            ),
            2,
        ),
        (lambda m: torch.optim.Adagrad(m.parameters()), 1),
    ],
    ids=["SGD", "momentum", "fused AdamW", "groups", "Adagrad"],
)
def test_the_optimizer_gets_the_shards(make: Any, copies: int) -> None:
    prediction = predict(mlp_step(make, clip_norm=1.0), make_batch, device="cuda", world_size=8)
    count = of_category(prediction, "parameters")
    assert of_category(prediction, "optimizer") == pytest.approx(copies * count, rel=0.02)


def test_what_dtensor_does_not_support_is_refused_as_in_a_real_run() -> None:
    step = mlp_step(lambda m: torch.optim.Adafactor(m.parameters()))
    with pytest.raises(FitError, match="placement"):
        predict(step, make_batch, device="cuda", world_size=8)
    assert predict(step, make_batch, device="cuda", world_size=8, shard="ddp").peak(4) > 0


def test_the_step_stays_as_it_is() -> None:
    model = Mlp()
    step = SupervisedStep(model, torch.optim.AdamW(model.parameters()), mean)
    before = [(name, id(one), one.clone()) for name, one in model.named_parameters()]
    predict(step, make_batch, device="cuda", world_size=8)
    after = [(name, id(one), one) for name, one in model.named_parameters()]
    assert [a[:2] for a in after] == [b[:2] for b in before]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before, strict=True))
    assert type(model) is Mlp
    assert not step.optimizers[0].state


def state_of_process() -> list[Any]:
    return [
        dist.is_initialized(),
        sys.excepthook,
        torch.UntypedStorage.resize_,
        DeviceMesh.__init__,
        DeviceMesh.mesh,
        ShardingPropagator.propagate_op_sharding_non_cached,
        ShardingPropagator._propagate_tensor_meta_non_cached,
        dist.distributed_c10d._world.group_count,
        len(dist.distributed_c10d._world.pg_map),
    ]


def test_the_process_stays_as_it_is_after_errors_too() -> None:
    def fail(model: nn.Module, mesh: DeviceMesh) -> None:
        init_device_mesh("cuda", (2, mesh.size() // 2))
        raise ValueError("a mistake")

    def refuse(model: nn.Module, _: Tensor) -> Tensor:
        raise ValueError("a mistake in the loss")

    before = state_of_process()
    with pytest.raises(FitError, match="mistake"):
        predict(mlp_step(sgd), make_batch, device="cuda", world_size=8, shard=fail)
    assert state_of_process() == before
    with torch.device("meta"):
        model = Mlp()
    with pytest.raises(FitError, match="loss"):
        predict(SupervisedStep(model, sgd(model), refuse), make_batch, device="cuda", world_size=8)
    assert state_of_process() == before


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"device": "cuda", "world_size": 0}, "world_size=1"),
        ({"device": "cuda", "world_size": 8, "shard": "zero3"}, "hsdp:8"),
        ({"device": "cuda", "world_size": 8, "shard": "hsdp:3"}, "divisor"),
        ({"world_size": 8}, "device='cuda'"),
    ],
)
def test_refused(kwargs: Any, word: str) -> None:
    with pytest.raises(FitError, match=word):
        predict(mlp_step(sgd), make_batch, **kwargs)


def test_parameters_must_keep_their_names() -> None:
    def rename(model: nn.Module, mesh: DeviceMesh) -> None:
        model.end = model.head
        del model.head

    with pytest.raises(FitError, match=r"head\.weight"):
        predict(mlp_step(sgd), make_batch, device="cuda", world_size=8, shard=rename)


def test_groups_of_a_real_run_are_not_seen() -> None:
    hook = sys.excepthook
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        with fake_ranks(4) as mesh:
            assert (mesh.size(), dist.get_world_size(), dist.get_backend()) == (4, 4, "fake")
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 1
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_model_of_a_real_run(launch_ranks: Callable[..., Any], tmp_path: Path) -> None:
    launch_ranks(DISTRIBUTED, tmp_path)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert seen[0]["before"] == seen[0]["after a step"]
    assert seen[0]["sum"] == 2.0
    step = mlp_step(lambda m: torch.optim.AdamW(m.parameters()), clip_norm=1.0)
    prediction = predict(step, make_batch, device="cuda", world_size=2)
    assert seen[0]["before"] == [prediction.peak(4), prediction.allocated(4)]
