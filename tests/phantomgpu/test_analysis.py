"""What the report says about a recorded history of allocations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phantomgpu import GPUS, Report
from phantomgpu.analysis import (
    History,
    annotate,
    categorise,
    follow,
    most,
    peaks_by_step,
    place,
    timeline,
)
from phantomgpu.report import build_report

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
def run() -> History:
    made = History()
    made.phases = [(10, "step", 1), (20, "optimizer", 1), (30, "step", 2)]
    made.owners = [(20, "gradients", {400}), (40, "parameters", {100})]
    follow(TRACE)
    annotate(made, TRACE)
    return made


def test_the_peak_is_where_most_is_live(run: History) -> None:
    assert (most(TRACE, "used"), TRACE[4]["used"]) == (18 * MIB, 18 * MIB)
    assert most(TRACE, "held") == 22 * MIB
    assert [one.get("end") for one in TRACE] == [None, 9, 9, 5, 8, None, 9, None, None]


def test_each_step_that_ended_has_a_peak(run: History) -> None:
    assert peaks_by_step(run, TRACE) == [(18 * MIB, 22 * MIB)]
    # Two with events, one without, and one that ends after the last of them.
    run.phases = [(10, "step", 1), (14, "step", 2), (15, "step", 3), (20, "step", 4)]
    run.phases += [(40, "step", 5), (50, "step", 6), (60, "optimizer", 6)]
    annotate(run, TRACE)
    assert peaks_by_step(run, TRACE) == [
        (18 * MIB, 20 * MIB),
        (18 * MIB, 20 * MIB),  # begins with what the step before left
        (10 * MIB, 20 * MIB),
        (11 * MIB, 22 * MIB),
        (7 * MIB, 22 * MIB),
    ]


def test_blocks_belong_to_who_held_them_while_they_lived(run: History) -> None:
    categorise(TRACE, run.owners)
    assert {one["addr"]: one["category"] for one in TRACE if "category" in one} == {
        100: "parameters",
        200: "activations",
        300: "logits",
        400: "gradients",
        500: "scratch of the optimizer",
    }
    assert place(TRACE[2]) == "model.py:7 forward"
    assert place(TRACE[4]) == "backward"


def test_phases(run: History) -> None:
    recomputed = event("alloc", 1, 1, 31, "/torch/utils/checkpoint.py:recompute_fn")
    annotate(run, seen := [*TRACE, recomputed])
    found = {one["addr"]: (one["phase"], one["step"]) for one in reversed(seen)}
    assert found[100] == ("start", 0)
    assert found[200] == ("forward", 1)
    assert found[400] == ("backward", 1)
    assert found[500] == ("optimizer", 1)
    assert found[1] == ("recomputation", 2)


def test_what_follows_backward_in_a_step_is_known(run: History) -> None:
    last = event("alloc", 600, 1, 15, "train.py:clip")
    annotate(run, [*TRACE[:6], last])
    assert last["phase"] == "the part after backward"
    run.phases = run.phases[:1]  # no optimizer follows
    annotate(run, [*TRACE[:6], last])
    assert last["phase"] == "forward"


@pytest.mark.parametrize("points", [100, 2])
def test_a_timeline_is_one_step_with_its_peak(run: History, points: int) -> None:
    categorise(TRACE, run.owners)
    made = timeline(TRACE, 4, points)
    columns = {one["name"]: one["bytes"] for one in made["categories"]}
    totals = [sum(sizes) for sizes in zip(*columns.values(), strict=True)]
    marks = {mark["text"]: mark["at"] for mark in made["marks"]}
    assert len(made["times"]) == len(totals) <= points + 1
    assert totals[marks["peak"]] == max(totals) == 18 * MIB
    assert set(marks) == {"peak", "backward", "optimizer step"}
    assert columns["parameters"] == [4 * MIB] * len(totals)
    largest = {one["name"]: max(one["bytes"]) for one in made["places"]}
    expected = {"model.py:7 forward": 2, "train.py:7 main": 8, "torch": 1}
    assert largest == {name: size * MIB for name, size in expected.items()}
    before, after = made["others"]
    assert (made["step"], before["step"]) == (1, 0)
    assert after["step"] == 2
    assert [sum(one["bytes"]) for one in after["places"]] == [2 * MIB, MIB]


def report(**values: Any) -> Report:
    result = {
        "status": "fits",
        "peak_allocated": 1 << 30,
        "phase": "backward",
        "step": 2,
        "steps": 3,
        "timeline": {
            "times": [0, 10],
            "categories": [{"name": "parameters", "bytes": [0, 1 << 30]}],
            "marks": [{"at": 1, "text": "peak"}],
        },
        **values,
    }
    return build_report(
        result, GPUS["h100"], gpu="an H100", memory=80 << 30, context=1 << 30, ranks=1, exit_code=0
    )


def test_a_step_without_counted_work_has_no_line_on_time() -> None:
    work = {"calls": (), "tokens": 0, "inside": 0.0, "between": 0.0}
    call = (0, "matrix products", "half", 1e12, 0, 0, 1)
    assert "time:" in str(report(work={**work, "calls": (call,)}))
    assert "time:" not in str(report(work=work))


def test_a_report_is_text_and_json() -> None:
    made = report(categories={"parameters": 1 << 29, "little": 5})
    text = str(made)
    assert "fits an H100" in text
    assert "backward of step 2" in text
    assert "parameters 0.50" in text
    assert "little" not in text
    values = json.loads(made.to_json())
    assert values["peak_allocated"] == values["timeline"]["peak_bytes"] == 1 << 30
    assert values["timeline"]["limit_bytes"] == made.available == 79 << 30
    assert values["timeline"]["title"] in text
    assert made.fits


def test_buffers_of_nccl_are_counted() -> None:
    made = report(nccl=1 << 30)
    assert made.available == 78 << 30
    assert "NCCL 1.00" in str(made)


def test_notes_say_what_the_figures_do_not_contain() -> None:
    assert any("cuDNN" in note for note in report().notes)
    assert not any("cuDNN" in note for note in report(cudnn=True).notes)
    assert any("no optimizer step" in note for note in report(steps=0).notes)
    assert any("caught" in note for note in report(out_of_memory=2).notes)
    assert report(status="failed").notes == ()
