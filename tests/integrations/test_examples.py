"""`examples/`: each script as it stands, and with stretto as its diff says."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from stretto import prepare

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted({path.stem for path in EXAMPLES.glob("*.diff")} - {"torchtune_recipe"})


def missing(script: Path) -> list[str]:
    """Return the packages of a script that are not installed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    needed = {name.partition(".")[0] for name in names}
    if "composer" in needed:  # which may be there and not importable by itself
        needed.add("torch_optimizer")
    return sorted(name for name in needed if find_spec(name) is None)


def run(script: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a script as its own program; return the last line that it prints."""
    if "composer" in script.stem:
        import_module("tests.integrations.torchvision_operators")
    capsys.readouterr()
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_every_script_has_a_diff_that_is_shown() -> None:
    page = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "coming-from").glob("*.md")
    )
    for name in (*SCRIPTS, "torchtune_recipe"):
        assert f"<!-- generated: examples/{name}.diff -->" in page


def test_the_recipe_of_torchtune_uses_what_a_run_has() -> None:
    """It runs only in `make test-adapters`, with torchtune."""
    lines = (EXAMPLES / "torchtune_recipe.diff").read_text(encoding="utf-8").splitlines()
    added = "\n".join(line for line in lines if line.startswith("+"))
    names = set(re.findall(r"self\._run\.(\w+)", added))
    assert len(names) > 5
    assert names <= set(dir(prepare(range(8), 4, max_duration="1ep")))


@pytest.mark.parametrize("name", ["composer_trainer", "huggingface_trainer", "lightning_trainer"])
def test_a_trainer_needs_three_more_lines(name: str) -> None:
    lines = (EXAMPLES / f"{name}.diff").read_text(encoding="utf-8").splitlines()[2:]
    assert [line for line in lines if line.startswith("-")] == []
    assert len([line for line in lines if line.startswith("+") and line != "+"]) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_as_it_stands_and_with_stretto(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if lacking := missing(EXAMPLES / f"{name}.py"):
        pytest.skip(f"needs {lacking}: make test-adapters")
    monkeypatch.chdir(tmp_path)
    script = Path(shutil.copy(EXAMPLES / f"{name}.py", tmp_path))
    stock = run(script, capsys)
    assert stock.startswith("80 steps, loss")  # 2 epochs of 640 samples, 16 a step
    command = ["git", "apply", str(EXAMPLES / f"{name}.diff")]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    ours = run(script, capsys)
    assert ours.startswith("50 steps, loss")  # 64 a step in the second epoch
    assert float(ours.split()[-1]) < 2.0
