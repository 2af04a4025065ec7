"""Run files, overrides, targets and commands that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.cli.training import unnamed_run_file
from stretto.config.plans import build_plan
from stretto.config.run import RunConfig, parse_run_file, read_run_file
from stretto.config.targets import Target, bound_target, call_target, import_target
from stretto.config.yaml import Source
from stretto.planning import plan
from stretto.report.pictures import draw
from stretto.report.run import compare, read_metrics
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


RAMP = {"start": 8, "end": 64, "over": "40%"}
LEDGER = "batch,epoch,sample,token,size,tokens,micro_batches,sec,decided_size,lr\n"
CASES: list[tuple[str, Callable[[], object]]] = [
    # what is not YAML, or not a run file
    ("config-file-bytes", written("run.yaml", "a: \xff", lambda: read_run_file("run.yaml"))),
    ("config-file-list", file("- max_duration: 2ep")),
    ("config-yaml-alias", file("a: *b")),
    ("config-yaml-documents", file("a: 1\n---\nb: 2")),
    # keys and values
    ("config-no-keys", file("seed: 1")),
    ("config-several", file("max_duration: 2\ndata: {target: a.b}\nbatch_size: 0\n")),
    ("config-last-batch", key("last_batch", "kep")),
    ("config-num-workers", key("loading", {"num_workers": 1.5})),
    ("config-target-number", key("model", {"target": 3})),
    # batch sizes and schedules
    ("config-batch-size-zero", key("batch_size", 0)),
    ("config-ramp-equal", key("batch_size", {"DoublingRamp": {**RAMP, "equal": "steps"}})),
    ("config-ramp-old", key("batch_size", {**RAMP, "ramp": "double"})),
    # overrides
    ("config-override-deep", file(GOOD, ".".join("a" * 31) + "=1")),
    ("config-override-index", file(GOOD + "evaluate: [{}]", "evaluate.1.every=1ep")),
    # what cannot be on this run
    # targets
    ("config-import-attribute", lambda: import_target("fractions:Fractoin")),
    ("config-call-argument", lambda: call_target(target("textwrap:TextWrapper", widht=3))),
    ("config-call-missing", lambda: call_target(target("textwrap:dedent"))),
    ("config-call-raised", lambda: call_target(target("fractions:Fraction", numerator="x"))),
    ("config-bind-number", lambda: bound_target(target("math:pi"))),
    ("config-plan-monitor", planned("checkpoint: {monitor: validation/loss}\n")),
    # training
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
    ("config-train-split", trained(evaluate={}, data={"target": "textwrap:wrap",
                                                     "text": "a"})),
    # commands
    ("config-command-unnamed-resume", lambda: unnamed_run_file(Path("runs/a"), "latest")),
    # pictures and reports
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
