"""What travels to the phantom, without one: another process reads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from phantomgpu import standins
from stretto.memory import find_batch_size, phantom
from stretto.memory.answer import NothingFitsError
from stretto.memory.phantom import _Copied
from stretto.memory.sharding import apply
from stretto.memory.step import WholeStep, read_step, step_bytes
from stretto.runtime import SupervisedStep


def fully_shard_all(model: nn.Module, mesh: Any) -> None:
    """Shard as a user does."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Rank 0 of 8, of which the others are not there."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Blocks(nn.Module):
    """Blocks with weights, and a buffer whose values decide something."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step_of(model: nn.Module, precision: Any = "bf16") -> SupervisedStep:
    optimizer = torch.optim.AdamW(model.parameters())
    return SupervisedStep(model, optimizer, lambda m, x: m(x).mean(), precision=precision)


@pytest.mark.parametrize("shard", ["fsdp", "hsdp:4", fully_shard_all])
def test_a_model_is_sharded_before_it_has_memory(eight_ranks: None, shard: Any) -> None:
    data = step_bytes(WholeStep.of(step_of(Blocks())))
    step: WholeStep = read_step(data, "cpu", parameters="meta")
    assert all(one.is_meta for one in step.model.parameters())
    apply(step.step, shard, 8, device="cpu")
    parts = 4 if shard == "hsdp:4" else 8
    for parameter in step.model.parameters():
        assert not parameter.is_meta
        assert parameter.to_local().numel() == parameter.numel() // parts  # type: ignore[attr-defined]
    assert {id(one) for one in step.step.parameters} == {id(p) for p in step.model.parameters()}
    assert step.model.get_buffer("order").tolist() == [2, 0, 1]
    # By FSDP2's own mixed precision, as in a run of ours; a function shards as it likes.
    with step.step.autocast():
        assert torch.is_autocast_enabled("cpu") == callable(shard)
        assert torch.is_autocast_cache_enabled() != callable(shard)
    step.run(torch.ones(2, 64))


def test_without_ranks_autocast_keeps_its_cache() -> None:
    with step_of(Blocks()).autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()


def test_a_model_larger_than_the_device_fits_on_ranks() -> None:
    missing = phantom.setup_problem()
    if missing is not None:
        pytest.skip(missing)
    with torch.device("meta"):
        step = step_of(Blocks(4096, 24))  # 1.5 GiB of weights, 6 GiB with all that AdamW has
    how: dict[str, Any] = {"gpu": "t4", "device_memory": "1.75GiB", "maximum": 8}
    with pytest.raises(NothingFitsError):
        find_batch_size(step, torch.ones(2, 4096), **how)
    assert find_batch_size(step, torch.ones(2, 4096), world_size=16, **how).size == 8


@pytest.mark.parametrize(
    ("cuda", "made", "is_ready"),
    [
        ("12.8", [], True),
        ("13.0", [], True),
        ("11.8", [], False),
        (None, [], False),
        (None, ["torch/lib"], False),  # a download that was interrupted
        (None, ["torch/lib", "torch/lib/libtorch_cuda.so"], True),
    ],
)
def test_whether_the_phantom_is_set_up(
    cuda: str | None,
    made: list[str],
    is_ready: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHANTOMGPU_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    folder = standins.setup_folder(torch.__version__.partition("+")[0])
    for name in made:
        (folder / name).mkdir(parents=True)
    assert (phantom.setup_problem() is None) == is_ready


READ = """
import sys
from pathlib import Path
import cloudpickle, torch
from stretto.memory.step import read_step
step = read_step(cloudpickle.loads(Path(sys.argv[1]).read_bytes()).data, "cpu")
out = step.model(input_ids=torch.zeros(2, 8, dtype=torch.long), output_router_logits=True)
print(len(out.router_logits))
"""


@pytest.mark.slow
def test_a_model_of_transformers_still_records_what_its_layers_return(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.SGD(model.parameters())
    step = WholeStep.of(SupervisedStep(model, optimizer, lambda m, x: m(x).logits.mean()))
    file = tmp_path / "step"
    file.write_bytes(cloudpickle.dumps(_Copied(step)))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n", done.stderr[-2000:]
