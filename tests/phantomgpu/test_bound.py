"""The least seconds of a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phantomgpu import GPUS
from phantomgpu.bound import bound_of, class_of, formulas, line_of, moved, unit_of

H100 = GPUS["h100"]
MIB = 1 << 20


def work(*calls: tuple[Any, ...], **values: Any) -> dict[str, Any]:
    return {"calls": calls, "tokens": 0, "inside": 0.0, "between": 0.0, **values}


def test_a_kernel_takes_what_it_computes_or_what_it_moves() -> None:
    product = (0, "matrix products", "half", 989.4e12, 0, 0, 2)
    assert bound_of(work(product), H100)["seconds"] == pytest.approx(2)
    copy = (0, "other kernels", "", 0, 50 * MIB + 335_000_000_000, 60 * MIB, 1)
    assert bound_of(work(copy), H100)["seconds"] == pytest.approx(0.1, rel=1e-3)
    both = (0, "matrix products", "half", 989.4e12, 335_000_000_000, 0, 1)
    assert bound_of(work(both), H100)["seconds"] == pytest.approx(1)
    made = bound_of(work(product, copy), H100)
    assert made["seconds"] == pytest.approx(2.1, rel=1e-3)
    assert sum(made["classes"].values()) == pytest.approx(made["seconds"])


def test_what_the_cache_can_hold_is_not_counted() -> None:
    assert bound_of(work((0, "other kernels", "", 0, 49 * MIB, 50 * MIB, 9)), H100)["seconds"] == 0


def test_streams_may_overlap_but_share_the_units() -> None:
    first, second = ((at, "matrix products", "half", 989.4e12, 0, 0, 1) for at in (1, 2))
    assert bound_of(work(first, second), H100)["seconds"] == pytest.approx(2)
    copies = (2, "other kernels", "", 0, 335_000_000_000, 0, 1)
    assert bound_of(work(first, copies), H100)["seconds"] == pytest.approx(1)


def test_communication_may_overlap() -> None:
    product = (0, "matrix products", "half", 989.4e12, 0, 0, 1)
    made = bound_of(work(product, inside=45e9, between=100e9), H100)
    assert made["links"] == pytest.approx(2)
    assert made["seconds"] == pytest.approx(2)
    assert bound_of(work(product, inside=45e9), H100)["seconds"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "unit", "teraflops"),
    [
        ("h100", "half", 989.4),
        ("h100", "tf32", 494.7),
        ("h100", "single", 66.9),
        ("h100", "byte", 1978.8),
        ("v100-32", "tf32", 15.7),
        ("rtx4090", "half", 1.2 * 165.2),
    ],
)
def test_peaks(kind: str, unit: str, teraflops: float) -> None:
    call = (0, "matrix products", unit, teraflops * 1e12, 0, 0, 1)
    assert bound_of(work(call), GPUS[kind])["seconds"] == pytest.approx(1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_faster_kind_has_no_larger_bound(gpu: Any) -> None:
    call = (0, "matrix products", "half", 1e12, 10**9, 10**9, 3)
    slow, fast = bound_of(work(call), gpu), bound_of(work(call), replace(gpu, half=2 * gpu.half))
    assert 0 < fast["seconds"] <= slow["seconds"]


def kernel(base: str, **values: Any) -> Any:
    return SimpleNamespace(**{"base": base, "overwrites": False, "is_out": False} | values)


def test_bytes_of_a_storage_are_counted_once_and_targets_twice() -> None:
    whole, other = torch.empty(4, 1000), torch.empty(4, 1000)
    assert moved(kernel("mul"), [], [whole, whole], [other]) == (16000, 16000)
    assert moved(kernel("add"), [], [whole[:1].expand(4, 1000)], []) == (16000, 0)
    assert moved(kernel("add_"), [whole], [whole], [whole]) == (16000, 16000)
    assert moved(kernel("fill_", overwrites=True), [whole], [whole], [whole]) == (0, 16000)
    assert moved(kernel("_foreach_copy_"), [whole], [whole, other], []) == (16000, 16000)
    assert moved(kernel("_fused_adamw_"), [whole], [whole], []) == (16000, 8000)
    table = torch.empty(1000, 8)
    assert moved(kernel("index_select"), [], [table], [torch.empty(2, 8)]) == (0, 64)
    assert moved(kernel("index_add_"), [table], [table], [table]) == (0, 0)


def test_classes_and_units() -> None:
    names = ("mm", "_scaled_dot_product_flash_attention", "convolution_backward", "_foreach_add_")
    expected = ["matrix products", "attention", "convolutions", "optimizer"]
    assert [class_of(name) for name in names] == expected
    assert class_of("gelu") == "other kernels"
    assert unit_of("mm", torch.bfloat16) == "half"
    assert unit_of("mm", torch.float32) == "single"
    assert unit_of("_slow_conv2d_forward", torch.float32) == "tf32"
    assert unit_of("mm", torch.float64) == "single"
    assert unit_of("_scaled_mm", torch.float8_e4m3fn) == "byte"


def test_formulas_are_those_of_torch() -> None:
    made = formulas()
    assert made["mm"](torch.empty(2, 3), torch.empty(3, 5)) == 60
    assert {"addmm", "bmm", "convolution_backward", "_addmm_activation"} <= set(made)


def test_the_line_has_a_ratio_beside_each_number() -> None:
    line = line_of(bound_of(work((0, "optimizer", "", 0, 10**11, 0, 1), tokens=4096), H100))
    assert "tokens/s" in line
    assert "percent of such a bound" in line
    assert "steps/s" in line_of(bound_of(work((0, "optimizer", "", 0, 10**11, 0, 1)), H100))
