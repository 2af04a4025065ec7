"""A run in the trainer of torchtitan: the real package, on the CPU and on a phantom."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import phantomgpu

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-adapters")

import torch
import torch.distributed as dist

if not hasattr(dist, "set_timeout"):
    pytest.skip("torchtitan needs torch 2.14", allow_module_level=True)

from tests.integrations import titan_toys
from tests.integrations.titan_toys import MICRO, RATE, SCHEDULES, SEED, SIZES, N, configuration
from torch.utils.data import TensorDataset
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import ConfigManager

from stretto.batching import NoiseScale
from stretto.errors import TrainingError
from stretto.integrations.torchtitan import RunTrainer, Schedules, StepDataLoader, check_titan
from stretto.ordering import SampleOrder
from stretto.planning import plan
from stretto.timing import Horizon

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SCRIPT = Path(titan_toys.__file__)
CLOSE = 5e-5  # the model trains in float32; measured: 9.5e-6
Rows = dict[int, tuple[list[int], set[float]]]


EVEN: dict[str, Any] = {
    "batch_size": "0sp:8 48sp:16",
    "max_duration": "1ep",
    "loading": {"seed": SEED, "last_batch": "drop"},
    "even": True,
}
"""Sizes of which 2 ranks with 2 micro-batches of 2 samples, and all their steps, are full."""


def planned(
    batch_size: str = SIZES, max_duration: str = "2ep", loading: Any = None, **_: Any
) -> Rows:
    """The samples of each step, and its learning rate."""
    last: Any = "keep" if loading is None else loading["last_batch"]
    horizon = Horizon(max_duration, dataset_num_samples=N, last_batch=last)
    steps = plan(horizon, batch_size, schedules=SCHEDULES, base={"lr": RATE}).batches()
    order = SampleOrder(N, seed=SEED)
    return {
        step.timestamp.sample: (
            sorted(order[step.timestamp.sample + at] for at in range(step.size)),
            {step.values["lr"]},
        )
        for step in steps
    }


def seen(out: Path, attempt: str, *, drops: bool) -> Rows:
    """What the ranks of an attempt have noted; those that share a model note the same."""
    files = [file.read_text().splitlines() for file in out.glob(f"{attempt}-*.jsonl")]
    found: Rows = {}
    for line in (line for file in files for line in file):
        sample, _, world, rate, ids, tokens, size = json.loads(line)
        found.setdefault(sample, ([], set()))[0].extend(ids)
        found[sample][1].add(rate)
        assert drops or tokens == (sample + size) * titan_toys.LENGTH
    copies = len(files) // world
    for sample, (ids, rates) in found.items():
        each = [sorted(ids)[at::copies] for at in range(copies)]
        assert each == each[:1] * copies
        found[sample] = each[0], rates
    return found


@pytest.fixture
def launch(torchrun: Callable[..., None], tmp_path: Path) -> Callable[..., Rows]:
    def start(name: str, attempt: str, *, ranks: int, **changed: Any) -> Rows:
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        torchrun(SCRIPT, out, json.dumps({"attempt": attempt} | changed), ranks=ranks)
        return seen(out, attempt, drops="loading" in changed)

    return start


@pytest.mark.distributed
def test_every_step_is_the_planned_one_when_the_ranks_change(
    launch: Callable[..., Rows], tmp_path: Path
) -> None:
    alone = launch("alone", "whole", ranks=1)
    assert alone == planned()
    found = launch("changed", "first", ranks=1, stop_after=20)
    assert max(found) == sorted(planned())[19]
    rest = launch("changed", "second", ranks=2, stop_after=33)
    assert min(rest) == sorted(planned())[14]  # checkpoints come every 7 steps
    last = launch("changed", "third", ranks=1)
    assert min(last) == sorted(planned())[28]
    assert found | rest | last == planned()
    one, other = [torch.load(tmp_path / name / "weights.pt") for name in ("alone", "changed")]
    print("largest difference of the weights", float((one - other).abs().max()))
    assert torch.allclose(one, other, rtol=0, atol=CLOSE)
    count = len(planned())
    assert count % 7, "the last step is no multiple"
    for name in ("alone", "changed"):
        assert (tmp_path / name / "checkpoint" / f"step-{count}").is_dir()


@pytest.mark.distributed
def test_tensor_parallel_ranks_share_a_batch(launch: Callable[..., Rows]) -> None:
    first = launch("out", "data", ranks=2, stop_after=15)
    tensor = {"tensor_parallel_degree": 2}
    rest = launch("out", "tensor", ranks=2, stop_after=24, parallelism=tensor)
    assert min(rest) == sorted(planned())[14]
    assert first | rest == {sample: planned()[sample] for sample in first | rest}


@pytest.mark.distributed
def test_ranks_that_share_a_model_agree_on_the_wall_clock(launch: Callable[..., Rows]) -> None:
    tensor = {"tensor_parallel_degree": 2}
    timed = {"max_duration": "15s", "batch_size": 4, "checkpoint": {"enable": False}}
    rows = launch("out", "timed", ranks=2, parallelism=tensor, **timed)
    assert len(rows) > 1
    assert {len(rates) for _, rates in rows.values()} == {1}


@pytest.mark.distributed
def test_pipelines_take_the_planned_steps(launch: Callable[..., Rows], tmp_path: Path) -> None:
    alone = launch("alone", "whole", ranks=1, **EVEN)
    assert alone == planned(**EVEN)
    often = {"checkpoint": {"interval": 4}, **EVEN}
    first = launch("out", "first", ranks=1, stop_after=5, **often)
    pipelines = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
    rest = launch("out", "pipes", ranks=4, stop_after=13, parallelism=pipelines, **often)
    assert min(rest) == sorted(alone)[4]
    last = launch("out", "last", ranks=1, **often)
    assert min(last) == sorted(alone)[12]
    assert first | rest | last == alone
    one, other = [torch.load(tmp_path / name / "weights.pt") for name in ("alone", "out")]
    print("largest difference of the weights", float((one - other).abs().max()))
    assert torch.allclose(one, other, rtol=0, atol=CLOSE)


SPLITS: dict[str, dict[str, Any]] = {
    "context": {"parallelism": {"context_parallel_degree": 2}},
    "graphs": {"training": {"disable_cuda_graphs": False}},
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", SPLITS)
def test_the_first_of_four_ranks_follows_the_plan_on_a_phantom(name: str, tmp_path: Path) -> None:
    """With flex attention: torchtitan's language models have no attention for the CPU."""
    length, world = 256, {"context": 2, "graphs": 4}[name]  # flex has blocks of 128 tokens
    changed: dict[str, Any] = {
        "attempt": name,
        "checkpoint": {"enable": False},
        **EVEN,
        "training": {"seq_len": length, "local_batch_size": 2, "mixed_precision_param": "bfloat16"},
        "parallelism": {"spmd_backend": "spmd_types"},
    }
    for part, fields in SPLITS[name].items():
        changed[part] |= fields
    command = [sys.executable, str(SCRIPT), str(tmp_path), json.dumps(changed)]
    report = phantomgpu.run(command, gpu="h100", ranks=4, steps=None)
    assert report.fits, report
    order, steps = SampleOrder(N, seed=SEED), planned(**EVEN)
    lines = (tmp_path / f"{name}-0.jsonl").read_text().splitlines()
    for line, (sample, (ids, rates)) in zip(lines, steps.items(), strict=True):
        own = [order[at] for at in range(sample, sample + len(ids)) if at % world == 0]
        noted = json.loads(line)
        assert noted[:5] == [sample, len(own) // 2, world, *rates, own]
        assert noted[6] == len(ids)


@pytest.mark.distributed
def test_the_end_is_saved_where_samples_are_dropped(
    launch: Callable[..., Rows], tmp_path: Path
) -> None:
    short = {"batch_size": 64, "max_duration": "1ep", "loading": {"last_batch": "drop"}}
    found = launch("out", "dropped", ranks=1, **short)
    assert sorted(found) == [0, 64, 128]
    assert (tmp_path / "out" / "checkpoint" / "step-3").is_dir()


CASES: dict[str, dict[str, Any]] = {
    "global_batch_size": {"training": {"global_batch_size": 8}},
    "graphs": {"training": {"disable_cuda_graphs": False}},
    "warmup_steps": {"lr_scheduler": Schedules.Config(warmup_steps=3)},
    "LRSchedulersContainer": {"lr_scheduler": LRSchedulersContainer.Config()},
    "dataset": {"dataset": "c4"},
    "make_data": {"make_data": None},
    "batch_size": {"batch_size": None},
}


@pytest.mark.parametrize("word", CASES)
def test_what_would_be_ignored_is_refused(word: str) -> None:
    with pytest.raises(TrainingError, match=word):
        check_titan(configuration(**CASES[word]))


def test_another_dataloader_pipelines_and_an_old_torch_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good: Any = configuration()
    check_titan(good)
    check_titan(configuration(training={"disable_cuda_graphs": False}, even=True))
    with pytest.raises(TrainingError, match="dataloader"):
        check_titan(replace(good, dataloader=BaseDataLoader.Config()))
    good.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(TrainingError, match="pipelines"):
        check_titan(good)
    check_titan(replace(good, dataloader=replace(good.dataloader, even=True)))
    monkeypatch.delattr(dist, "set_timeout")
    with pytest.raises(TrainingError, match="torch"):
        check_titan(configuration())


def bound(data: Any = None, passes: int = 1, **changed: Any) -> StepDataLoader:
    make_data = titan_toys.Rows if data is None else lambda: data
    config = StepDataLoader.Config(
        make_data=lambda *_: make_data(), **{"batch_size": 8, "even": True} | changed
    )
    length = titan_toys.LENGTH
    sizes = {"dp_world_size": 1, "dp_rank": 0, "local_batch_size": MICRO, "seq_len": length}
    loader = config.build(tokenizer=None, **sizes)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    loader.bind([optimizer], Schedules.Config(), mesh=None, num_passes=passes)
    return loader


def unmade(loader: StepDataLoader, step: int) -> Any:
    """A trainer before its first step; to make it, torchtitan needs processes."""
    trainer: Any = object.__new__(RunTrainer)
    trainer.dataloader, trainer.step, trainer.saved = loader, step, []
    trainer.num_pipeline_parallel_microbatches = 1
    trainer.checkpointer = SimpleNamespace(save=lambda *how, **more: trainer.saved.append(how))
    return trainer


def test_a_checkpoint_without_the_position_is_refused() -> None:
    """Its learning rates would begin anew."""
    trainer = unmade(bound(even=False), 5)
    with pytest.raises(TrainingError, match="step"):
        trainer.train_step(iter(()))


def test_the_end_is_saved_where_it_was_not_known() -> None:
    loader = bound(even=False, max_duration="2ba")
    while loader.draw() is not None:
        loader.run.finish()
    trainer = unmade(loader, 3)
    with pytest.raises(DataloaderExhaustedError):
        trainer.train_step(iter(()))
    assert trainer.saved == [(2,)]


@pytest.mark.parametrize(
    "changed",
    [
        {"batch_size": "0sp:8 104sp:10", "loading": {"last_batch": "drop"}},
        {"batch_size": 8},  # the last batch of the epoch has 3 samples
        {"batch_size": NoiseScale(8, 64), "even": False},
    ],
    ids=["uneven", "cut", "measured"],
)
def test_sizes_that_cannot_be_followed_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="batch"):
        bound(**changed)


