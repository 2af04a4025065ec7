"""Run files, overrides, targets and commands that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stretto.cli.app import convert
from stretto.cli.planning import split_arguments
from stretto.cli.training import unnamed_run_file
from stretto.config.plans import build_plan
from stretto.config.run import RunConfig, parse_run_file, read_run_file
from stretto.config.targets import Target, bound_target, call_target, import_target
from stretto.config.yaml import Source, parse_yaml
from stretto.planning import plan
from stretto.report.ledger import compare
from stretto.report.pictures import draw
from stretto.report.run import read_metrics
from stretto.timing import Horizon

SOURCE = Source("run.yaml")
HEAD = "max_duration: 2ep\ndata: {target: 'my.data:make', num_samples: 100}\n"
GOOD = HEAD + "batch_size: 10\n"


def file(text: str, *overrides: str) -> Callable[[], object]:
    """A case of a run file with this text."""
    return lambda: parse_run_file(text, "run.yaml", overrides)


def key(name: str, value: Any) -> Callable[[], object]:
    """A case of a run file that is right but for one key."""
    values = {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 10}
    return lambda: RunConfig.parse({**values, name: value}, SOURCE)


def planned(text: str, *overrides: str) -> Callable[[], object]:
    """A case of a run file that says what cannot be on its own run."""

    def build() -> object:
        run_file = parse_run_file(GOOD + text, "run.yaml", overrides)
        return build_plan(run_file)

    return build


def trained(**changes: Any) -> Callable[[], object]:
    """A case of a run file that describes no training."""

    def build() -> object:
        from stretto.config.training import build_trainer

        values: Mapping[str, Any] = {
            "max_duration": "2ep",
            "data": {"target": "stretto.examples.text:PythonDocs", "sequence_length": 4096},
            "model": {"target": "torch.nn:Linear", "in_features": 1, "out_features": 1},
            "optimizer": {"target": "torch.optim:SGD", "lr": 0.1},
            "loss": {"target": "stretto.examples.text:next_byte_loss"},
            "batch_size": 10,
            "log": {"loggers": []},
        }
        return build_trainer(RunConfig.parse({**values, **changes}, SOURCE))

    return build


def written(name: str, text: str, read: Callable[[], object]) -> Callable[[], object]:
    """A case of a file that holds something else than it should."""

    def write_and_read() -> object:
        Path(name).write_bytes(text.encode("latin-1"))
        return read()

    return write_and_read


def target(text: str, **arguments: Any) -> Target:
    """A section that names something of Python's."""
    return Target(target=text, arguments=arguments)


