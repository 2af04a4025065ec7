"""Build what a release consists of and try it in an empty environment of each Python there is.

`dist/` has the sdist, the wheel of stretto built from it, the wheel of phantomgpu alone, and
the notes from the changelog. Nothing is uploaded. Environments lie in `build/release`. The package
index decides which build of torch is installed: `PIP_EXTRA_INDEX_URL` adds the one for the CPU. A
Python whose torch would be too much gets none, and is tried without: `--without-torch 3.12`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from try_wheel import CHECK, run

ROOT = Path(__file__).parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINS = {name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
RECIPE = str(ROOT / "examples" / "recipes" / "deepseek-v3.yaml")
VERSION = "import sys; print(sys.executable, *sys.version_info[:2])"


def interpreters() -> dict[str, str]:
    """Return the newest Pythons that are found: version -> path of the interpreter."""
    found = {}
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("*/bin/python"))
    for name in (*(f"python{version}" for version in PYTHONS), *map(str, pyenv)):
        if shutil.which(name):
            command = [name, "-c", VERSION]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            path, *version = said.split() or [""]
            found[".".join(version)] = path
    return {version: found[version] for version in PYTHONS if version in found}


def notes(changelog: str, version: str) -> str:
    """Return what a changelog says of a version.

    Raises:
        ValueError: If it has no dated section `## VERSION (YYYY-MM-DD)`.
    """
    section = re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    if section is None:
        raise ValueError(
            f"CHANGELOG.md has no section of the version {version} with a date. "
            f"Write: ## {version} (YYYY-MM-DD)"
        )
    return section[1].strip() + "\n"


def build() -> tuple[Path, Path]:
    """Build the sdist, the wheel from it, and phantomgpu's; return both wheels."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    tools = WORK / "tools"
    run(
        sys.executable,
        *PIP,
        "install",
        "--target",
        str(tools),
        "hatchling",
        cwd=ROOT,
        environment=PINS,
    )
    hatch = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST))
    run(*hatch, cwd=ROOT, environment={"PYTHONPATH": str(tools)})
    (sdist,) = DIST.glob("stretto-*.tar.gz")
    for source in (sdist, ROOT / "phantom"):
        wheel = (*PIP, "wheel", "--no-deps", "--wheel-dir", str(DIST), str(source))
        run(sys.executable, *wheel, cwd=WORK, environment=PINS)
    (ours,), (phantom,) = DIST.glob("stretto-*.whl"), DIST.glob("phantomgpu-*.whl")
    return ours, phantom


def environment(python: str, name: str) -> str:
    """Make an empty environment; return its Python."""
    run(python, "-m", "venv", str(WORK / name), cwd=WORK, environment={})
    return str(WORK / name / "bin" / "python")


def try_phantom(python: str, version: str, wheel: Path) -> None:
    """Install phantomgpu alone: it requires no torch, and brings no stretto."""
    own = environment(python, f"phantomgpu-{version}")
    run(own, *PIP, "install", str(wheel), cwd=WORK, environment={})
    run(str(Path(own).parent / "phantomgpu"), "gpus", cwd=WORK, environment={})
    absent = (
        "import importlib.util as u; assert not u.find_spec('torch') and not u.find_spec('stretto')"
    )
    run(own, "-c", absent, cwd=WORK, environment={})


def try_stretto(python: str, version: str, wheel: Path, *, torch: bool) -> None:
    """Install stretto; read its names and train with it, or without torch only plan."""
    own = environment(python, f"stretto-{version}")
    command = Path(own).parent / "stretto"
    if torch:
        run(own, *PIP, "install", str(wheel), cwd=WORK, environment=PINS)
        home = f"lib/python{version}/site-packages"
        run(own, "-c", CHECK, str(WORK / f"stretto-{version}" / home), cwd=WORK, environment={})
        run(str(command), "train", "max_duration=0.02ep", cwd=WORK, environment={})
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        needed = [one for one in project["dependencies"] if not one.startswith("torch")]
        run(own, *PIP, "install", *needed, cwd=WORK, environment={})
        run(own, *PIP, "install", "--no-deps", str(wheel), cwd=WORK, environment={})
    run(str(command), "plan", RECIPE, cwd=WORK, environment={})


def main() -> None:
    """Write the notes, build, and try everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--without-torch", default="", metavar="3.12,3.13")
    parser.add_argument(
        "--rehearse", action="store_true", help="no notes, for an undated changelog"
    )
    options = parser.parse_args()
    source = (ROOT / "src" / "stretto" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.M)
    text = "" if options.rehearse else notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    ours, phantom = build()
    (DIST / "notes.md").write_text(text, "utf-8")
    tried = interpreters()
    for name, python in tried.items():
        with_torch = name not in options.without_torch.split(",")
        print(f"Python {name}{'' if with_torch else ', without torch'}", flush=True)
        try_phantom(python, name, phantom)
        try_stretto(python, name, ours, torch=with_torch)
    for name in [name for name in PYTHONS if name not in tried]:
        print(f"Python {name} is not installed here: not tried")
    print(f"{DIST} has version {version}; RELEASING.md says what comes next")


if __name__ == "__main__":
    main()
