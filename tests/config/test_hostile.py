"""Run files that mean harm: each ends with our error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from stretto.config.plans import build_plan
from stretto.config.run import parse_run_file, read_run_file
from stretto.config.yaml import MAX_BYTES
from stretto.errors import ConfigError, StrettoError
from stretto.report import plan_table

GOOD = 'max_duration: 2ep\ndata: {target: "my.data:make", num_samples: 1000}\nbatch_size: 64\n'
NINES = "9" * 90
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, key in zip("abcdefgh", "bcdefghi", strict=True)
)

TEXTS = {
    "object": ("model: !!python/object/apply:os.system ['touch harm']\n", "object"),
    "name": ("model: !!python/name:os.system\n", "object"),
    "module": ("model: !!python/module:os\n", "object"),
    "object as a key": ("? !!python/tuple [1]\n: 1\n", "object"),
    "tag of one's own": ("model: !Model {}\n", "the tag '!Model' would make an object"),
    "binary": ("folder: !!binary aGk=\n", "object"),
    "tag without a name": ("folder: ! runs\n", "object"),
    "tag that is declared": ("%TAG !e! tag:a,2000:\n---\na: !e!b c\n", "object"),
    "directive": ("%YAML " + "9" * 5000 + ".1\n---\na: 1\n", "read"),
    "escape beyond Unicode": ('folder: "\\U00110000"\n', "read"),
    "escape beyond C": ('folder: "\\UFFFFFFFF"\n', "read"),
    "surrogate": ('folder: "\\ud800"\n', "surrogate"),
    "null character": ("folder: a\0b\n", "character"),
    "billion laughs": (LAUGHS, "10000"),
    "alias of itself": ("a: &a [*a]\n", "deeper"),
    "merge": ("a: &a {b: 1}\nc: {<<: *a}\n", "merges"),
    "twice": ("seed: 1\nseed: 2\n", "twice"),
    "twice, deep": ("model: {target: 'a:b', x: {y: 1, y: 2}}\n", "twice"),
    "deep brackets": ("a: " + "[" * 50_000, "deeper"),
    "deep braces": ("a: " + "{b: " * 20_000, "deeper"),
    "deep dashes": ("a:\n" + "- " * 40_000, "deeper"),
    "deep lines": ("".join(" " * i + "b:\n" for i in range(400)), "deeper"),
    "question marks": ("? " * 40_000, "deeper"),
    "many values": ("a: [" + "1," * 40_000 + "]", "10000"),
    "many keys": ("".join(f"k{i}: 1\n" for i in range(4_000)), "there is no such key"),
    "long": ("x" * MAX_BYTES, "bytes"),
    "long key": ("k" * 90_000 + ": 1\n", "expected"),
    "long seed": ("seed: " + "9" * 5_000 + "\n", "integer"),
    "large seed": (f"seed: {NINES}\n", "2.63"),
    "infinite": ("scale_schedule: .inf\n", "number"),
    "not a number": ("clip_norm: .nan\n", "number"),
    "overflow": ("clip_norm: 1e999\n", "number"),
    "target of code": ("model: {target: '__import__(\"os\"):system'}\n", "is not of the form"),
    "target of a path": ("model: {target: '../harm:make'}\n", "is not of the form"),
}


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_hostile_texts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_file(text if text.startswith(("%", "?")) else GOOD + text)


def test_a_message_moves_no_cursor() -> None:
    escape = '"\\e[2J\\r\\n": 1'
    for text, overrides in (
        (f"{escape}\n", ()),
        (f"log: {{{escape}}}\n", ()),
        (f"data: {{target: {escape.partition(':')[0]}}}\n", ()),
        (f"folder: [{escape.partition(':')[0]}]\n", ()),
        ("model: {a\n b:c}\n", ()),
        (f"checkpoint: [{{{escape}}}]\n", ()),
        ("", ("\x1b[2J\r\n=1",)),
        ("", ("\x1b[2J\r\n=",)),
        ("", ("log.\x1b[2J\r\n=1",)),
        ("", ("x\x1b[2J\r\n='",)),
        ("", ("\x1b[2J\r\n",)),
    ):
        head = GOOD.splitlines()[0] if text.startswith("data") else GOOD
        with pytest.raises(ConfigError) as caught:
            parse_run_file(f"{head}\n{text}", overrides=overrides)
        assert all(line.isprintable() for line in str(caught.value).split("\n")), caught.value


BYTES = {
    "UTF-16": (GOOD.encode("utf-16"), "utf-8"),
    "UTF-16 without a mark": (GOOD.encode("utf-16-le"), "character"),
    "UTF-32": (GOOD.encode("utf-32-be"), "character"),
    "Latin-1": (GOOD.replace("my", "mé").encode("latin-1"), "utf-8"),
    "overlong": (b"a: \xc0\xaf", "utf-8"),
    "surrogate": (b"a: \xed\xa0\x80", "utf-8"),
    "zip": (b"PK\x03\x04" + bytes(100), "character"),
    "pickle": (b"\x80\x04\x95\x0f", "utf-8"),
}


@pytest.mark.parametrize(("data", "message"), BYTES.values(), ids=BYTES)
def test_hostile_bytes(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_run_file(path)


def test_a_file_without_end_is_read_no_further_than_it_may_be() -> None:
    with pytest.raises(ConfigError, match="file"):
        read_run_file("/dev/zero")


HARMFUL = """
max_duration: 2ep
model: {target: "harm:touch"}
data: {target: "harm:touch", num_samples: 1000}
optimizer: {target: "harm:touch", lr: 0.1}
loss: {target: "harm:touch"}
batch_size: 64
callbacks: [{target: "harm:touch"}]
loading: {collate_fn: {target: "harm:touch"}}
evaluate: {metrics: {a: {target: "harm:touch"}}, data: {target: "harm:touch"}}
log: {loggers: [{target: "harm:touch"}]}
"""


def test_what_reading_and_planning_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harm.py").write_text("def touch(*_, **__):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_run_file(HARMFUL)
    build_plan(config)
    assert "harm" not in sys.modules
    for override in (
        "batch_size={target: 'harm:touch'}",
        "schedules.lr={target: 'harm:touch'}",
        "rule={target: 'harm:touch'}",
        "data.num_samples=null",
    ):
        config = parse_run_file(HARMFUL, overrides=[override])
        assert "harm" not in sys.modules
        with contextlib.suppress(StrettoError):
            build_plan(config)
        assert sys.modules.pop("harm", None) is not None, override


OVERRIDES = {
    "index": ("a." + "9" * 5_000 + "=1", "there is no such key"),
    "index of a list": ("evaluate." + "9" * 5_000 + ".every=1ep", "evaluate is a list of 1"),
    "deep": ("data." + ".".join("a" * 20_000) + "=1", "its key has 20001 parts"),
    "bytes": ("data.\udcff=1", "key=value"),
    "bytes in the value": ("data.x=\udcff", "character"),
    "deep value": ("data.x=" + "[" * 20_000, "deeper"),
    "tag": ("model=!!python/name:os.system", "object"),
    "long": ("folder=" + "x" * 200_000, "bytes"),
    "size in batches": ("batch_size=64Kba", "a time in batches; write .*'64Ktok'"),
    "size in epochs": ("batch_size=1ep", "a time in epochs; write .*'64Ktok'"),
    "size of no unit": ("batch_size=64K", "not a number of samples or tokens; write"),
    "steps in batches": ("batch_size='0tok:64Kba'", "a time in batches"),
    "two units": ("batch_size='0tok:64Ktok 1Btok:64'", "in tokens and 64 in samples"),
    "bound in another unit": (
        "batch_size={AtMost: {policy: 64Ktok, size: 8}}",
        "in tokens and 8 in samples",
    ),
    "long size": ("batch_size=" + "9" * 195 + "Ttok", "samples or tokens"),
    "rule in batches": ("rule={sqrt: 4Mba}", "a time in batches"),
}


@pytest.mark.parametrize(("override", "message"), OVERRIDES.values(), ids=OVERRIDES)
def test_hostile_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run_file(GOOD + "evaluate: [{}]\n", overrides=[override])


RAMP = "batch_size={LinearRamp: {start: 1, end: 100000000, over: "
ABSURD = {
    "short": ("max_duration=1e-150ep",),
    "long": ("max_duration=1e150ep", "log.every=1sp"),
    "long in batches": ("max_duration=1e150ba", "batch_size=" + NINES),
    "large batches": ("batch_size=" + NINES, "micro_batch_size=1"),
    "large batches in tokens": ("batch_size=" + NINES + "tok", "data.tokens_per_sample=4096"),
    "tiny increments in tokens": (
        "batch_size={LinearRamp: {start: 4096tok, end: 2Mtok, over: 50%, increment: 2tok}}",
        "data.tokens_per_sample=4096",
        "data.num_samples=1_000_000_000_000",
    ),
    "continuous growth in tokens": (
        "batch_size={DecayGrowth: {decay: {Cosine: {}}, size: 64Ktok, factor: continuous}}",
        "data.tokens_per_sample=4096",
        "data.num_samples=1_000_000_000_000",
    ),
    "many samples": ("data.num_samples=" + NINES, "evaluate.every=1e-190dur"),
    "steep ramp": (RAMP.replace("100000000", NINES) + "1ep}}", "data.num_samples=" + NINES),
    "steep ramp of equal batches": (
        RAMP.replace("100000000", NINES) + "1ep, equal: batches}}",
        "data.num_samples=" + NINES,
    ),
    "tiny steps": ("schedules.lr={StepDecay: {every: 1e-100ep, gamma: 0.5}}",),
    "tiny epochs": ("data.num_samples=1", "max_duration=1e15ep", "last_batch=carry"),
    "rate": ("schedules.lr=1e308", "optimizer={target: 'torch.optim:SGD', lr: 1e308}"),
}


@pytest.mark.parametrize("overrides", ABSURD.values(), ids=ABSURD)
def test_absurd_numbers_have_a_plan(overrides: tuple[str, ...]) -> None:
    run_file = parse_run_file(GOOD, overrides=overrides)
    planned = build_plan(run_file)
    assert 1 <= len(planned.stages) < 1_000
    assert len(plan_table(planned)) < 50_000


REFUSED = {
    "scale": (("scale_schedule=1e308",), "it takes more than 200 digits"),
    "length": (
        ("max_duration=1e199ep",),
        r"more than 200 digits; write .* \(max_duration on the command line\)",
    ),
    "length in batches": (
        ("max_duration=1e199ba", "batch_size=" + NINES),
        r"more than 200 digits; write .* \(max_duration on the command line\)",
    ),
    "scaled interval": (
        ("scale_schedule=1e150", "log.every=1e150sp"),
        r"more than 200 digits; .* \(log\.every on the command line\)",
    ),
    "tokens of unknown samples": (("batch_size=64Ktok",), "set data.tokens_per_sample|lengths"),
    "rule of unknown samples": (("rule={sqrt: 64Ktok}",), "reference is in tokens"),
    "less than a sample": (
        ("batch_size=64tok", "data.tokens_per_sample=4096"),
        "less than one sample of 4,096 tokens",
    ),
    "ranks": (("world_size=" + NINES,), "each rank needs at least one sample"),
    "growth": (("schedules.lr={Exponential: {gamma: 1e308, every: 1ba}}",), "beyond all floats"),
    "endless ramp": (
        (RAMP + "1e50ep}}", "max_duration=1e60ep"),
        "its batch size changes more than 100,000 times; write a larger 'increment'",
    ),
    "endless ramp in batches": (
        (RAMP + "1e50ba}}", "max_duration=1e60ba"),
        "its batch size changes more than 100,000 times",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_absurd_numbers_without_a_plan(overrides: tuple[str, ...], message: str) -> None:
    run_file = parse_run_file(GOOD, overrides=overrides)
    with pytest.raises((ConfigError, ValueError), match=message):
        build_plan(run_file)
