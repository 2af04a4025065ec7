"""A Llama of any size, for the benchmarks of memory: grouped heads, rotary positions, RMSNorm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Size(NamedTuple):
    """The numbers that a model is made of."""

    vocabulary: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int


SIZES = {
    "tiny": Size(1024, 256, 704, 8, 8, 3),
    "1B": Size(32000, 2048, 5632, 32, 4, 22),
    "7B": Size(32000, 4096, 11008, 32, 32, 32),
    "70B": Size(32000, 8192, 28672, 64, 8, 80),
}


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attend; under tensor parallelism, with this rank's heads."""
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return result


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.width, size.hidden, bias=False)
        self.w3 = nn.Linear(size.width, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: Size, *, checkpoints: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention, self.feed_forward = Attention(size), FeedForward(size)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Run the layer, with its activations kept or computed anew."""
        if self.checkpoints:
            again: Tensor = checkpoint(self._run, x, cosine, sine, use_reentrant=False)
            return again
        return self._run(x, cosine, sine)

    def _run(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


class Llama(nn.Module):
    """A decoder without bias."""

    def __init__(self, size: Size, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        blocks = [Block(size, checkpoints=checkpoints) for _ in range(size.layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(size.width)
        self.out = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(ids)
        halves = torch.arange(0, self.head, 2, device=ids.device, dtype=torch.float32)
        positions = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.outer(positions, 1 / 10000 ** (halves / self.head))
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits: Tensor = self.out(self.norm(x))
        return logits


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross-entropy in full precision."""
    return functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
