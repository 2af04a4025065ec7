"""Training scripts that know nothing of phantomgpu, built from configurations without downloads."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
from tests.phantomgpu.test_runs import reason

import phantomgpu
from phantomgpu import standins
from phantomgpu.child import Settings
from phantomgpu.running import Session

pytestmark = [pytest.mark.slow, pytest.mark.skipif(reason is not None, reason=str(reason))]
long = pytest.mark.long
SCRIPTS = Path(__file__).parent / "scripts"
RUNS = {
    # what is needed, the script, its arguments, and a batch size that needs more than 16 GiB
    "unet": ("torch", "unet.py", [], 4096),
    "nanogpt": ("torch", "nanogpt.py", [], 512),
    "nanogpt-compiled": ("triton", "nanogpt.py", ["--compile"], 512),
    "resnet": ("transformers", "resnet.py", [], 2048),
    "lightning-fp16": ("lightning", "lightning_fp16.py", [], None),
    "llava": ("transformers", "vision_language.py", ["llava"], None),
    "qwen2-vl": ("transformers", "vision_language.py", ["qwen"], None),
    "idefics3": ("transformers", "vision_language.py", ["idefics"], None),
    "diffusers-unet": ("diffusers", "diffusers_unet.py", [], 4096),
    "torchtune": ("torchtune", "torchtune_loop.py", [], 512),
    "trl-dpo": ("trl", "trl_dpo.py", [], None),
}


def torch_folder() -> Path:
    spec = util.find_spec("torch")
    assert spec
    assert spec.origin
    made = standins.setup_folder(metadata.version("torch").partition("+")[0])
    folder = made / "torch"
    return folder if folder.exists() else Path(spec.origin).parent


def start(name: str, size: int) -> tuple[phantomgpu.Report, list[str]]:
    needed, script, arguments, _ = RUNS[name]
    if util.find_spec(needed) is None and not (torch_folder().parent / needed).exists():
        pytest.skip(f"needs {needed}")
    command = [str(SCRIPTS / script), str(size), *arguments]
    report = phantomgpu.run([sys.executable, *command], gpu="h100", memory="16GiB")
    return report, command


def chosen(*names: str) -> list[Any]:
    """Two of the scripts run always, the others in `make test-long`."""
    return [one if one in ("unet", "nanogpt") else pytest.param(one, marks=long) for one in names]


@pytest.mark.parametrize("name", chosen(*RUNS))
def test_the_peaks_are_those_without_the_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The peaks of a compiled model differ by 164 kB between an empty and a filled cache of kernels.
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    report, command = start(name, 4)
    assert report.fits, report.problem
    assert report.steps == 3
    bare = subprocess.run(
        [sys.executable, str(SCRIPTS.parent / "bare.py"), str(torch_folder()), "3", *command],
        env={**os.environ, "PHANTOMGPU_FACTS": Session("h100", "16GiB", Settings()).facts},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bare.returncode == 0, bare.stderr
    line = next(line for line in bare.stdout.splitlines() if line.startswith("peaks"))
    assert line == f"peaks {report.peak_allocated} {report.peak_reserved}"


@pytest.mark.parametrize("name", chosen(*(name for name, (*_, size) in RUNS.items() if size)))
def test_a_batch_that_is_too_large_does_not_fit(name: str) -> None:
    size = RUNS[name][-1]
    assert size
    assert start(name, size)[0].status == "does not fit"


def test_values_that_decide_sizes_and_branches_are_named() -> None:
    """Masks have their expected sizes, which the script checks; what hangs on unknown is listed."""
    script = SCRIPTS / "values.py"
    report = phantomgpu.run([sys.executable, str(script), "1024"], gpu="h100", memory="16GiB")
    assert report.fits, report.problem
    assert report.steps == 3
    lines = script.read_text().splitlines()
    named = {lines[int(place.rpartition(":")[2]) - 1].strip() for place in report.unknown}
    for decides in (
        "hard = losses[losses > 0.7] if losses[least] > 0.7 else losses[:least]",
        "order = order[shared / (2 - shared) < 0.3]",
        "if (before[part] - now).mean().item() > 0.015:",
        "ratio = 10 * torch.log10(1 / error.detach()).item()",
    ):
        assert decides in named
