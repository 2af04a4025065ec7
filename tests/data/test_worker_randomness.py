"""Chance inside samples that workers fetch, and workers that die."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stretto.data import StepLoader
from stretto.errors import DataError


class Noisy(Dataset[Any]):
    """Samples with chance from torch, Python and NumPy in them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        chance = np.random.rand()  # noqa: NPY002  the generator that data sets draw from
        return torch.tensor([index, torch.rand(()), random.random(), chance])


class Deadly(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 20 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(index)])


def batches(loader: StepLoader) -> list[list[Any]]:
    return [[micro.batch for micro in step] for step in loader]


def same(one: list[list[Any]], other: list[list[Any]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("sizes", ["0sp:6 40sp:10", lambda timestamp, current: 7])
@pytest.mark.usefixtures("small_chunks")
def test_what_workers_draw_is_the_same_after_a_resume_and_for_any_number_of_them(
    sizes: Any,
) -> None:
    def loader(workers: int) -> StepLoader:
        return StepLoader(
            Noisy(),
            sizes,
            max_duration="2ep",
            micro_batch_size=4,
            loading={"num_workers": workers},
        )

    whole = batches(loader(2))
    first = loader(2)
    for _ in range(5):
        next(first)
    state = first.state_dict(again=True)
    first.close()
    resumed = loader(2)
    resumed.load_state_dict(state)
    assert same(batches(resumed), whole[4:])  # the fifth was in hand
    assert same(batches(loader(1)), whole)
    values = torch.cat([torch.cat(step) for step in whole])
    assert len(values[:, 1].unique()) == len(values)  # no two samples share their chance


def test_ranks_do_not_share_their_chance() -> None:
    drawn = [
        torch.cat(
            [
                torch.cat(step)
                for step in batches(
                    StepLoader(
                        Noisy(),
                        8,
                        max_duration="1ep",
                        loading={"num_workers": 1},
                        rank=rank,
                        world_size=2,
                    )
                )
            ]
        )
        for rank in (0, 1)
    ]
    values = torch.cat(drawn)
    assert len(values[:, 1].unique()) == len(values) == 64


def test_a_worker_start_function_sees_the_data_set_itself() -> None:
    def check(worker: int) -> None:
        del worker
        info: Any = get_worker_info()
        assert isinstance(info.dataset, Noisy)

    data = DataLoader(Noisy(), batch_size=8, num_workers=2, worker_init_fn=check)
    assert len(batches(StepLoader(data, 8, max_duration="1ep"))) == 8


def test_a_worker_that_dies_is_told_with_what_to_do() -> None:
    loader = StepLoader(
        Deadly(), 4, max_duration="1ep", loading={"num_workers": 1, "shuffle": False}
    )
    seen: list[Any] = []
    with pytest.raises(DataError, match="resume"):
        seen.extend(loader)
    # Whatever had arrived before it died; the sample that kills is number 20.
    assert loader.timer.sample == 4 * len(seen) <= 20


class HalfWay(Noisy):
    """Samples whose connection breaks on arrival, and whose worker ends only after that."""

    def __getitem__(self, index: int) -> Any:
        return Broken()


class Broken:
    def __reduce__(self) -> Any:
        return (break_off, (os.getpid(),))


def break_off(worker: int) -> None:
    os.kill(worker, signal.SIGSTOP)  # so that it is there still when it is waited for
    threading.Timer(0.2, os.kill, (worker, signal.SIGKILL)).start()
    raise EOFError("half way")


def test_a_worker_that_ends_after_its_connection_leaves_no_error_in_a_finalizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    loader = StepLoader(
        HalfWay(),
        4,
        max_duration="1ep",
        loading={"num_workers": 1, "shuffle": False, "collate_fn": lambda x: x},
    )
    with pytest.raises(DataError, match="ended"):
        next(iter(loader))
    del loader
    gc.collect()
    assert not ignored
