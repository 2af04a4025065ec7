"""Every input that fuzzing has kept is read or refused; so are those that hypothesis makes up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")


def load(name: str) -> ModuleType:
    """Import a file beside this one; tests are no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


targets = load("targets")
TARGETS: dict[str, Callable[[bytes], None]] = targets.TARGETS


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    yield
    targets.remove_checkpoint()


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_read_or_refused(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert len(files) >= 10
    for file in files:
        TARGETS[name](file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_damaged_inputs_of_the_corpus_are_read_or_refused(name: str, data: st.DataObject) -> None:
    files = sorted((CORPUS / name).iterdir())
    content = bytearray(data.draw(st.sampled_from(files)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 8)))
        content[start:end] = data.draw(st.binary(max_size=8))
    TARGETS[name](bytes(content))


@pytest.mark.parametrize("name", TARGETS)
@given(content=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(name: str, content: bytes) -> None:
    TARGETS[name](content)
