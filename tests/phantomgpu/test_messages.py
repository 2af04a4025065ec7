"""Systems that cannot run a phantom, and commands that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import phantomgpu
from phantomgpu import GPUS, NotSupportedError, child, standins
from phantomgpu.child import Settings
from phantomgpu.cli import app, exit_code, warn
from phantomgpu.report import build_report
from phantomgpu.running import Session


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_other_systems_get_a_clear_message(
    system: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(NotSupportedError, match=name):
        standins.check_system()


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotSupportedError, match="gcc"):
        standins.check_system()


def test_gpus_are_listed() -> None:
    shown = CliRunner().invoke(app, ["gpus"])
    assert shown.exit_code == 0
    assert all(key in shown.output for key in phantomgpu.GPUS)


@pytest.mark.parametrize(
    "arguments",
    [["run", "--", "true"], ["run", "--gpu", "h100"], ["search", "--gpu", "h100", "--", "true"]],
)
def test_what_is_missing_is_a_usage_error(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_more_memory_than_the_kind_has_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    warn("t4", "12GiB")
    assert not capsys.readouterr().err
    warn("t4", "16GiB")
    assert "14.75" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("fits", 0, 0), ("does not fit", 3, 3), ("failed", 7, 7), ("failed", 0, 1)],
)
def test_exit_codes(status: str, code: int, expected: int) -> None:
    report = build_report(
        {"status": status}, GPUS["h100"], gpu="", memory=1, context=0, ranks=1, exit_code=code
    )
    assert exit_code(report) == expected


def test_the_stand_ins_have_a_name_for_every_function() -> None:
    assert all(standins._owner(name) in standins.PREFIXES for name in standins.known_names())


@pytest.mark.parametrize(
    ("name", "stem", "called", "answer"),
    [
        ("cublasSgemm_v2", "libcublas", True, "return 0"),
        ("cuDriverGetVersion", "libcuda", True, "*(int *)a0 = CUDA * 1000"),
        ("cudnnGetVersion", "libcudnn", True, "return 99900"),
        ("cudaStreamCreate", "libcudart", True, "phantom_handle"),
        ("cudaMemcpy", "libcudart", True, "phantom_copy"),
        ("cuLaunchKernelEx", "libcuda", False, "return 0"),
        ("cudaGraphClone", "libcudart", False, "return 801"),
        ("cudnnRNNForward", "libcudnn", True, "return 3000"),
        ("cusolverDnSgeqrf_bufferSize", "libcusolver", True, "*(int *)a5 = size;"),
        ("cusolverDnXsyevd_bufferSize", "libcusolver", True, "*(size_t *)a12 = 0;"),
        ("cusolverDnSgels_bufferSize", "libcusolver", True, "return 9"),
        ("cusparseSpGEMM_compute", "libcusparse", True, "return 10"),
        ("cusparseGetErrorString", "libcusparse", True, "not supported"),
    ],
)
def test_functions_without_code_answer(name: str, stem: str, called: bool, answer: str) -> None:
    code = standins._default(name, stem, called=called)
    assert answer in code
    is_refused = answer in ("return 801", "return 3000", "return 9", "return 10")
    assert ("phantom_assumed |= 8" in code) == is_refused


def test_nothing_private_of_torch_but_these() -> None:
    text = "".join(file.read_text() for file in Path(standins.__file__).parent.glob("*.py"))
    for name in ("_lazy_call", "_record_memory_history", "_snapshot"):
        assert name in text
    for name in ("_python_dispatch", "torch._ops", "_gpu_trace"):
        assert name not in text


def test_a_step_of_small_kernels_has_no_bound() -> None:
    work = {"calls": [], "tokens": 0, "inside": 0.0, "between": 0.0}
    known = {"gpu": "an H100", "memory": 1, "context": 0, "ranks": 1}
    report = build_report({"status": "fits", "steps": 1, "work": work}, GPUS["h100"], **known)
    assert "time:" not in str(report) + report.to_json()


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "failed"),
        ({"out_of_memory": 1}, "failed"),  # it may have tried how much there is
        ({"out_of_memory": 1, "left_out_of_memory": True}, "does not fit"),
    ],
)
def test_an_out_of_memory_error_that_ends_a_script_explains_its_exit_code(
    more: dict[str, Any], status: str, tmp_path: Path
) -> None:
    (tmp_path / "run-000000-1.json").write_text(json.dumps({"status": "fits", **more}))
    report = Session("h100", None, Settings()).report(tmp_path, "run", 1)
    assert report.status == status
    assert ("run out of memory before" in str(report)) == (more == {"out_of_memory": 1})


@pytest.mark.parametrize("cuda", ["'11.8'", "None"])
def test_a_torch_for_another_cuda_names_the_setup(
    cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libtorch_cuda.so").touch()
    (folder / "__init__.py").touch()
    text = f"from typing import Optional\n__version__ = '2.13.0+x'\ncuda: Optional[str] = {cuda}\n"
    (folder / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(standins, "check_system", lambda: None)
    monkeypatch.setenv("PHANTOMGPU_CACHE", str(tmp_path / "cache"))
    with pytest.raises(phantomgpu.SetupNeededError, match="setup") as caught:
        child._find_cuda_torch()
    assert ("11.8" in str(caught.value)) == ("11.8" in cuda)


def test_a_kind_that_torch_has_no_code_for_is_said() -> None:
    known = {"gpu": "a Tesla", "memory": 1, "context": 0, "ranks": 1, "exit_code": 0}
    result = {"status": "fits", "torch": "2.13.0+cu130"}
    assert "CUDA 12.6" in str(build_report(result, GPUS["v100-32"], **known))
    assert "CUDA 12.6" not in str(build_report(result, GPUS["t4"], **known))
    older = {**result, "torch": "2.7.1+cu126"}
    assert "CUDA 12.6" not in str(build_report(older, GPUS["v100-32"], **known))


def test_a_file_is_named_before_the_command() -> None:
    done = CliRunner().invoke(app, ["run", "--gpu", "h100", "--json", "--", "python", "train.py"])
    assert "no file is named before '--'" in str(done.exception)
    assert not Path("--").exists()
