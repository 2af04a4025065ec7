"""The scratch memory of reductions on CUDA.

A sum over many rows into few columns is divided among thread blocks, which exchange partial sums
through global memory. How much follows from the shape and from the GPU (`setReduceConfig` in
`ATen/native/cuda/Reduce.cuh`, torch 2.13). It grows with the rows only up to a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stretto.memory.prediction.cuda.gpu import Gpu

_MOST_THREADS = 512
_WARP = 32
_VECTOR = 4
_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread should sum."""
_LARGEST_OFFSET = 2**31 - 1


class _Dimension(NamedTuple):
    size: int
    stride: int
    """In bytes."""
    is_reduced: bool


def reduction_scratch(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    *,
    item_bytes: int,
    partial_bytes: int = 4,
    gpu: Gpu,
) -> list[int]:
    """Return the bytes of the blocks that a reduction allocates for itself.

    >>> from stretto.memory.prediction.cuda.gpu import GPUS
    >>> reduction_scratch((4096, 512), (512, 1), [0], item_bytes=4, gpu=GPUS["h100"])
    [16777216, 16]

    Args:
        shape: the shape of the input.
        strides: its strides, in elements.
        reduced: the dimensions that are reduced.
        item_bytes: bytes of an element of the input.
        partial_bytes: bytes of a partial result.
        gpu: the kind of GPU.
    """
    if 0 in shape:
        return []
    dimensions = [
        _Dimension(size, stride * item_bytes, index in reduced)
        for index, (size, stride) in enumerate(zip(shape, strides, strict=True))
    ]
    dimensions = _split(_coalesced(dimensions))
    num_reduced = sum(one.is_reduced for one in dimensions)
    inputs = math.prod(one.size for one in dimensions if one.is_reduced)
    outputs = math.prod(one.size for one in dimensions if not one.is_reduced)
    if not dimensions or not num_reduced:
        return []
    is_row = num_reduced == len(dimensions) or dimensions[0].stride < dimensions[num_reduced].stride
    width, height = (inputs, outputs) if is_row else (outputs, inputs)
    fastest = dimensions[0 if is_row else num_reduced]
    vector = 1
    if fastest.stride == item_bytes:
        if is_row and width > 128 and len(dimensions) == 1:
            width //= _VECTOR
        elif not is_row:
            vector = _vector(dimensions, num_reduced, item_bytes)
            width //= vector
    block_x, block_y = _block(width, height, _MOST_THREADS // vector)
    step = block_x if is_row else 1
    outputs_per_block = vector * (1 if is_row else block_x)
    splits_rows = -(-inputs // step) >= min(block_y * 16, _MOST_VALUES)
    if not splits_rows:
        return []
    step *= block_y
    values = -(-inputs // step)
    grid = -(-outputs // outputs_per_block)
    target = gpu.num_processors * (gpu.threads_per_processor // (block_x * block_y))
    if values < _MOST_VALUES or grid > target:
        return []
    blocks = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return []
    partial = partial_bytes * outputs * blocks
    if not is_row:
        partial *= block_x * vector
    return [partial, 4 * grid]


def _coalesced(dimensions: Sequence[_Dimension]) -> list[_Dimension]:
    """Sort as TensorIterator does, reduced dimensions first, and merge neighbours."""
    ordered = sorted(
        (one for one in dimensions if one.size != 1),
        key=lambda one: (not one.is_reduced, one.stride),
    )
    result: list[_Dimension] = []
    for one in ordered:
        last = result[-1] if result else None
        is_next = last is not None and last.size * last.stride == one.stride
        if last is not None and is_next and last.is_reduced == one.is_reduced:
            result[-1] = last._replace(size=last.size * one.size)
        else:
            result.append(one)
    return result


def _split(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Halve the longest dimension until offsets need only 32 bits, as TensorIterator does."""
    while sum((one.size - 1) * one.stride for one in dimensions) >= _LARGEST_OFFSET:
        longest = max(
            range(len(dimensions)),
            key=lambda i: (dimensions[i].size - 1) * dimensions[i].stride,
        )
        one = dimensions[longest]
        dimensions[longest] = one._replace(size=one.size - one.size // 2)
    return dimensions


def _vector(dimensions: Sequence[_Dimension], output: int, item_bytes: int) -> int:
    """Return how many neighbouring outputs a thread computes."""
    vector = _VECTOR
    others = [one.stride // item_bytes for i, one in enumerate(dimensions) if i != output]
    for number in (dimensions[output].size, *others):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the width and the height of a block of at most `most` threads."""
    width, height = (min(most, 1 << max(side, 1).bit_length() - 1) for side in (width, height))
    block_x = min(width, _WARP)
    block_y = min(height, most // block_x)
    return min(width, most // block_y), block_y