def test_even_steps_are_full_micro_batches() -> None:
    loader = bound(batch_size="0sp:8 104sp:16", loading={"last_batch": "drop"})
    micros = iter(loader)
    while (step := loader.draw()) is not None:
        assert {len(next(micros)[1]) for _ in step} == {MICRO}
        loader.run.finish()
    # Sizes over wall time are known only at their step.
    late = bound(batch_size="0s:8 0.000001s:10")
    late.draw()
    late.run.finish()
    with pytest.raises(TrainingError, match="even"):
        late.draw()


def test_rows_of_another_length_are_refused() -> None:
    """Their tokens would be counted wrongly."""
    loader = bound(TensorDataset(torch.zeros(8, 3), torch.zeros(8, 3)))
    loader.draw()
    with pytest.raises(TrainingError, match="tokens"):
        next(iter(loader))


def test_the_command_line_of_torchtitan_changes_its_own_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(titan_toys, "small", configuration, raising=False)
    arguments = ["--module", titan_toys.__name__, "--config", "small", "--dataloader.even"]
    config = ConfigManager().parse_args([*arguments, "--training.local-batch-size", "2"])
    assert config.dataloader.even
    assert config.dataloader.batch_size == SIZES
    assert config.training.local_batch_size == 2
    assert config.lr_scheduler.schedules == SCHEDULES
    json.dumps(config.to_dict())
