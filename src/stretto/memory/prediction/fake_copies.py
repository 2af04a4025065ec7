"""Copies of a training step with fake tensors, which have shapes and types but no memory.

Tracing a whole training step needs some care (measured with torch 2.13):

- Modules cannot be converted under the fake mode (`.to()` fails). So model, optimizer and loss are
  copied together, once, with fakes in place of tensors. Tied weights and references stay.
- `copy.deepcopy` in a forward pass would copy the mode, too. So a copy of the mode is itself.
- Optimizers read their step counts, so tensors of one element keep their value.
- Some libraries take another path for fake tensors (Llama in transformers builds a mask: +2.7
  percent). So the check for fakes returns False for them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from stretto.checkpoint.sharding import is_dtensor
from stretto.data.containers import mapped
from stretto.memory.step import WholeStep


@final
class _Mode(FakeTensorMode):
    """A fake mode whose copies are itself."""

    def __deepcopy__(self, _memo: Any) -> _Mode:
        return self


@final
class FakeCopies:
    """Makes fake copies of real objects, all in one fake mode.

    >>> copies = FakeCopies()
    >>> copies.tensor(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, device: str = "cpu") -> None:
        self.mode = _Mode(allow_non_fake_inputs=True)
        self._device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, Tensor] = {}
        # The memo uses ids of objects, so keep the objects alive.
        self._kept: list[Any] = []

    def step(self, step: WholeStep) -> WholeStep:
        """Return a copy of `step` with fake tensors."""
        real = step.step
        self._memo[id(real.transforms)] = real.transforms
        with _Copying(self), torch.no_grad():
            # `deepcopy` of a parameter bypasses the mode, so add parameters to the memo first.
            for parameter in (*step.model.parameters(), *step.parameters):
                self.tensor(parameter)
            fake = copy.deepcopy(real, self._memo)
            for transform in real.transforms:
                # The `Run` that transforms get refers to everything; copy it shallowly.
                for argument in getattr(transform, "args", ()):
                    alone = self._memo.setdefault(id(argument), copy.copy(argument))
                    if getattr(alone, "model", None) is real.model:
                        alone.model = fake.model
            fake.transforms = copy.deepcopy(list(real.transforms), self._memo)
        return dataclasses.replace(step, step=fake)

    def batch(self, batch: Any) -> Any:
        """Return a copy of `batch` with fake tensors."""
        return mapped(self.tensor, batch)

    def tensor(self, real: Tensor) -> Tensor:
        """Return a fake of a tensor; fakes share storage if the tensors do."""
        if isinstance(real, FakeTensor):
            return real
        if id(real) in self._memo:
            known: Tensor = self._memo[id(real)]
            return known
        is_plain = real.device.type == "cpu" and not real.requires_grad
        is_known = real.numel() == 1 and not isinstance(real, nn.Parameter) and is_plain
        value = real.item() if is_known else None
        with self.mode, torch.no_grad():
            if value is None:
                fake = self._unknown(real)
            else:
                fake = torch.tensor(value, dtype=real.dtype).reshape(real.shape)
        if isinstance(real, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=real.requires_grad)
        elif real.is_leaf and real.requires_grad:
            fake.requires_grad_()
        self._memo[id(real)] = fake
        self._kept.append(real)
        return fake

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Activate the fake mode."""
        with patch.object(torch._subclasses, "FakeTensor", _NoTensor), self.mode:
            yield

    def _unknown(self, real: Tensor) -> Tensor:
        if is_dtensor(real):  # as it was before it was sharded
            return torch.empty(real.shape, dtype=real.dtype, device=self._device)
        storage = real.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            count = storage.nbytes() // real.element_size()
            self._storages[key] = torch.empty(count, dtype=real.dtype, device=self._device)
            self._kept.append(storage)
        base = self._storages[key]
        if base.dtype != real.dtype:
            base = base.view(real.dtype)
        return base.as_strided(real.size(), real.stride(), real.storage_offset()).detach()


@final
class _Copying(TorchFunctionMode):
    """Replaces tensors by fakes during `copy.deepcopy`."""

    def __init__(self, copies: FakeCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return self._copies.tensor(args[0])
        return func(*args, **(kwargs or {}))


class _NoTensor:
    """Shown to libraries as the class of fake tensors, so that no tensor is fake."""
