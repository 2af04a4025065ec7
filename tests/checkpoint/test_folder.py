from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import (
    checkpoint_path,
    checkpoints,
    describe,
    keep,
    latest_good,
    open_checkpoint,
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
    left = ["1.tmp", "2.tmp", "2.replaced"]
    others = ["3.tmp", "3.replaced", "2.bad", "2.old1", "2.tmp2"]
    for name in (*left, *others):
        number, _, ending = name.partition(".")
        (tmp_path / f"checkpoint-{int(number):012d}.{ending}").mkdir()
    keep(tmp_path, 2)
    assert names(tmp_path) == sorted(["1", "2", *others])


def test_positions_beyond_twelve_digits_are_in_order(tmp_path: Path) -> None:
    write_some(tmp_path, 10**12, 10**12 - 1)
    assert [int(path.name[11:]) for path in checkpoints(tmp_path)] == [10**12 - 1, 10**12]


def test_links_to_checkpoints_are_not_listed(tmp_path: Path) -> None:
    (one,) = write_some(tmp_path / "a", 1)
    (tmp_path / "b").mkdir()
    checkpoint_path(tmp_path / "b", 2).symlink_to(one)
    assert checkpoints(tmp_path / "b") == []


def test_the_newest_good_one_is_found_and_bad_ones_are_set_aside(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2, 3)
    damage(paths[1])
    (paths[2] / "state.json").unlink()
    with pytest.warns(RuntimeWarning) as told:
        assert latest_good(tmp_path) == paths[0]
    set_aside = "{0} is damaged and was renamed to {0.name}.bad: {1}; {2} is used instead"
    assert [str(warning.message) for warning in told] == [
        set_aside.format(paths[2], "state.json is missing", paths[0].name),
        set_aside.format(paths[1], "model.safetensors is not what was written", paths[0].name),
    ]
    assert names(tmp_path) == ["1", "2.bad", "3.bad"]
    assert latest_good(tmp_path) == paths[0]  # and says nothing any more


def test_each_one_that_is_set_aside_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert latest_good(tmp_path / "none") is None
    (one,) = write_some(tmp_path, 1)
    for _ in range(2):
        damage(*write_some(tmp_path, 2))
        with pytest.warns(RuntimeWarning, match="used"):
            assert latest_good(tmp_path) == one
    assert names(tmp_path) == ["1", "2.bad", "2.bad2"]


def test_one_that_cannot_be_renamed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_some(tmp_path, 1, 2)
    damage(paths[1])

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.warns(RuntimeWarning, match="Permission"):
        assert latest_good(tmp_path) == paths[0]


def test_one_of_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2)
    (paths[1] / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="install"):
        latest_good(tmp_path)
    assert names(tmp_path) == ["1", "2"]


def test_one_that_was_being_replaced_is_still_there(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2)
    paths[1].rename(paths[1].with_name(paths[1].name + ".replaced"))
    assert checkpoints(tmp_path) == paths
    assert read_checkpoint(paths[1]).records == {"path": paths[1].name}
    assert describe(paths[1]).is_whole
    assert latest_good(tmp_path) == paths[1]
    assert names(tmp_path) == ["1", "2"]


