"""Kinds of GPU, and how sizes are written."""

from __future__ import annotations

import pytest

from phantomgpu import GPU, GPUS, UnknownGPUError
from phantomgpu.gpus import _LIMITS, GIB, context_bytes, driver_facts, find_gpu, parse_memory


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        ("H100-80GB", "h100"),
        ("NVIDIA RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("4060 Ti 16GB", "rtx4060ti-16"),
        ("rtx 4060 ti 8gb", "rtx4060ti-8"),
        ("3080-12GiB", "rtx3080-12"),
        ("Tesla V100 16GB", "v100-16"),
        ("A100-80GB", "a100-80"),
    ],
)
def test_a_kind_is_found_by_names_that_people_write(name: str, key: str) -> None:
    assert find_gpu(name) is GPUS[key]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownGPUError, match="h100"):
        find_gpu("voodoo2")


SOLD_TWICE = ("a100", "v100", "p100", "h20", "gh200", "3060", "3080", "4060 Ti", "RTX 5060 Ti")


@pytest.mark.parametrize("name", SOLD_TWICE)
def test_a_name_of_two_sizes_is_refused_with_both(name: str) -> None:
    with pytest.raises(UnknownGPUError) as caught:
        find_gpu(name)
    both = str(caught.value).rpartition("write ")[2].split(" or ")
    first, second = map(find_gpu, both)
    assert first.memory < second.memory
    for kind in (first, second):
        size = kind.key.partition("-")[2]
        assert {find_gpu(f"{name} {size}GB"), find_gpu(f"{name}-{size}")} == {kind}


def test_every_key_is_the_name_of_its_own_kind() -> None:
    for key, kind in GPUS.items():
        assert find_gpu(key) is kind
    keys = [key.partition("-")[0] for key in GPUS]
    alone = {key for key in GPUS if "-" in key and keys.count(key.partition("-")[0]) == 1}
    assert not alone


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


NOMINAL = (8, 10, 12, 16, 24, 32, 40, 48, 80, 96, 141, 144, 180, 186, 288)
"""GB on the boxes of the kinds."""


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_number_of_a_kind_is_plausible(gpu: GPU) -> None:
    box = min(size for size in NOMINAL if size >= gpu.memory * 0.99)
    assert 0.9 * box * 10**9 < gpu.memory * GIB <= box * GIB
    assert context_bytes(gpu) < gpu.memory * GIB / 10
    assert gpu.source in ("message", "printed", "nominal")
    assert gpu.capability in _LIMITS
    assert 20 <= gpu.processors <= 200
    assert 2 <= gpu.cache <= 192
    assert gpu.single < gpu.half <= 40 * gpu.single
    assert 240 <= gpu.bandwidth <= 8000
    assert 16 <= gpu.link <= 900
    assert gpu.network <= gpu.link or gpu.link < 50  # PCIe
    if "GeForce" in gpu.name:  # sums of half-precision products in fp32 run at half rate
        assert gpu.half == pytest.approx(2 * gpu.single, rel=0.01)


@pytest.mark.parametrize(
    ("name", "why"),
    [("MI300X", "ROCm"), ("TPU-v5e", "CUDA"), ("M3 Max", "mps"), ("RTX 4080 Laptop", "laptop")],
)
def test_what_cannot_be_played_is_refused_with_a_reason(name: str, why: str) -> None:
    with pytest.raises(UnknownGPUError, match=why):
        find_gpu(name)
