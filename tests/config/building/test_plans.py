"""A run file to a plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config.plans import build_plan, plan_of, prepare_checked
from stretto.config.run import RunConfig, parse_run_file
from stretto.errors import ConfigError, PlanError, StrettoError
from stretto.planning import Plan
from stretto.report import plan_table
from stretto.timing import Time

RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "data": {"target": "my.data:make", "num_samples": 100, "tokens_per_sample": 4},
    "batch_size": 10,
}


def config(**changes: Any) -> RunConfig:
    return RunConfig.parse(RUN | changes)


def test_a_plan_of_stated_sizes() -> None:
    plan = build_plan(config(batch_size="0ep:10 1ep:20"))
    assert [(stage.size, stage.batches) for stage in plan.stages] == [(10, 10), (20, 5)]
    assert plan.end is not None
    assert plan.end.token == 800


def test_nothing_of_the_data_is_imported_and_torch_is_not(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "max_duration: 2ep\n"
        "data: {target: 'no.such:thing', num_samples: 100}\n"
        "optimizer: {target: 'torch.optim:AdamW', lr: 0.1}\n"
        "schedules: {lr: {Cosine: {}}}\n"
        "batch_size: 10\n"
        "evaluate: {every: 10%}\n"
    )
    code = (
        "import sys\n"
        "from stretto.config.run import read_run_file\n"
        "from stretto.config.plans import build_plan\n"
        "assert build_plan(read_run_file('run.yaml')).num_batches == 20\n"
        "print(*{'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_unstated_sizes_are_those_of_the_data(project: str) -> None:
    data = {"target": f"{project}:Points", "count": 30, "tokens_per_sample": 2}
    plan = build_plan(config(data={"target": f"{project}:Points", "count": 30}))
    assert plan.horizon.dataset_num_samples == 30
    plan = build_plan(config(data={**data, "num_samples": 30}))
    assert plan.horizon.tokens_per_sample == 2


def test_scale_schedule_stretches_every_time_but_fractions() -> None:
    plan = build_plan(
        config(
            scale_schedule=2.5,
            batch_size={"0ep": 10, "1ep": 20},
            schedules={"lr": {"StepDecay": "1ep"}, "momentum": {"StepDecay": "50%"}},
            checkpoint={"every": "1ep"},
            evaluate={"every": "25%", "data": {"target": "a:b"}},
        )
    )
    assert plan.horizon.max_duration == Time("5ep")
    assert [stage.batches for stage in plan.stages] == [25, 13]
    events = {event.name: event.count for event in plan.events}
    assert events["checkpoint"] == 2
    assert events["evaluate validation"] == 4
    assert plan.values_at(24)["lr"] == 1.0
    assert plan.values_at(26)["lr"] == pytest.approx(0.1)
    assert plan.values_at(26)["momentum"] == pytest.approx(0.1)


def test_the_rule_and_the_number_of_ranks() -> None:
    plan = build_plan(
        config(
            batch_size="0ep:10 1ep:40",
            rule={"sqrt": 10},
            micro_batch_size=5,
            world_size=2,
        )
    )
    assert [stage.accumulation for stage in plan.stages] == [1, 4]
    assert [stage.values["lr"].first for stage in plan.stages] == [1.0, 2.0]
    assert plan.world_size == 2


def test_functions_of_yours(project: str) -> None:
    plan = build_plan(
        config(
            batch_size={
                "SizeFunction": {"function": {"target": f"{project}:grow"}, "every": "1ep"}
            },
            schedules={"lr": {"target": f"{project}:halve_each_epoch"}},
            rule={"target": f"{project}:follow"},
        )
    )
    assert [stage.size for stage in plan.stages] == [8, 12]
    assert plan.stages[1].values["lr"].first == 0.5 * 1.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "schedules:\n  lr:\n    Cosine: {warmup: 3ep}\n",
            r"warmup='3ep'.* \(schedules.lr in run.yaml, line 5\)",
        ),
        (
            "schedules: {momentum: {Cosine: {warmup: 3tok}}}\n",
            r"num_tokens of the data.* \(schedules.momentum in run.yaml, line 4\)",
        ),
        (
            "last_batch: drop\nbatch_size: 101\n",
            r"write AtMost\(policy, 100\) or last_batch='carry' \(batch_size in run.yaml, line 4\)",
        ),
    ],
)
def test_errors_say_where_they_come_from(text: str, message: str) -> None:
    size = "" if "batch_size" in text else "batch_size: 10\n"
    head = f"max_duration: 2ep\ndata: {{target: 'a:b', num_samples: 100}}\n{size}"
    run_file = parse_run_file(head + text)
    with pytest.raises(ConfigError, match=message):
        build_plan(run_file)


def test_the_batch_size_says_where_it_stands() -> None:
    text = (
        "max_duration: 2ep\ndata: {target: 'a:b', num_samples: 100}\nbatch_size: 0ep:8 3Mtok:16\n"
    )
    run_file = parse_run_file(text)
    with pytest.raises(PlanError, match="tokens_per_sample"):
        build_plan(run_file)


def test_a_run_that_only_the_run_can_tell() -> None:
    with pytest.raises(PlanError, match="follow"):
        build_plan(config(batch_size="0s:8 10m:16"))


def test_a_stage_smaller_than_the_ranks() -> None:
    with pytest.raises(PlanError, match="batches"):
        build_plan(config(world_size=16))


TOKENS = "max_duration: 1Mtok\nbatch_size: 0tok:8 100Ktok:16\n"


def test_a_plan_needs_no_data() -> None:
    planned = build_plan(parse_run_file(TOKENS + "data: {tokens_per_sample: 1000}\n"))
    assert planned.is_exact
    assert [(one.size, one.batches, one.samples) for one in planned.stages] == [
        (8, 13, 104),
        (16, 56, 896),
    ]
    assert not planned.warnings
    samples = build_plan(parse_run_file("max_duration: 100sp\nbatch_size: 8\n"))
    assert [one.size for one in samples.batches()] == [8] * 12 + [4]


def test_a_run_wholly_in_tokens_needs_no_sample() -> None:
    planned = build_plan(
        parse_run_file("max_duration: 1Mtok\nbatch_size: 0tok:8Ktok 96Ktok:16Ktok")
    )
    assert [(one.size, one.batches, one.first.token) for one in planned.stages] == [
        (8_000, 12, 0),
        (16_000, 57, 96_000),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TOKENS, "tokens_per_sample"),
        (TOKENS + "data: {tokens: 8}\n", "cannot use the key 'tokens'.*no target"),
    ],
)
def test_what_a_plan_without_data_still_needs(text: str, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        build_plan(parse_run_file(text))


WHOLE = "max_duration: 1Mtok\nbatch_size: 0tok:8Ktok 96Ktok:16Ktok\n"


@pytest.mark.parametrize(
    "text",
    [
        "schedules: {lr: {Cosine: {warmup: 1000sp}}}\n",
        "checkpoint: {every: 1000sp}\n",
        "rule: {sqrt: 256}\n",
        "micro_batch_size: 8\n",
    ],
    ids=["schedule", "checkpoint", "rule", "micro-batch"],
)
def test_a_run_wholly_in_tokens_has_nothing_in_samples(text: str) -> None:
    with pytest.raises(StrettoError, match=r"tok"):
        build_plan(parse_run_file(WHOLE + text))


class Texts:
    """A stream of texts of two lengths."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        yield {"input_ids": mask, "attention_mask": mask}


def texts() -> list[dict[str, Any]]:
    """Return the same as a list."""
    return [*Texts()]


def test_a_plan_says_what_only_reading_tells() -> None:
    planned = plan_file(WHOLE + f"data: {{target: '{__name__}:Texts'}}\nmicro_batch_size: 4Ktok\n")
    assert [(one.size, one.batches, one.accumulation) for one in planned.stages] == [
        (8_000, 12, 2),
        (16_000, 57, 4),
    ]
    assert "only reading tells how many tokens each sample has" in planned.warnings[0]
    assert planned.warnings[0] in plan_table(planned).replace("\n      ", " ")
    assert (
        plan_file(WHOLE.replace("1Mtok", "2ep") + f"data: {{target: '{__name__}:Texts'}}").end
        is None
    )


def test_data_by_index_without_lengths_have_no_plan() -> None:
    with pytest.raises(PlanError, match="lengths"):
        plan_file(WHOLE + f"data: {{target: '{__name__}:texts'}}\n")


def plan_file(text: str) -> Plan:
    """Return the plan that the command line prints."""
    run_file = parse_run_file(text)
    return plan_of(run_file, prepare_checked(run_file)[1])
