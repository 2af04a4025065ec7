"""The kernel that `scaled_dot_product_attention` runs on CUDA.

The choice follows `sdp_utils.cpp` of torch 2.13: flash attention for bf16 and fp16 without a mask,
memory-efficient attention for the rest that it supports, else the formula itself.
`torch.nn.attention.sdpa_kernel` and `torch.backends.cuda` can switch kernels off, as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stretto.memory.prediction.cuda.gpu import Gpu

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FLASH_MULTIPLE = 8
"""Flash attention pads heads to a multiple of this."""
_MASK_MULTIPLE = 16
"""Memory-efficient attention pads rows of the mask to a multiple of this."""
_LARGEST_FLASH_HEAD = 256


class _Call(NamedTuple):
    """The arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def heads_are_equal(self) -> bool:
        return self.query.size(-1) == self.key.size(-1) == self.value.size(-1)

    @property
    def has_grouped_heads(self) -> bool:
        return self.query.dim() == 4 and self.query.size(1) != self.key.size(1)


def attention(gpu: Gpu) -> Callable[..., Tensor]:
    """Return a function that replaces `scaled_dot_product_attention`."""

    def run(  # noqa: PLR0917  as in ATen
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  as in ATen
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if query.dim() == 4 and query.dtype == key.dtype == value.dtype:
            if _can_flash(call, gpu):
                return _flash(call)
            if _can_be_efficient(call, gpu):
                return _efficient(call)
        return _by_formula(call)

    return run


def num_splits(blocks: int, head: int, num_keys: int, gpu: Gpu) -> int:
    """Return into how many parts flash attention splits the keys (`num_splits_heuristic`).

    Args:
        blocks: blocks of queries, over all samples and heads.
        head: the width of a head.
        num_keys: the number of keys.
        gpu: the kind of GPU.
    """
    columns = 256 if head <= 64 else 128 if head <= 128 else 64
    key_blocks = -(-num_keys // columns)
    processors = 2 * gpu.num_processors
    if blocks >= 0.8 * processors:
        return 1

    def is_new(splits: int) -> bool:
        return splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))

    efficiency = {
        splits: (blocks * splits / processors) / math.ceil(blocks * splits / processors)
        for splits in range(1, min(128, processors, key_blocks) + 1)
        if is_new(splits)
    }
    best = max(efficiency.values())
    return next(splits for splits, one in efficiency.items() if one >= 0.85 * best)


def _can_flash(call: _Call, gpu: Gpu) -> bool:
    query, key = call.query, call.key
    head = query.size(-1)
    needs_gradient = any(t.requires_grad for t in (query, key, call.value))
    is_small_chip = gpu.capability in {(8, 6), (8, 9), (12, 0)}
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and gpu.capability >= (8, 0)
        and query.dtype in _HALF
        and call.mask is None
        and call.heads_are_equal
        and head <= _LARGEST_FLASH_HEAD
        and not (needs_gradient and is_small_chip and head > 192 and call.dropout > 0)
        and not (call.is_causal and query.size(-2) != key.size(-2))
        and (not call.has_grouped_heads or call.enable_gqa)
    )


def _can_be_efficient(call: _Call, gpu: Gpu) -> bool:
    query, value = call.query, call.value
    multiple = 16 // query.element_size()
    aligned = query.size(-1) % multiple == 0 and value.size(-1) % multiple == 0
    types = (torch.float32, torch.float16, *[torch.bfloat16] * (gpu.capability >= (8, 0)))
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in types
        and aligned
        and query.size(-1) == call.key.size(-1)
        and not call.has_grouped_heads
        and not (call.mask is not None and call.mask.requires_grad and call.mask.dim() < 4)
    )


def _flash(call: _Call) -> Tensor:
    head = call.query.size(-1)
    missing = -head % _FLASH_MULTIPLE
    query, key, value = (
        functional.pad(tensor, (0, missing)) if missing else tensor
        for tensor in (call.query, call.key, call.value)
    )
    scale = call.scale if call.scale is not None else head**-0.5
    result: Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.is_causal, scale=scale
    )[0]
    return result[..., :head] if missing else result


def _efficient(call: _Call) -> Tensor:
    query, key = call.query, call.key
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (query, key, call.value, call.mask)
    )
    bias = None if call.mask is None else _bias(call.mask, query)
    if bias is not None:
        missing = -bias.size(-1) % _MASK_MULTIPLE
        if missing or bias.stride(-1) != 1:
            bias = functional.pad(bias, (0, missing))[..., : call.mask.size(-1)]  # type: ignore[union-attr]
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    result: Tensor = _aten._scaled_dot_product_efficient_attention(
        query,
        key,
        call.value,
        bias,
        needs_gradient,
        call.dropout,
        call.is_causal,
        scale=call.scale,
    )[0]
    return result


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return what is added to the scores; a mask of booleans becomes one of numbers."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), 0.0)


def _by_formula(call: _Call) -> Tensor:
    mask: Any = call.mask
    result: Tensor = _aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        mask if mask is None else _bias(mask, call.query),
        call.dropout,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]
    return result
