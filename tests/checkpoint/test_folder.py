from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import (
    checkpoint_path,
    checkpoints,
    keep,
    latest_good,
    read_checkpoint,
    write_checkpoint,
)
from stretto.errors import CheckpointError

TENSORS = {
    "model": {
        "weight": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
    },
    "optimizer": {},
}
RECORDS = {"clock": {"sample": 2**60 + 1}, "loss": 0.1, "none": None, "nested": [1, [2]]}


def test_what_is_written_is_read_to_the_last_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", TENSORS, RECORDS)
    tensors, records = read_checkpoint(tmp_path / "a")
    assert records == RECORDS
    assert tensors["optimizer"] == {}
    for name, tensor in TENSORS["model"].items():
        assert tensors["model"][name].dtype == tensor.dtype
        assert torch.equal(tensors["model"][name], tensor)


def test_tied_tensors_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    shared = torch.randn(100, 10)
    write_checkpoint(tmp_path / "a", {"model": {"head": shared, "embedding": shared}}, {})
    assert (tmp_path / "a" / "model.safetensors").stat().st_size < 2 * shared.nbytes
    tensors = read_checkpoint(tmp_path / "a").tensors["model"]
    assert torch.equal(tensors["head"], shared)
    assert torch.equal(tensors["embedding"], shared)


def test_views_and_transposed_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    named = {"base": base, "transposed": base.t(), "row": base[1], "every_other": base[:, ::2]}
    write_checkpoint(tmp_path / "a", {"model": named}, {})
    tensors = read_checkpoint(tmp_path / "a").tensors["model"]
    for name, tensor in named.items():
        assert torch.equal(tensors[name], tensor)


def test_nothing_unfinished_is_listed(tmp_path: Path) -> None:
    write_checkpoint(checkpoint_path(tmp_path, 20), TENSORS, RECORDS)
    write_checkpoint(checkpoint_path(tmp_path, 100), TENSORS, RECORDS)
    (tmp_path / "checkpoint-000000000200.tmp").mkdir()
    (tmp_path / "checkpoint-000000000300").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-000000000020",
        "checkpoint-000000000100",
    ]
    assert checkpoints(tmp_path / "nowhere") == []


def write_some(folder: Path, *samples: int) -> list[Path]:
    paths = [checkpoint_path(folder, sample) for sample in samples]
    for path in paths:
        write_checkpoint(path, {"model": {"w": torch.ones(2)}}, {"path": path.name})
    return paths


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("checkpoint-").lstrip("0") for path in folder.iterdir())


def damage(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def test_only_the_newest_stay_and_those_asked_for(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2, 3, 4, 5)
    keep(tmp_path, 2, also=[paths[1]])
    assert names(tmp_path) == ["2", "4", "5"]
    keep(tmp_path, 1)
    assert names(tmp_path) == ["5"]


def test_nothing_is_deleted_while_the_newest_is_not_there(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2, 3)
    (paths[-1] / "model.safetensors").unlink()
    keep(tmp_path, 1)
    assert names(tmp_path) == ["1", "2", "3"]


def test_what_killed_processes_left_behind_goes_and_nothing_else(tmp_path: Path) -> None:
    write_some(tmp_path, 1, 2)
    left = ["1.tmp", "2.tmp", "3.tmp"]
    others = ["2.old1", "2.tmp2"]
    for name in (*left, *others):
        number, _, ending = name.partition(".")
        (tmp_path / f"checkpoint-{int(number):012d}.{ending}").mkdir()
    keep(tmp_path, 2)
    assert names(tmp_path) == sorted(["1", "2", *others])


def test_positions_beyond_twelve_digits_are_in_order(tmp_path: Path) -> None:
    write_some(tmp_path, 10**12, 10**12 - 1)
    assert [int(path.name[11:]) for path in checkpoints(tmp_path)] == [10**12 - 1, 10**12]


def test_one_of_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2)
    (paths[1] / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="install"):
        latest_good(tmp_path)
    assert names(tmp_path) == ["1", "2"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="another"):
        write_checkpoint(tmp_path / "file" / "a", TENSORS, RECORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_is_not_written_to_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint"):
        write_checkpoint(checkpoint_path(Path("s3://bucket/run"), 1), {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_holds_damaged_ones_alone_is_an_error_again_and_again(
    number: int, tmp_path: Path
) -> None:
    """A job that is started again after the error would begin anew at the second time."""
    paths = write_some(tmp_path, *range(1, number + 1))
    for path in paths:
        damage(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="delete") as caught:
            latest_good(tmp_path)
        for path in paths:
            assert path.name in str(caught.value)
        assert len(names(tmp_path)) == number


def test_older_ones_that_are_not_whole_do_not_count_among_those_that_stay(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2, 3, 4)
    (paths[2] / "manifest.json").unlink()
    keep(tmp_path, 2)
    assert names(tmp_path) == ["2", "3", "4"]


def test_the_newest_good_one_is_found_and_nothing_is_changed(tmp_path: Path) -> None:
    assert latest_good(tmp_path / "none") is None
    paths = write_some(tmp_path, 1, 2, 3)
    damage(paths[1])
    (paths[2] / "state.json").unlink()
    (checkpoint_path(tmp_path, 4)).mkdir()
    (checkpoint_path(tmp_path, 5)).write_text("")
    checkpoint_path(tmp_path, 6).symlink_to("nowhere")
    for _ in range(2):
        with pytest.warns(RuntimeWarning) as told:
            assert latest_good(tmp_path) == paths[0]
        for number, path in enumerate((2, 3, 4, 5, 6)):
            assert f"{path} is damaged" in str(told[4 - number].message)
    assert names(tmp_path) == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("times", [2, 3])
def test_a_read_that_fails_is_tried_again_and_is_no_damage(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_some(tmp_path, 1, 2)
    opened, left = os.open, [times]

    def stale(path: str, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("state.json") and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", stale)
    slept: list[float] = []
    if times == 2:
        assert latest_good(tmp_path, sleep=slept.append) == paths[1]
    else:
        with pytest.raises(CheckpointError, match="state"):
            latest_good(tmp_path, sleep=slept.append)
    assert 0 < sum(slept) < 2
    assert names(tmp_path) == ["1", "2"]
