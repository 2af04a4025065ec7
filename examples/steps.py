"""Steps of your own: two optimizers over one model, two models against each other, two passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from stretto.runtime import TrainStep


@final
class MuonStep(TrainStep):
    """Muon for the matrices of a model, and AdamW for all else.

    Args:
        model: the model.
        loss: `loss(model, batch)`, a mean.
        lr: the learning rate of both.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    >>> step = MuonStep(model, lambda model, x: model(x).square().mean(), lr=0.01)
    >>> [len(one.param_groups[0]["params"]) for one in step.optimizers]
    [2, 2]
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], *, lr: float) -> None:
        self.model, self.loss = model, loss
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add the gradient of a micro-batch."""
        assert self.loss is not None, "given"
        loss = self.loss(self.model, batch)
        (loss * weight).backward()
        return loss

    def update(self) -> Mapping[str, float | Tensor]:
        """Let both update their parameters."""
        for optimizer in self.optimizers:
            optimizer.step()
        return {}


@final
class GANStep(TrainStep):
    """A generator and a discriminator, updated at once; batches are real samples.

    Args:
        generator: makes samples from noise.
        discriminator: returns the logit of a sample being real.
        make: makes an optimizer of parameters.
        noise: numbers that a sample is made from.

    >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    >>> step = GANStep(nn.Linear(2, 3), nn.Linear(3, 1), sgd, noise=2)
    >>> _ = step.forward_backward(torch.ones(4, 3), 1.0)
    >>> list(step.update())
    ['generator_loss']
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        make: Callable[[Any], Optimizer],
        *,
        noise: int,
    ) -> None:
        self.model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        self.optimizers = [make(generator.parameters()), make(discriminator.parameters())]
        self._generator, self._discriminator = generator, discriminator
        self._noise = noise
        self._sum: float | Tensor = 0.0

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add the gradients of both, each of its own loss, and return the discriminator's."""
        generator, discriminator = self._generator, self._discriminator
        fake = generator(torch.randn(len(batch), self._noise, dtype=batch.dtype))
        real, made = discriminator(batch), discriminator(fake.detach())
        loss = functional.softplus(-real).mean() + functional.softplus(made).mean()
        (loss * weight).backward()
        own = functional.softplus(-discriminator(fake)).mean()
        # Only the generator learns from its loss.
        parameters = list(generator.parameters())
        gradients = torch.autograd.grad(own * weight, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._sum = self._sum + own.detach() * weight
        return loss

    def update(self) -> Mapping[str, float | Tensor]:
        """Update both."""
        for optimizer in self.optimizers:
            optimizer.step()
        return {"generator_loss": self._sum}

    def clear(self) -> None:
        """Forget what was accumulated."""
        super().clear()
        self._sum = 0.0


@final
class SAMStep(TrainStep):
    """Sharpness-aware minimisation (Foret et al. 2021, arXiv 2010.01412, algorithm 1).

    The gradient that updates the weights is taken at the weights plus `radius` along the gradient.

    Args:
        model: the model.
        optimizer: updates it.
        loss: `loss(model, batch)`, a mean.
        radius: how far from the weights the second gradient is taken.

    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> step = SAMStep(model, optimizer, lambda model, x: model(x).square().mean(), radius=0.05)
    >>> _ = step.forward_backward(torch.ones(4, 3), 1.0)
    >>> list(step.update())
    ['grad_norm']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        radius: float,
    ) -> None:
        self.model, self.optimizers, self.loss = model, [optimizer], loss
        self._radius = radius
        self._pieces: list[tuple[Any, float]] = []

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add the gradient of a micro-batch, and keep that for the second pass."""
        self._pieces.append((batch, weight))
        return self._pass(batch, weight)

    def update(self) -> Mapping[str, float | Tensor]:
        """Take the gradient once more uphill, and step with it from where the weights were."""
        trained = [p for p in self.parameters if p.grad is not None]
        before = [p.detach().clone() for p in trained]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        with torch.no_grad():
            for parameter in trained:
                assert parameter.grad is not None
                parameter.add_(self._radius / (norm + 1e-12) * parameter.grad)
        super().clear()
        for batch, weight in self._pieces:
            self._pass(batch, weight)
        self.average_gradients()
        with torch.no_grad():
            for parameter, old in zip(trained, before, strict=True):
                parameter.copy_(old)
        self.optimizers[0].step()
        return {"grad_norm": norm}

    def clear(self) -> None:
        """Forget what was accumulated, and the micro-batches."""
        super().clear()
        self._pieces = []

    def _pass(self, batch: Any, weight: float) -> Tensor:
        assert self.loss is not None, "given"
        loss = self.loss(self.model, batch)
        (loss * weight).backward()
        return loss
