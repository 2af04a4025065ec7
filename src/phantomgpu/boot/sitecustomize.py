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
    folder = Path(__file__).resolve().parent
    package = folder.parent
    spec = importlib.util.spec_from_file_location(
        "phantomgpu", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["phantomgpu"] = module
    spec.loader.exec_module(module)
    from phantomgpu import child

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
