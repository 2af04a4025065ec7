"""Kernels that are chosen as on CUDA, on fake tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stretto.memory.prediction.cuda.gpu import GPUS
from stretto.memory.prediction.cuda.kernels import cuda_kernels

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
FORMULA = "bmm"


class Names(TorchDispatchMode):
    """Collects the operations, and the types of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtype = result.dtype if isinstance(result, Tensor) else None
        self.seen.append((func.overloadpacket.__name__, dtype))
        return result

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.seen}


@pytest.fixture
def seen() -> Iterator[Names]:
    names = Names()
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(GPUS["h100"]), names:
        yield names


def heads(number: int = 4, length: int = 16, width: int = 64, dtype: Any = torch.float32) -> Tensor:
    return torch.empty(2, number, length, width, dtype=dtype, requires_grad=True)


ATTENTION: dict[str, tuple[Callable[[], Tensor], str]] = {
    "fp32": (lambda: attend(heads()), EFFICIENT),
    "fp32, dropout": (lambda: attend(heads(), dropout_p=0.1), EFFICIENT),
    "bf16": (lambda: attend(heads(dtype=torch.bfloat16)), FLASH),
    "bf16, mask": (
        lambda: attend(heads(dtype=torch.bfloat16), attn_mask=torch.ones(16, 16).bool()),
        EFFICIENT,
    ),
    "fp32, grouped heads": (
        lambda: functional.scaled_dot_product_attention(
            heads(), heads(2), heads(2), enable_gqa=True
        ),
        FORMULA,
    ),
    "bf16, grouped heads": (
        lambda: functional.scaled_dot_product_attention(
            heads(dtype=torch.bfloat16),
            heads(2, dtype=torch.bfloat16),
            heads(2, dtype=torch.bfloat16),
            enable_gqa=True,
        ),
        FLASH,
    ),
    "fp32, odd heads": (lambda: attend(heads(width=6)), FORMULA),
    "bf16, wide heads": (lambda: attend(heads(width=320, dtype=torch.bfloat16)), EFFICIENT),
    "three dimensions": (lambda: attend(torch.empty(2, 16, 64)), FORMULA),
}


def attend(tensor: Tensor, **more: Any) -> Tensor:
    return functional.scaled_dot_product_attention(tensor, tensor, tensor, **more)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, seen: Names) -> None:
    run, kernel = ATTENTION[name]
    run()
    found = seen.names & {FLASH, EFFICIENT, FORMULA}
    assert found == {kernel}


def test_attention_obeys_switches(seen: Names) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attend(heads(dtype=torch.bfloat16))
    assert not seen.names & {FLASH, EFFICIENT}


def test_old_gpus_have_no_flash_attention() -> None:
    names = Names()
    with FakeTensorMode(), cuda_kernels(GPUS["t4"]), names:
        attend(heads(dtype=torch.float16))
    assert EFFICIENT in names.names


def test_dropout_keeps_a_mask_of_bytes(seen: Names) -> None:
    functional.dropout(torch.empty(8, requires_grad=True), 0.5)
    assert "native_dropout" in seen.names


def test_kernels_are_also_chosen_in_recomputation(seen: Names) -> None:
    tensor = torch.empty(8, requires_grad=True)
    checkpoint(lambda x: functional.dropout(x, 0.5), tensor, use_reentrant=False).sum().backward()
    assert [name for name, _ in seen.seen].count("native_dropout") == 2


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_autocast_is_that_of_cuda(name: str, seen: Names) -> None:
    half = torch.empty(4, 8, dtype=torch.bfloat16)
    with torch.autocast(name, torch.bfloat16):
        assert functional.linear(torch.empty(4, 8), torch.empty(3, 8)).dtype == torch.bfloat16
        for function in (torch.exp, torch.sum, lambda x: functional.layer_norm(x, (8,))):
            assert function(half).dtype == torch.float32
        assert functional.softmax(half, -1).dtype == torch.float32
        assert torch.cat([half, half]).dtype == torch.bfloat16
    assert seen.seen


def test_a_loss_in_bf16_has_a_gradient_in_bf16(seen: Names) -> None:
    logits = torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    assert ("_log_softmax_backward_data", torch.bfloat16) in seen.seen


def test_rms_norm_keeps_its_input_and_a_number_for_each_row(seen: Names) -> None:
    weight = torch.empty(8, requires_grad=True)
    functional.rms_norm(torch.empty(4, 8, requires_grad=True), (8,), weight).sum().backward()
    assert not seen.names & {"pow", "rsqrt", "mean"}
    assert weight.grad is not None


def test_nothing_is_left_and_real_tensors_are_computed_as_ever() -> None:
    real = torch.randn(2, 4, 16, 64)
    expected = attend(real)
    with cuda_kernels(GPUS["h100"]):
        assert torch.equal(attend(real), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert real.bfloat16().exp().dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert real.bfloat16().exp().dtype == torch.bfloat16
    names = Names()
    with FakeTensorMode(), names:
        functional.dropout(torch.empty(8, requires_grad=True), 0.5)
    assert "native_dropout" not in names.names
