"""What a run says of what it has not seen: without a phantom, from what is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phantomgpu import watching
from phantomgpu.child import Settings
from phantomgpu.errors import RunFailedError
from phantomgpu.gpus import GIB, GPUS
from phantomgpu.report import Report, build_report
from phantomgpu.running import LAUNCHER, NODES, Session
from phantomgpu.watching import Run, growth, ran_out

FITS = {"status": "fits", "steps": 3, "peak_allocated": GIB, "stopped": "train.py:3"}


def built(**more: Any) -> Report:
    known: dict[str, Any] = {"gpu": "a T4", "memory": 16 * GIB, "context": 0, "ranks": 1}
    return build_report({**FITS, **more}, GPUS["t4"], **known)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"out_of_memory": 2}, "out of memory once"),
        ({"assumed": 16}, "out of memory once"),
        ({"assumed": 8}, "an error was caught"),
        ({"grew": 3 << 20}, "still growing"),
        ({"waiting": ["Adam"]}, "few steps of Adam"),
        ({"idle": 4}, "steps without the GPU"),
        ({"others": {"2 processes": "they take 20 GiB together"}}, "2 processes"),
        ({"decides": ["train.py:3"]}, "depends on values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_whole_run_may_differ_in_is_in_the_first_line(
    seen: dict[str, Any], said: str
) -> None:
    plain, report = built(), built(**seen)
    assert "(" not in plain.lines()[0].partition(":")[0]
    assert report.fits
    assert f"fits a T4 ({said})" in report.lines()[0]
    assert len(report.notes) == len(plain.notes) + 1
    assert report.row(gpu="t4")["notes"] == [*report.notes]
    assert json.loads(report.to_json())["notes"] == [*report.notes]


@pytest.mark.parametrize(
    ("kept", "grew"),
    [
        ([100], 0.1),  # what the optimizer keeps is not there in the first step
        ([100, 180, 180], 0),
        ([100, 180, 180.0009], 0),
        ([100, 180, 200], 20),
        ([100, 120, 140, 160], 20),
        ([200, 200, 200], 0),
    ],
)
def test_growth_is_that_of_the_last_step(kept: list[float], grew: float) -> None:
    mib = 1 << 20
    found = growth([int(size * mib) for size in kept]) / mib
    assert found == (100 if len(kept) == 1 else grew)


class EndError(Exception):
    """Instead of the end of the process: the status, and how often each optimizer stepped."""


class Device:
    """Stands for the stand-ins: whether something was launched since the last step."""

    launches = True

    def __init__(self) -> None:
        self.weights: dict[int, nn.Parameter] = {}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of three steps, whose optimizers train weights on the device."""
    run = Run(Settings(), Device())
    monkeypatch.setattr(Run, "has_launched", lambda self: self.library.launches)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"requested_bytes.all.peak": 1})
    monkeypatch.setattr(
        watching,
        "weights_of",  # other tests may have left optimizers
        lambda one: {id(p) for p in one.param_groups[0]["params"]} & {*run.library.weights},
    )

    def finish(status: str, code: int | None) -> None:
        raise EndError(status, code, [*run.steps.values()])

    def leave(code: int, result: dict[str, Any], *_: Any) -> None:
        raise EndError(result["status"], code, run.idle)

    monkeypatch.setattr(run, "finish", finish)
    monkeypatch.setattr(watching, "leave", leave)
    return run


def weights(run: Run) -> list[nn.Parameter]:
    weight = nn.Parameter(torch.zeros(1))
    run.library.weights[id(weight)] = weight
    return [weight]


def end_of(run: Run, optimizers: list[Any]) -> tuple[Any, ...]:
    """Let optimizers step in this order, again and again, until the run ends."""
    with pytest.raises(EndError) as end:
        any(map(run.after_step, optimizers * 200))
    return end.value.args


def test_a_run_ends_when_each_optimizer_with_weights_of_its_own_has_stepped(watched: Run) -> None:
    critic, generator = weights(watched), weights(watched)
    often, rarely = torch.optim.Adam(critic), torch.optim.Adam(generator)
    wrapper = torch.optim.SGD(critic)  # never steps, and has no weights of its own
    assert end_of(watched, [often] * 5 + [rarely]) == ("fits", 0, [15, 3])
    assert watched.doubts == {"waiting": [], "grew": 0}
    del wrapper


def test_an_optimizer_that_never_steps_is_named(watched: Run) -> None:
    steps, never = torch.optim.SGD(weights(watched)), torch.optim.RMSprop(weights(watched))
    assert end_of(watched, [steps]) == ("fits", 0, [30])
    assert watched.doubts["waiting"] == [type(never).__name__]


