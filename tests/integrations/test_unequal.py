"""Batches and micro-batches in tokens, in the loops and trainers of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs stretto[huggingface]: make test-adapters")

import torch
from tests.integrations import huggingface_toys as toys
from torch.utils.data import DataLoader
from transformers import Trainer

from stretto import DataSpec, Loading, prepare
from stretto.errors import StrettoError
from stretto.integrations import huggingface

ROWS = toys.rows()
LENGTHS = [len(row["input_ids"]) for row in ROWS]
SIZES = "0tok:60tok 700tok:150tok"
BUDGET = 3 * max(LENGTHS)


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[list[int]], torch.Tensor]:
    """The samples of each step, and the weights after one big batch for each."""
    model = toys.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=toys.RATE)
    run = prepare(
        DataSpec(ROWS, lengths=LENGTHS),
        SIZES,
        max_duration="2ep",
        optimizer=optimizer,
        schedules=toys.SCHEDULES,
        loading=Loading(seed=toys.SEED, collate_fn=toys.collate),
    )
    ids = []
    for step in run:
        (micro,) = step
        ids.append(sorted(toys.ids_of(micro.batch)))
        model(**micro.batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.finish()
    return ids, toys.flat(model)


class Watched(torch.nn.Module):
    """A model; keeps the samples and the padded tokens of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toys.llama()
        self.passes: list[tuple[list[int], int]] = []

    def forward(self, **batch: Any) -> Any:
        if self.training:
            self.passes.append((toys.ids_of(batch), batch["input_ids"].numel()))
        return self.inner(**batch)


def check(passes: list[tuple[list[int], int]], steps: list[list[int]]) -> None:
    """Each step has its samples, in passes of at most the budget."""
    assert max(tokens for _, tokens in passes) <= BUDGET
    left = iter(passes)
    for step in steps:
        seen: list[int] = []
        while len(seen) < len(step):
            seen += next(left)[0]
        assert sorted(seen) == step
    assert next(left, None) is None


def same(model: torch.nn.Module, weights: torch.Tensor) -> None:
    torch.testing.assert_close(toys.flat(model), weights, rtol=0, atol=1e-7)


def trainer_of(sizes: Any = SIZES, **settings: Any) -> tuple[Trainer, toys.Recorder]:
    facts = {
        name: settings.pop(name) for name in ("lengths", "micro_batch_size") if name in settings
    }
    trainer = Trainer(
        model=toys.llama(),
        args=toys.arguments(max_grad_norm=0.0, **settings),
        train_dataset=ROWS,
        eval_dataset=ROWS[:20],
        data_collator=toys.collate,
    )
    every = {"save": "1ba", "evaluate": "50%", "log": "1ba"}
    huggingface.attach(trainer, sizes, toys.SCHEDULES, every=every, **facts)
    return trainer, toys.Recorder(trainer)


def test_a_trainer_of_hugging_face(by_hand: Any, tmp_path: Path) -> None:
    ids, weights = by_hand
    facts = {"lengths": LENGTHS, "micro_batch_size": f"{BUDGET}tok"}
    trainer, seen = trainer_of(out=str(tmp_path), **facts)
    trainer.train()
    assert seen.ids == ids
    assert any(len(step) > 1 for step in seen.micros)
    same(trainer.model, weights)
    assert (trainer.state.global_step, trainer.state.max_steps) == (len(ids), len(ids))
    assert sum("eval_loss" in line for line in trainer.state.log_history) == 2
    tokens = [line["tokens"] for line in trainer.state.log_history if "loss" in line]
    assert tokens[-1] == 2 * sum(LENGTHS)
    at = len(ids) // 2
    other, rest = trainer_of(**facts | {"micro_batch_size": "200tok"})
    other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert rest.ids == ids[at:]
    same(other.model, weights)


def test_a_loop_of_accelerate(by_hand: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs stretto[accelerate]")
    from stretto.integrations.accelerate import attach

    model, accelerator = Watched(), accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=toys.RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader, _ = attach(
        accelerator,
        SIZES,
        toys.SCHEDULES,
        data=DataLoader(ROWS, 4, shuffle=True, collate_fn=toys.collate),  # type: ignore[arg-type]
        optimizer=optimizer,
        max_duration="2ep",
        units="tokens",
        micro_batch_size=f"{BUDGET}tok",
        loading=Loading(seed=toys.SEED),
        lengths=LENGTHS,
    )
    lengths = []
    for _ in range(2):
        lengths.append(len(loader))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    check(model.passes, by_hand[0])
    assert sum(lengths) == len(model.passes)
    same(model.inner, by_hand[1])


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_lightning(by_hand: Any) -> None:
    pytest.importorskip("lightning", reason="needs stretto[lightning]: make test-adapters")
    from lightning.pytorch import LightningModule
    from tests.integrations import lightning_toys

    from stretto.integrations.lightning import attach

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Watched()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=toys.RATE)

    trainer, module = lightning_toys.make_trainer(), Module()
    batches = attach(
        trainer,
        SIZES,
        toys.SCHEDULES,
        data=DataLoader(ROWS, 4, shuffle=True, collate_fn=toys.collate),  # type: ignore[arg-type]
        units="tokens",
        micro_batch_size=f"{BUDGET}tok",
        loading=Loading(seed=toys.SEED),
        lengths=LENGTHS,
    )
    trainer.fit(module, batches)
    found = [one for one in module.net.passes if len(one[0])]
    assert trainer.global_step == len(by_hand[0])
    same(module.net.inner, by_hand[1])
    assert max(tokens for _, tokens in found) <= BUDGET


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "pass lengths="),
        ({"sizes": 8, "micro_batch_size": "39tok"}, "pass lengths="),
        ({"lengths": LENGTHS, "micro_batch_size": "8tok"}, "longest|exceeds"),
        ({"lengths": LENGTHS[1:]}, "149"),
        ({"lengths": LENGTHS, "sizes": "0tok:60tok 700tok:9"}, "tokens"),
    ],
)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        trainer_of(**settings)
