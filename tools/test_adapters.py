"""Run the tests of adapters, stores and sources, each against the real packages in an environment.

The environments are made once, in `bench/.venvs`, about 1 GB each. `make test-adapters
ARGS=huggingface` runs those of one. What ran is kept in `bench/results/adapters-<name>.txt`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import peer_environments  # noqa: E402
from peer_environments import Environment, python_of  # noqa: E402


@dataclass(frozen=True)
class Adapter:
    """What the tests of an adapter need."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    """Files in `tests`."""
    without_dependencies: tuple[str, ...] = ()
    """Installed last, and without what they ask for."""
    options: tuple[str, ...] = ()
    """For pytest."""


COMPOSER = peer_environments.ENVIRONMENTS["composer"]
ADAPTERS = {
    "huggingface": Adapter(
        packages=(
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "peft==0.21.2",
            "sentence-transformers==6.2.0",
            "transformers==5.23.0",
            "trl==1.16.0",
        ),
        tests=(
            "integrations/test_huggingface.py",
            "integrations/test_trl.py",
            "integrations/test_sentence_transformers.py",
            "integrations/test_accelerate.py",
            "integrations/test_examples.py",
            "data/test_sources.py",
        ),
    ),
    "lightning": Adapter(
        packages=("lightning==2.6.6",),
        tests=("integrations/test_lightning.py", "integrations/test_examples.py"),
    ),
    "composer": Adapter(
        packages=COMPOSER.requirements,
        tests=("integrations/test_composer.py", "integrations/test_examples.py"),
        without_dependencies=COMPOSER.without_dependencies,
        options=("-p", "no:unraisableexception"),  # Composer leaves files open
    ),
    "torchtune": Adapter(
        packages=("torchao==0.15.0", "torchtune==0.6.1"), tests=("integrations/test_torchtune.py",)
    ),
    # torchtitan 0.3.0 pins datasets<4.8, and so an old fsspec: its other requirements, itself
    # without.
    "torchtitan": Adapter(
        packages=(
            "datasets==5.2.0",
            "einops==0.8.2",
            "pillow",
            "spmd_types==0.2.3",
            "tensorboard",
            "tokenizers",
            "torch_checkpointing==0.1.1",
            "torchdata==0.11.0",
            "triton",
            "tyro==1.0.17",
        ),
        tests=("integrations/test_torchtitan.py",),
        without_dependencies=("torchtitan==0.3.0",),
    ),
    "ray": Adapter(packages=("ray[train]==2.60.0",), tests=("integrations/test_ray.py",)),
    "s3": Adapter(
        packages=("boto3", "moto[server]==5.2.5", "s3fs==2026.9.0"),
        tests=("training/checkpointing/test_s3.py",),
        options=("-s",),  # prints how many faults there were
    ),
    # Without datasets: pip finds no versions of both.
    "streaming": Adapter(
        packages=("mosaicml-streaming==0.13.0", "torchdata==0.11.0", "torchvision==0.28.0"),
        tests=("data/test_sources.py",),
    ),
}


def own_requirements() -> tuple[str, ...]:
    """Return what stretto itself and its tests need, beside torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [one for one in project["dependencies"] if not one.startswith("torch")]
    return (*needed, "hypothesis", "pytest", "pytest-timeout")


def python_for(name: str) -> Path:
    """Return the Python of the environment of an adapter, made first if it is not there yet."""
    adapter = ADAPTERS[name]
    peer_environments.ENVIRONMENTS[f"adapter-{name}"] = Environment(
        (*adapter.packages, *own_requirements()), adapter.without_dependencies
    )
    return python_of(f"adapter-{name}")


def test(name: str) -> int:
    """Run the tests of one adapter; return the exit code."""
    adapter, python = ADAPTERS[name], python_for(name)
    result = ROOT / "bench" / "results" / f"adapters-{name}.txt"
    files = [f"tests/{one}" for one in adapter.tests]
    command = [str(python), "-m", "pytest", "-q", "--show-capture=no", "--tb=short"]
    command += [*adapter.options, *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["STRETTO_ADAPTERS"] = "1"  # see tests/integrations/conftest.py
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    print(done.stdout, done.stderr[-2000:], sep="\n")
    last = done.stdout.strip().splitlines()[-1]
    versions = " ".join((*adapter.packages, *adapter.without_dependencies))
    result.write_text(f"{last}\n{versions}\n{' '.join(adapter.tests)}\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(max([test(name) for name in sys.argv[1:] or ADAPTERS]))
