from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto import Cosine, Horizon, Hyperparameters, Linear, Seesaw, Timestamp, plan, prepare
from stretto.batching import (
    HalfLifeRule,
    LinearRule,
    Rule,
    RuleLike,
    SquareRootRule,
    as_rule,
    as_rules,
)
from stretto.batching.seesaw import paired
from stretto.errors import BatchSizeError, ScheduleError


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_rules_are_their_formulas(size: int, reference: int) -> None:
    assert LinearRule(reference)(size) == size / reference
    assert SquareRootRule(reference)(size) == math.sqrt(size / reference)
    assert LinearRule(size)(size) == SquareRootRule(size)(size) == 1.0


def clipped(size: int) -> float:
    return min(2, size / 256)


@pytest.mark.parametrize("rule", [LinearRule(256), SquareRootRule(256)], ids=repr)
def test_rules_are_values(rule: Rule) -> None:
    assert eval(repr(rule)) == rule
    assert isinstance(rule(1024), float)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, None, "1"], ids=repr)
def test_wrong_factors_name_the_call(factor: object) -> None:
    def mine(size: int) -> float:
        return factor  # type: ignore[return-value]

    with pytest.raises(ScheduleError, match="mine"):
        plan(Horizon("64sp"), 8, schedules={"lr": 1}, rule=mine)


@pytest.mark.parametrize("rule", [LinearRule, SquareRootRule])
@pytest.mark.parametrize("reference", [0, -1, 1.5, True, None], ids=repr)
def test_references_are_batch_sizes(rule: type[LinearRule], reference: int) -> None:
    with pytest.raises(BatchSizeError, match="reference"):
        rule(reference)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ({"linear": 256}, LinearRule(256)),
        ({"sqrt": 256}, SquareRootRule(256)),
        (clipped, clipped),
        (LinearRule(8), LinearRule(8)),
    ],
    ids=["linear", "sqrt", "function", "rule"],
)
def test_a_rule_is_written_as_in_a_run_file_or_as_a_function(written: RuleLike, rule: Rule) -> None:
    assert as_rule(written) == rule


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("sqrt", "sqrt"),
        ("root", "exactly"),
        (256, "exactly"),
        ({}, "exactly"),
        ({"sqrt": 8, "linear": 8}, "exactly"),
        ({"squared": 8}, "exactly"),
        ({"sqrt": "8ba"}, "reference"),
    ],
    ids=repr,
)
def test_what_is_no_rule_says_what_to_write(written: RuleLike, message: str) -> None:
    with pytest.raises(BatchSizeError, match=message):
        as_rule(written)


# ---------------------------------------------------------------------------------- rules by name


@given(st.floats(0, 1), st.integers(1, 10**4), st.integers(1, 10**4))
def test_a_half_life_stays_in_samples(beta: float, reference: int, size: int) -> None:
    found = HalfLifeRule(reference).moved(beta, size)
    assert found == beta ** (size / reference)
    if 0.01 < beta < 0.999 and found > 1e-100:
        # The samples in which an average forgets half: those of a batch, as often as it takes.
        assert size / math.log2(1 / found) == pytest.approx(reference / math.log2(1 / beta))


NAMES = ["lr", "lr@0", "lr@head", "weight_decay", "weight_decay@head", "betas", "betas.1",
         "betas.1@head", "momentum"]  # fmt: skip
ONES: list[Any] = [LinearRule(8), SquareRootRule(4), HalfLifeRule(16), lambda size: size / 10]


def optimizer() -> torch.optim.Optimizer:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.1, "name": "rest"},
              {"params": weights[1:], "lr": 0.3, "name": "head", "weight_decay": 0.5}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99), weight_decay=0.25)


def wanted(rules: dict[str, Any], key: str, index: int | None, group: str) -> Any:
    """The rule of one value: of the group before that of all, of the index before that of all."""
    for at in (f"@{group}", ""):
        # Of an optimizer with betas, the first one is its momentum.
        first = "momentum" if (key, index) == ("betas", 0) else f"{key}.{index}"
        for text in (f"{first}{at}", f"{key}{at}"):
            if text in rules:
                return rules[text]
    return None


@given(st.data(), st.integers(1, 40), st.integers(0, 9))
def test_the_rule_of_a_value_is_the_one_that_says_most(
    data: st.DataObject, size: int, batch: int
) -> None:
    names = data.draw(st.sets(st.sampled_from([name for name in NAMES if "@0" not in name])))
    rules = {}
    for name in sorted(names):
        may = ONES if name[0] in "bm" else [one for one in ONES if not averages(one)]
        rules[name] = data.draw(st.sampled_from(may))
    schedules = {"lr": Linear(1, 0), "betas.1": 0.5, "lr@head": 2.0}
    first = optimizer()
    found = Hyperparameters(first, schedules, Horizon("10ba"), rule=rules)
    found.apply(Timestamp(batch=batch), size)
    for group in first.param_groups:
        factor = (1 - batch / 10) * (2 if group["name"] == "head" else 1)
        expected = {
            ("lr", None): group["initial_lr"] * factor,
            ("weight_decay", None): group.get("initial_weight_decay", group["weight_decay"]),
            ("betas", 0): 0.9,
            ("betas", 1): 0.99 * 0.5,
        }
        for (key, index), value in expected.items():
            rule = wanted(rules, key, index, group["name"])
            if rule is not None:
                value = rule.moved(value, size) if hasattr(rule, "moved") else value * rule(size)
            present = group[key] if index is None else group[key][index]
            assert present == pytest.approx(value, rel=1e-14, abs=1e-300)
    assert found.values().keys() >= rules.keys()


