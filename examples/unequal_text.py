"""Fine-tuning on texts of unequal length: batches in tokens, and a token budget, in an own loop.

A sample is a question and its answer: a name of Python's manual, and a paragraph of what the manual
says about it. The loss is over the answer alone. `unequal_text.yaml` is the same run as a file.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import stretto
from stretto.examples.tiny_gpt import TinyGPT

LONGEST = 512
"""Tokens of a sample; each is a byte. Longer texts are cut."""
IGNORED = -100
"""The label of what is no target: the question, and the padding."""


def make_data() -> stretto.DataSpec:
    """Return the samples, and how many tokens each has."""
    samples, seen = [], set()
    for name in sorted(topics):
        for text in topics[name].split("\n\n"):
            if text.strip() and text not in seen:  # topics quote each other
                seen.add(text)
                samples.append(encode(f"{name}: ", text.strip()))
    return stretto.DataSpec(samples, lengths=[len(sample["input_ids"]) for sample in samples])


def encode(question: str, answer: str) -> dict[str, Tensor]:
    """Return the tokens of a sample, and the label of each: the token that follows it."""
    tokens = torch.tensor(list(f"{question}{answer}\n".encode()[: LONGEST + 1]))
    labels = tokens[1:].clone()
    labels[: len(question.encode()) - 1] = IGNORED
    return {"input_ids": tokens[:-1], "labels": labels}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad samples to the longest of them."""

    def padded(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(
            [one[name] for one in samples], batch_first=True, padding_value=value
        )

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED)}


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss over the tokens of the answers."""
    logits = model(batch["input_ids"])
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
    )


def main() -> None:
    """Train, and say what padding costs."""
    torch.manual_seed(0)
    model = TinyGPT(layers=1, width=32, heads=2, context=LONGEST)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = stretto.prepare(
        make_data(),
        "0tok:4Ktok 40%:16Ktok",
        max_duration="1ep",
        optimizer=optimizer,
        schedules={"lr": stretto.Cosine(end=0.1, warmup="10%")},
        micro_batch_size="1Ktok",
        loading={"collate_fn": collate},
        loss_weight="tokens",
        every={"log": "20%"},
    )
    tokens = computed = 0
    for step in run:
        losses = []
        for micro in step:
            loss = answer_loss(model, micro.batch) * micro.weight
            loss.backward()
            losses.append(loss.detach())
            tokens, computed = tokens + micro.num_tokens, computed + micro.batch["labels"].numel()
        optimizer.step()
        optimizer.zero_grad()
        if "log" in run.finish():
            size = f"{step.num_samples} samples, {step.num_tokens} tokens in {len(step)} passes"
            print(f"{run.timer.get('tok')}: loss {sum(losses):.3f}; {size}")
    print(f"{run.timer.batch} batches; computed over real tokens: {computed / tokens:.2f}")


if __name__ == "__main__":
    main()
