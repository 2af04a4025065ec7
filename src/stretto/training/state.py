"""Everything that a run must remember to go on as if it had never stopped."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.checkpoint import Checkpoint, pack_optimizer, unpack_optimizer
from stretto.data import StepLoader
from stretto.errors import CheckpointError, cannot
from stretto.training.callback import Callback
from stretto.training.evaluate import Evaluator
from stretto.training.ranks import Ranks
from stretto.training.recorder import Recorder


@final
class RunState:
    """Captures a run as tensors and JSON, and puts it back.

    Args:
        model: the model itself, neither compiled nor wrapped.
        optimizer: its optimizer.
        loader: the clock, the position in the data and the batch size policy's state.
        recorder: the losses since the last log, and how long its files are.
        scaler: the loss scaler of fp16, or None.
        callbacks: listeners that may have state of their own.
        evaluators: know when they last measured.
        ranks: the processes of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loader: StepLoader,
        recorder: Recorder,
        scaler: torch.amp.GradScaler | None,
        callbacks: Sequence[Callback],
        evaluators: Sequence[Evaluator],
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._recorder = recorder
        self._scaler = scaler
        self._callbacks = callbacks
        self._evaluators = evaluators
        self._ranks = ranks

    def capture(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return tensors by group and name, and the rest as JSON. Every rank must call it."""
        tensors, record = pack_optimizer(self._optimizer)
        everybody = self._ranks.gather(json.dumps(_random_state()))
        records = {
            "optimizer": record,
            "loader": self._loader.state_dict(),
            "recorder": self._recorder.state_dict(),
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "callbacks": [
                {"type": type(callback).__qualname__, "state": callback.state_dict()}
                for callback in self._callbacks
            ],
            "evaluated": {one.name: one.measured_at for one in self._evaluators},
            "random": [json.loads(text) for text in everybody],
        }
        return {"model": self._model.state_dict(), "optimizer": tensors}, records

    def restore(self, checkpoint: Checkpoint, path: Path, *, is_own: bool) -> None:
        """Put back what `capture` returned.

        A callback gets the state of the one of its type; of several, in their order.

        Args:
            checkpoint: what was read.
            path: where it was read, for messages.
            is_own: whether it lies in this run's folder, whose files go on from there.

        Raises:
            CheckpointError: it was captured from another model, optimizer or data.
        """
        tensors, records = checkpoint
        try:
            self._model.load_state_dict(tensors["model"])
        except RuntimeError as error:
            raise CheckpointError(
                cannot(
                    f"resume from {path}",
                    why=f"its weights are another model's ({' '.join(str(error).split())[:300]})",
                    instead="build the model that it was saved from, or choose a new folder",
                )
            ) from None
        unpack_optimizer(self._optimizer, tensors["optimizer"], records["optimizer"])
        self._loader.load_state_dict(records["loader"])
        self._recorder.load_state_dict(records["recorder"], is_own=is_own)
        if self._scaler is not None and records["scaler"] is not None:
            self._scaler.load_state_dict(records["scaler"])
        states = list(records["callbacks"])
        for callback in self._callbacks:
            kind = type(callback).__qualname__
            saved = next((one for one in states if one["type"] == kind), None)
            if saved is not None:
                states.remove(saved)
                callback.load_state_dict(saved["state"])
        for evaluator in self._evaluators:
            evaluator.measured_at = records["evaluated"].get(evaluator.name, -1)
        if self._ranks.rank < len(records["random"]):
            _restore_random_state(records["random"][self._ranks.rank])


def _random_state() -> dict[str, Any]:
    """The state of every generator that training may draw from, as JSON."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(_tensor(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
