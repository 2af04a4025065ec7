"""Training steps whose largest batch on CUDA is measured and predicted.

`FAMILIES` names them. Each makes its step on a given device, and its batches on the CPU. The models
are built on the CPU and then moved, as most programs do. Where a model has a convolution, cuDNN
is left out: what that library allocates is not torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from families import cuda_hugging_face as hugging_face
from families.cuda_models import (
    GPT,
    ByHand,
    Encoder,
    ExpertsWithCapacity,
    ExpertsWithMask,
    LowRank,
    MakeBatch,
    PatchTransformer,
    Translator,
    experts_block,
    next_byte,
    perceptron,
)
from torch import Tensor, nn
from torch.nn import functional

from stretto.examples.tiny_gpt import TinyGPT
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep, TrainStep

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


class CudaFamily(NamedTuple):
    """How a step and its batches are made, and the memories in GiB to ask for."""

    make_step: Callable[[str], WholeStep]
    """`make_step(device)` returns a new step whose model lies on that device."""
    make_batch: MakeBatch
    memories: tuple[int, ...] = (1, 4)
    uses_cudnn: bool = True
    """Whether `torch.backends.cudnn.enabled` stays; without convolutions it changes nothing."""


def family(
    make_model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    make_batch: MakeBatch,
    make_optimizer: MakeOptimizer = ADAMW,
    **options: Any,
) -> CudaFamily:
    """Return a family of a model, a loss, batches and an optimizer."""
    memories = options.pop("memories", (1, 4))
    uses_cudnn = options.pop("uses_cudnn", True)
    accumulation = options.pop("accumulation", 1)

    def make_step(device: str) -> WholeStep:
        model = make_model().train().to(device)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        step = SupervisedStep(model, optimizer, loss, **options)
        return WholeStep.of(step, accumulation=accumulation)

    return CudaFamily(make_step, make_batch, memories, uses_cudnn)


# Batches and losses


def features(size: int) -> Tensor:
    """Return samples of 512 features."""
    return torch.zeros(size, 512)


def classes(size: int) -> tuple[Tensor, Tensor]:
    """Return samples of 512 features, and classes."""
    return torch.zeros(size, 512), torch.zeros(size, dtype=torch.long)


def tokens(length: int) -> MakeBatch:
    """Return what makes sequences of tokens."""
    return lambda size: torch.zeros(size, length, dtype=torch.long)


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Return pictures in colour, and classes."""
    return torch.zeros(size, 3, 64, 64), torch.zeros(size, dtype=torch.long)


def masked_pictures(size: int) -> tuple[Tensor, Tensor]:
    """Return pictures in colour, and for each patch whether it is seen."""
    return torch.zeros(size, 3, 64, 64), torch.ones(size, 1, 1, 64, dtype=torch.bool)


