"""Make the environments of the peers, one each, in `bench/.venvs` (about 1 GB each).

All have the same torch as stretto's own environment, the build for CPUs if that is one: a
constraints file holds it, so that pip brings no other. Composer asks for an older torch; see
`Environment.without_dependencies`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent / ".venvs"


@dataclass(frozen=True)
class Environment:
    """What is installed for one peer."""

    requirements: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Installed last, and without what they ask for."""
    wheels_of: str = ""
    """The Python whose wheels are taken for those; what is used of them must be Python alone."""

    def options(self, folder: Path) -> tuple[str, ...]:
        """Return the options of pip that install those wheels in an environment."""
        if not self.wheels_of:
            return ()
        packages = next(folder.glob("lib/python*/site-packages"))
        which = ("--python-version", self.wheels_of, "--platform", "manylinux_2_28_x86_64")
        # Given a version, pip asks for a target, too.
        return (
            "--ignore-requires-python",
            "--only-binary=:all:",
            *which,
            "--target",
            str(packages),
        )


ENVIRONMENTS = {
    "accelerate": Environment(("accelerate==1.15.0",)),
    "ignite": Environment(("pytorch-ignite==0.5.5", "numpy==2.4.6")),
    "lightning": Environment(("lightning==2.6.6",)),
    "transformers": Environment(("transformers==5.23.0", "accelerate==1.15.0")),
    # mosaicml 0.32.1 pins torch<2.7.1 and torchvision<0.22.1. It runs beside newer ones, so that
    # all peers can be measured on one torch: its other requirements as it states them, itself and
    # torchvision (whose compiled half, built for CUDA, is not used) without theirs.
    "composer": Environment(
        (
            "coolname>=1.1.0,<3",
            "importlib-metadata>=5.0.0,<9",
            "mosaicml-cli>=0.5.25,<0.8",
            "numpy>=1.21.5,<2.3.0",
            "packaging>=21.3.0,<25.1",
            "pillow>=10.3.0,<12",
            "psutil>=5.8.0,<8",
            "py-cpuinfo>=8.0.0,<10",
            "pyyaml>=6.0,<7",
            "requests>=2.26.0,<3",
            "tabulate==0.9.0",
            "torch-optimizer>=0.3.0,<0.4",
            "torchmetrics>=1.0,<1.7.5",
            "tqdm>=4.62.3,<5",
        ),
        without_dependencies=("mosaicml==0.32.1", "torchvision==0.28.0"),
    ),
}


def python_of(name: str) -> Path:
    """Return the Python of a peer's environment, made first if it is not there yet."""
    environment, folder = ENVIRONMENTS[name], FOLDER / name
    python = folder / "bin" / "python"
    # Written last: an environment without it was left half made.
    done = folder / "requirements.txt"
    torch = "torch==" + metadata.version("torch").partition("+")[0]
    content = "\n".join((torch, *environment.requirements, *environment.without_dependencies))
    if done.exists() and done.read_text(encoding="utf-8") == content:
        return python
    print(f"making {folder} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as constraints:
        constraints.write(torch + "\n")
        constraints.flush()
        command = [*pip, "--constraint", constraints.name, torch, *environment.requirements]
        subprocess.run(command, check=True)
    if environment.without_dependencies:
        options = ("--no-deps", *environment.options(folder))
        subprocess.run([*pip, *options, *environment.without_dependencies], check=True)
    done.write_text(content, encoding="utf-8")
    return python
