"""What a message says to write exists: calls, arguments, commands, extras, keys of run files.

`test_advice.py` executes times and arguments in their places. Here are all texts of the source,
also of messages that no test raises, and all keys of a run file.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.docs import test_commands
from torch import nn
from torch.distributed import device_mesh, fsdp

import stretto
from stretto import batching, checkpoint, data, distributed, memory, schedules, timing
from stretto.config import parse_run_file, run_file_schema
from stretto.errors import ConfigError
from stretto.training import algorithms

SOURCE = Path(stretto.__file__).parents[1]
FILES = [
    path
    for name in ("stretto", "phantomgpu")
    for path in sorted((SOURCE / name).rglob("*.py"))
    if path.name not in ("standins.py", "out_of_memory.py")  # C, and patterns
]
OURS = (timing, schedules, batching, data, distributed, memory, checkpoint, algorithms)
THEIRS = (nn, torch.optim, torch.utils.data, torch.distributed, fsdp)
NAMES: dict[str, Any] = {
    **{name: getattr(module, name) for module in THEIRS for name in dir(module)},
    **{name: getattr(module, name) for module in OURS for name in module.__all__},
    **{name: getattr(stretto, name) for name in stretto.__all__},
    "torch": torch,
    "stretto": stretto,
    "trainer": stretto.Trainer,
    "model": nn.Module,
    "init_device_mesh": device_mesh.init_device_mesh,
    "build_plan": stretto.plan,
}
CALL = re.compile(r"(?<![\w.])(?P<name>[A-Z_a-z][\w.]*)\((?P<given>(?:[^()]|\([^()]*\))*)\)")
COMMAND = re.compile(
    r"(?P<quote>['`])(?P<quoted>(?:stretto|phantomgpu|make|torchrun) [^'`]+)(?P=quote)"
    r"|(?P<bare>pip install '[^']+'|(?:stretto|phantomgpu) (?:train|plan|report|setup) [^;,()]+"
    r"|torchrun --[^;,()]+)"
)
TREES = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
DEFINED = {
    node.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
}
METHODS = {*DEFINED, *dir(builtins), *NAMES, *dir(nn.Module), *dir(torch.Tensor)}
METHODS |= {*dir(torch.optim.Optimizer), "accumulate", "setup", "criterion", "shard"}
METHODS |= {"Accuracy", "merge_state", "compute"}
"""Of ours, of torch, and of the frameworks that adapters speak of."""
GAP = "2"


def literal(node: ast.AST) -> str | None:
    """The text of a constant, or of an f-string with something in its gaps."""
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else GAP for one in node.values]
        return "".join(map(str, parts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a file that are no docstrings."""
    nodes = list(ast.walk(tree))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner |= {id(one) for node in nodes if isinstance(node, ast.JoinedStr) for one in node.values}
    for node in nodes:
        text = literal(node)
        if text is not None and " " in text and id(node) not in inner:
            yield text


def wrong_call(name: str, given: str, names: Mapping[str, Any]) -> str | None:
    """Why a call that a message writes cannot be made, if so."""
    try:
        call = ast.parse(f"f({given})", mode="eval").body
    except SyntaxError:
        return None  # the gap of an f-string was more than a value
    assert isinstance(call, ast.Call)
    root, *rest = name.split(".")
    found: Any = names.get(root)
    if found is None:
        return None if name.rpartition(".")[2] in METHODS else f"nothing is named {name}"
    for part in rest:
        if not hasattr(found, part):
            return f"{name} has no {part}"
        found = getattr(found, part)
    known = inspect.signature(found).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return None
    unknown = [one.arg for one in call.keywords if one.arg not in known]
    return f"{name} takes no {unknown}" if unknown else None