def test_steps_without_the_device_are_not_counted(watched: Run) -> None:
    one = torch.optim.SGD(weights(watched))
    watched.library.launches = False
    assert end_of(watched, [one]) == ("unused", 0, 3)
    assert not watched.steps
    watched.settings, watched.idle = Settings(steps=None), 0
    for _ in range(100):
        watched.after_step(one)
    assert (watched.steps, watched.idle) == ({}, 100)


def test_peaks_that_a_script_resets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run, stats = Run(Settings(), Device()), {"allocated_bytes.all.peak": 8, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    run.reset(lambda _: stats.update({"allocated_bytes.all.peak": 2, "num_ooms": 0}), 0)
    assert stats["allocated_bytes.all.peak"] == 2
    assert run.peaks(0)["allocated_bytes.all.peak"] == 8
    assert run.peaks(0)["num_ooms"] == 1
    assert run.peaks(1)["allocated_bytes.all.peak"] == 2


def test_what_ends_a_script_is_known_from_how_it_leaves() -> None:
    run = Run(Settings(), Device())
    with pytest.raises(SystemExit, match="3"):
        run.left(3)
    assert not run.problem
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        with pytest.raises(SystemExit):
            run.left(1)
    assert run.problem == {"left_out_of_memory": True}
    assert not ran_out(sys.exc_info()[1])


def process(number: int, **more: Any) -> dict[str, Any]:
    return {**FITS, "place": [None, 0], "peak_reserved": number * GIB, **more}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (process(2), "2 processes used this GPU: if at a time, 5.50 GiB with their contexts"),
        (process(2, place=[None, 1]), ""),
        (process(2, place=["3", 0]), ""),
        (process(0), ""),
        ({"status": "lost"}, "1 without a report: what they took was not seen"),
        ({"status": "unused", "problem": "x"}, ""),
    ],
)
def test_processes_beside_the_one_of_the_report(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for number, one in enumerate((process(2), other)):
        (tmp_path / f"run-000000-{number}.json").write_text(json.dumps(one))
    session = Session("h100", None, Settings())
    session.context = GIB * 3 // 4
    report = session.report(tmp_path, "run", 0)
    assert report.fits
    assert ("(" in report.lines()[0].partition(":")[0]) == bool(said)
    assert said in str(report)


@pytest.mark.parametrize(
    ("result", "code", "why"),
    [
        ({"status": "unused", "problem": "3 optimizer steps"}, 0, "3 opt"),
        (process(0), 0, "used no memory of the GPU"),  # torch itself may start CUDA
        ({"status": "lost"}, 0, "ended at once with exit code 0"),
        ({"status": "lost"}, 7, "exit code 7"),
    ],
)
def test_a_run_without_the_gpu_or_a_report_is_an_error(
    result: dict[str, Any], code: int, why: str, tmp_path: Path
) -> None:
    (tmp_path / "run-000000-1.json").write_text(json.dumps(result))
    with pytest.raises(RunFailedError, match=why):
        Session("h100", None, Settings()).report(tmp_path, "run", code)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py", "--nnodes 2"),
        ("/env/bin/torchrun --nnodes=4 train.py --lr 1", "--nnodes=4"),
        ("python -m torch.distributed.run --nnodes 2 train.py", "--nnodes 2"),
        ("env A=1 python3.11 -u -m torch.distributed.launch --nnodes=2 -m mine", "--nnodes=2"),
        ("accelerate launch --num_machines 2 train.py", "--num_machines 2"),
        ("deepspeed --num_nodes 2 train.py", "--num_nodes 2"),
        ("torchrun --standalone --nnodes 1 train.py --num_nodes 1000", None),
        ("torchrun --standalone train.py --nnodes 4", None),
        ("torchrun -m train --nnodes 4", None),
        ("python train.py --num_nodes 1000", None),
        ("python train.py --standalone torchrun --nnodes 2", None),
        ("python -m train torchrun --nnodes 2", None),
        ("python train.py torchrun", None),
        ("accelerate config --num_machines 2", None),
    ],
)
def test_only_the_options_of_a_launcher_itself_are_read(command: str, found: str | None) -> None:
    launcher = LAUNCHER.match("".join(f"{one}\n" for one in command.split()))
    nodes = NODES.search(launcher[1]) if launcher else None
    assert (nodes and nodes[0].replace("\n", " ")) == found
