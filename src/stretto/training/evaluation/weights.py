"""The weights for evaluation, if an optimizer keeps others in the model while it trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.runtime.compiled import plain_naming, plain_state


@final
class TrainingWeights:
    """Switches optimizers that have the methods `train()` and `eval()`.

    That is the protocol of `schedulefree` and of optimizers like it: a step needs one point, an
    evaluation another. `train()` is called here, so that a search for what fits may take steps.

    Args:
        model: the model.
        optimizers: those of the run.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers: list[Any] = [one for one in optimizers if is_switched(one)]
        """Those that are switched."""
        self.model = model
        self.train()

    def train(self) -> None:
        """Put the weights for training into the model."""
        self._are_in = True
        for one in self.optimizers:
            one.train()

    def eval(self) -> None:
        """Put the weights for evaluation into the model."""
        self._are_in = False
        for one in self.optimizers:
            one.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the weights for evaluation within a `with` block."""
        if not (self.optimizers and self._are_in):
            self.eval()
            yield
            return
        self.train()  # a callback of the user's may have switched them before
        # There and back, `schedulefree` rounds twice: a look would change the training.
        kept = {name: one.detach().clone() for name, one in self.state_dict().items()}
        try:
            self.eval()
            yield
        finally:
            self.train()
            self.load_state_dict(kept)

    def for_inference(self) -> dict[str, Any]:
        """Return the state of the model with copies of the weights for evaluation."""
        with self.evaluating():
            return {
                name: one.detach().clone() if isinstance(one, Tensor) else one
                for name, one in plain_state(self.model).items()
            }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that are in the model."""
        plain = plain_naming(self.model)
        return {plain(name): one for name, one in self.model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put weights into the model."""
        with torch.no_grad():
            for name, one in self.state_dict().items():
                one.copy_(state[name])


def is_switched(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has `train()` and `eval()`, both without arguments."""
    try:
        for name in ("train", "eval"):
            inspect.signature(getattr(optimizer, name)).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True
