"""Models whose memory on CUDA is measured and predicted. None needs more than torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MakeBatch = Callable[[int], Any]


def next_byte(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a language model."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class AttentionByHand(nn.Module):
    """Causal attention by hand: the whole matrix of weights."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return mixed features."""
        length = features.size(1)
        per_head = self.project_in(features).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=features.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        weights = functional.dropout(weights, self.dropout, self.training)
        out: Tensor = self.project_out((weights @ value).transpose(1, 2).flatten(-2))
        return out


class ByHand(nn.Module):
    """A language model with attention by hand, LayerNorm and dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), AttentionByHand(64, 4, dropout), nn.Dropout(dropout))
            for _ in range(3)
        )
        self.head = nn.Linear(64, 256)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        features = self.embedding(tokens)
        for block in self.blocks:
            features = features + block(features)
        logits: Tensor = self.head(features)
        return logits


class LowRank(nn.Module):
    """A frozen layer and a low-rank change to it that is learnt."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the frozen layer gives, changed."""
        out: Tensor = self.frozen(inputs) + self.up(self.down(inputs))
        return out


def perceptron(width: int = 512, hidden: int = 2048, out: int = 512) -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, out),
    )


class Block(nn.Module):
    """A transformer block: LayerNorm, scaled dot product attention, dropout, biases."""

    def __init__(self, width: int, heads: int, dropout: float, *, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.is_causal = heads, dropout, is_causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.up: nn.Module = nn.Linear(width, 4 * width)
        self.down: nn.Module = nn.Linear(4 * width, width)

    def attend(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return mixed features."""
        per_head = self.query_key_value(features).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return out

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return features."""
        mixed = self.attend(self.norms[0](features), mask)
        features = features + functional.dropout(mixed, self.dropout, self.training)
        hidden = self.down(functional.gelu(self.up(self.norms[1](features))))
        return features + functional.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder as GPT-2: learnt positions, LayerNorm, optional dropout and checkpointing."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        *,
        heads: int = 4,
        context: int = 256,
        vocabulary: int = 1024,
        dropout: float = 0.0,
        tied: bool = False,
        recompute: bool = False,
        block: Callable[[int, int, float], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.dropout, self.recompute = dropout, recompute
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the head is applied to."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        features = self.token_embedding(tokens) + self.position_embedding(positions)
        features = functional.dropout(features, self.dropout, self.training)
        for block in self.blocks:
            if self.recompute:
                features = checkpoint(block, features, use_reentrant=False)
            else:
                features = block(features)
        normed: Tensor = self.norm(features)
        return normed

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.features(tokens))
        return logits


class ExpertsWithCapacity(nn.Module):
    """Each token goes to its best expert, as long as that one has room."""

    def __init__(self, width: int, experts: int = 4, room: float = 1.25) -> None:
        super().__init__()
        self.room, self.experts = room, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width).normal_(std=0.02))

    def forward(self, features: Tensor) -> Tensor:
        """Return features; zero for tokens that found no room."""
        places = math.ceil(self.room * features.size(1) / self.experts)
        weights, chosen = self.router(features).softmax(-1).max(-1)
        is_chosen = functional.one_hot(chosen, self.experts)
        place = (is_chosen.cumsum(1) - 1) * is_chosen
        fits = (place < places) & (is_chosen > 0)
        # One where a token (second dimension) has a place (fourth) of an expert (third).
        at = functional.one_hot(place.clamp(max=places - 1), places) * fits.unsqueeze(-1)
        sent = at.to(features.dtype)
        inputs = torch.einsum("btep,btw->ebpw", sent, features)
        hidden = functional.gelu(torch.einsum("ebpw,ewh->ebph", inputs, self.up))
        outputs = torch.einsum("ebph,ehw->ebpw", hidden, self.down)
        back = sent * weights[..., None, None]
        return torch.einsum("btep,ebpw->btw", back, outputs)


class ExpertsWithMask(nn.Module):
    """All tokens go to all experts; those that are not among the best two get weight zero."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return features."""
        scores = self.router(features)
        best, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1).to(scores.dtype))
        out = torch.zeros_like(features)
        for expert, weight in zip(self.experts, weights.unbind(-1), strict=True):
            out = out + expert(features) * weight.unsqueeze(-1)
        return out


def experts_block(experts: type[nn.Module]) -> Callable[[int, int, float], nn.Module]:
    """Return what makes a block whose perceptron is a mixture of experts."""

    def make(width: int, heads: int, dropout: float) -> nn.Module:
        block = Block(width, heads, dropout)
        block.up, block.down = experts(width), nn.Linear(width, width)
        return block

    return make


class PatchTransformer(nn.Module):
    """A vision transformer; patches come from a convolution, or from reshaping."""

    def __init__(self, *, convolution: bool, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.side, patch = 8, 3 * 8 * 8
        self.convolution = nn.Conv2d(3, width, 8, stride=8) if convolution else None
        self.project = None if convolution else nn.Linear(patch, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(Block(width, 4, 0.0, is_causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100 if convolution else patch)

    def patches(self, pictures: Tensor) -> Tensor:
        """Return the pixels of each patch: (batch, patch, pixels)."""
        side = self.side
        parts = pictures.unflatten(3, (-1, side)).unflatten(2, (-1, side))
        found: Tensor = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return found

    def forward(self, pictures: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of pictures, or each patch if patches are reshaped."""
        if self.convolution is not None:
            features = self.convolution(pictures).flatten(2).transpose(1, 2)
        else:
            assert self.project is not None
            features = self.project(self.patches(pictures))
        features = features + self.position
        for block in self.blocks:
            features = block(features, mask)
        features = self.norm(features)
        out: Tensor = self.head(features if self.convolution is None else features.mean(1))
        return out


class Translator(nn.Module):
    """torch's own encoder and decoder, with dropout, a causal mask and padding."""

    def __init__(self, width: int = 256, vocabulary: int = 2000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        """Return logits."""
        length = target.size(1)
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        features = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.head(features)
        return logits


class Encoder(nn.Module):
    """torch's own encoder over tokens with padding, and the mean of what is no padding."""

    def __init__(self, width: int = 256, vocabulary: int = 2000, out: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        layer: Any = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, out)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return logits."""
        features = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        logits: Tensor = self.head((features * kept).sum(1) / kept.sum(1).clamp(min=1))
        return logits