LONG = "{LinearRamp: {start: 1, end: 100_000_000, over: 9ep}}"
RAMP = {"start": 8, "end": 64, "over": "40%"}
LEDGER = "batch,epoch,sample,token,size,tokens,micro_batches,lr\n"
CASES: list[tuple[str, Callable[[], object]]] = [
    # what is not YAML, or not a run file
    ("config-file-absent", lambda: read_run_file("run.yaml")),
    ("config-file-bytes", written("run.yaml", "a: \xff", lambda: read_run_file("run.yaml"))),
    ("config-file-empty", file("")),
    ("config-file-list", file("- max_duration: 2ep")),
    ("config-yaml-tag", file("a: !!python/object:os.system ls")),
    ("config-yaml-twice", file("seed: 1\nseed: 2")),
    ("config-yaml-alias", file("a: *b")),
    ("config-yaml-merge", file("<<: {a: 1}")),
    ("config-yaml-colon", file("max_duration: 2ep: 3ep")),
    ("config-yaml-tab", file("model:\n\ttarget: a")),
    ("config-yaml-open", file("model: {target: a")),
    ("config-yaml-indent", file("model:\n  target: a\n seed: 1")),
    ("config-yaml-documents", file("a: 1\n---\nb: 2")),
    ("config-yaml-deep", lambda: parse_yaml("[" * 100, "run.yaml")),
    ("config-yaml-character", file("a: \x07")),
    ("config-yaml-escape", file('a: "\\U00110000"')),
    # keys and values
    ("config-no-keys", file("seed: 1")),
    ("config-key-misspelt", file(GOOD + "optimiser: {target: 'torch.optim:SGD'}")),
    ("config-key-unknown", file(GOOD + "fruit: apple")),
    ("config-several", file("max_duration: 2\ndata: {target: a.b}\nbatch_size: 0\n")),
    ("config-max-duration-bare", key("max_duration", 90)),
    ("config-max-duration-fraction", key("max_duration", "50%")),
    ("config-last-batch", key("last_batch", "kep")),
    ("config-precision", key("precision", "int4")),
    ("config-shuffle-on", key("loading", {"shuffle": "on"})),
    ("config-num-workers", key("loading", {"num_workers": 1.5})),
    ("config-micro-batch-text", key("micro_batch_size", "all")),
    ("config-target-dot", key("model", {"target": "my.models.Model"})),
    ("config-target-number", key("model", {"target": 3})),
    ("config-evaluate-every", key("evaluate", {"every": "0ep"})),
    ("config-evaluate-twice", key("evaluate", [{}, {}])),
    ("config-loggers", key("log", {"loggers": ["tensorbord"]})),
    ("config-logger-target", key("log", {"loggers": [{"target": "my.Logger"}]})),
    ("config-rule", key("rule", {"linear": 8, "sqrt": 8})),
    ("config-rule-word", key("rule", "sqrt")),
    ("config-scale", key("scale_schedule", 0)),
    ("config-group", key("optimizer", {"target": "a:b", "groups": {"g": {"parameters": "("}}})),
    # batch sizes and schedules
    ("config-batch-size-zero", key("batch_size", 0)),
    ("config-batch-size-text", key("batch_size", "8 16")),
    ("config-batch-size-nothing", key("batch_size", {"AtMost": {"size": 8}})),
    (
        "config-ramp-endless",
        planned("", "max_duration=9ep", "data.num_samples=1_000_000_000_000", "batch_size=" + LONG),
    ),
    ("config-ramp-kind", key("batch_size", {"DoublngRamp": RAMP})),
    ("config-ramp-shrinks", key("batch_size", {"DoublingRamp": {**RAMP, "end": 4}})),
    ("config-ramp-key", key("batch_size", {"DoublingRamp": {"start": 8, "over": "1ep"}})),
    ("config-ramp-old", key("batch_size", {**RAMP, "ramp": "double"})),
    ("config-ramp-equal", key("batch_size", {"DoublingRamp": {**RAMP, "equal": "steps"}})),
    ("config-rampup-micro", planned("", "batch_size={rampup: {final: 64, over: 10%}}")),
    ("config-steps-start", key("batch_size", {"1ep": 8})),
    ("config-schedule-kind", key("schedules", {"lr": {"Cosin": {}}})),
    ("config-schedule-two", key("schedules", {"lr": {"Cosine": {}, "Linear": {}}})),
    ("config-schedule-none", key("schedules", {"lr": {"cosine": {}}})),
    ("config-schedule-text", key("schedules", {"lr": "cosine"})),
    ("config-schedule-name", key("schedules", {"learning rate": 1})),
    ("config-period-duration", key("schedules", {"lr": {"Periods": [{"Cosine": {}}]}})),
    # overrides
    ("config-override-deep", file(GOOD, ".".join("a" * 31) + "=1")),
    ("config-override-bytes", file(GOOD, "data.\udcff=1")),
    ("config-override-no-equals", file(GOOD, "max_duration")),
    ("config-override-no-value", file(GOOD, "max_duration=")),
    ("config-override-key", file(GOOD, "log..every=1ep")),
    ("config-override-through", file(GOOD, "batch_size.end=8")),
    ("config-override-index", file(GOOD + "evaluate: [{}]", "evaluate.1.every=1ep")),
    ("config-override-unknown", file(GOOD, "max_duratoin=1ep")),
    # what cannot be on this run
    ("config-plan-warmup", planned("schedules: {lr: {Cosine: {warmup: 3ep}}}")),
    ("config-plan-tokens", planned("schedules: {lr: {Cosine: {warmup: 3tok}}}")),
    ("config-plan-wall-clock", planned("", "batch_size=0s:8 10m:16")),
    ("config-plan-ranks", planned("world_size: 16")),
    ("config-plan-drop", planned("last_batch: drop", "batch_size=101")),
    # targets
    ("config-import-module", lambda: import_target("no_such_module:x")),
    ("config-import-attribute", lambda: import_target("fractions:Fractoin")),
    ("config-call-argument", lambda: call_target(target("textwrap:TextWrapper", widht=3))),
    ("config-call-missing", lambda: call_target(target("textwrap:dedent"))),
    ("config-call-raised", lambda: call_target(target("fractions:Fraction", numerator="x"))),
    ("config-bind-number", lambda: bound_target(target("math:pi"))),
    ("config-schedule-number", key("schedules", {"lr": {"Linear": {"start": "x"}}})),
    ("config-plan-metric", planned("evaluate: {}\n",
                                   "batch_size={Plateau: {metric: a/b, start: 8, maximum: 64}}")),
    ("config-plan-monitor", planned("checkpoint: {monitor: validation/loss}\n")),
    # training
    ("config-train-model", trained(model=None)),
    ("config-train-loss", trained(loss=None)),
    (
        "config-train-logger",
        trained(log={"loggers": [{"target": "fractions:Fraction", "numerator": 1}]}),
    ),
    ("config-train-step", trained(step={"target": "fractions:Fraction"})),
    (
        "config-train-step-model",
        trained(step={"target": "examples.steps:MuonStep", "lr": 0.1, "model": 1}),
    ),
    ("config-train-kind", trained(model={"target": "fractions:Fraction"})),
    ("config-train-sizes", trained(data={"target": "stretto.examples.text:PythonDocs",
                                         "num_samples": 7})),
    ("config-train-drop-last", trained(data={"target": "torch.utils.data:DataLoader",
                                             "dataset": [1, 2, 3], "drop_last": True})),
    ("config-train-ranks", trained(world_size=8)),
    ("config-train-split", trained(evaluate={}, data={"target": "textwrap:wrap",
                                                     "text": "a"})),
    ("config-train-group", trained(optimizer={"target": "torch.optim:SGD",
                                              "groups": {"head": {"parameters": "zzz"}}})),
    # commands
    ("config-command-unnamed-resume", lambda: unnamed_run_file(Path("runs/a"), "latest")),
    ("config-command-override", lambda: split_arguments(["run.yaml", "seed"])),
    ("config-command-convert", partial(
        convert, "0.1dur", to="ba", max_duration="90ep", batch_size=128)),
    # pictures and reports
    ("config-picture-ending", lambda: draw(plan(Horizon("8ba"), 8), Path("plan.gif"))),
    ("config-picture-tokens", lambda: draw(
        plan(Horizon("40sp"), 8), Path("a.png"), unit="tok")),
    ("config-picture-end", lambda: draw(plan(Horizon("10m"), 8), Path("a.png"))),
    ("config-report-absent", lambda: read_metrics(Path("runs/a"))),
    ("config-report-broken", written("metrics.jsonl", json.dumps({"loss": 1}) + "\n",
                                     lambda: read_metrics(Path()))),
    ("config-ledger-absent", lambda: compare(plan(Horizon("40sp"), 8), Path("runs/a"))),
    ("config-ledger-columns", written("ledger.csv", "a,b\n",
                                      lambda: compare(plan(Horizon("40sp"), 8), Path()))),
    ("config-ledger-row", written("ledger.csv", LEDGER + "0,0,0,0,8\n",
                                  lambda: compare(plan(Horizon("40sp"), 8), Path()))),
    ("config-ledger-empty", written("ledger.csv", LEDGER,
                                    lambda: compare(plan(Horizon("40sp"), 8), Path()))),
]  # fmt: skip
