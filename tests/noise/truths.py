"""Problems whose gradient, and the variance of it, are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Draws gradients of single samples, `[samples, parameters]`, and knows their moments."""

    draw: Callable[[int, torch.Generator], Tensor]
    variance: float
    """tr(Sigma)."""
    square: float
    """|mu|^2."""

    def steps(
        self, count: int, sizes: Sequence[int], chance: torch.Generator
    ) -> list[tuple[list[float], float]]:
        """For each of many steps, the squared norms of its groups, and that of the whole."""
        drawn = self.draw(count * sum(sizes), chance).unflatten(0, (count, sum(sizes)))
        parts = [part.mean(1).square().sum(1) for part in drawn.split(list(sizes), dim=1)]
        squares = torch.stack(parts, dim=1).tolist()
        return list(zip(squares, drawn.mean(1).square().sum(1).tolist(), strict=True))


def linear_regression() -> Truth:
    """Gradients of `(x w - y)^2 / 2` with `x ~ N(0, C)` and `y = x w* + noise`, at a fixed w."""
    scales = torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    off = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)  # w - w*
    noise = 0.7

    def draw(count: int, chance: torch.Generator) -> Tensor:
        x = torch.randn(count, 12, dtype=torch.float64, generator=chance) * scales
        y_noise = noise * torch.randn(count, dtype=torch.float64, generator=chance)
        return (x @ off - y_noise)[:, None] * x

    covariance = scales.square()
    residual = float(off.square() @ covariance) + noise**2  # variance of x (w - w*) - noise
    square = float((covariance * off).square().sum())
    # Isserlis: E[(x d)^2 x x'] = (d' C d) C + 2 C d d' C, less mu mu'.
    return Truth(draw, float(covariance.sum()) * residual + square, square)


def quadratic() -> Truth:
    """Gradients of a quadratic with a given covariance that is not diagonal."""
    chance = torch.Generator().manual_seed(3)
    root = torch.randn(8, 8, dtype=torch.float64, generator=chance)
    mean = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)

    def draw(count: int, chance: torch.Generator) -> Tensor:
        return mean + torch.randn(count, 8, dtype=torch.float64, generator=chance) @ root.T

    return Truth(draw, float(root.square().sum()), float(mean.square().sum()))


TRUTHS = {"linear regression": linear_regression(), "quadratic": quadratic()}
