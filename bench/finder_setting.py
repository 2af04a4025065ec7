"""What every finder is asked: three models, a step, and a limit that is real. Needs only torch."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

LIMIT = 800 * 2**20
"""Bytes that a process may take beyond what it has when its model is built."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        size, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(size, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(size, length, width))
        result: Tensor = x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))
        return result


class GPT(nn.Module):
    """A small language model over bytes."""

    def __init__(self, layers: int = 3, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next bytes."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        result: Tensor = self.head(self.blocks(x))
        return result


def mlp() -> nn.Module:
    """Return a perceptron of six layers."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.ReLU())]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """Return convolutions with batch normalisation, as small ResNets have them."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    widths = [(3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    body = [layer for widths_of_one in widths for layer in block(*widths_of_one)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Case(NamedTuple):
    """A model, what it learns from, and its loss."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def next_byte(model: Any, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the bytes."""
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


CASES = {
    "GPT": Case(GPT, lambda size: torch.randint(256, (size, 128)), next_byte),
    "MLP": Case(mlp, lambda size: torch.randn(size, 768), lambda m, x: m(x).square().mean()),
    "CNN": Case(
        cnn, lambda size: torch.randn(size, 3, 32, 32), lambda m, x: m(x).logsumexp(1).mean()
    ),
}


class Counter:
    """Counts the samples that go through a model, and the sizes of the batches."""

    def __init__(self, model: nn.Module) -> None:
        self.samples = 0
        self.sizes: list[int] = []
        model.register_forward_pre_hook(self._count)

    def _count(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if type(arguments[0]) is Tensor:  # and no fake one, which costs nothing
            self.samples += len(arguments[0])
            if len(arguments[0]) not in self.sizes:
                self.sizes.append(len(arguments[0]))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def take_step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> None:
    """Take one training step."""
    case.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def set_limit() -> None:
    """Limit this process to what it has now and `LIMIT` more; what exceeds it fails."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmData")]
    used = int(line.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, resource.RLIM_INFINITY))
