"""Makes modules of Megatron importable without all that their packages import.

`import megatron.core` needs Triton, and `import megatron.bridge` transformers and Transformer
Engine. What a plan meets (the calculator, the schedules, callbacks, samplers) needs none of
them. Where Triton is installed, `megatron.core` is the whole package. A test file imports this
module first, then `# isort: split`, then Megatron's; without its packages, the file is skipped.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOUND = find_spec("megatron")
if FOUND is None:
    pytest.skip("needs Megatron's packages: make adapters", allow_module_level=True)
assert FOUND.submodule_search_locations is not None
FOLDER = Path(next(iter(FOUND.submodule_search_locations)))
PACKAGES = ("bridge", "bridge.data", "bridge.training", "training")


def bare(name: str) -> None:
    """Let modules of a package be imported without running the package's own file."""
    package = ModuleType(f"megatron.{name}")
    package.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
    sys.modules[package.__name__] = package


for package in PACKAGES if find_spec("triton") else ("core", *PACKAGES):
    bare(package)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and Apex are not installed
    # First: the other modules of the core import it, and it imports them.
    import_module("megatron.core.parallel_state")
    import_module("megatron.core.optimizer")


def cut(file: str, wanted: Callable[[ast.AST], bool], names: dict[str, Any]) -> dict[str, Any]:
    """Run the one statement of an installed file that is wanted; return the names that it sees."""
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and wanted(node)]
    exec(compile(ast.Module([found], []), file, "exec"), names)
    return names


def function(file: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of an installed file, or a method, with the names that it sees."""
    is_wanted = lambda node: isinstance(node, ast.FunctionDef) and node.name == name  # noqa: E731
    found: Callable[..., Any] = cut(file, is_wanted, names)[name]
    return found
