"""Peaks of memory that others published for real GPUs, beside ours on a GPU that is not there.

    python bench/published_memory.py [--only WORD] [--save]

Each row trains the same model in the same way with `phantomgpu`, which needs the CUDA build of
torch (`phantomgpu setup`) and no GPU. The versions of torch differ: the published runs are from
2021 to 2024. `--save` writes `results/published_memory.txt`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import phantomgpu

RESULT = Path(__file__).parent / "results" / "published_memory.txt"
GIB = 1 << 30
TITAN = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
FSDP2 = "github.com/pytorch/torchtitan/pull/165"
ANATOMY = "huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one"


class Row(NamedTuple):
    """One published run."""

    name: str
    source: str
    function: str
    options: dict[str, Any]
    published: dict[str, float]
    """GiB: reserved, or active (which is nearly what is allocated)."""
    gpu: str
    memory: str
    ranks: int = 1
    known: str = ""


def llama(**options: Any) -> dict[str, Any]:
    """Return the settings of a Llama."""
    return {"batch": 8, "length": 2048, "keeps": "all", **options}


L7 = {"vocabulary": 32000, "hidden": 11008, "kv_heads": 32}
L8 = {"vocabulary": 128256, "hidden": 14336, "kv_heads": 8}
H100 = ("h100", "95.04GiB")
V100 = ("t4", "16GiB")
LOADED = 1343 / 1024  # what the page shows before the model is loaded: the context
NEWER = "the page's memory also holds what CUDA loads later, and its optimizer and torch were older"


def bert(name: str, megabytes: int, **options: Any) -> Row:
    """Return a row of the page of Hugging Face."""
    published = {"reserved": megabytes / 1024 - LOADED}
    return Row(f"BERT-large, {name}", ANATOMY, "bert", options, published, *V100, known=NEWER)


ROWS = (
    Row(
        "Llama 3.1 8B, FSDP2 on 8 H100, 2 x 8192, selective checkpointing",
        TITAN,
        "titan",
        llama(**L8, batch=2, length=8192, keeps="some"),
        {"reserved": 82.4},
        *H100,
        ranks=8,
    ),
    Row(
        "Llama 3.1 8B, FSDP2 on 128 H100, 2 x 8192, selective checkpointing",
        TITAN,
        "titan",
        llama(**L8, batch=2, length=8192, keeps="some"),
        {"reserved": 67.0},
        *H100,
        ranks=128,
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, full checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="none"),
        {"active": 22.73, "reserved": 31.02},
        *H100,
        ranks=8,
        known="not explained",
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, selective checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="some"),
        {"active": 49.54, "reserved": 59.41},
        *H100,
        ranks=8,
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 16 x 2048, selective checkpointing",
        FSDP2,
        "titan",
        llama(**L7, keeps="some", batch=16),
        {"reserved": 88.23},
        *H100,
        ranks=8,
        known="published for torch.compile, ours is eager",
    ),
    Row(
        "Llama 7B, FSDP2 on 8 H100, 8 x 2048, no checkpointing",
        FSDP2,
        "titan",
        llama(**L7),
        {"reserved": 90.28},
        *H100,
        ranks=8,
        known="published for torch.compile, ours is eager",
    ),
    bert("batch 4", 14949, batch=4),
    bert("batch 1, 4 accumulated", 8681, batch=1, accumulate=4),
    bert("the same, checkpointing", 6775, batch=1, accumulate=4, checkpoints=True),
    bert("batch 4, fp16", 13939, batch=4, fp16=True),
    bert("accumulated, checkpointing, fp16", 7275, batch=1, accumulate=4, checkpoints=True, fp16=True),
    bert("batch 4, Adafactor", 12295, batch=4, adafactor=True),
    bert(
        "accumulated, checkpointing, fp16, Adafactor",
        4847,
        batch=1,
        accumulate=4,
        checkpoints=True,
        fp16=True,
        adafactor=True,
    ),
)


def bert_large(
    *,
    batch: int,
    accumulate: int = 1,
    checkpoints: bool = False,
    fp16: bool = False,
    adafactor: bool = False,
) -> None:
    """Train BERT-large on 512 tokens, as the page does; gradients are zeroed, not freed."""
    import torch
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


def titan(
    *, vocabulary: int, hidden: int, kv_heads: int, batch: int, length: int, keeps: str
) -> None:
    """Train a Llama of 32 layers of 4,096 as torchtitan does: FSDP2, bf16, fp32 reduction."""
    import functools

    import torch
    from torch import Tensor, distributed, nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    width, heads, layers = 4096, 32, 32
    head = width // heads

    def rotated(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def repeated(x: Tensor) -> Tensor:
        times = heads // kv_heads
        shape = x.shape
        if times == 1:
            return x
        wide = x[:, :, :, None, :].expand(*shape[:3], times, head)
        return wide.reshape(*shape[:2], heads, head)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.wk, self.wv = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
            self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
            self.w2 = nn.Linear(hidden, width, bias=False)

        def attend(self, x: Tensor, turns: Tensor) -> Tensor:
            q, k, v = (
                project(x).view(*x.shape[:2], -1, head) for project in (self.wq, self.wk, self.wv)
            )
            q, k = rotated(q, turns), repeated(rotated(k, turns))
            q, k, v = (one.transpose(1, 2) for one in (q, k, repeated(v)))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            result: Tensor = self.wo(y.transpose(1, 2).contiguous().view(x.shape))
            return result

        def forward(self, x: Tensor, turns: Tensor) -> Tensor:
            x = x + self.attend(self.norm1(x), turns)
            y = self.norm2(x)
            result: Tensor = x + self.w2(functional.silu(self.w1(y)) * self.w3(y))
            return result

    def contexts() -> Any:
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

    distributed.init_process_group("nccl")
    with torch.device("meta"):
        embedding = nn.Embedding(vocabulary, width)
        blocks = nn.ModuleList(Block() for _ in range(layers))
        norm, out = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        model = nn.ModuleDict({"embedding": embedding, "blocks": blocks, "norm": norm, "out": out})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap = functools.partial(checkpoint_wrapper, preserve_rng_state=False)
    for index, block in enumerate(blocks):
        if keeps == "none":
            blocks[index] = wrap(block)
        elif keeps == "some":
            blocks[index] = wrap(block, context_fn=contexts)
        fully_shard(blocks[index], mp_policy=policy, reshard_after_forward=index < layers - 1)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, ids: Tensor, turns: Tensor) -> Tensor:
            x = embedding(ids)
            for block in blocks:
                x = block(x, turns)
            result: Tensor = out(norm(x)).float()
            return result

    whole = Whole()
    fully_shard(whole, mp_policy=policy)
    whole.to_empty(device="cuda")
    turns = torch.ones(length, 1, head // 2, dtype=torch.complex64, device="cuda")
    optimizer = torch.optim.AdamW(whole.parameters(), foreach=True)
    while True:
        ids = torch.randint(0, vocabulary, (batch, length), device="cuda")
        logits = whole(ids, turns)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()


FUNCTIONS = {"bert": bert_large, "titan": titan}


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    given = parser.parse_args()
    lines = [f"{'published':>9} {'ours':>7} {'ratio':>6}  what, GiB"]
    torch = ""
    for row in ROWS:
        if given.only not in row.name:
            continue
        began = time.perf_counter()
        report = phantomgpu.run(
            FUNCTIONS[row.function],
            gpu=row.gpu,
            memory=row.memory,
            ranks=row.ranks,
            kwargs=row.options,
        )
        torch = report.torch or torch
        ours = {"active": report.peak_allocated / GIB, "reserved": report.peak_reserved / GIB}
        for what, published in row.published.items():
            ratio = ours[what] / published
            known = f"; {row.known}" if row.known and abs(ratio - 1) > 0.02 else ""
            line = f"{published:9.2f} {ours[what]:7.2f} {ratio:6.3f}  {what}: {row.name} "
            lines.append(f"{line}[{row.source}]{known}")
            print(lines[-1], report.status, f"{time.perf_counter() - began:.0f} s", flush=True)
    lines.append(f"torch {torch}; three optimizer steps; cuDNN off")
    if given.save:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
