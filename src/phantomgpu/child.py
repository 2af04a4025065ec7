"""Inside a run: give torch the phantom when it is imported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from phantomgpu import files, standins
from phantomgpu.errors import PhantomError, SetupNeededError
from phantomgpu.kernels import set_hook

DOES_NOT_FIT = 3
CANNOT_RUN = 4


@dataclass(frozen=True)
class Settings:
    """What the run that started this process wants; travels as JSON in the environment."""

    folder: str = ""
    process: int = 0
    """The process that waits for this one."""
    steps: int | None = 3
    ranks: int = 1
    rank: int = 0
    real: bool = False
    """Whether all processes that the script starts run, each on a device of its own."""
    cudnn: bool = False
    messages: str = ""
    """The folder of what ranks send to each other."""
    details: bool = True
    seconds: float | None = None
    """After how many seconds the script ends, with a report of what was seen until then."""
    longest: bool = False
    """Let loaders give their longest samples in each batch."""
    path: list[str] = field(default_factory=list)


def install() -> None:
    """Wait for the import of torch, unless the run is over and only its environment was kept."""
    settings = Settings(**json.loads(os.environ["PHANTOMGPU_RUN"]))
    if not Path(settings.folder).is_dir():
        return
    if os.getppid() == settings.process:
        end_with_parent()
    check_rank(settings)
    sys.path += [entry for entry in settings.path if entry not in sys.path]
    sys.meta_path.insert(0, _TorchFinder(settings))


def check_rank(settings: Settings) -> None:
    """Let one rank live of those that a launcher such as torchrun starts: it plays the others."""
    rank, world = (int(os.environ.get(one) or 0) for one in ("RANK", "WORLD_SIZE"))
    if settings.real or not world:
        return
    if world != settings.ranks:
        problem = f"the launcher starts {world} ranks; write --ranks {world}: one of them runs"
        leave(CANNOT_RUN, {"status": "cannot run", "problem": problem}, settings)
    if rank != settings.rank:
        os._exit(0)


def end_with_parent() -> None:
    """Let the system end this process when its parent ends, whatever ends that one."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


class _TorchFinder(MetaPathFinder):
    """Loads the stand-ins before torch, and starts the run after it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if name in sys.modules or name not in ("torch", *THEN):
            return None
        if name == "torch":
            with _reported(self.settings):
                spec = _find_cuda_torch()
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:  # `importlib.util.find_spec` may ask, too
            spec.loader = _Loader(spec.loader, self.settings, THEN.get(name))
        return spec


def _find_cuda_torch() -> importlib.machinery.ModuleSpec | None:
    """Find torch with CUDA code: the installed one, or the one that `phantomgpu setup` made."""
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version, cuda = _versions(folder)
    if cuda.partition(".")[0] in standins.CUDA and standins.has_cuda(folder.parent):
        return spec
    standins.check_system()
    made = standins.setup_folder(version)
    if not standins.has_cuda(made):
        raise SetupNeededError(
            f"cannot run: torch {version} is installed {f'for CUDA {cuda}' * bool(cuda)}"
            f"{'without CUDA code' * (not cuda)}, and the stand-ins are for CUDA 12 and 13; run "
            "`phantomgpu setup` once (it downloads the CUDA build of that version, about "
            "530 MB, and leaves your environment as it is)"
        )
    if str(made) not in sys.path:
        sys.path.insert(0, str(made))
    return importlib.machinery.PathFinder.find_spec("torch")


def _versions(folder: Path) -> tuple[str, str]:
    """Return the version of the torch in a folder, and of the CUDA that it was built for."""
    text = files.read(folder / "version.py").decode()
    found = dict(re.findall(r"^(__version__|cuda)\b.*= '(.*)'", text, re.MULTILINE))
    return found["__version__"].partition("+")[0], found.get("cuda", "")


def _hide_values(dynamo: ModuleType) -> None:
    del dynamo
    if "phantomgpu.values" in sys.modules:
        sys.modules["phantomgpu.values"].hide()


THEN = {"triton.knobs": set_hook, "torch._dynamo": _hide_values}
"""What follows the import of a module."""


class _Loader(Loader):
    """Runs a module as its own loader does, and something behind it: for torch, the run."""

    def __init__(
        self, loader: Loader, settings: Settings, then: Callable[[ModuleType], None] | None
    ) -> None:
        self.loader, self.settings, self.then = loader, settings, then or self.start

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":
            assert module.__file__
            with _reported(self.settings):
                folder = standins.build(Path(module.__file__).parent)
                self.library = standins.load(folder)
            os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))
        self.loader.exec_module(module)
        self.then(module)

    def start(self, torch: ModuleType) -> None:
        del torch
        from phantomgpu.watching import Run

        Run(self.settings, self.library).start()


@contextlib.contextmanager
def _reported(settings: Settings) -> Iterator[None]:
    """End the process, with a report, where a phantom is not possible."""
    try:
        yield
    except PhantomError as error:
        leave(CANNOT_RUN, {"status": "cannot run", "problem": str(error)}, settings)


def save(result: dict[str, Any], settings: Settings, name: str = "") -> None:
    """Write what is known for the process that started this one."""
    rank = os.environ.get("RANK", "0")
    file = Path(settings.folder) / f"{name or 'run'}-{int(rank):06d}-{os.getpid()}.json"
    files.write(file, json.dumps(result))


def leave(code: int, result: dict[str, Any], settings: Settings, name: str = "") -> NoReturn:
    """Write the result and end the process at once: nothing of the script runs any more."""
    save(result, settings, name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
