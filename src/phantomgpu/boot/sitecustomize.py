"""Python imports this file at its start when `phantomgpu` runs a command.

It makes `phantomgpu` importable without its neighbours, whatever Python the command uses, and
imports the `sitecustomize` that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys
import traceback
from pathlib import Path


def _start() -> None:
    neighbours = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, neighbours)
    from phantomgpu import child

    sys.path.remove(neighbours)
    child.install()


def _chain() -> None:
    """Import the next `sitecustomize` on the path."""
    folder = str(Path(__file__).resolve().parent)
    others = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "PHANTOMGPU_RUN" in os.environ:
    try:
        _start()
    except Exception:  # noqa: BLE001  Python would go on without a phantom
        traceback.print_exc()
        os._exit(4)
_chain()
