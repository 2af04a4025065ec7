"""`Bundle`: samples sent by a worker, packed into few tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple, final

import torch
from torch import Tensor


class Bundle(NamedTuple):
    """Samples whose tensors are joined by dtype.

    A worker sends each tensor through shared memory and a file of its own: 128 samples of two
    tensors, fetched ahead by several workers, are more open files than a process may have.

    >>> bundle = Bundle.of([{"x": torch.ones(2)}, {"x": torch.zeros(1)}])
    >>> bundle.samples()
    [{'x': tensor([1., 1.])}, {'x': tensor([0.])}]
    """

    rest: bytes
    """The samples without their tensors."""
    joined: dict[torch.dtype, Tensor]
    """The elements of all tensors, by dtype."""
    shapes: list[tuple[torch.dtype, torch.Size]]
    """The tensors in the order of the samples."""

    @classmethod
    def of(cls, samples: list[Any]) -> Bundle:
        """Bundle some samples."""
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(samples)
        parts: dict[torch.dtype, list[Tensor]] = {}
        for tensor in writer.tensors:
            parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        shapes = [(tensor.dtype, tensor.shape) for tensor in writer.tensors]
        joined = {dtype: torch.cat(some) for dtype, some in parts.items()}
        return cls(file.getvalue(), joined, shapes)

    def samples(self) -> list[Any]:
        """Return the samples; their tensors are views."""
        parts = {
            dtype: iter(joined.split([shape.numel() for one, shape in self.shapes if one == dtype]))
            for dtype, joined in self.joined.items()
        }
        tensors = [
            next(parts[dtype]) if len(shape) == 1 else next(parts[dtype]).view(shape)
            for dtype, shape in self.shapes
        ]
        samples: list[Any] = _Reader(self.rest, tensors).load()
        return samples


@final
class _Writer(pickle.Pickler):
    """Pickles samples without their plain tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a plain tensor; None for anything else."""
        if type(value) is not Tensor or value.requires_grad:
            return None
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


@final
class _Reader(pickle.Unpickler):
    """Unpickles samples with their tensors; the data come from this process's own worker."""

    def __init__(self, rest: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        """Return the tensor with a number."""
        tensor: Tensor = self._tensors[number]
        return tensor
