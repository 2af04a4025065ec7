"""Small data and models that show which samples each step of a Hugging Face trainer saw."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from stretto.ordering import SampleOrder
from stretto.planning import Plan, plan
from stretto.schedules import Cosine
from stretto.timing import Horizon

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

N, WORDS, SEED = 150, 64, 3
SIZES = "0sp:8 65sp:18 125sp:31 200sp:64"  # grows inside epochs; 18 and 31 split unevenly
SCHEDULES = {"lr": Cosine(end=0.1, warmup="60sp", warmup_start=0.05)}
RATE = 1e-2


def rows(number: int = N) -> list[dict[str, list[int]]]:
    """Sequences of 4 to 13 tokens; the first two name the sample."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(number):
        length = int(torch.randint(4, 14, (1,), generator=generator))
        ids = torch.randint(3, WORDS, (length,), generator=generator)
        ids[0], ids[1] = i // 60 + 3, i % 60 + 3
        found.append({"input_ids": ids.tolist()})
    return found


def dataset(number: int = N) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows(number))


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(one["input_ids"]) for one in samples)

    def padded(row: list[int], value: int) -> list[int]:
        return row + [value] * (width - len(row))

    ids = [list(one["input_ids"]) for one in samples]
    return {
        "input_ids": torch.tensor([padded(one, 0) for one in ids]),
        "labels": torch.tensor([padded(one, -100) for one in ids]),
        "attention_mask": torch.tensor([padded([1] * len(one), 0) for one in ids]),
    }


def ids_of(batch: Any) -> list[int]:
    ids = batch["input_ids"]
    return ((ids[:, 0] - 3) * 60 + ids[:, 1] - 3).tolist()


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            num_attention_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **sizes | changes,
        )
    )


def words() -> Tokenizer:
    table = {f"w{number}": number for number in range(3, WORDS)}
    found = Tokenizer(WordLevel(table | {"<pad>": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
    found.pre_tokenizer = Whitespace()
    return found


def arguments(kind: type = TrainingArguments, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": changes.pop("out", None) or tempfile.mkdtemp(),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 4,
        "learning_rate": RATE,
        "optim": "sgd",
        "seed": SEED,
        "num_train_epochs": 2,
        "save_strategy": "no",
    }
    return kind(**settings | changes)


def planned(micro_batch_size: int | None = None) -> Plan:
    horizon = Horizon("2ep", dataset_num_samples=N)
    return plan(
        horizon,
        SIZES,
        schedules=SCHEDULES,
        base={"lr": RATE},
        micro_batch_size=micro_batch_size,
    )


def planned_ids() -> list[list[int]]:
    order, found = SampleOrder(N, SEED), []
    for one in planned().batches():
        start = one.timestamp.sample
        found.append(sorted(order[place] for place in range(start, start + one.size)))
    return found


class Recorder:
    """The samples, the micro-batches and the learning rate of each optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.ids: list[list[int]] = []
        self.micros: list[list[int]] = []
        self.rates: list[float] = []
        self._ids: list[int] = []
        self._micros: list[int] = []
        self._trainer = trainer
        trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)
        optimizer = trainer.create_optimizer()
        optimizer.register_step_pre_hook(lambda *_: self._step(optimizer))

    def _forward(self, model: Any, _: Any, inputs: Any) -> None:
        own = getattr(self._trainer, "stretto", None)
        if model.training and (own is None or own.weight):
            ids = ids_of(inputs)
            self._ids += ids
            self._micros.append(len(ids))

    def _step(self, optimizer: Any) -> None:
        self.ids.append(sorted(self._ids))
        self.micros.append(self._micros)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self._ids, self._micros = [], []


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def train_by_hand(model: Any) -> tuple[torch.Tensor, list[float]]:
    """Train on one big batch for each step of the plan; return the weights and losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data, losses = rows(), []
    for batch, ids in zip(planned().batches(), planned_ids(), strict=True):
        optimizer.param_groups[0]["lr"] = batch.values["lr"]
        loss = model(**collate([data[i] for i in ids])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return flat(model), losses
