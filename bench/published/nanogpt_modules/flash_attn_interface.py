"""FlashAttention 3 that computes nothing: it allocates what `hopper/flash_api.cpp` allocates.

Only what the scripts here use: heads of at most 128, as many of keys as of queries, causal or in
a window, one split. The sizes are those of the source of August to December 2025 on Hopper, where
a block has 64 rows of queries for such attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 64
HEAD = 128


@torch.library.custom_op("attention_stand_in::forward", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del k, longest
    found = _results(q, v)
    sequences = q.shape[0] if starts is None else starts.numel() - 1
    q.new_empty(1 + 4 * _whole(sequences, 4), dtype=torch.int32)  # of the scheduler
    return found


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del k, rest
    return _results(q, v)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *batch, tokens, heads = q.shape[:-1]
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    log_sum = q.new_empty(*batch, heads, tokens, dtype=torch.float32)
    return out, log_sum, out.new_empty(0), out.new_empty(0)


@torch.library.custom_op(
    "attention_stand_in::backward", mutates_args=("dq", "dk", "dv"), device_types="cuda"
)
def _backward(  # noqa: PLR0917 - tensors of an operator must be positional
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    starts: Tensor | None,
    longest: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    del log_sum, dq, dk, dv
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out)]
    sums = _sums(q, starts)
    logs = torch.empty_like(sums)
    total = q.new_empty(*sums.shape, HEAD, dtype=torch.float32)
    sequences = q.shape[0] if starts is None else starts.numel() - 1
    locks = q.new_empty(
        _whole(longest, BLOCK) // BLOCK * sequences * q.shape[-2], dtype=torch.int32
    )
    del rows, logs, total, locks
    return sums


@_backward.register_fake
def _(grad: Tensor, q: Tensor, *rest: Any) -> Tensor:
    del grad
    return _sums(q, rest[4])


def _sums(q: Tensor, starts: Tensor | None) -> Tensor:
    """Return a number for each row of each head; sequences one behind another are padded."""
    *batch, tokens, heads = q.shape[:-1]
    padded = tokens if starts is None else tokens + (starts.shape[0] - 1) * BLOCK
    return q.new_empty(*batch, heads, _whole(padded, BLOCK), dtype=torch.float32)


def _whole(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, starts, longest = inputs
    ctx.save_for_backward(q, k, v, *output[:2], starts)
    ctx.longest = longest


def _differentiate(ctx: Any, grad: Tensor, *others: Any) -> tuple[Any, ...]:
    del others
    q, k, v, out, log_sum, starts = ctx.saved_tensors
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _backward(grad, q, k, v, out, log_sum, starts, ctx.longest, dq, dk, dv)
    return dq, dk, dv, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    causal: bool,
    **rest: Any,
) -> Tensor:
    """Return the output for sequences one behind another; its values are unknown."""
    del rest
    _check(q, k, causal=causal)
    out: Tensor = _forward(q, k, v, cu_seqlens_q, max_seqlen_q)[0]
    return out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **rest: Any) -> Tensor:
    """Return the output for sequences of one length; its values are unknown."""
    del rest
    _check(q, k, causal=causal)
    out: Tensor = _forward(q, k, v, None, q.shape[1])[0]
    return out


def _check(q: Tensor, k: Tensor, *, causal: bool) -> None:
    if not causal or q.shape[-2] != k.shape[-2] or q.shape[-1] > HEAD:
        raise NotImplementedError(f"the stand-in is for causal heads of at most {HEAD}")
