"""What `published_memory.py` trains: BERT-large, and a Llama as torchtitan has it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, HEADS, LAYERS = 4096, 32, 32
HEAD = WIDTH // HEADS


def bert_large(
    *,
    batch: int,
    accumulate: int = 1,
    checkpoints: bool = False,
    fp16: bool = False,
    adafactor: bool = False,
) -> None:
    """Train BERT-large on 512 tokens, as the page does; gradients are zeroed, not freed."""
    from transformers import Adafactor, BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    with torch.device("cuda"):
        model = BertForSequenceClassification(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer: torch.optim.Optimizer
    if adafactor:
        optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler(enabled=fp16)
    while True:
        for _ in range(accumulate):
            ids = torch.randint(100, 30000, (batch, 512), device="cuda")
            labels = torch.randint(0, 2, (batch,), device="cuda")
            with torch.autocast("cuda", torch.float16, enabled=fp16):
                loss = model(input_ids=ids, labels=labels).loss
            scaler.scale(loss / accumulate).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=False)


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def _repeated(x: Tensor) -> Tensor:
    """Repeat the heads of keys and values, in a copy."""
    batch, length, heads, size = x.shape
    if heads == HEADS:
        return x
    wide = x[:, :, :, None, :].expand(batch, length, heads, HEADS // heads, size)
    return wide.reshape(batch, length, HEADS, size)


class Block(nn.Module):
    """One layer of a Llama."""

    def __init__(self, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * HEAD, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)

    def attend(self, x: Tensor, turns: Tensor) -> Tensor:
        """Attend with rotary positions."""
        q, k, v = (
            project(x).view(*x.shape[:2], -1, HEAD) for project in (self.wq, self.wk, self.wv)
        )
        q, k = _rotated(q, turns), _repeated(_rotated(k, turns))
        q, k, v = (one.transpose(1, 2) for one in (q, k, _repeated(v)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.wo(y.transpose(1, 2).contiguous().view(x.shape))
        return result

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Run the layer."""
        x = x + self.attend(self.norm1(x), turns)
        y = self.norm2(x)
        result: Tensor = x + self.w2(functional.silu(self.w1(y)) * self.w3(y))
        return result


class Llama(nn.Module):
    """Embedding, layers and head; the logits are in full precision."""

    def __init__(self, vocabulary: int, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden, kv_heads) for _ in range(LAYERS))
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: Tensor, turns: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, turns)
        result: Tensor = self.out(self.norm(x)).float()
        return result


def _contexts() -> Any:
    """Keep every second product of matrices, and what attention and communication return."""
    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    counts = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        if operation is aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        is_kept = operation in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def titan(
    *,
    vocabulary: int,
    hidden: int,
    kv_heads: int,
    batch: int,
    length: int,
    keeps: str,
    holds_logits: bool = False,
) -> None:
    """Train a Llama of 32 layers of 4,096 as torchtitan does: FSDP2, bf16, fp32 reduction."""
    distributed.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama(vocabulary, hidden, kv_heads)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
    for index, block in enumerate(model.blocks):
        if keeps == "none":
            model.blocks[index] = wrap(block)
        elif keeps == "some":
            model.blocks[index] = wrap(block, context_fn=_contexts)
        again = index < LAYERS - 1
        fully_shard(model.blocks[index], mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    turns = torch.ones(length, 1, HEAD // 2, dtype=torch.complex64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    while True:
        ids = torch.randint(0, vocabulary, (batch, length), device="cuda")
        logits = model(ids, turns)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if not holds_logits:
            del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
