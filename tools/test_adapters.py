"""Run the tests of adapters, stores and sources, each against the real packages in an environment.

The environments are made once, in `bench/.venvs`, about 1 GB each. `make test-adapters
ARGS=huggingface` runs those of one. What ran is kept in `bench/results/adapters-<name>.txt`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]

import peer_environments  # noqa: E402
from peer_environments import Environment, python_of  # noqa: E402

from phantomgpu import standins  # noqa: E402
from phantomgpu.gpus import driver_facts, find_gpu  # noqa: E402


@dataclass(frozen=True)
class Adapter:
    """What the tests of an adapter need: a table `[tool.adapters.<name>]` of pyproject.toml."""

    tests: list[str]
    """Files in `tests`."""
    packages: list[str] = field(default_factory=list)
    without_dependencies: list[str] = field(default_factory=list)
    """Installed last, and without what they ask for."""
    wheels_of: str = ""
    """The Python whose wheels are taken for those, if not the one that runs the tests."""
    environment: str = ""
    """The environment of `bench` that names the packages."""
    options: list[str] = field(default_factory=list)
    """For pytest."""

    @property
    def needed(self) -> Environment:
        """The packages."""
        if self.environment:
            return peer_environments.ENVIRONMENTS[self.environment]
        return Environment(tuple(self.packages), tuple(self.without_dependencies), self.wheels_of)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADAPTERS = {name: Adapter(**table) for name, table in PROJECT["tool"]["adapters"].items()}


def own_requirements() -> tuple[str, ...]:
    """Return what stretto itself and its tests need, beside torch."""
    dependencies = PROJECT["project"]["dependencies"]
    needed = [package for package in dependencies if not package.startswith("torch")]
    return (*needed, "hypothesis", "pytest", "pytest-timeout")


def python_for(name: str) -> Path:
    """Return the Python of the environment of an adapter, made first if it is not there yet."""
    needed = ADAPTERS[name].needed
    peer_environments.ENVIRONMENTS[f"adapter-{name}"] = Environment(
        (*needed.requirements, *own_requirements()),
        needed.without_dependencies,
        needed.wheels_of,
    )
    return python_of(f"adapter-{name}")


def stand_ins(python: Path) -> dict[str, str]:
    """Return the environment in which a CUDA build of torch runs without CUDA, on the CPU.

    A newer torch than that of this project comes without CUDA's libraries (`without_dependencies`).
    """
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    if not standins.has_cuda(packages) or (packages / "nvidia").exists():
        return {}
    files = map(str, standins.build(packages / "torch").glob("*.phantom"))
    facts = driver_facts(find_gpu("h100"), memory=1, context=0, devices=0)
    return {"LD_PRELOAD": os.pathsep.join(files), "PHANTOMGPU_FACTS": facts}


def test(name: str) -> int:
    """Run the tests of one adapter; return the exit code."""
    adapter, python = ADAPTERS[name], python_for(name)
    result = ROOT / "bench" / "results" / f"adapters-{name}.txt"
    files = [f"tests/{file}" for file in adapter.tests]
    command = [str(python), "-m", "pytest", "-q", "--show-capture=no", "--tb=short"]
    command += [*adapter.options, *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"STRETTO_ADAPTERS": "1", **stand_ins(python)}  # tests/integrations/conftest.py
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    print(done.stdout, done.stderr[-2000:], sep="\n")
    last = done.stdout.strip().splitlines()[-1]
    versions = " ".join((*adapter.needed.requirements, *adapter.needed.without_dependencies))
    result.write_text(f"{last}\n{versions}\n{' '.join(adapter.tests)}\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(max([test(name) for name in sys.argv[1:] or ADAPTERS]))
