"""What the report says about a recorded history of allocations."""

from __future__ import annotations

from typing import Any

import pytest

from phantomgpu import Report
from phantomgpu.analysis import explain, live_at, peak, phase_of, reserved, timeline
from phantomgpu.child import Run, Settings
from phantomgpu.report import build_report, draw

MIB = 1 << 20


def event(action: str, address: int, size: int, time: int, *frames: str) -> dict[str, Any]:
    found = [dict(zip(("filename", "name"), frame.split(":"), strict=True)) for frame in frames]
    return {
        "action": action,
        "addr": address,
        "size": size,
        "time_us": time,
        "frames": [{**frame, "line": 7} for frame in found],
    }


TRACE = [
    event("segment_alloc", 0, 20 * MIB, 1),
    event("alloc", 100, 4 * MIB, 2, "train.py:main"),  # the parameters
    event("alloc", 200, 2 * MIB, 11, "/torch/nn/linear.py:forward", "model.py:forward"),
    event("alloc", 300, 8 * MIB, 12, "/torch/nn/functional.py:cross_entropy", "train.py:main"),
    event("alloc", 400, 4 * MIB, 13),  # backward: the gradients
    event("free_completed", 300, 8 * MIB, 14),
    event("alloc", 500, 1 * MIB, 21, "/torch/optim/adam.py:step"),
    event("segment_alloc", 999, 2 * MIB, 22),
    event("free_completed", 400, 4 * MIB, 31),
]


@pytest.fixture
def run() -> Run:
    made = Run(Settings(""), None)
    made.phases = [(10, "step", 1), (20, "optimizer", 1), (30, "step", 2)]
    made.owners = [(20, "gradients", {400}), (40, "parameters", {100})]
    return made


def test_the_peak_is_where_most_is_live() -> None:
    assert peak(TRACE) == (18 * MIB, 4)
    assert reserved(TRACE) == 22 * MIB
    live, ends = live_at(TRACE, 4)
    assert live == [1, 2, 3, 4]
    assert ends == {3: 14, 4: 31}


def test_blocks_belong_to_who_held_them_while_they_lived(run: Run) -> None:
    live, ends = live_at(TRACE, 4)
    categories, places = explain(run, TRACE, live, ends, run.owners)
    assert categories == {
        "parameters": 4 * MIB,
        "gradients": 4 * MIB,
        "activations": 2 * MIB,
        "logits": 8 * MIB,
    }
    assert places == {"model.py:7 forward": 2 * MIB, "train.py:7 main": 8 * MIB}


def test_phases(run: Run) -> None:
    assert phase_of(run, TRACE[1]) == ("start", 0)
    assert phase_of(run, TRACE[2]) == ("forward", 1)
    assert phase_of(run, TRACE[4]) == ("backward", 1)
    assert phase_of(run, TRACE[6]) == ("optimizer", 1)
    recomputed = event("alloc", 1, 1, 31, "/torch/utils/checkpoint.py:recompute_fn")
    assert phase_of(run, recomputed) == ("recomputation", 2)


def test_modules_name_places_when_they_were_followed(run: Run) -> None:
    run.spans = [(11, "layers.0.mlp"), (12, "")]
    live, ends = live_at(TRACE, 4)
    assert explain(run, TRACE, live, ends, run.owners)[1]["layers.0.mlp"] == 2 * MIB


def test_a_timeline_keeps_the_peak() -> None:
    points = timeline(TRACE, points=3)
    assert max(used for _, used, _ in points) == 18 * MIB


def report(**values: Any) -> Report:
    result = {
        "status": "fits",
        "peak_allocated": 1 << 30,
        "phase": "backward",
        "step": 2,
        "steps": 3,
        "timeline": [[0, 0, 0], [10, 1 << 30, 2 << 30]],
        **values,
    }
    return build_report(
        result, gpu="an H100", memory=80 << 30, context=1 << 30, ranks=1, exit_code=0
    )


def test_a_report_is_text_and_json() -> None:
    made = report(categories={"parameters": 1 << 29, "little": 5})
    text = str(made)
    assert "fits an H100" in text
    assert "backward of step 2" in text
    assert "parameters 0.50" in text
    assert "little" not in text
    assert '"peak_allocated": 1073741824' in made.to_json()
    assert made.fits


def test_notes_say_what_the_figures_do_not_contain() -> None:
    assert any("cuDNN" in note for note in report().notes)
    assert not any("cuDNN" in note for note in report(cudnn=True).notes)
    assert any("no optimizer step" in note for note in report(steps=0).notes)
    assert any("caught" in note for note in report(out_of_memory=2).notes)
    assert report(status="failed").notes == ()


def test_a_picture(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    draw(report(), str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
