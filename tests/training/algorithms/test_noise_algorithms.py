"""What is done with the noise besides a batch size: a report, and a learning rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from stretto.batching import (
    NoiseScale,
    PowerOfTwo,
    Signals,
    SquareRootRule,
    Steps,
    as_policy,
)
from stretto.config import parse_run_file
from stretto.errors import BatchSizeError
from stretto.noise import NoiseEstimator, NoiseTerms
from stretto.timing import Horizon, Timestamp
from stretto.training import Callback, Checkpointing, Logging, Run, Stepping, Trainer
from stretto.training.algorithms import NoiseReport

Make = Callable[..., Any]


def known(*callbacks: Callback, **settings: Any) -> Trainer:
    """Gradients are drawn with |mu|^2 = 1 and tr(Sigma) = 40, whatever the weights are."""
    draws = torch.randn(4000, 10, generator=torch.Generator().manual_seed(6)) * 2.0
    draws[:, 0] += 1.0
    model = nn.Linear(10, 1, bias=False)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mean: Tensor = model(batch).mean()
        return mean

    given = {"max_duration": "4000sp", "batch_size": 40, "micro_batch_size": 5, **settings}
    model = given.pop("model", model)
    given.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(model, draws, loss=loss, callbacks=callbacks, **given)


def moment(passed: float) -> Any:
    """What a report asks a run for."""
    timer = SimpleNamespace(timestamp=Timestamp(), get_elapsed_duration=lambda: passed)
    return SimpleNamespace(horizon=Horizon("1ep"), timer=timer)


def measured(report: NoiseReport, scales: list[float], *, size: int = 16, steps: int = 60) -> None:
    """Let a report see steps of batches of `size` at noise scales that are spread over a run."""
    for number, scale in enumerate(scales):
        for step in range(steps):
            at = moment((number + step / steps) / len(scales))
            terms = Signals(noise_numerator=scale + (-1) ** step * 0.1, noise_denominator=1.0)
            step_of_size: Any = SimpleNamespace(batch_size=size)
            report.on_noise(at, step_of_size, terms)


def test_the_noise_scale_is_logged_with_its_interval(tmp_path: Path) -> None:
    report = NoiseReport(minimum=4)
    known(report, folder=tmp_path, log=Logging("10ba")).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "noise_scale" not in lines[0]
    last = lines[-1]
    assert last["noise_scale"] == pytest.approx(40, rel=0.35)
    assert last["noise_scale_low"] < last["noise_scale"] < last["noise_scale_high"]
    written = (tmp_path / "suggested_batch_size.yaml").read_text()
    assert written.rstrip() == report.suggestion()
    parse_run_file(f"max_duration: 1ep\ndata: {{target: 'a:b'}}\n{written}")
    assert "rule: {linear: 40}" in written


def test_a_run_that_follows_the_noise_logs_what_it_follows(tmp_path: Path) -> None:
    logged: list[list[dict[str, float]]] = []
    for size, callbacks, name in (
        (PowerOfTwo(NoiseScale(20, 20)), [], "follows"),
        (16, [NoiseReport()], "reports"),
    ):
        folder = tmp_path / name
        known(*callbacks, batch_size=size, folder=folder, log=Logging("1ba")).fit()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        names = ("noise_scale", "noise_scale_low", "noise_scale_high")
        logged.append([{name: line[name] for name in names if name in line} for line in lines])
    own, reported = logged
    assert not own[0]
    assert own[-1]
    # The policy has decided by what was measured up to the batch before, and it may go by an end
    # of the interval where the scale is not known well enough to be reported.
    assert [one if "noise_scale" in one else {} for one in own[1:]] == reported[:-1]
    assert any(one and "noise_scale" not in one for one in own)


def test_a_rule_is_suggested_where_there_is_none() -> None:
    report = NoiseReport()
    known(report, stepping=Stepping(rule=SquareRootRule(8))).fit()
    assert "batch_size: " in report.suggestion()
    assert "rule" not in report.suggestion()
    moving = NoiseReport()
    known(moving, batch_size=Steps("0sp:30 500sp:40")).fit()
    assert "rule" not in moving.suggestion()
    restored = NoiseReport()
    restored.load_state_dict(moving.state_dict())
    assert restored.suggestion() == moving.suggestion()


@pytest.mark.parametrize(("c", "power"), [(2.0, 1.0), (5.0, 0.5)])
def test_the_suggestion_is_what_the_policy_decides(c: float, power: float) -> None:
    """On a run whose noise it can hardly tell, too: then the policy follows its interval's end."""
    seen: list[tuple[float, Signals]] = []

    class Watch(Callback):
        def on_noise(self, run: Run, step: Any, signals: Signals) -> None:
            seen.append((run.timer.get_elapsed_duration(), signals))

    report = NoiseReport(c=c, power=power, minimum=4, maximum=64)
    known(report, Watch(), batch_size=10).fit()
    bound = NoiseScale(4, 64, c=c, power=power).bind(Horizon("1ep"))
    state, sizes = bound.start, [(0.0, 4)]
    for at, signals in seen:
        size, state = bound.decide(Timestamp(), state, signals)
        if size != sizes[-1][1]:
            sizes.append((at, size))
    assert len(sizes) > 2, "it moves more than once"
    stay = [min(size for _, size in sizes[number:]) for number in range(len(sizes))]
    wanted = sorted({4 << (size // 4).bit_length() - 1 for size in stay})
    found = yaml.safe_load(report.suggestion())["batch_size"]
    assert list(found.values()) == wanted
    assert ("# follows 5 times the power 0.5 of" in report.suggestion()) == (power == 0.5)


@pytest.mark.parametrize(
    ("scales", "settings", "steps"),
    [
        ([10, 20, 40, 80], {"minimum": 8}, "0%:8 25%:16 50%:32 75%:64"),
        ([10, 20, 40, 80], {"minimum": 12}, "0%:12 50%:24 75%:48"),
        ([10, 20, 40, 80], {"c": 0.5, "maximum": 16, "minimum": 4}, "0%:4 25%:8 50%:16"),
        ([100, 10, 40, 20], {"minimum": 4}, "0%:4 2%:8 50%:16"),
        ([1, 1, 1], {"minimum": 4}, "0%:4"),
        ([10, 40], {}, "0%:8 50%:16 51%:32"),
    ],
    ids=["growing", "from a minimum", "a part", "a passing peak", "too small", "from its own"],
)
def test_a_ramp_is_suggested_that_stays_below(
    scales: list[float], settings: dict[str, Any], steps: str
) -> None:
    report = NoiseReport(**settings, window=8)
    measured(report, scales)
    expected = dict(one.split(":") for one in steps.split())
    found = yaml.safe_load(report.suggestion())["batch_size"]
    assert list(found.values()) == [int(size) for size in expected.values()]
    for at, wanted in zip(found, expected, strict=True):
        # Averages take some of their window to follow.
        assert 0 <= float(at.rstrip("%")) - float(wanted.rstrip("%")) < 8
    as_policy(found)


@pytest.mark.parametrize(
    ("size", "scales", "sizes"),
    [(12, [13, 26, 52], [12, 24, 48]), (24, [8, 30], [6, 12, 24]), (3, [2, 2], [2])],
)
def test_the_suggestion_begins_with_the_runs_own_size(
    size: int, scales: list[float], sizes: list[int]
) -> None:
    report = NoiseReport(window=8)
    measured(report, scales, size=size)
    assert list(yaml.safe_load(report.suggestion())["batch_size"].values()) == sizes


def test_what_was_known_does_not_depend_on_when_it_was_logged() -> None:
    texts = []
    for every in ("1ba", "100ba"):
        report = NoiseReport(minimum=4, maximum=8)
        known(report, log=Logging(every)).fit()
        texts.append(report.suggestion())
    assert texts[0] == texts[1]
    assert "where it was known" in texts[0]


def test_what_is_decided_behind_the_last_batch_is_not_suggested() -> None:
    report = NoiseReport(minimum=4, maximum=64)
    report.load_state_dict(
        {**report.state_dict(), "decided": [[0.0, 4], [0.5, 8], [0.9997, 32], [1.0, 4]]}
    )
    assert yaml.safe_load(report.suggestion())["batch_size"] == {"0%": 4, "50%": 8}


def test_a_suggestion_lies_within_bounds_that_a_run_was_resumed_with() -> None:
    first = NoiseReport(minimum=4, maximum=64)
    first.load_state_dict({**first.state_dict(), "decided": [[0.0, 4], [0.5, 16], [0.7, 64]]})
    raised = NoiseReport(minimum=32, maximum=64)
    raised.load_state_dict(first.state_dict())
    assert yaml.safe_load(raised.suggestion())["batch_size"] == {"0%": 32, "70%": 64}


def test_nothing_is_suggested_that_is_not_known(tmp_path: Path) -> None:
    known(NoiseReport(), folder=tmp_path, max_duration="5ba").fit()
    text = (tmp_path / "suggested_batch_size.yaml").read_text()
    assert text.startswith("# the noise scale is not known after 5 measured steps: measure more")
    assert all(line.startswith("#") for line in text.splitlines())


def test_a_suggestion_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    report = NoiseReport()
    (tmp_path / "suggested_batch_size.yaml").mkdir()
    with pytest.warns(RuntimeWarning, match="suggested_batch_size"):
        known(report, folder=tmp_path).fit()


def test_batches_of_one_have_no_noise(tmp_path: Path) -> None:
    known(
        NoiseReport(), folder=tmp_path, max_duration="9ba", batch_size=1, micro_batch_size=1
    ).fit()
    text = (tmp_path / "suggested_batch_size.yaml").read_text()
    assert text == "# no noise was measured: it takes batches of two samples or more\n"


def test_the_rule_is_that_of_the_optimizer(tmp_path: Path) -> None:
    report = NoiseReport()
    trainer = known(report)
    trainer.fit()
    assert "rule: {linear: 40}" in report.suggestion()
    other = NoiseReport()
    adam = torch.optim.Adam(trainer.model.parameters())
    known(other, optimizer=adam, model=trainer.model).fit()
    assert "rule: {sqrt: 40}" in other.suggestion()


def test_a_report_leaves_the_run_as_it_is(problem: Make) -> None:
    plain, reported = problem(), problem()
    plain.trainer(micro_batch_size=2).fit()
    reported.trainer(micro_batch_size=2, callbacks=[NoiseReport()]).fit()
    assert torch.equal(plain.weights(), reported.weights())


def test_a_resumed_run_goes_on_to_the_last_bit(problem: Make, tmp_path: Path) -> None:
    whole, cut, states = problem(), problem(), []
    one = NoiseReport()
    settings = {"micro_batch_size": 2, "max_duration": "60ba", "log": Logging("7ba")}
    whole.trainer(**settings, callbacks=[one]).fit()
    states.append(one.state_dict())

    class Stop(Callback):
        def on_batch_end(self, run: Any, step: Any) -> None:
            if run.timer.batch == 31:
                run.stop("cut")

    keep = {"checkpoint": Checkpointing("31ba"), "folder": tmp_path}
    cut.trainer(**settings, **keep, callbacks=[NoiseReport(), Stop()]).fit()
    again, other = problem(), NoiseReport()
    trainer = again.trainer(**settings, **keep, callbacks=[other])
    trainer.resume()
    trainer.fit()
    assert other.state_dict() == states[0]
    assert torch.equal(again.weights(), whole.weights())


def test_the_gain_is_that_of_the_noise() -> None:
    estimator = NoiseEstimator()
    assert estimator.gain(64, 8) == 1.0
    for step in range(60):
        estimator.add(NoiseTerms(64.0 + (-1) ** step, 1.0))
    scale = estimator.noise_scale
    assert scale is not None
    for size in (8, 16, 64, 4096):
        expected = (scale / 8 + 1) / (scale / size + 1)
        assert estimator.gain(size, 8) == pytest.approx(expected)
        assert 1 <= estimator.gain(size, 8) <= size / 8
    assert estimator.gain(8, 8) == 1.0


def test_the_gain_stays_where_a_batch_jumps() -> None:
    estimator = NoiseEstimator(window=30)
    for size in (*[64] * 300, *[1024] * 5):
        estimator.add(NoiseTerms(1000.0, 1.0), size)
        if estimator.steps > 30:
            assert estimator.gain(size, 64) == pytest.approx((1000 / 64 + 1) / (1000 / size + 1))


def test_the_gain_is_all_or_nothing_where_there_is_only_noise_or_none() -> None:
    noise, still = NoiseEstimator(), NoiseEstimator()
    for _ in range(40):
        noise.add(NoiseTerms(50.0, -0.1))
        still.add(NoiseTerms(-0.1, 2.0))
    assert noise.gain(64, 8) == 8.0
    assert still.gain(64, 8) == 1.0


@pytest.mark.parametrize("bounds", [{"maximum": 4}, {"minimum": 32, "maximum": 64}], ids=repr)
def test_a_report_may_be_resumed_with_other_bounds(
    bounds: dict[str, int], problem: Make, tmp_path: Path
) -> None:
    keep = {"folder": tmp_path, "micro_batch_size": 2, "checkpoint": Checkpointing("4ba")}
    problem().trainer(**keep, max_duration="4ba", callbacks=[NoiseReport()]).fit()
    report = NoiseReport(**bounds)
    trainer = problem().trainer(**keep, max_duration="8ba", callbacks=[report])
    trainer.resume()
    trainer.fit()
    assert report.estimator.steps == 8


def test_values_that_cannot_be() -> None:
    with pytest.raises(BatchSizeError, match="noise"):
        NoiseReport(c=-1)


def test_signals_without_noise_are_no_terms() -> None:
    assert NoiseTerms.of(Signals(loss=1.0)) is None
