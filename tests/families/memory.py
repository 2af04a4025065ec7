"""Small training steps of many families, to hold predictions of their memory to.

Each is a function that makes a step and what makes its batches. The models are small so that all
of them can be taken for real in a minute; what decides how memory behaves is there: the kind of
layers, attention, normalisation, optimizer, precision, accumulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

MakeBatch = Callable[[int], Any]


class Family(NamedTuple):
    """A step, and how its batches are made."""

    step: WholeStep
    make_batch: MakeBatch


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer that most of them have."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)


# Inputs and targets: 64 features, small pictures, bytes.


def rows(size: int) -> tuple[Tensor, Tensor]:
    """Return samples of 64 features, and classes."""
    return torch.randn(size, 64), torch.randint(0, 10, (size,))


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Return pictures in colour, and classes."""
    return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))


def texts(size: int) -> Tensor:
    """Return sequences of bytes."""
    return torch.randint(0, 256, (size, 64))


def classify(model: Any, batch: Any) -> Tensor:
    """Return the loss of a classifier."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def next_byte(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of a language model."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def hugging_face(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss that a model of transformers computes itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


# Models


def mlp() -> nn.Module:
    """Return a perceptron of three layers."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    )


class ResidualBlock(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or width != out:
            self.past = nn.Sequential(
                nn.Conv2d(width, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features."""
        hidden = functional.relu(self.first_norm(self.first(inputs)), inplace=True)
        return functional.relu(self.second_norm(self.second(hidden)) + self.past(inputs))


def resnet() -> nn.Module:
    """Return a small ResNet with BatchNorm."""
    widths = (16, 32, 64)
    blocks = [
        ResidualBlock(a, b, 1 + (a != b)) for a, b in zip((16, *widths), widths, strict=False)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()
        )
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a picture."""
        first = self.down(inputs)
        out: Tensor = self.out(torch.cat([first, self.up(self.deep(first))], dim=1))
        return out


class VisionTransformer(nn.Module):
    """Patches, a transformer of torch's own layers, the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        self.position = nn.Parameter(torch.zeros(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        features = self.patches(inputs).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.encoder(features).mean(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM or GRU over bytes."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.cells = kind(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.cells(self.embedding(tokens))[0])
        return logits


class Attention(nn.Module):
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

    def __init__(self, dropout: float = 0.1, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), Attention(64, 4, dropout), nn.Dropout(dropout))
            for _ in range(3)
        )
        self.head = nn.Linear(64, 256)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        features = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                features = features + checkpoint(block, features, use_reentrant=False)
            else:
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


def lora() -> nn.Module:
    """Return a GPT whose weights are frozen but for low-rank changes."""
    model = TinyGPT(layers=2, width=64, context=64).requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in ("query_key_value", "perceptron_in", "perceptron_out"):
            setattr(block, name, LowRank(getattr(block, name), 4))
    return model


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        """Return a product, and keep its factors."""
        context.save_for_backward(inputs)
        return inputs * inputs.sigmoid()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        (inputs,) = context.saved_tensors
        gate = inputs.sigmoid()
        gradient: Tensor = gradients[0] * (gate + inputs * gate * (1 - gate))
        return gradient


class OwnFunction(nn.Module):
    """A perceptron with an activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        hidden = Doubled.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        logits: Tensor = self.second(hidden)
        return logits


class Experts(nn.Module):
    """Each token goes to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        features = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.router(features).softmax(-1).max(-1)
        out = torch.zeros_like(features)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, mine, expert(features[mine]) * weights[mine, None])
        logits: Tensor = self.head(out).unflatten(0, tokens.shape)
        return logits


class LooksAtValues(nn.Module):
    """A perceptron that takes another way where values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.layers(inputs)
        if out.abs().max().item() > 1e9:
            out = out.double().softmax(-1).log().float()
        return out


def contrast(model: Any, batch: Any) -> Tensor:
    """Return a loss over all pairs of samples."""
    features = functional.normalize(model(batch[0]), dim=-1)
    similar = features @ features.T / 0.1
    return functional.cross_entropy(similar, torch.arange(similar.size(0)))


def _of(
    model: nn.Module,
    loss: Any,
    make_batch: MakeBatch,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Family:
    accumulation = options.pop("accumulation", 1)
    step = SupervisedStep(model, optimizer or adamw(model), loss, **options)
    return Family(WholeStep.of(step, accumulation=accumulation), make_batch)


def _mlp(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], **options: Any) -> Family:
    model = mlp()
    return _of(model, classify, rows, make(list(model.parameters())), **options)


def _gpt(model: dict[str, Any] | None = None, **options: Any) -> Family:
    gpt = TinyGPT(**{"layers": 2, "width": 64, "context": 64, **(model or {})})
    return _of(gpt, next_byte, texts, **options)


def _gpt_with(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Family:
    gpt = TinyGPT(2, 64, context=64)
    return _of(gpt, next_byte, texts, make(list(gpt.parameters())))


def _transformers(kind: str) -> Family:
    transformers = importlib.import_module("transformers")  # where it is installed

    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    if kind == "bert":
        config = transformers.BertConfig(**small, vocab_size=256, intermediate_size=128)
        model = transformers.BertForMaskedLM(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            **small, vocab_size=256, intermediate_size=128, num_key_value_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256)
        model = transformers.GPT2LMHeadModel(config)
    return _of(model.train(), hugging_face, texts)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW

FAMILIES: dict[str, Callable[[], Family]] = {
    "MLP, SGD": lambda: _mlp(SGD),
    "MLP, SGD with momentum": lambda: _mlp(lambda p: SGD(p, momentum=0.9)),
    "MLP, AdamW": lambda: _mlp(ADAMW),
    "MLP, AdamW foreach": lambda: _mlp(lambda p: ADAMW(p, foreach=True)),
    "MLP, AdamW fused": lambda: _mlp(lambda p: ADAMW(p, fused=True)),
    "MLP, AdamW amsgrad": lambda: _mlp(lambda p: ADAMW(p, amsgrad=True)),
    "MLP, RMSprop centred": lambda: _mlp(lambda p: torch.optim.RMSprop(p, centered=True)),
    "MLP, Adagrad": lambda: _mlp(torch.optim.Adagrad),
    "MLP, Adafactor": lambda: _mlp(torch.optim.Adafactor),
    "MLP, clipping": lambda: _mlp(SGD, clip_norm=1.0),
    "MLP, accumulation 4": lambda: _mlp(ADAMW, accumulation=4),
    "MLP, fp16 with a scaler": lambda: _mlp(ADAMW, precision="fp16"),
    "MLP, loss over pairs": lambda: _of(mlp(), contrast, rows),
    "own autograd function": lambda: _of(OwnFunction(), classify, rows),
    "MLP, SGD nesterov": lambda: _mlp(lambda p: SGD(p, momentum=0.9, nesterov=True)),
    "MLP, SGD, accumulation 2, sum": lambda: _mlp(SGD, accumulation=2, loss_reduction="sum"),
    "MLP, NAdam": lambda: _mlp(torch.optim.NAdam),
    "GPT, SDPA": _gpt,
    "GPT, SDPA, tied": lambda: _gpt({"tied": True}),
    "GPT, SDPA, 4 layers": lambda: _gpt({"layers": 4}),
    "GPT, SDPA, SGD momentum": lambda: _gpt_with(lambda p: SGD(p, momentum=0.9)),
    "GPT, SDPA, AdamW fused": lambda: _gpt_with(lambda p: ADAMW(p, fused=True)),
    "GPT, SDPA, AdamW foreach": lambda: _gpt_with(lambda p: ADAMW(p, foreach=True)),
    "GPT, SDPA, dropout": lambda: _gpt({"dropout": 0.1}),
    "GPT, SDPA, bf16": lambda: _gpt(precision="bf16"),
    "GPT, SDPA, clipping": lambda: _gpt(clip_norm=1.0),
    "GPT, SDPA, bf16, clipping": lambda: _gpt(precision="bf16", clip_norm=1.0),
    "GPT, SDPA, accumulation 2": lambda: _gpt(accumulation=2),
    "GPT, attention by hand, dropout": lambda: _of(ByHand(), next_byte, texts),
    "GPT, by hand, bf16": lambda: _of(ByHand(), next_byte, texts, precision="bf16"),
    "GPT, activation checkpointing": lambda: _of(ByHand(recompute=True), next_byte, texts),
    "GPT, LoRA": lambda: _of(lora(), next_byte, texts),
    "ViT": lambda: _of(VisionTransformer(), classify, pictures),
    "ResNet, BatchNorm": lambda: _of(resnet(), classify, pictures),
    "U-Net": lambda: _of(UNet(), lambda m, b: (m(b[0]) - b[0]).square().mean(), pictures),
    "LSTM": lambda: _of(Recurrent(nn.LSTM), next_byte, texts),
    "GRU": lambda: _of(Recurrent(nn.GRU), next_byte, texts),
    "mixture of experts": lambda: _of(Experts(), next_byte, texts),
    "branch on a value": lambda: _of(LooksAtValues(), classify, rows),
    "BERT (transformers)": lambda: _transformers("bert"),
    "GPT-2 (transformers)": lambda: _transformers("gpt2"),
    "Llama (transformers)": lambda: _transformers("llama"),
}
