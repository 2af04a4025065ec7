"""Copies of tensors in host memory or on disk, to restore them later.

The storage behind a tensor is copied once, even if several tensors share it. Copies on disk leave
memory free for a trial.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from stretto.errors import FitError


@final
class Copies:
    """Copies storages of tensors and restores them.

    Args:
        on_disk: whether to store CPU tensors in an anonymous temporary file, which disappears
            with this process. Tensors of accelerators are copied to host memory.

    >>> tensor = torch.arange(3)
    >>> copies = Copies()
    >>> copies.keep(tensor)
    >>> _ = tensor.zero_()
    >>> copies.restore()
    >>> tensor.tolist()
    [0, 1, 2]
    """

    def __init__(self, *, on_disk: bool = False) -> None:
        self._file = tempfile.TemporaryFile() if on_disk else None  # noqa: SIM115  closed by us
        self._end = 0
        # By device, address and size. The entry keeps the storage alive, so addresses are unique.
        self._undo: dict[tuple[str, int, int], Callable[[], object]] = {}

    def keep(self, tensor: Tensor) -> None:
        """Copy the storage behind a tensor.

        Raises:
            FitError: the disk is full.
        """
        parts = parts_of(tensor)
        if parts is not None:
            for part in parts:
                self.keep(part)
        elif tensor.layout is not torch.strided:
            copy = tensor.detach().clone()
            self._undo.setdefault(("", id(tensor), 0), lambda: tensor.copy_(copy))
        elif tensor.device.type != "meta":
            self._keep_bytes(_bytes_of(tensor))

    def restore(self) -> None:
        """Write everything back. It can be called several times."""
        with torch.no_grad():
            for undo in self._undo.values():
                undo()

    def close(self) -> None:
        """Drop all copies."""
        self._undo.clear()
        if self._file is not None:
            self._file.close()

    def _keep_bytes(self, memory: Tensor) -> None:
        key = (str(memory.device), memory.data_ptr(), memory.numel())
        if not memory.numel() or key in self._undo:
            return
        if self._file is not None and memory.device.type == "cpu":
            start = self._append(memory)
            self._undo[key] = lambda: self._read(start, memory)
        else:
            copy = memory.to("cpu", copy=True)
            self._undo[key] = lambda: memory.copy_(copy)

    def _append(self, memory: Tensor) -> int:
        assert self._file is not None, "asked for"
        start = self._end
        try:
            self._file.seek(start)
            self._file.write(_buffer(memory))
            self._file.flush()
        except OSError as error:
            raise FitError.cannot(
                "keep a copy of the model's state on the disk",
                why=(error.strerror or str(error)).lower(),
                instead="set TMPDIR to a folder with room, or use a method that takes no step",
            ) from None
        self._end += memory.numel()
        return start

    def _read(self, start: int, memory: Tensor) -> None:
        assert self._file is not None, "asked for"
        self._file.seek(start)
        # Read directly into the tensor: there may be no memory for a buffer.
        self._file.readinto(_buffer(memory))


def parts_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the tensors inside a tensor subclass such as `DTensor`; None for a plain one.

    >>> parts_of(torch.ones(2)) is None
    True
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    named = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for part in named if isinstance(part, Tensor)]


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the parts of a sparse tensor, by layout."""


def memory_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind a tensor: one for a plain tensor, several for a sparse one.

    Nothing is yielded for layouts whose storage torch does not expose.

    >>> [storage.nbytes() for storage in memory_of(torch.eye(3).to_sparse())]
    [48, 12]
    """
    parts = parts_of(tensor)
    if parts is None and tensor.layout is torch.strided:
        yield tensor.untyped_storage()
        return
    if parts is None:
        parts = [getattr(tensor, name)() for name in _SPARSE.get(tensor.layout, ())]
    for part in parts:
        yield from memory_of(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    storage: Any = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))


def _buffer(memory: Tensor) -> Any:
    array: Any = memory.numpy()
    return memoryview(array)
