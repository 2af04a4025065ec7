"""Published step times beside the least seconds that phantomgpu computes.

    python bench/published_time.py [--only WORD] [--page]

The models are built here from their sizes, without weights. What is left out makes a step faster,
never slower: recomputation of activations, metrics, and optimizers that do more than AdamW. Where
the published program fuses kernels (torch.compile, llm.c), only what fusing cannot save is counted:
matrix products, attention and communication. So the bound must lie below each published time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import phantomgpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "published_time.json"
PAGE = ROOT / "docs" / "phantomgpu" / "time.md"
TITAN = "torchtitan benchmarks/llama3_h100_202412"
MODDED = "modded-nanogpt records/track_1_short"
NVIDIA = "NVIDIA/DeepLearningExamples ResNet-50 v1.5"
PEFT = "PEFT method_comparison/MetaMathQA"


def step(model: Any, loss_of: Callable[[], Any], dtype: Any) -> None:
    """Train for two steps."""
    import torch

    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(2):
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gpt2(sequences: int, heads: int) -> None:
    """GPT-2 with 124 million parameters, in bf16 by autocast."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50304, n_head=heads, **drops)).cuda()
    tokens = torch.randint(0, 50304, (sequences, 1024), device="cuda")
    step(model, lambda: model(tokens, labels=tokens).loss, torch.bfloat16)


def llama3(sequences: int) -> None:
    """Llama 3.1 8B with FSDP2, parameters in fp32 and products in bf16, 8192 tokens."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    distributed.init_process_group("nccl")
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (*model.model.layers, model):
        fully_shard(block, mp_policy=policy)
    model.to_empty(device="cuda")
    tokens = torch.randint(0, 128256, (sequences, 8192), device="cuda")
    step(model, lambda: model(tokens, labels=tokens).loss, None)


def llama32(tokens: int, rank: int | None) -> None:
    """Llama 3.2 3B in bf16, batch 4: whole, or LoRA on the queries and values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class LoRA(torch.nn.Module):
        def __init__(self, base: Any, rank: int) -> None:
            super().__init__()
            self.base = base
            self.a = torch.nn.Linear(base.in_features, rank, bias=False, device="cuda")
            self.b = torch.nn.Linear(rank, base.out_features, bias=False, device="cuda")

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.b(self.a(x.float())).to(x.dtype)

    config = LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cuda")
    model.tie_weights()
    if rank is not None:
        model.requires_grad_(requires_grad=False)
        for block in model.model.layers:
            block.self_attn.q_proj = LoRA(block.self_attn.q_proj, rank)
            block.self_attn.v_proj = LoRA(block.self_attn.v_proj, rank)
    ids = torch.randint(0, 128256, (4, tokens), device="cuda")
    step(model, lambda: model(ids, labels=ids).loss, None)


def resnet50(images: int, precision: str) -> None:
    """ResNet-50 in fp32 or mixed precision."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).cuda()
    pixels = torch.randn(images, 3, 224, 224, device="cuda")
    labels = torch.zeros(images, dtype=torch.long, device="cuda")
    dtype = torch.float16 if precision == "amp" else None
    step(model, lambda: model(pixels, labels=labels).loss, dtype)


class Row(NamedTuple):
    """A published time.

    Attributes:
        seconds: Of a step on one GPU; from units a second where those were published.
        fused: Whether the published program fuses kernels.
    """

    name: str
    gpu: str
    source: str
    seconds: float
    script: Callable[..., None]
    args: tuple[Any, ...]
    ranks: int = 1
    fused: bool = False


def titan(name: str, rate: float, ranks: int, *, fused: bool = False) -> Row:
    """Return a row of torchtitan's table, from tokens a second."""
    return Row(name, "h100", TITAN, 2 * 8192 / rate, llama3, (2,), ranks, fused)


def modded(name: str, record: str, seconds: float, heads: int) -> Row:
    """Return a row of a record of modded-nanogpt."""
    return Row(name, "h100", f"{MODDED}/{record}", seconds, gpt2, (64, heads), 8, fused=True)


ROWS = (
    modded("GPT-2 124M, llm.c, 8 GPUs", "2024-10-13", 0.140, 12),
    modded("GPT-2 124M, Muon, 8 GPUs", "2024-10-10", 0.21633, 12),
    modded("the same, modern blocks", "2024-10-14", 0.17889, 6),
    modded("the same, torch 2.5", "2024-10-18", 0.14182, 6),
    titan("Llama 3.1 8B, FSDP, 8 GPUs", 5762, 8),
    titan("the same, compiled, 8 GPUs", 6667, 8, fused=True),
    titan("Llama 3.1 8B, FSDP, 128 GPUs", 5605, 128),
    titan("the same, compiled, 128 GPUs", 6514, 128, fused=True),
    Row("GPT-2 124M, nanoGPT", "a100-40", "nanoGPT README", 0.250, gpt2, (12, 12)),
    Row("the same, compiled", "a100-40", "nanoGPT README", 0.135, gpt2, (12, 12), fused=True),
    Row("Llama 3.2 3B, LoRA", "l40s", PEFT, 29.0046 / 250, llama32, (212, 32)),
    Row("Llama 3.2 3B, whole", "l40s", PEFT, 90.9493 / 250, llama32, (212, None)),
    Row("ResNet-50, mixed precision", "a100-80", NVIDIA, 128 / 2470, resnet50, (128, "amp")),
    Row("ResNet-50, TF32", "a100-80", NVIDIA, 128 / 938, resnet50, (128, "tf32")),
    Row("ResNet-50, mixed precision, V100", "v100-32", NVIDIA, 128 / 1156, resnet50, (128, "amp")),
    Row("ResNet-50, FP32, V100", "v100-32", NVIDIA, 128 / 356, resnet50, (128, "fp32")),
)


@cache
def measured(
    script: Callable[..., None], args: tuple[Any, ...], gpu: str, ranks: int
) -> dict[str, Any]:
    """Return the bound of a script; the memory of the card does not matter here."""
    report = phantomgpu.run(script, gpu=gpu, memory="900GiB", ranks=ranks, args=args, steps=2)
    if not report.bound:
        return {"problem": report.problem or report.status}
    return {"bound": report.bound, "torch": report.torch, "seconds": report.seconds}


def least(row: Row, bound: dict[str, Any]) -> float:
    """Return the least seconds of the published program."""
    kept = ("matrix products", "attention", "convolutions")
    computed: float = sum(bound["classes"].get(name, 0.0) for name in kept)
    whole: float = bound["seconds"]
    return max(computed, bound["links"]) if row.fused else whole


def table(found: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| run | GPU | published | at least | share | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in (one for one in ROWS if "bound" in found.get(one.name, {})):
        seconds = least(row, found[row.name]["bound"])
        lines.append(
            f"| {row.name} | {row.gpu} | {1000 * row.seconds:.0f} ms | {1000 * seconds:.0f} ms | "
            f"{100 * seconds / row.seconds:.0f} % | {row.source} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the rows that have no result, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--page", action="store_true", help="only write the table into the page")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for row in () if given.page else ROWS:
        if given.only in row.name and (given.again or row.name not in found):
            found[row.name] = measured(row.script, row.args, row.gpu, row.ranks)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(row.name, row.seconds, found[row.name].get("bound", found[row.name]), flush=True)
    if given.page:
        text = PAGE.read_text()
        between = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end -->)", re.DOTALL)
        PAGE.write_text(between.sub(f"\n{table(found)}\n\n", text))
    print(table(found))


if __name__ == "__main__":
    main()
