"""A language model over bytes that is small enough to train on two cores in a minute."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import nn
from torch.nn import functional

from stretto.errors import ConfigError

EMBEDDING_STD = 0.02
"""Standard deviation of the embeddings at the start, as in GPT-2."""


@final
class TinyGPT(nn.Module):
    """A decoder-only transformer: pre-norm RMSNorm, normalised queries and keys, no biases.

    Maps tokens `(batch, length)`, integers below `vocabulary`, to logits
    `(batch, length, vocabulary)`. Position `t` sees the positions up to `t` only. At the start all
    tokens are nearly equally likely, so the loss is `log(vocabulary)`, 5.55 for bytes.

    Args:
        layers: number of transformer blocks.
        width: number of features of a token; a multiple of `heads`.
        heads: number of attention heads.
        context: greatest length of a sequence.
        vocabulary: number of different tokens; 256 for bytes.
        dropout: probability with which training drops a feature of a block's two branches.
        tied: whether the output layer shares the weights of the token embedding.

    >>> model = TinyGPT(layers=1, width=16, context=8)
    >>> model(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])

    Raises:
        ConfigError: `width` is not a multiple of `heads`.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        *,
        heads: int = 4,
        context: int = 128,
        vocabulary: int = 256,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            why = f"they share the width {width} equally"
            raise ConfigError.bad("heads", heads, why, "write a width that is a multiple of heads")
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        blocks = (_Block(width, heads, dropout, branches=2 * layers) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = _norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token_embedding.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.position_embedding.weight, std=EMBEDDING_STD)
        if tied:
            self.head.weight = self.token_embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=EMBEDDING_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return, for each position, the logits of the token that follows it.

        >>> TinyGPT(1, 8, context=4)(torch.zeros(2, 4, dtype=torch.long)).shape
        torch.Size([2, 4, 256])

        Raises:
            ConfigError: the sequences are longer than `context`.
        """
        length = tokens.shape[-1]
        if length > self.context:
            why = f"the sequences have {length} tokens"
            raise ConfigError.bad("context", self.context, why, f"write context={length}")
        features = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        logits: torch.Tensor = self.head(self.norm(self.blocks(features)))
        return logits


def _norm(features: int) -> nn.RMSNorm:
    """Return a norm without weights; the layer that follows it has all that is needed.

    On a CPU each weight costs a pass forward and a reduction backward, 10 percent of a step.
    """
    return nn.RMSNorm(features, elementwise_affine=False)


@final
class _Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each added to its input.

    `branches` is the number of such additions in the whole model. The last layer of each branch
    starts smaller by its square root: the sum does not grow with depth (GPT-2, section 2.3).
    """

    def __init__(self, width: int, heads: int, dropout: float, *, branches: int) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = _norm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = _norm(width // heads)
        self.key_norm = _norm(width // heads)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = _norm(width)
        self.perceptron_in = nn.Linear(width, 4 * width, bias=False)
        self.perceptron_out = nn.Linear(4 * width, width, bias=False)
        for layer in (self.query_key_value, self.perceptron_in):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
        for layer in (self.attention_out, self.perceptron_out):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features * branches))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features + self.dropout(self._attend(self.attention_norm(features)))
        hidden = functional.gelu(self.perceptron_in(self.perceptron_norm(features)))
        out: torch.Tensor = features + self.dropout(self.perceptron_out(hidden))
        return out

    def _attend(self, features: torch.Tensor) -> torch.Tensor:
        per_head = self.query_key_value(features).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)  # each (batch, head, length, feature)
        mixed = functional.scaled_dot_product_attention(
            self.query_norm(query), self.key_norm(key), value, is_causal=True
        )
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return out
