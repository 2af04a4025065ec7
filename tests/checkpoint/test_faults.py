"""Whatever happens while a checkpoint is written, the one before it is there, or the new one."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.checkpoint import (
    checkpoint_path,
    latest_good,
    read_checkpoint,
    write_checkpoint,
)
from stretto.errors import CheckpointError

WORK = Path(__file__).with_name("faults.py")
TENSORS = {"model": {"weight": torch.ones(3)}}


@pytest.mark.parametrize(
    ("kind", "said"),
    [("kill", "operations: [2-9][0-9]"), ("full", "File too large; free space or choose another")],
    ids=["kill", "full"],
)
def test_a_kill_between_any_two_file_operations_or_a_full_disk_leaves_a_good_one(
    kind: str, said: str, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    done = run_python(str(WORK), kind, str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout)


class Failing:
    """Stands in for a function of `os`, and fails at the n-th call."""

    def __init__(self, function: Any, call: int, code: int) -> None:
        self._function = function
        self._left = call
        self._code = code
        self.has_failed = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.has_failed = True
            raise OSError(self._code, os.strerror(self._code))
        return self._function(*arguments, **options)


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_of_the_system_leaves_what_was_there(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = checkpoint_path(tmp_path, 0)
    write_checkpoint(last, TENSORS, {"value": 0})
    for call in range(1, 100):
        told: str | None = None
        failing = Failing(getattr(os, name), call, code)
        path = checkpoint_path(tmp_path, call)
        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing)
            try:
                write_checkpoint(path, TENSORS, {"value": call})
            except CheckpointError as error:
                told = str(error)
        if told is not None:
            assert failing.has_failed
            assert os.strerror(code) in told
        # After the rename the new one is in its place, and good.
        last = path if path.exists() else last
        assert latest_good(tmp_path) == last
        assert read_checkpoint(last).records == {"value": int(last.name[-12:])}
        if not failing.has_failed:
            break
    else:
        pytest.fail("it never ends")
    assert last == path
    assert call > 1


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to the superuser")
def test_a_read_only_folder_is_an_error_and_can_be_read(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    write_checkpoint(path, TENSORS, {})
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission"):
            write_checkpoint(checkpoint_path(tmp_path, 2), TENSORS, {})
        assert latest_good(tmp_path) == path
    finally:
        tmp_path.chmod(0o700)
