"""A training step on fake tensors: all shapes and kinds, no memory and no values.

What PyTorch's fake tensors need beside themselves to follow a training step, all of it measured
with torch 2.13:

- Modules cannot be converted under the mode (`.to()` fails), so model, optimizer and loss are
  copied together, once, with a fake in the place of each tensor: ties and references stay.
- A copy made under the mode (`copy.deepcopy` in a forward) would copy the mode too, and both would
  be asked: the mode is its own copy.
- Optimizers read their step counts: tensors of one element keep their value.
- Libraries ask whether a tensor is fake, and take another path if it is (Llama of transformers
  builds a mask: +2.7 percent). They are told what they would be told in a real step.
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

from stretto.data.containers import mapped
from stretto.memory.step import WholeStep


@final
class _Mode(FakeTensorMode):
    """The mode, of which there is one."""

    def __deepcopy__(self, _memo: Any) -> _Mode:
        return self


@final
class FakeCopies:
    """Fake copies of real things, all in one mode.

    >>> copies = FakeCopies()
    >>> copies.tensor(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, device: str = "cpu") -> None:
        self.mode = _Mode(allow_non_fake_inputs=True)
        self._device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, Tensor] = {}
        # The memo knows objects by their ids, so they must not be gone before it.
        self._kept: list[Any] = []

    def step(self, step: WholeStep) -> WholeStep:
        """Return a copy of `step` that is all fake."""
        real = step.step
        self._memo[id(real.transforms)] = real.transforms
        with _Copying(self), torch.no_grad():
            # Parameters copy themselves without asking a mode, so they are known beforehand.
            for parameter in (*step.model.parameters(), *step.parameters):
                self.tensor(parameter)
            fake = copy.deepcopy(real, self._memo)
            for transform in real.transforms:
                # The run that the trainer hands to them refers to all there is.
                for argument in getattr(transform, "args", ()):
                    alone = self._memo.setdefault(id(argument), copy.copy(argument))
                    if getattr(alone, "model", None) is real.model:
                        alone.model = fake.model
            fake.transforms = copy.deepcopy(list(real.transforms), self._memo)
        return dataclasses.replace(step, step=fake)

    def batch(self, batch: Any) -> Any:
        """Return a copy of `batch` with fakes in the place of its tensors."""
        return mapped(lambda tensor: tensor if _is_fake(tensor) else self.tensor(tensor), batch)

    def tensor(self, real: Tensor) -> Tensor:
        """Return a fake of a tensor; tensors that share memory have fakes that share it."""
        if id(real) in self._memo:
            known: Tensor = self._memo[id(real)]
            return known
        is_known = real.numel() == 1 and not isinstance(real, nn.Parameter) and _has_value(real)
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
        """Run what is inside on fakes."""
        with patch.object(torch._subclasses, "FakeTensor", _NoTensor), self.mode:
            yield

    def _unknown(self, real: Tensor) -> Tensor:
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
    """While things are copied: tensors become fakes, whatever holds them."""

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
    """What libraries are shown as the class of fake tensors: nothing is one."""


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _has_value(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.requires_grad