def sentences(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sources, targets that are shorter, and where the sources are padded."""
    source = torch.zeros(size, 96, dtype=torch.long)
    return source, source[:, :80].clone(), torch.zeros(size, 96, dtype=torch.bool)


def padded_texts(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, where they are padded, and labels."""
    made = torch.zeros(size, 128, dtype=torch.long)
    return made, torch.zeros(size, 128, dtype=torch.bool), torch.zeros(size, 20)


def restore(model: Any, batch: Tensor, *, loss: Any = functional.mse_loss) -> Tensor:
    """Return the loss of a model that gives back its input."""
    found: Tensor = loss(model(batch), batch)
    return found


def classify(model: Any, batch: Any, *, smoothing: float = 0.0) -> Tensor:
    """Return the loss of a classifier."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, label_smoothing=smoothing)


def distil(model: Any, batch: Tensor) -> Tensor:
    """Return how far a distribution is from another."""
    found = functional.log_softmax(model(batch), -1)
    return functional.kl_div(found, functional.softmax(batch, -1), reduction="batchmean")


def restore_patches(model: Any, batch: Any) -> Tensor:
    """Return the mean difference of each pixel, with a mask on attention."""
    images, is_seen = batch
    return functional.l1_loss(model(images, is_seen), model.patches(images))


def translate(model: Any, batch: Any) -> Tensor:
    """Return the loss of a translation, with label smoothing and ignored targets."""
    source, target, padding = batch
    logits = model(source, target[:, :-1], padding)
    return functional.cross_entropy(
        logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
    )


def label(model: Any, batch: Any) -> Tensor:
    """Return the loss of several labels for each text."""
    made, padding, targets = batch
    return functional.binary_cross_entropy_with_logits(model(made, padding), targets)


# Steps and models that the table below cannot say in a line


class MuonStep(TrainStep):
    """Muon updates the matrices of the blocks, AdamW the rest."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            in_blocks = name.startswith("blocks") and parameter.dim() == 2
            (matrices if in_blocks else rest).append(parameter)
        self.optimizers = (torch.optim.Muon(matrices), ADAMW(rest))

    def forward_backward(self, batch: Any, weight: float) -> Tensor:
        """Add the gradient of the loss in bf16."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = next_byte(self.model, batch)
        (loss * weight).backward()
        return loss

    def update(self) -> dict[str, float]:
        """Update all parameters."""
        for optimizer in self.optimizers:
            optimizer.step()
        return {}


def low_rank() -> nn.Module:
    """Return a GPT whose weights are frozen but for low-rank changes."""
    model = GPT(6, 384, heads=6, dropout=0.1, recompute=True).requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in ("query_key_value", "attention_out", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name), 8))
    return model


def only_matrices() -> nn.Module:
    """Return a GPT of which only the matrices of the blocks are trained."""
    model = GPT(4, 256)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks") and parameter.dim() == 2)
    return model


def gpt(make_optimizer: MakeOptimizer = ADAMW, **options: Any) -> CudaFamily:
    """Return a small GPT with its own keywords, and those of the step."""
    of_step = ("precision", "clip_norm", "accumulation", "memories", "loss_reduction")
    kept = {name: options.pop(name) for name in of_step if name in options}
    length = options.get("context", 256)
    make_model = functools.partial(GPT, **options)
    return family(make_model, next_byte, tokens(length), make_optimizer, **kept)


def mlp(loss: Any, make_optimizer: MakeOptimizer, **options: Any) -> CudaFamily:
    """Return a perceptron."""
    make_batch = classes if getattr(loss, "func", loss) is classify else features
    return family(perceptron, loss, make_batch, make_optimizer, **options)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def _fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ADAMW(parameters, fused=True)


def _tiny_gpt() -> nn.Module:
    return TinyGPT(4, 256, context=256, vocabulary=1024)


_smooth_l1 = functools.partial(restore, loss=functional.smooth_l1_loss)
_bce = functools.partial(restore, loss=functional.binary_cross_entropy_with_logits)
_smoothed = functools.partial(classify, smoothing=0.1)
_large_gpt: dict[str, Any] = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "context": 1024,
    "vocabulary": 50304,
}

FAMILIES: dict[str, CudaFamily] = {
    "MLP, SGD, mse": mlp(restore, SGD),
    "MLP, SGD momentum, smooth l1": mlp(_smooth_l1, _momentum),
    "MLP, AdamW, clipping, accumulation 4": mlp(_smoothed, ADAMW, clip_norm=1.0, accumulation=4),
    "MLP, NAdam, fp16": mlp(classify, torch.optim.NAdam, precision="fp16"),
    "MLP, RMSprop, bce": mlp(_bce, torch.optim.RMSprop),
    "MLP, AdamW fused, bf16, kl": mlp(distil, _fused, precision="bf16"),
    "TinyGPT, AdamW": family(_tiny_gpt, next_byte, tokens(256)),
    "TinyGPT, bf16, accumulation 2": family(
        _tiny_gpt, next_byte, tokens(256), precision="bf16", accumulation=2
    ),
    "GPT, AdamW": gpt(),
    "GPT, AdamW fused, dropout": gpt(_fused, dropout=0.1),
    "GPT, bf16, dropout, clipping": gpt(dropout=0.1, precision="bf16", clip_norm=1.0),
    "GPT, fp16, tied, clipping, accumulation 2": gpt(
        tied=True, precision="fp16", clip_norm=1.0, accumulation=2
    ),
    "GPT, checkpointing, Adafactor": gpt(torch.optim.Adafactor, recompute=True),
    "GPT, checkpointing, bf16, dropout": gpt(
        recompute=True, precision="bf16", dropout=0.1, layers=8, width=384, heads=6
    ),
    "GPT, Muon and AdamW, bf16": CudaFamily(
        lambda device: WholeStep.of(MuonStep(GPT().to(device))), tokens(256)
    ),
    "GPT, Muon, rest frozen": family(only_matrices, next_byte, tokens(256), torch.optim.Muon),
    "GPT, attention by hand, bf16, accumulation 2": family(
        ByHand, next_byte, tokens(64), precision="bf16", accumulation=2
    ),
    "GPT, LoRA, checkpointing, bf16": family(low_rank, next_byte, tokens(256), precision="bf16"),
    "experts with capacity, bf16": gpt(
        block=experts_block(ExpertsWithCapacity), precision="bf16", clip_norm=1.0
    ),
    "experts with a mask": gpt(_momentum, block=experts_block(ExpertsWithMask), dropout=0.1),
    "ViT with masks, bf16, l1": family(
        functools.partial(PatchTransformer, convolution=False),
        restore_patches,
        masked_pictures,
        precision="bf16",
    ),
    "ViT without cuDNN": family(
        functools.partial(PatchTransformer, convolution=True),
        _smoothed,
        pictures,
        uses_cudnn=False,
    ),
    "nn.Transformer, label smoothing": family(Translator, translate, sentences, clip_norm=1.0),
    "nn.TransformerEncoder, bf16, bce": family(Encoder, label, padded_texts, precision="bf16"),
    "GPT, 124M, bf16, clipping": gpt(
        **_large_gpt, precision="bf16", clip_norm=1.0, memories=(16, 80)
    ),
    "GPT, 124M, fp16, tied, dropout, fused": gpt(
        _fused, **_large_gpt, tied=True, dropout=0.1, precision="fp16", memories=(16, 80)
    ),
    **{
        name: family(make_model, loss, make_batch, make_optimizer, **options)
        for name, (make_model, loss, make_batch, make_optimizer, options) in (
            hugging_face.RECIPES.items()
        )
    },
}
