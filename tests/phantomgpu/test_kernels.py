"""Triton's kernels: no machine code is made, and no real GPU finds what was made here."""

from __future__ import annotations

import importlib.machinery
import os
from pathlib import Path
from typing import Any

import pytest

from phantomgpu.child import Settings, _TorchFinder
from phantomgpu.kernels import shorten
from phantomgpu.running import Session


def stages(made: list[str]) -> dict[str, Any]:
    """Return stages that note their names."""

    def stage(name: str) -> Any:
        def make(module: Any, metadata: dict[str, Any]) -> str:
            del metadata
            made.append(name)
            return f"{module} {name}"

        return make

    return {name: stage(name) for name in ("ttir", "ttgir", "llir", "ptx", "cubin")}


def compiled(text: str) -> tuple[Any, list[str], dict[str, Any]]:
    made: list[str] = []
    metadata: dict[str, Any] = {"num_warps": 4}
    kept = stages(made)
    assert shorten(None, kept, {}, "triton", 90) is None
    module: Any = text
    for stage in kept.values():
        module = stage(module, metadata)
    return module, made, metadata


def test_a_kernel_is_checked_and_not_compiled() -> None:
    module, made, metadata = compiled("tt.func public @add_kernel(%arg0: !tt.ptr<f32>) {")
    assert made == ["ttir"]
    assert isinstance(module, bytes)
    assert (metadata["name"], metadata["shared"], metadata["num_warps"]) == ("add_kernel", 0, 4)


@pytest.mark.parametrize(
    "text", ["tt.func public @copy() { tt.make_tensor_descriptor %0", "module without a name"]
)
def test_a_kernel_that_takes_memory_is_compiled(text: str) -> None:
    module, made, metadata = compiled(text)
    assert made == ["ttir", "ttgir", "llir", "ptx", "cubin"]
    assert module.endswith("cubin")
    assert "shared" not in metadata


def test_other_languages_are_compiled() -> None:
    kept = {"ttgir": None, "cubin": None}
    shorten(None, kept, {}, "gluon", 90)
    assert list(kept) == ["ttgir", "cubin"]


def test_caches_are_apart_from_those_of_a_gpu(tmp_path: Path) -> None:
    key = shorten()
    assert key is not None
    assert all("phantomgpu" in part for part in key)
    environment = Session("h100", None, Settings()).environment(str(tmp_path))
    assert environment["TORCH_COMPILE_CACHE_KEY_TAG"] == "phantomgpu"


def test_the_hook_is_set_when_triton_is_imported(tmp_path: Path) -> None:
    (tmp_path / "knobs.py").write_text("class runtime:\n    add_stages_inspection_hook = None\n")
    spec = _TorchFinder(Settings(str(tmp_path))).find_spec("triton.knobs", [os.fspath(tmp_path)])
    assert isinstance(spec, importlib.machinery.ModuleSpec)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.runtime.add_stages_inspection_hook is shorten
