"""`attach` of each framework, called wrongly: an error of ours that says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("transformers", reason="needs stretto[huggingface]")
pytest.importorskip("lightning", reason="needs stretto[lightning]")

import lightning
import transformers
from accelerate import Accelerator
from tests.integrations import huggingface_toys as toys

from stretto.errors import StrettoError, TrainingError
from stretto.integrations import accelerate, huggingface
from stretto.integrations import lightning as lightning_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
Call = tuple[Callable[..., Any], dict[str, Any]]
MODEL = toys.llama()


def of_hugging_face() -> Call:
    arguments, rows = toys.arguments(), toys.rows(8)
    trainer = transformers.Trainer(MODEL, arguments, toys.collate, train_dataset=rows)
    more = ("rule", "every", "max_duration", "micro_batch_size", "last_batch", "lengths")
    return huggingface.attach, {"trainer": trainer, **usual(), **dict.fromkeys(more)}


def of_lightning() -> Call:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
    more = ("rule", "every", "max_duration", "micro_batch_size", "loading", "lengths")
    given = {"trainer": trainer, **usual(), "data": data(), **dict.fromkeys(more)}
    return lightning_adapter.attach, {**given, "units": "samples"}


def of_accelerate() -> Call:
    more = ("rule", "units", "every", "micro_batch_size", "loading", "lengths")
    given = {"accelerator": Accelerator(cpu=True), **usual(), "data": data()}
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    own = {"optimizer": optimizer, "max_duration": "1ep"}
    return accelerate.attach, {**given, **own, **dict.fromkeys(more)}


def usual() -> dict[str, Any]:
    return {"batch_size": 8, "schedules": {"lr": 1.0}}


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)


FRAMEWORKS = {
    "huggingface": of_hugging_face,
    "lightning": of_lightning,
    "accelerate": of_accelerate,
}
WRONG: tuple[Any, ...] = (
    None, 8, 2.5, -1, True, float("nan"), "8", "cosine", "1ep", b"8", [], [1], {}, {"lr": 1.0},
    {"lr": "x"}, {1: 2}, object(), int, torch.nn.Linear(1, 1), data(),
    torch.optim.SGD([torch.ones(1)], lr=0.1),
)  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_wrong_argument_is_an_error_of_ours(name: str) -> None:
    attach, given = FRAMEWORKS[name]()
    attach(**given)
    for argument in given:
        for value in (*WRONG, given[next(iter(given))]):
            _, given = FRAMEWORKS[name]()
            try:
                attach(**{**given, argument: value})
            except StrettoError:
                continue
            # Whatever is accepted is not of another kind.
            assert argument not in ("trainer", "accelerator") or value is not None
            assert argument != "batch_size" or value in (8, "8")
            assert argument != "every" or not value


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_arguments_in_another_order_show_the_call(name: str) -> None:
    attach, given = FRAMEWORKS[name]()
    owner, batch_size, schedules, *_ = given.values()
    others = dict([*given.items()][3:])
    for order in (
        (batch_size, owner, schedules),
        (schedules, batch_size, owner),
        (owner, schedules, batch_size),
        (owner, MODEL, schedules),
    ):
        with pytest.raises(TrainingError, match=rf"write attach\({next(iter(given))}, 8, "):
            attach(*order, **others)


def test_an_accelerator_is_attached_once() -> None:
    attach, given = of_accelerate()
    given = {**given, "micro_batch_size": 8}
    loader, _ = attach(**given)
    with pytest.raises(TrainingError, match="twice"):
        attach(**given)
    for batch in loader:
        with given["accelerator"].accumulate():
            assert batch[0].shape == (8, 4)
            given["optimizer"].step()
    assert loader.run.is_done
    second, _ = attach(**given)
    assert second._backward.func is Accelerator.backward
