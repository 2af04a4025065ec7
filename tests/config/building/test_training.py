"""A run file to a trainer, and that a run follows the plan of its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.batching import SquareRootRule
from stretto.config.plans import build_plan
from stretto.config.run import RunConfig, dump_run_file, parse_run_file
from stretto.config.training import build_finding, build_trainer, make_logging, resolved
from stretto.errors import ConfigError, StrettoError
from stretto.report.run import compare
from stretto.timing import Time
from stretto.training import TensorBoardLogger, WandbLogger

RUN: dict[str, Any] = {
    "max_duration": "2ep",
    "model": {"target": "my_project:Line"},
    "data": {"target": "my_project:Points"},
    "optimizer": {"target": "torch.optim:SGD", "lr": 0.01},
    "batch_size": 8,
    "log": {"loggers": []},
}
GROW = {"target": "my_project:grow"}
pytestmark = pytest.mark.usefixtures("project")


def config(**changes: Any) -> RunConfig:
    return RunConfig.parse(RUN | changes)


def test_trains() -> None:
    trainer = build_trainer(config())
    trainer.fit()
    assert (trainer.timer.batch, trainer.timer.sample) == (10, 80)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "max_duration": "2ep",
            "schedules": {
                "lr": {"Cosine": {"warmup": "3ba"}},
                "momentum": {"StepDecay": {"every": "1ep"}},
            },
            "batch_size": {"DoublingRamp": {"start": 3, "end": 13, "over": "50sp"}},
            "optimizer": {"target": "torch.optim:SGD", "lr": 0.01, "momentum": 0.5},
        },
        {
            "max_duration": "2.5ep",
            "last_batch": "carry",
            "micro_batch_size": 4,
            "schedules": {"lr": [0.5, {"Linear": {"over": "1/3dur"}}]},
            "batch_size": {"0ep": 7, "6ba": 11},
            "rule": {"linear": 7},
        },
        {
            "max_duration": "10ba",
            "last_batch": "drop",
            "data": {"target": "my_project:Points", "tokens_per_sample": 3},
            "schedules": {"lr": {"Exponential": {"every": "60tok", "gamma": 0.9}}, "lr@head": 0.5},
            "batch_size": {"SizeFunction": {"function": GROW, "every": "2ba"}},
            "optimizer": {
                "target": "torch.optim:AdamW",
                "betas": [0.9, 0.95],
                "groups": {"head": {"parameters": "^last", "lr": 0.1}},
            },
        },
        {
            "max_duration": "2ep",
            "data": {"target": "my_project:Points", "tokens_per_sample": 3},
            "micro_batch_size": 4,
            "schedules": {"lr": {"Cosine": {"warmup": "20tok"}}},
            "batch_size": {"LinearRamp": {"start": "10tok", "end": "40tok", "over": "50%"}},
            "rule": {"sqrt": "20tok"},
        },
        {
            "max_duration": "2ep",
            "data": {"target": "my_project:Points", "tokens_per_sample": 3},
            "schedules": {},
            "batch_size": {
                "Seesaw": {"decay": {"Cosine": {}}, "size": "10tok", "maximum": "31tok"}
            },
        },
    ],
    ids=[
        "mixed units",
        "carry, accumulation, a rule",
        "drop, tokens, a group, a function",
        "sizes in tokens, a rule",
        "a pair in tokens",
    ],
)
def test_a_run_follows_the_plan_of_its_file(changes: dict[str, Any], tmp_path: Path) -> None:
    described = config(**changes)
    trainer = build_trainer(described, folder=tmp_path)
    plan = build_plan(resolved(described, trainer))
    trainer.fit()
    comparison = compare(plan, tmp_path)
    assert comparison.agrees, str(comparison)
    assert comparison.batches == plan.num_batches
    assert {"size", "sample", "lr"} <= set(comparison.compared)


def test_the_resolved_file_states_what_the_run_found(tmp_path: Path) -> None:
    chosen = config(
        data={"target": "my_project:Points", "tokens_per_sample": 3},
        optimizer={"target": "torch.optim:AdamW"},
    )
    found = resolved(chosen, build_trainer(chosen, folder=tmp_path))
    assert (found.data.num_samples, found.data.tokens_per_sample) == (40, 3)
    assert found.optimizer is not None
    assert found.optimizer.arguments == {"lr": 1e-3}
    assert found.folder == str(tmp_path)
    assert parse_run_file(dump_run_file(found)) == found


def test_everything_is_handed_over(tmp_path: Path) -> None:
    trainer = build_trainer(
        config(
            schedules={"lr": 0.5},
            micro_batch_size=3,
            rule={"sqrt": 8},
            evaluate={"every": "50%", "metrics": {"l1": {"target": "my_project:absolute_loss"}}},
            checkpoint={"every": "1ep", "keep": 2},
            clip_norm=0.1,
            stepping={"loss_weight": {"target": "my_project:count"}},
            loss={"target": "my_project:absolute_loss", "scale": 2.0},
            callbacks=[{"target": "stretto.training:Callback"}],
            seed=3,
        ),
        folder=tmp_path,
    )
    assert trainer.run.hyperparameters.rules == {"lr": SquareRootRule(8)}
    assert trainer.plan is not None
    assert trainer.plan.micro_batch_size == 3
    trainer.fit()
    measured = trainer.evaluate()
    assert set(measured) == {"validation/loss", "validation/l1"}
    assert measured["validation/loss"] == pytest.approx(2 * measured["validation/l1"])
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_metric_may_be_a_class_of_torchmetrics_and_of_another_project() -> None:
    metric = {"target": "torchmetrics.regression:MeanSquaredError", "squared": False}
    predict = {"target": "my_project:predict"}
    evaluate = {"metrics": {"root": metric, "l1": {"target": "my_project:absolute_loss"}}}
    chosen = build_trainer(config(evaluate=evaluate | {"predict": predict})).evaluate()
    default = build_trainer(config(evaluate=evaluate)).evaluate()
    assert chosen == default
    assert default["validation/root"] >= default["validation/l1"] > 0
    without_arguments = {"target": "torchmetrics.regression:MeanSquaredError", "root": True}
    with pytest.raises(ConfigError, match="root"):
        build_trainer(config(evaluate={"metrics": {"root": without_arguments}}))


def test_scale_schedule_reaches_callbacks() -> None:
    freezing = {
        "target": "stretto.training.algorithms:LayerFreezing",
        "layers": ["first"],
        "start": "2ep",
        "end": "80%",
    }
    trainer = build_trainer(config(callbacks=[freezing], scale_schedule=0.5))
    assert trainer.run.horizon.max_duration == Time("1ep")
    assert repr(trainer.callbacks[0]) == (
        "LayerFreezing(['first'], start='1ep', end='0.8dur', level=1.0)"
    )


def test_the_seed_makes_the_model() -> None:
    def weights(seed: int) -> list[float]:
        return [
            value
            for parameter in build_trainer(config(seed=seed)).model.parameters()
            for value in parameter.flatten().tolist()
        ]

    assert weights(3) == weights(3)
    assert weights(3) != weights(4)


def test_groups_take_parameters_by_name() -> None:
    groups = {
        "weights": {"parameters": "weight$", "lr": 0.5},
        "rest_of_last": {"parameters": "last"},
    }
    trainer = build_trainer(
        config(optimizer={"target": "torch.optim:SGD", "lr": 0.1, "groups": groups})
    )
    found = {
        group["name"]: ([tuple(one.shape) for one in group["params"]], group["lr"])
        for group in trainer.optimizer.param_groups
    }
    assert found == {
        "rest": ([(1,)], 0.1),
        "weights": ([(1, 2), (1, 1)], 0.5),
        "rest_of_last": ([(1,)], 0.1),
    }


def test_evaluation_data_may_be_of_its_own() -> None:
    trainer = build_trainer(config(evaluate={"data": {"target": "my_project:plain_points"}}))
    assert set(trainer.evaluate()) == {"validation/loss"}


def test_loggers() -> None:
    assert make_logging(config()).loggers == []
    (logger,) = make_logging(RunConfig.parse({**RUN, "log": {}})).loggers
    assert isinstance(logger, TensorBoardLogger), "it is installed, and wanted where it is"
    assert WandbLogger.__name__ == "WandbLogger"


STEPS = "examples.steps"


def test_a_step_of_yours_gets_model_optimizer_and_loss(tmp_path: Path) -> None:
    described = config(
        step={"target": f"{STEPS}:SAMStep", "radius": 0.1},
        checkpoint={"every": "1ep"},
        schedules={"lr": {"Cosine": {}}},
    )
    trainer = build_trainer(described, folder=tmp_path)
    trainer.fit()
    assert type(trainer.step).__name__ == "SAMStep"
    assert trainer.step.loss is sys.modules["my_project"].Line.loss
    assert trainer.run.hyperparameters.base["lr"] == 0.01
    assert compare(build_plan(resolved(described, trainer)), tmp_path).agrees
    again = build_trainer(parse_run_file(dump_run_file(resolved(described, trainer))))
    again.resume()
    assert again.timer.sample == 80


def test_a_step_may_make_its_optimizers_itself() -> None:
    described = config(step={"target": f"{STEPS}:MuonStep", "lr": 0.01}, optimizer=None)
    trainer = build_trainer(described)
    trainer.fit()
    assert len(trainer.step.optimizers) == 2
    assert type(build_finding(described).step).__name__ == "MuonStep"


def test_a_logger_of_yours_gets_the_run_file(tmp_path: Path) -> None:
    log = {"loggers": [{"target": "my_project:Kept", "note": "mine"}], "console": False}
    trainer = build_trainer(config(log=log, max_duration="1ba"), folder=tmp_path)
    trainer.fit()
    (logger,) = sys.modules["my_project"].Kept.made
    assert logger.note == "mine"
    assert logger.config["optimizer"]["lr"] == 0.01
    assert logger.config["log"]["loggers"] == log["loggers"]
    assert logger.config["folder"] == str(tmp_path)
    assert len(logger.lines) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "cannot train: there is no 'model'"),
        ({"optimizer": None}, "cannot train: there is no 'optimizer'"),
        ({"data": {"num_samples": 100}}, "cannot train: there is no 'data' with a target"),
        ({"model": {"target": "my_project:NoLoss"}}, "there is no 'loss', and NoLoss has no"),
        ({"model": {"target": "my_project:Points"}}, "Points and not a Module"),
        ({"optimizer": {"target": "my_project:plain_points"}}, "it raised|Points and not"),
        (
            {"optimizer": {"target": "torch.optim:Adam", "lr": 1, "eps": -1}},
            "it raised ValueError: Inv",
        ),
        ({"optimizer": {"target": "torch.optim:SGD", "lrr": 1}}, "lrr"),
        (
            {"optimizer": {"target": "torch.optim:SGD", "groups": {"g": {"parameters": "zzz"}}}},
            "no parameter left has a name with 'zzz' in it; .* such as 'first.weight'",
        ),
        ({"data": {"target": "my_project:Points", "num_samples": 41}}, "41.*40|40.*41"),
        ({"data": {"target": "my_project:Points", "cuont": 41}}, "cuont"),
        ({"data": {"target": "my_project:NUMBER"}}, "NUMBER"),
        ({"schedules": {"lrr": 0.5}}, "cannot schedule 'lrr'"),
        ({"schedules": {"lr@head": 0.5}}, "no such parameter group"),
        ({"world_size": 4}, "torchrun --nproc-per-node 4"),
        ({"checkpoint": {}}, "the run has no folder"),
        (
            {"data": {"target": "my_project:plain_points"}, "evaluate": {}},
            "my_project:plain_points takes no 'split'",
        ),
        (
            {"data": {"target": "my_project:Points", "split": "validation"}, "evaluate": {}},
            "validation split",
        ),
        ({"callbacks": [{"target": "my_project:Line"}]}, "not a Callback"),
        ({"loss": {"target": "my_project:NUMBER"}}, "callable"),
        ({"device": "abacus"}, "abacus"),
        ({"stepping": {"rank_timeout": "5ba"}}, r"cannot wait '5ba'.*stepping.rank_timeout in"),
        (
            {"batch_size": {"Plateau": {"metric": "validation/loss", "start": 4, "maximum": 8}}},
            r"no evaluation measures it; set evaluate.* \(batch_size in",
        ),
        (
            {
                "batch_size": {"Plateau": {"metric": "validation/los", "start": 4, "maximum": 8}},
                "evaluate": {},
            },
            r"no evaluation measures it; write one of 'validation/loss' \(batch_size in",
        ),
    ],
)
def test_what_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        build_trainer(config(**changes))


def test_a_data_loader_that_drops_its_last_batch_is_refused_unless_the_file_says_it() -> None:
    data = {"target": "my_project:dropping"}
    for build in (build_trainer, build_plan):
        with pytest.raises(ConfigError, match="last_batch"):
            build(config(data=data))
    for last_batch, samples in (("drop", 6), ("keep", 8)):
        trainer = build_trainer(config(data=data, batch_size=3, last_batch=last_batch))
        assert sum(step.num_samples for step in trainer.run.loader) == 2 * samples


def test_a_run_file_says_that_streams_are_sharded() -> None:
    data = {"target": "my_project:plain_batches", "num_samples": 8, "sharded": True}
    trainer = build_trainer(config(data=data, evaluate={"data": {"target": "my_project:Points"}}))
    assert trainer.run.loader.spec.sharded
    trainer.fit()
    assert trainer.timer.sample == 16


def test_data_may_be_a_spec_of_which_the_file_states_more() -> None:
    spec = {"target": "my_project:spec_of_batches", "num_samples": 8}
    trainer = build_trainer(config(data=spec, batch_size=4))
    assert trainer.run.loader.spec.known_num_samples == 8
    assert trainer.run.loader.spec.tokens_per_sample == 3


def test_stated_sizes_are_held_against_the_data() -> None:
    with pytest.raises(ConfigError, match="data"):
        build_trainer(config(data={"target": "my_project:Points", "num_samples": 41}))
