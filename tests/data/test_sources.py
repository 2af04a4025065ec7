"""Which sources of data resume exactly, on how many ranks; docs/data.md has the table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stretto import DataSpec, StepLoader
from stretto.errors import StrettoError

N = 120
SIZES = "0sp:4 30sp:8 70sp:16"
SCRIPT = Path(__file__).with_name("streaming_ranks.py")
Make = Callable[[Path], Any]


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": torch.tensor(index)}


class Replayed(IterableDataset[Any]):
    """Has no state, so it is read again from the start of the epoch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"id": torch.tensor(index)} for index in range(N))


def hf_rows(_: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="needs datasets: make test-adapters")
    return datasets.Dataset.from_dict({"id": list(range(N))}).with_format("torch")


def hf_stream(folder: Path) -> Any:
    return DataSpec(hf_rows(folder).to_iterable_dataset(num_shards=3), num_samples=N)


def stateful(_: Path) -> Any:
    name = "torchdata.stateful_dataloader"
    torchdata = pytest.importorskip(name, reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(Rows(), batch_size=4)


def write_mds(folder: Path, count: int) -> Any:
    """Write rows as MDS shards; return the module that reads them."""
    try:
        importlib.import_module("tests.integrations.torchvision_operators")
        streaming = importlib.import_module("streaming")
    except ImportError:
        pytest.skip("needs mosaicml-streaming")
    if not (folder / "mds").exists():
        writer = streaming.MDSWriter(
            out=str(folder / "mds"), columns={"id": "int"}, size_limit=1000
        )
        with writer:
            for index in range(count):
                writer.write({"id": index})
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()
    return streaming


def mds(folder: Path) -> Any:
    write_mds(folder, N)
    from examples.mosaicml_streaming import ByIndex

    return ByIndex(local=str(folder / "mds"))


EXACT: dict[str, Make] = {
    "map-style": lambda _: Rows(),
    "list": lambda _: [{"id": index} for index in range(N)],
    "DataLoader": lambda _: DataLoader(Rows(), batch_size=3, shuffle=True),
    "Hugging Face Dataset": hf_rows,
    "Hugging Face IterableDataset": hf_stream,
    "MosaicML MDS by index": mds,
    "torchdata StatefulDataLoader": stateful,
    "replayed": lambda _: DataSpec(Replayed(), num_samples=N),
}


def walk(
    make: Callable[[], Any],
    ranks: int,
    state: Any = None,
    *,
    steps: int = 1000,
    length: str = "2ep",
) -> tuple[list[list[int]], Any]:
    """Return the sorted samples of each step over all ranks, and the state after the last."""
    loaders = [
        StepLoader(
            make(),
            SIZES,
            max_duration="2ep",
            micro_batch_size=4,
            loading={"seed": 3},
            rank=rank,
            world_size=ranks,
        )
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    seen: list[list[int]] = []
    while len(seen) < steps:
        step = [next(loader, None) for loader in loaders]
        found: list[int] = []
        for loader, own in zip(loaders, step, strict=True):
            if own is None:
                return seen, None
            for micro in own:
                if micro.weight:
                    found += torch.as_tensor(micro.batch["id"]).flatten().tolist()
            loader.finish(own, tokens=0)
        seen.append(sorted(found))
    return seen, loaders[0].state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXACT)
def test_resumes_exactly_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    def make() -> Any:
        return EXACT[name](tmp_path)

    whole, _ = walk(make, 1)
    assert sorted(one for step in whole for one in step) == sorted([*range(N)] * 2)
    for before, after in ((1, 1), (2, 1), (1, 3)):
        first, state = walk(make, before, steps=10)
        rest, _ = walk(make, after, state)
        assert first + rest == whole


def test_what_can_be_read_only_once_is_refused() -> None:
    def once() -> Any:
        return DataSpec(iter([{"id": torch.arange(4)}] * 30), num_samples=N)

    with pytest.raises(StrettoError, match="once"):
        walk(once, 1)
    loader = StepLoader(once(), SIZES, max_duration="1ep")
    loader.finish(next(loader))
    state = loader.state_dict()
    loader.finish(next(loader))
    with pytest.raises(StrettoError, match="once"):
        loader.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.distributed
def test_streaming_by_mosaicml_pads_when_it_is_iterated(
    torchrun: Callable[..., None], tmp_path: Path
) -> None:
    """It shares out by itself, so it is refused on several ranks if that is not stated."""
    write_mds(tmp_path, 121)
    torchrun(SCRIPT, tmp_path)
    found = json.loads((tmp_path / "found0.json").read_text())
    assert "sharded=True" in found["plain"]
    assert len(found["sharded"]) > 121  # by index, each sample comes once
    assert set(found["sharded"]) == set(range(121))