def averages(rule: Any) -> bool:
    return isinstance(rule, HalfLifeRule)


def test_two_names_of_one_value_are_refused() -> None:
    rules = {"momentum": LinearRule(8), "betas.0": SquareRootRule(8)}
    with pytest.raises(ScheduleError, match=r"momentum.*betas\.0"):
        Hyperparameters(optimizer(), {}, Horizon("10ba"), rule=rules)


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ({"weigth_decay": LinearRule(8)}, "'weight_decay'"),
        ({"lr@tail": LinearRule(8)}, "no such parameter group"),
        ({"betas.2": LinearRule(8)}, "'betas.1'"),
        ({"l r": LinearRule(8)}, "hyper-parameter"),
    ],
    ids=repr,
)
def test_a_name_that_no_optimizer_has_is_refused(rule: Any, word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        prepare(range(80), 8, max_duration="10ba", optimizer=optimizer(), rule=rule)


@pytest.mark.parametrize("name", ["lr", "lr@head", "weight_decay", "eps"])
def test_a_half_life_of_no_average_is_refused(name: str) -> None:
    with pytest.raises(BatchSizeError, match="no average"):
        as_rules({name: HalfLifeRule(8)})
    with pytest.raises(BatchSizeError, match="no average"):
        as_rules(HalfLifeRule(8))


def test_a_half_life_is_of_a_value_up_to_1() -> None:
    run = prepare(range(80), 8, max_duration="10ba", optimizer=optimizer(),
                  schedules={"betas.1": 2.0}, rule={"betas.1": HalfLifeRule(8)})  # fmt: skip
    with pytest.raises(BatchSizeError, match="from 0 to 1"):
        run.begin()


def test_a_run_follows_its_plan_and_every_other_size() -> None:
    rules = {"lr": SquareRootRule(8), "weight_decay@head": LinearRule(8),
             "betas.1": {"half_life": 8}}  # fmt: skip
    first = optimizer()
    run = prepare(range(80), "0sp:8 40sp:20", max_duration="80sp", optimizer=first, rule=rules)
    assert run.plan is not None
    planned = [batch.values for batch in run.plan.batches()]
    for step, values in zip(run, planned, strict=True):
        ratio = step.batch_size / 8
        rest, head = first.param_groups
        assert (rest["weight_decay"], head["weight_decay"]) == (0.25, 0.5 * ratio)
        assert rest["betas"] == head["betas"] == (0.9, 0.99**ratio)
        assert values == pytest.approx(
            {"lr": 0.1 * math.sqrt(ratio), "weight_decay@head": 0.5 * ratio, "betas.1": 0.99**ratio}
        )
        first.step()
        run.finish()
    by_name = plan(Horizon("80sp"), "0sp:8 40sp:20", rule=rules, base=run.hyperparameters.base)
    assert [batch.values for batch in by_name.batches()] == planned


def test_a_plan_says_what_it_cannot_show() -> None:
    planned = plan(Horizon("80sp"), 16, rule={"betas.1": HalfLifeRule(8), "lr": LinearRule(8)})
    assert planned.values_at(0) == {"lr": 2.0}
    assert any("betas.1" in line for line in planned.warnings)


def test_references_may_be_in_tokens() -> None:
    facts = Horizon("80sp", tokens_per_sample=100)
    rules = {"betas.1": HalfLifeRule("1_600tok"), "weight_decay": {"linear": "800tok"}}
    planned = plan(facts, 8, rule=rules, base={"betas.1": 0.81, "weight_decay": 0.1})
    assert planned.values_at(0) == pytest.approx({"betas.1": 0.9, "weight_decay": 0.1})


def test_a_pair_takes_rules_of_other_names() -> None:
    pair = Seesaw(Cosine(), 16, maximum=64)
    _, schedules, rules = paired(pair, {"weight_decay": 1.0}, {"betas.1": HalfLifeRule(16)})
    assert rules == {"betas.1": HalfLifeRule(16), "lr": pair.rule}
    assert schedules.keys() == {"weight_decay", "lr"}
    for rule in ({"lr": LinearRule(8)}, {"lr@head": LinearRule(8)}, LinearRule(8)):
        with pytest.raises(BatchSizeError, match="its own"):
            paired(pair, {}, rule)
