"""The exception tree: drawn in its docstring, each leaf also a builtin."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import stretto
from stretto import errors
from stretto.errors import (
    ConfigError,
    ConversionError,
    Place,
    StrettoError,
    cannot,
    nearest,
    shown,
    without_credentials,
)

SOURCE = Path(stretto.__file__).parent

LEAVES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, StrettoError) and value is not StrettoError
]


@pytest.mark.parametrize("error", LEAVES)
def test_each_leaf_is_drawn_with_its_builtin(error: type[StrettoError]) -> None:
    assert error.__bases__[0] is StrettoError
    builtin = error.__bases__[1].__name__
    assert re.search(rf"── {error.__name__} +\({builtin}\)", errors.__doc__ or "")


def test_nothing_else_is_drawn() -> None:
    drawn = re.findall(r"── (\w+)", errors.__doc__ or "")
    assert drawn == [error.__name__ for error in LEAVES]


PLACE = Place("batch_size", file="run.yaml", line=3)
ERROR = ConversionError(
    cannot("read 'end=5'", why="it is odd", instead="write end=6", where="here")
)


def test_an_error_has_the_fields_of_its_message() -> None:
    assert ERROR.message.what == "read 'end=5'"
    assert ERROR.message.why == "it is odd"
    assert ERROR.message.instead == "write end=6"
    error = ERROR.recast(ConfigError, where=PLACE)
    assert error.message.where == (Place("here"), PLACE)
    places = "(here) (batch_size in run.yaml, line 3)"
    assert str(error) == f"cannot read 'end=5': it is odd; write end=6 {places}"


def test_an_error_with_several_messages_shows_each_in_a_line() -> None:
    message = ERROR.message
    assert str(ConfigError(message, message)) == f"{message}\n{message}"


@pytest.mark.parametrize("error", LEAVES)
def test_errors_can_be_sent_to_other_processes(error: type[StrettoError]) -> None:
    sent = pickle.loads(pickle.dumps(error(ERROR.message)))
    assert type(sent) is error
    assert sent.message == ERROR.message


READERS = {"startswith", "endswith", "removeprefix", "replace", "partition", "split", "splitlines"}
PATTERNS = {"sub", "search", "match", "fullmatch", "findall", "finditer", "split"}


def reads_a_message(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call takes the text of one of the caught errors `names` apart."""
    if not isinstance(call.func, ast.Attribute):
        return False
    of_re = isinstance(call.func.value, ast.Name) and call.func.value.id == "re"
    read = call.args if of_re and call.func.attr in PATTERNS else [call.func.value]
    if not of_re and call.func.attr not in READERS:
        return False
    texts = [
        one.args[0]
        for node in read
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "str"
    ]
    return any(isinstance(text, ast.Name) and text.id in names for text in texts)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_code_reads_the_message_of_an_error_of_ours(path: Path) -> None:
    ours = {error.__name__ for error in [*LEAVES, StrettoError]}
    for handler in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type:
            kinds = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
            if kinds & ours:
                calls = (node for node in ast.walk(handler) if isinstance(node, ast.Call))
                assert not [ast.unparse(c) for c in calls if reads_a_message(c, {handler.name})]


def test_guesses_what_was_meant() -> None:
    assert nearest("micro-batch-size", ["batch_size", "micro_batch_size"]) == "micro_batch_size"
    assert nearest("xyz", ["batch_size"]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3epoch", "'3epoch'"),
        (None, "None"),
        ([1, 2], "[1, 2]"),
        (10**5000, "a very large int"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (list(range(1000)), str(list(range(1000)))[:77] + "..."),
    ],
    ids=["text", "none", "list", "huge", "long text", "long list"],
)
def test_values_in_messages_are_short(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(shown(value)) <= 80


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://KEY:SEC/RET+x@bucket/run", "s3://bucket/run"),
        ("'ftp://me:p@ss@host/x'", "'ftp://host/x'"),
        ("https://token@host/x", "https://host/x"),
        ("az://place/x?sv=1&sig=a%2B", "az://place/x"),
        ("simplecache::s3://KEY:SECRET@bucket", "simplecache::s3://bucket"),
        *(
            (same, same)
            for same in ("sftp://me@host:22/a@b", "abfs://place@account/x", "s3://b/a?")
        ),
        ("https://host/x#access_token=1a2b", "https://host/x"),
        ("AccountName=a;AccountKey=1a2b3c4d==;x", "AccountName=a;AccountKey=;x"),
        ("token=hf_abcdefgh is not known", "token= is not known"),
        *((same, same) for same in ("num_tokens=1000000", "pad_token=1000000")),
        *((same, same) for same in ("a: b@c", "http://host:80/run@1", "s3://bucket/run:1@x")),
    ],
)
def test_no_password_of_an_address_is_said(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
    assert str(StrettoError(cannot(f"reach {text}", why="it is not there", instead="x"))) == (
        f"cannot reach {shown}: it is not there; x"
    )
