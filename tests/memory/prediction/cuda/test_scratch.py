"""Memory that kernels take for themselves, held to what torch's allocator saw on the phantom."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.memory.prediction.cuda.gpu import GPUS
from stretto.memory.prediction.cuda.reductions import reduction_scratch
from stretto.memory.prediction.cuda.scratch import argument_copies, kernel_scratch, result_bytes

H100 = GPUS["h100"]
aten = torch.ops.aten


# torch 2.13 on an H100: rows, columns, reduced dimensions, bytes of an element, allocated blocks.
@pytest.mark.parametrize(
    ("shape", "dims", "item_bytes", "blocks"),
    [
        ((1000, 64), [0], 4, []),
        ((4096, 512), [0], 4, [16_777_216, 16]),
        ((4096, 512), [0], 2, [16_777_216, 16]),
        ((16384, 768), [0], 4, [100_663_296, 24]),
        ((16384, 3072), [0], 4, [138_412_032, 96]),
        ((16384, 50304), [0], 2, [412_090_368, 1572]),
        ((16384, 50304), [0], 4, [206_045_184, 1572]),  # in two halves of 32-bit offsets
        ((100_000, 8), [0], 4, [25_088, 4]),
        ((4096, 512), [1], 4, []),
        ((4096, 512), [0, 1], 4, [1024, 4]),
        ((8, 512, 16, 64), [0, 1], 4, [33_554_432, 32]),
        ((8, 512, 16, 64), [0, 2], 4, []),
        ((2188, 256), [0], 4, [4_587_520, 8]),
    ],
)
def test_reductions(
    shape: tuple[int, ...], dims: list[int], item_bytes: int, blocks: list[int]
) -> None:
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    found = reduction_scratch(shape, strides, dims, item_bytes=item_bytes, gpu=H100)
    assert [count for count in found if count] == blocks


def test_scratch_saturates_and_depends_on_the_gpu() -> None:
    def of(rows: int, gpu: str = "h100") -> int:
        return sum(reduction_scratch((rows, 512), (512, 1), [0], item_bytes=4, gpu=GPUS[gpu]))

    assert of(1 << 16) == of(1 << 17) > of(4096) > 0
    assert of(1 << 16, "a100") < of(1 << 16)


def heads(*shape: int, dtype: Any) -> Tensor:
    batch, number, length, width = shape
    return torch.empty(batch, length, number, width, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("dtype", "shape", "blocks"),
    [
        (torch.bfloat16, (33, 4, 256, 64), [135_168, 8_659_200]),
        (torch.bfloat16, (4, 8, 100, 32), [12_800, 1_049_600]),
        (torch.bfloat16, (2, 4, 64, 96), [2_048, 524_416]),
        (torch.bfloat16, (1, 2, 512, 256), [4_096, 3_146_240]),
        (torch.float32, (2, 4, 64, 96), [196_608, 2_048, 2_048, 2_048, 524_544]),
        (torch.float32, (33, 4, 256, 64), [8_650_752, 135_168, 135_168, 135_168, 8_659_200]),
    ],
)
def test_memory_efficient_attention(dtype: Any, shape: tuple[int, ...], blocks: list[int]) -> None:
    with FakeTensorMode():
        query = heads(*shape, dtype=dtype)
        call = aten._scaled_dot_product_efficient_attention_backward.default
        groups = kernel_scratch(call, (query, query, query, query), None, H100)
    assert [count for group in groups for count in group if count] == blocks


@pytest.mark.parametrize(
    ("shape", "key_heads", "blocks"),
    [
        ((2, 4, 256, 64), 4, [8_192, 524_288]),
        ((2, 4, 64, 96), 4, [4_096, 393_216]),
        ((2, 32, 2048, 128), 8, [524_288, 67_108_864, 33_554_432, 33_554_432]),
    ],
)
def test_flash_attention(shape: tuple[int, ...], key_heads: int, blocks: list[int]) -> None:
    with FakeTensorMode():
        query = heads(*shape, dtype=torch.bfloat16)
        key = heads(shape[0], key_heads, *shape[2:], dtype=torch.bfloat16)
        call = aten._scaled_dot_product_flash_attention_backward.default
        groups = kernel_scratch(call, (query, query, key, key, query), None, H100)
    assert [count for group in groups for count in group if count] == blocks


def test_few_queries_are_split_by_keys() -> None:
    call = aten._scaled_dot_product_flash_attention.default
    with FakeTensorMode():
        query = heads(1, 1, 4096, 64, dtype=torch.bfloat16)
        groups = kernel_scratch(call, (query, query, query, 0.0), None, H100)
        many = heads(64, 8, 256, 64, dtype=torch.bfloat16)
        none = kernel_scratch(call, (many, many, many, 0.0), None, H100)
    assert groups == [[65_536, 4_194_304]]
    assert sum(map(sum, none)) == 0


def test_gradients_of_embeddings() -> None:
    call = aten.embedding_dense_backward.default
    with FakeTensorMode():

        def of(number: int) -> list[int]:
            indices = torch.empty(number, dtype=torch.long)
            args = (torch.empty(number, 64), indices, 50_304, -1, False)
            return [count for group in kernel_scratch(call, args, None, H100) for count in group]

        assert sum(of(3000)) == 0
        assert 9_227_264 in of(32_768)
        assert 262_144 in of(32_768)


def test_a_mean_keeps_the_storage_of_all_losses() -> None:
    with FakeTensorMode():
        tensor = torch.empty(4096, 512)
        assert result_bytes(aten.mse_loss.default, (tensor, tensor)) == tensor.nbytes
        assert result_bytes(aten.mse_loss.default, (tensor, tensor, 0)) is None
        groups = kernel_scratch(aten.mse_loss.default, (tensor, tensor, 1), None, H100)
    assert groups == [[tensor.nbytes, 1024, 4]]


def test_kernels_copy_what_is_not_contiguous() -> None:
    with FakeTensorMode():
        tensor = torch.empty(128, 64)
        for given, count in ((tensor, 0), (tensor.t(), tensor.nbytes)):
            groups = kernel_scratch(aten._log_softmax.default, (given, 1, False), given, H100)
            assert groups == [[count]]
            assert argument_copies(aten.native_layer_norm.default, (given, [64])) == [count]
        wide = torch.empty(64, 256)
        assert argument_copies(aten.mm.default, (wide[:, ::2], tensor)) == [64 * 128 * 4, 0]
        assert argument_copies(aten.mm.default, (wide[:, :128], tensor)) == [0, 0]
