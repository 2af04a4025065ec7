"""Train GPT-2 small on the manual of Python: pip install '.[huggingface]'.

The configuration is that of GPT-2 small, its weights are random, and the text ships with Python. A
token is a byte, so 256 of the 50,257 tokens occur. There are 8 short steps: a minute on one
core. With torch 2.13 and Python 3.11 it prints:

    124,439,808 parameters, validation loss 10.46
    step 6, 16 samples: loss 5.75
    step 8, 32 samples: loss 5.41

5.55 is the logarithm of 256: by then it has learnt that tokens are bytes.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stretto
from stretto.examples.text import PythonDocs

LENGTH = 32


def batch_loss(model: GPT2LMHeadModel, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch[0], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel) -> float:
    model.eval()
    loss = batch_loss(
        model, PythonDocs(LENGTH, split="validation").get_batch([0, 200, 400, 600, 800, 1000])
    )
    model.train()
    return loss.item()


def main(samples: int = 32, **config: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(**config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    run = stretto.prepare(
        PythonDocs(LENGTH),
        "0%:2 25%:4 50%:8",
        max_duration=f"{samples}sp",
        micro_batch_size=4,
        optimizer=optimizer,
        schedules={"lr": stretto.Cosine(end=0.1, warmup="20%")},
        every={"evaluate": "50%"},
        loading={"seed": 0},
    )
    print(f"{model.num_parameters():,} parameters, validation loss {evaluate(model):.2f}")
    for step in run:
        for micro in step:
            (batch_loss(model, micro.batch) * micro.weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if "evaluate" in run.finish():
            loss = evaluate(model)
            print(f"step {run.timer.batch}, {run.timer.sample} samples: loss {loss:.2f}")


if __name__ == "__main__":
    main()
