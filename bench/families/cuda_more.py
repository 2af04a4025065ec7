"""More steps whose largest batch is asked about: recurrent, sparse, offloading, compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from families.cuda import CudaFamily, family, tokens
from families.cuda_models import GPT, next_byte
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep, TrainStep


class Recurrent(nn.Module):
    """Two recurrent layers over bytes."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 512)
        self.cells = kind(512, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.head(self.cells(self.embedding(inputs))[0])
        return out


class Sparse(nn.Module):
    """A large embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100_000, 256, sparse=True)
        self.head = nn.Linear(256, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.head(self.embedding(inputs))
        return out


def ctc(model: Any, inputs: Tensor) -> Tensor:
    """Return a CTC loss over the positions of a sequence."""
    log_probs = model(inputs).log_softmax(-1).transpose(0, 1)
    size, length = inputs.shape
    lengths = torch.full((size,), length, dtype=torch.long)
    return functional.ctc_loss(log_probs, inputs[:, :32], lengths, torch.full_like(lengths, 32))


def chunked(model: Any, inputs: Tensor) -> Tensor:
    """Return a cross-entropy whose logits are computed in chunks, twice."""
    hidden = model.features(inputs[:, :-1])

    def part(features: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(model.head(features), targets, reduction="sum")

    rows, targets = hidden.flatten(0, 1), inputs[:, 1:].flatten()
    parts = zip(rows.split(4096), targets.split(4096), strict=True)
    losses = [checkpoint(part, *one, use_reentrant=False) for one in parts]
    total: Tensor = torch.stack(losses).sum() / targets.numel()
    return total


class Preferences(TrainStep):
    """Direct preference optimization: a trained model beside a frozen copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.frozen = copy.deepcopy(model).requires_grad_(requires_grad=False)
        self.optimizers = [torch.optim.AdamW(model.parameters())]

    def forward_backward(self, batch: Tensor, weight: float) -> Tensor:
        """Compare two halves of each pair."""
        chosen, rejected = batch.chunk(2, dim=1)
        margin = self._score(self.model, chosen) - self._score(self.model, rejected)
        with torch.no_grad():
            before = self._score(self.frozen, chosen) - self._score(self.frozen, rejected)
        loss = -functional.logsigmoid(0.1 * (margin - before)).mean()
        (loss * weight).backward()
        return loss

    @staticmethod
    def _score(model: nn.Module, inputs: Tensor) -> Tensor:
        logits = model(inputs[:, :-1]).log_softmax(-1)
        score: Tensor = logits.gather(-1, inputs[:, 1:, None]).sum((1, 2))
        return score

    def update(self) -> dict[str, float]:
        """Step."""
        self.optimizers[0].step()
        return {}


class Averaged(TrainStep):
    """Keeps an average of the weights on the device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(requires_grad=False)
        self.optimizers = [torch.optim.AdamW(model.parameters())]

    def forward_backward(self, batch: Tensor, weight: float) -> Tensor:
        """Add the gradient."""
        loss = next_byte(self.model, batch)
        (loss * weight).backward()
        return loss

    def update(self) -> dict[str, float]:
        """Step, then move the average."""
        self.optimizers[0].step()
        pairs = zip(self.average.parameters(), self.model.parameters(), strict=True)
        for average, parameter in pairs:
            average.lerp_(parameter.detach(), 0.01)
        return {}


def offloaded(model: Any, inputs: Tensor) -> Tensor:
    """Return the loss; what the backward pass needs lies in memory of the host meanwhile."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return next_byte(model, inputs)


class SignMomentum(torch.optim.Optimizer):
    """An optimizer of one's own (Lion, arXiv 2302.06675)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step by the sign of an interpolated momentum."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum.lerp(parameter.grad, 0.1).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def _made(make: Callable[[nn.Module], TrainStep], length: int = 256) -> CudaFamily:
    def make_step(device: str) -> WholeStep:
        return WholeStep.of(make(GPT().to(device)))

    return CudaFamily(make_step, tokens(length))


def _compiled(device: str) -> WholeStep:
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return WholeStep.of(SupervisedStep(model, optimizer, next_byte, precision="bf16", compile=True))


MORE: dict[str, CudaFamily] = {
    "GRU": family(lambda: Recurrent(nn.GRU), next_byte, tokens(64)),
    "LSTM": family(lambda: Recurrent(nn.LSTM), next_byte, tokens(64)),
    "CTC": family(lambda: Recurrent(nn.GRU), ctc, tokens(64)),
    "sparse embedding": family(Sparse, next_byte, tokens(256), torch.optim.SGD),
    "GPT, loss in chunks": family(
        functools.partial(GPT, vocabulary=16384), chunked, tokens(256), precision="bf16"
    ),
    "GPT, DPO": _made(Preferences, length=512),
    "GPT, average of weights": _made(Averaged),
    "GPT, saved on the host": family(GPT, offloaded, tokens(256)),
    "GPT, own optimizer": family(GPT, next_byte, tokens(256), SignMomentum),
    "GPT, bf16, compiled": CudaFamily(_compiled, tokens(256)),
}
