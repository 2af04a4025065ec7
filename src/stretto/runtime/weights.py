"""`WeightWatch`: sees whether weights are trained, finite, and the same on all ranks."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.errors import TrainingError
from stretto.runtime.ranks import Ranks
from stretto.runtime.sharded import is_dtensor, local_part
from stretto.timing import Timestamp

_SAMPLE = 64


@final
class WeightWatch:
    """Looks at the weights after steps 1, 10, 100, ... of a run, and at its end.

    Only then the host waits for the device. What it cannot read it leaves out.

    Args:
        optimizers: those of the run.
        at: the clock before the first step.
        ranks: those that train the same weights; None: they are not compared.
        checks_finite: whether a weight that is not finite is an error.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        at: Timestamp,
        ranks: Ranks | None,
        *,
        checks_finite: bool,
    ) -> None:
        self._optimizers, self._ranks, self._checks_finite = optimizers, ranks, checks_finite
        self._first, self.next = at.batch, at.batch + 1
        """The number of batches at which it looks next."""
        self._has_warned = self._has_changed = False
        self._versions = [one._version for one in self._weights()]
        self._start = self._marks()
        # A rank may have experts of its own: only what is alike at the start must stay so.
        self._shared = [at for at, one in enumerate(self._weights()) if not _is_cut(one)]
        self._shared = self._compare(self._start, "before the first step")

    def look(self, at: Timestamp, *, is_last: bool = False) -> None:
        """Look after a step, together with all ranks; at the end of the run each looks alone.

        Raises:
            TrainingError: a weight is not finite.
        """
        self.next, marks = self._first + 10 * (self.next - self._first), self._marks()
        self._has_changed |= marks != self._start  # it may return to where it was
        if not is_last:
            self._compare(marks, f"after {at.get('ba')}")
        for number, (mark, start) in enumerate(zip(marks, self._start, strict=False)):
            if self._checks_finite and math.isfinite(sum(start)) > math.isfinite(sum(mark)):
                raise TrainingError.cannot(
                    f"continue after {at.get('sp')}",
                    why=f"weight {number} of the optimizers is not finite",
                    instead="resume from before that with a lower learning rate",
                )
        is_due = not self._first and at.batch >= (2 if is_last else 10)
        if is_due and self._has_learnt_nothing(marks):
            self._warn(
                f"nothing was learnt in {at.batch} steps: every gradient was zero; the loss must "
                "depend on the weights that the optimizer has"
            )

    def _has_learnt_nothing(self, marks: list[tuple[float, ...]]) -> bool:
        """Return whether updates have not changed the weights, or gradients have left no trace."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        is_set = any(map(any, marks)) and any(group.get("lr", 1) for group in groups)
        is_updated = self._versions != [one._version for one in self._weights()]
        if is_set and is_updated and not self._has_changed:
            return True
        # Decay moves weights, too. What optimizers keep of gradients is as large as these.
        kept = [
            local_part(state)
            for one in self._optimizers
            for weight, states in one.state.items()
            for state in states.values()
            if isinstance(state, Tensor) and state.dim() and state.shape == weight.shape
        ]
        return bool(kept) and not any(bool(one.any()) for one in kept)

    def _compare(self, marks: list[tuple[float, ...]], when: str) -> list[int]:
        """Warn if the ranks have trained apart; return the numbers of the weights that are alike.

        All ranks must call it.
        """
        if self._ranks is None:
            return []
        own = [zlib.crc32(repr(marks[at]).encode()) for at in self._shared]
        texts = self._ranks.differing(json.dumps(own), call="the same step")
        columns = zip(self._shared, *map(json.loads, texts), strict=False)
        alike = [at for at, *each in columns if len(set(each)) == 1] if texts else self._shared
        # Experts may differ from the start on.
        if texts and self._ranks.is_first and not (alike and marks is self._start):
            self._warn(
                f"the weights of the ranks differ {when}: each trains a model of its own; wrap the "
                "model in DistributedDataParallel, or average the gradients before the update"
            )
        return alike

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            warnings.warn(text, UserWarning, stacklevel=5)
        self._has_warned = True

    def _weights(self) -> list[Tensor]:
        groups = (group for one in self._optimizers for group in one.param_groups)
        return [one for group in groups for one in group["params"]]

    def _marks(self) -> list[tuple[float, ...]]:
        """Return the norm and the first elements of each weight."""
        found: list[tuple[float, ...]] = []
        for one in map(local_part, self._weights()):
            mark: list[float] = []
            with suppress(RuntimeError, TypeError, ValueError):  # a lazy one, or one that cannot
                wide = torch.promote_types(one.dtype, torch.float32)
                norm = torch.linalg.vector_norm(one.detach(), dtype=wide).reshape(1)
                mark = torch.cat((norm, one.detach().flatten()[:_SAMPLE].to(wide))).tolist()
            found.append(tuple(mark))
        return found


def _is_cut(weight: Tensor) -> bool:
    """Return whether a rank has only a part of a weight, in FSDP2, TP or FSDP1."""
    return is_dtensor(weight) or getattr(weight, "_fsdp_flattened", False)