def test_what_was_there_before_survives_a_write_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_checkpoint(path, TENSORS, RECORDS)
    with pytest.raises((CheckpointError, TypeError)):
        write_checkpoint(path, TENSORS, {"not JSON": object()})
    assert read_checkpoint(path).records == RECORDS


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="another"):
        write_checkpoint(tmp_path / "file" / "a", TENSORS, RECORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


PASSING = [errno.ESTALE, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES, errno.EMFILE]


class Flaky:
    """Stands in for a function of `os`: fails for files of one name, a number of times."""

    def __init__(self, function: Any, name: str, code: int, times: int = 999) -> None:
        self._function = function
        self._name = name
        self._code = code
        self.left = times

    def __call__(self, path: Any, *arguments: Any, **options: Any) -> Any:
        if self.left and str(path).endswith(self._name):
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code), str(path))
        return self._function(path, *arguments, **options)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("open", "manifest.json"),
        ("open", "model.safetensors"),
        ("stat", "manifest.json"),
        ("stat", "checkpoint-000000000002"),
        ("listdir", "checkpoints"),
    ],
)
@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_an_error_of_the_system_sets_nothing_aside_and_names_the_file(
    function: str, name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    write_some(folder, 1, 2)
    flaky = Flaky(getattr(os, function), name, code)
    monkeypatch.setattr(os, function, flaky)
    slept: list[float] = []
    with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
        latest_good(folder, sleep=slept.append)
    monkeypatch.undo()
    assert name in str(caught.value)
    assert "try again" in str(caught.value)
    assert 0 < sum(slept) < 2
    assert names(folder) == ["1", "2"]


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_an_error_of_the_system_that_passes_is_not_noticed(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_some(tmp_path, 1, 2)
    flaky = Flaky(os.open, "state.json", code, times=2)
    monkeypatch.setattr(os, "open", flaky)
    assert latest_good(tmp_path, sleep=lambda _: None) == paths[1]
    assert flaky.left == 0
    flaky.left = 2
    assert open_checkpoint(paths[1], sleep=lambda _: None).records == {"path": paths[1].name}


def test_an_error_in_the_middle_of_a_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("hashlib.file_digest", fail)
    with pytest.raises(CheckpointError, match="Input/output"):
        latest_good(tmp_path, sleep=lambda _: None)
    assert names(tmp_path) == ["1"]


def test_a_checkpoint_is_not_written_to_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint"):
        write_checkpoint(checkpoint_path(Path("s3://bucket/run"), 1), {}, {})
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_library_names_the_file_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors of the system have a text alone, and no number."""
    write_some(tmp_path, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError("Stale file handle (os error 116)")

    monkeypatch.setattr("stretto.checkpoint.reading.safe_open", fail)
    with pytest.raises(CheckpointError, match="safetensors"):
        latest_good(tmp_path, sleep=lambda _: None)
    assert names(tmp_path) == ["1"]


def test_an_error_when_the_file_has_just_been_opened_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fstat", fail)
        with pytest.raises(CheckpointError) as caught:
            latest_good(tmp_path, sleep=lambda _: None)
    assert "manifest.json: Input/output error" in str(caught.value)


def test_too_little_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library maps a file into memory, and says MemoryError where that fails."""
    write_some(tmp_path, 1, 2)

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr("stretto.checkpoint.reading.safe_open", refuse)
    with pytest.raises(CheckpointError, match="enough"):
        latest_good(tmp_path, sleep=lambda _: None)
    assert names(tmp_path) == ["1", "2"]


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
            assert f"{path.name}: model.safetensors is not what was written" in str(caught.value)
        assert len(names(tmp_path)) == number


def test_one_that_was_set_aside_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2)
    damage(paths[1])
    with pytest.warns(RuntimeWarning, match="used"):
        assert latest_good(tmp_path) == paths[0]
    shutil.rmtree(paths[0])
    with pytest.raises(CheckpointError, match=r"2\.bad"):
        latest_good(tmp_path)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
        one.bind(path.name)


KINDS: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "file": Path.touch,
    "socket": bind_socket,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link": lambda path: path.symlink_to("checkpoint-000000000001"),
}
"""What may lie where a checkpoint should."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_checkpoint_but_is_called_like_one_is_set_aside(
    kind: str, tmp_path: Path
) -> None:
    (one,) = write_some(tmp_path, 1)
    KINDS[kind](checkpoint_path(tmp_path, 2))
    with pytest.warns(RuntimeWarning, match="checkpoint"):
        assert latest_good(tmp_path) == one
    assert names(tmp_path) == ["1", "2.bad"]


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_one_whose_manifest_is_missing_or_no_file_is_set_aside(
    kind: str | None, tmp_path: Path
) -> None:
    one, two = write_some(tmp_path, 1, 2)
    (two / "manifest.json").unlink()
    if kind is not None:
        KINDS[kind](two / "manifest.json")
    said = "manifest.json is missing" if kind is None else "manifest"
    with pytest.warns(RuntimeWarning, match=said):
        assert latest_good(tmp_path) == one
    assert names(tmp_path) == ["1", "2.bad"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_where_a_checkpoint_is_written_is_kept(kind: str, tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 2)
    KINDS[kind](path)
    write_some(tmp_path, 2)
    assert names(tmp_path) == ["2", "2.bad"]
    assert describe(path).is_whole


def test_older_ones_that_are_not_whole_do_not_count_among_those_that_stay(tmp_path: Path) -> None:
    paths = write_some(tmp_path, 1, 2, 3, 4)
    (paths[2] / "manifest.json").unlink()
    keep(tmp_path, 2)
    assert names(tmp_path) == ["2", "3", "4"]
