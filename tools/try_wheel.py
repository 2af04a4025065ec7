"""Build the wheel, unpack it into an empty folder and try it there, away from the source tree.

The packages it depends on come from the environment that runs this; stretto itself comes from the
wheel, and the first check is that it does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"

CHECK = """
import importlib.metadata, pathlib, sys
import stretto

home = pathlib.Path(stretto.__file__).parent
assert home.parent == pathlib.Path(sys.argv[1]), f"not the wheel's: {home}"
assert (home / "py.typed").exists() and (home / "__init__.pyi").exists()
found = {d.name: d for d in importlib.metadata.distributions(path=[sys.argv[1]])}["stretto"]
assert found.version == stretto.__version__
assert "licenses/LICENSE" in " ".join(map(str, found.files))
page = home / "report" / "page"
assert (page / "page.html").exists() and (page / "uplot" / "LICENSE").exists(), "no run page"
for name in stretto.__all__:
    getattr(stretto, name)
import phantomgpu
beside = pathlib.Path(phantomgpu.__file__).parent
assert beside.parent == home.parent and (beside / "native" / "device.c").exists()
assert (beside / "native" / "names.txt").exists() and (beside / "boot" / "call.py").exists()
print(f"stretto {stretto.__version__}: {len(stretto.__all__)} names import from the wheel")
"""


def run(*command: str, cwd: Path, environment: dict[str, str]) -> None:
    """Run a command with these variables added to its environment; fail when it does."""
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **environment})


def main() -> None:
    """Build, unpack, try."""
    shutil.rmtree(BUILD, ignore_errors=True)
    wheels, target, empty = BUILD / "wheels", BUILD / "installed", BUILD / "empty"
    empty.mkdir(parents=True)
    constraints = str(ROOT / "constraints.txt")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pins = {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    build = ("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    run(*pip, *build, cwd=ROOT, environment=pins)
    (wheel,) = wheels.glob("stretto-*.whl")
    unpack = ("install", "--no-deps", "--target", str(target), str(wheel))
    run(*pip, *unpack, cwd=empty, environment={})
    run(
        sys.executable, "-c", CHECK, str(target), cwd=empty, environment={"PYTHONPATH": str(target)}
    )


if __name__ == "__main__":
    main()