def wrong(text: str, names: Mapping[str, Any] = NAMES) -> list[str]:
    """What a text says to write that does not exist."""
    calls = [wrong_call(call["name"], call["given"], names) for call in CALL.finditer(text)]
    found = [one for one in calls if one]
    for command in COMMAND.finditer(text):
        words = shlex.split(command["quoted"] or command["bare"])
        try:
            if words[0] == "torchrun":  # whatever it starts
                words += ["stretto", "--version"]
            if words[0] in test_commands.PROGRAMS:
                test_commands.check_ours(words[0], words[1:], is_whole=False)
            elif f"[{GAP}]" not in command[0]:  # any extra
                test_commands.check(words)
        except (Exception, SystemExit) as error:  # noqa: BLE001  typer hides its own
            found.append(f"{command[0]}: {error!r}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_a_file_says_to_write_exists(path: Path) -> None:
    names = {} if "integrations" in path.parts else NAMES  # they speak of the host's `Trainer`
    assert [one for text in texts(TREES[path]) for one in wrong(text, names)] == []


@pytest.mark.parametrize(
    "text",
    [
        "write Cosin(end=0.1)",
        "write Cosine(ends=0.1)",
        "call trainer.resumes()",
        "run 'make uplot', or install a wheel",
        "see 'stretto rapport runs/a'",
        "run pip install '.[plots]'",
        "call note_the_metric() first",
    ],
)
def test_what_does_not_exist_is_noticed(text: str) -> None:
    assert len(wrong(text)) == 1


EXTRA = re.compile(r"(?:import_optional|missing)\([^()]*, \"(?P<extra>\w+)\"\)")


def test_every_extra_that_the_source_names_is_in_the_project() -> None:
    named = {one for path in FILES for one in EXTRA.findall(path.read_text("utf-8"))}
    assert named
    assert named <= test_commands.EXTRAS


FILE: dict[str, Any] = {
    "max_duration": "9ep",
    "data": {"target": "my.data:make", "num_samples": 100},
    "batch_size": 8,
}
SCHEMA = run_file_schema()
SECTIONS = {
    "data": "Data",
    "optimizer": "Optimizer",
    "loading": "Loading",
    "stepping": "Stepping",
    "evaluate": "Evaluate",
    "checkpoint": "Checkpointing",
    "log": "Log",
}
KEYS = [(key,) for key in SCHEMA["properties"]] + [
    (key, inner)
    for key, kind in SECTIONS.items()
    for inner in SCHEMA["$defs"][kind].get("properties", ())
]
JUNK = [-1, 0, 2.5, 1e99, True, "", "x", "3epoch", "tru", [], [1], {}, {"x": 1}, {"target": 1}]
MAPPING = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")


def with_key(key: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A run file in which a key has this value."""
    if len(key) == 1:
        return {**FILE, key[0]: value}
    section = FILE.get(key[0]) or ({"target": "a:b"} if key[0] == "optimizer" else {})
    return {**FILE, key[0]: {**section, key[1]: value}}


def complaints(key: tuple[str, ...], value: Any) -> list[Any]:
    """What a run file with this value is refused for, at that key."""
    try:
        parse_run_file(yaml.safe_dump(with_key(key, value)))
    except ConfigError as error:
        name = ".".join(key)
        return [one for one in error.messages if any(place.key == name for place in one.where)]
    return []


def advised(instead: str) -> list[Any]:
    """The values that a message says to write: in quotes, in braces, and numbers."""
    rest, found = instead, []
    for mapping in MAPPING.findall(instead):
        found.append(yaml.safe_load(mapping))
        rest = rest.replace(mapping, "")
    quoted = [one for one in re.findall(r"'([^']*)'", rest) if "..." not in one]
    found += [yaml.safe_load(one) if ": " in one else one for one in quoted]
    rest = re.sub(r"'[^']*'|\([^)]*\)", "", rest)
    found += [yaml.safe_load(one) for one in re.findall(r"(?<![\w.])\d[\w.]*%?", rest)]
    found += [word == "true" for word in re.findall(r"\b(true|false)\b", rest)]
    return [[one] for one in found] if "a list" in instead else found


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_a_value_that_is_advised_for_a_key_is_accepted_there(key: tuple[str, ...]) -> None:
    # What the steps of sequence_length say is about a time inside, which any unit might be.
    junk = (
        JUNK if key != ("sequence_length",) else [one for one in JUNK if not isinstance(one, dict)]
    )
    refused = [one for value in junk for one in complaints(key, value)]
    answers = {
        json.dumps(one): message.instead for message in refused for one in advised(message.instead)
    }
    assert {one: said for one, said in answers.items() if complaints(key, json.loads(one))} == {}
