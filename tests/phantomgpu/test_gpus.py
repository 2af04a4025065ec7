"""Kinds of GPU, and how sizes are written."""

from __future__ import annotations

import pytest

from phantomgpu import GPUS, UnknownGPUError
from phantomgpu.gpus import GIB, context_bytes, driver_facts, find_gpu, parse_memory


@pytest.mark.parametrize(
    ("name", "key"),
    [("h100", "h100"), ("H100-80GB", "h100"), ("NVIDIA RTX 4090", "rtx4090"), ("4090", "rtx4090")],
)
def test_a_kind_is_found_by_names_that_people_write(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownGPUError, match="h100"):
        find_gpu("voodoo2")


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * GIB), ("24 GB", 24 * 10**9), ("1.5gb", 15 * 10**8), ("512MiB", 1 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "much", "-1GiB", "1XB", "40", "40G", "1.2.3GiB", 400 * "9" + "GiB", "4٤GiB"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_memory(text)


@pytest.mark.parametrize("key", GPUS)
def test_facts_have_the_form_that_the_stand_ins_read(key: str) -> None:
    gpu = GPUS[key]
    facts = driver_facts(gpu, memory=1 << 30, context=context_bytes(gpu), devices=2)
    numbers, name = facts.split()[:12], facts.split(maxsplit=12)[12]
    assert all(number.isdecimal() for number in numbers)
    assert name == gpu.name
    assert len(name) < 64
    assert gpu.key == key


def test_a_program_sees_less_than_the_nominal_memory() -> None:
    assert GPUS["h100"].memory < 80
    assert all(context_bytes(gpu) < gpu.memory * GIB for gpu in GPUS.values())
