"""Stand-ins for the CUDA libraries: built once for a build of torch, loaded before it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phantomgpu import files
from phantomgpu.errors import NotSupportedError, PhantomError

NATIVE = Path(__file__).parent / "native"
CUDA = ("12", "13")
"""The versions of CUDA that the stand-ins serve."""
_SAME = "cublas cublasLt cudnn cufft cupti curand cusolver cusparse cusparseLt nccl nvrtc"
PREFIXES = {f"lib{prefix}": prefix for prefix in _SAME.split()}
PREFIXES |= {"libcuda": "cu", "libcudart": "cuda", "libcufile": "cuFile", "libnvidia-ml": "nvml"}
PREFIXES["libnvshmem_host"] = "nvshmem"
"""How the names of a library's functions begin."""
SOURCES = {"libcuda": ["device.c", "driver.c"], "libcudart": ["runtime.c"], "libnccl": ["nccl.c"]}
UNSUPPORTED = {"libcudnn": 3000, "libcusolver": 9, "libcusparse": 10}
"""The number of "not supported" where it is not 801."""
FUNCTION = re.compile(r"(?:__)?(?:cu|nccl|nvrtc|nvshmem|nvml)\w")
DEFINED = re.compile(r"^[\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
_GIVEN = ", ".join(f"long a{number}" for number in range(19))  # as many as any function has
LAUNCHES = re.compile(r"LaunchKernel|gemm|Gemm(Ex|Strided)|LtMatmul$|cudaMem(cpy|set)Async")
"""What takes a place in the queue of a stream."""
LOOKED_UP = re.compile(rb"\0((?:cu[A-Z]|nvml)\w+)(?=\0)")


@dataclass
class Library:
    """What torch asks of a CUDA library."""

    soname: str
    version: str | None = None
    functions: set[str] = field(default_factory=set)
    """What torch itself calls."""
    others: set[str] = field(default_factory=set)
    """What else the real library has."""


def check_system() -> None:
    """Refuse systems on which torch has no CUDA code.

    Raises:
        NotSupportedError: This is not Linux on x86-64 or arm64, or a tool is missing.
        PhantomError: There is no folder for what is built once.
    """
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        raise NotSupportedError(
            f"phantomgpu cannot run on {system}: it runs the CUDA code of torch, which exists for "
            "Linux only; use a Linux machine or container (a GPU is not needed)"
        )
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise NotSupportedError(
            f"cannot build the stand-ins: {', '.join(missing)} not found; install a C compiler "
            "(on Debian and Ubuntu: apt-get install gcc)"
        )
    cache_folder()


def cache_folder() -> Path:
    """Return the folder for what is built or downloaded once (`PHANTOMGPU_CACHE`).

    Raises:
        PhantomError: There is none.
    """
    given = os.environ.get("PHANTOMGPU_CACHE")
    base = given or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    if base.startswith("~"):  # the user of a container may have no HOME and no entry in /etc/passwd
        why = "this user has no home folder; set PHANTOMGPU_CACHE to a folder of this user"
        raise PhantomError(f"cannot keep what is built once: {why}")
    return Path(base) if given else Path(base, "phantomgpu")


def build(torch: Path) -> Path:
    """Build the stand-ins for the torch in that folder, unless they are there; return theirs."""
    check_system()
    library = torch / "lib" / "libtorch_cuda.so"
    parts = [str(library.stat().st_size), str(library.stat().st_mtime_ns), str(torch)]
    parts += [files.read(path).decode() for path in sorted([*NATIVE.iterdir(), Path(__file__)])]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "standins" / name
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise PhantomError(f"{error}; set PHANTOMGPU_CACHE to a folder of this user") from None
    with scratch:
        new = Path(scratch.name, "new")
        new.mkdir()
        compile_all(wanted(torch), new)
        with suppress(OSError):  # another process may have been faster
            new.rename(folder)
    if not folder.exists():
        raise PhantomError(f"cannot keep the stand-ins in {folder}; set PHANTOMGPU_CACHE")
    return folder


def load(folder: Path) -> ctypes.CDLL:
    """Load the stand-ins, so that torch finds them under their names; return the device's."""
    stems = {file.stem for file in folder.glob("*.phantom")}
    first = ["libcuda", "libcudart"]  # the others link these
    files = [str(folder / f"{stem}.phantom") for stem in (*first, *sorted(stems - set(first)))]
    device, *_ = [ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL) for file in files]
    return device


def wanted(torch: Path) -> dict[str, Library]:
    """Return what the libraries of torch need of the CUDA libraries."""
    libraries = {stem: Library(f"{stem}.so.1") for stem in ("libcuda", "libnvidia-ml")}
    built = sorted((torch / "lib").glob("lib*.so"))
    for file in built:
        for soname in re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-d", file)):
            stem = soname.partition(".so")[0]
            if stem in PREFIXES:
                libraries.setdefault(stem, Library(soname))
    if libraries["libcudart"].soname.rpartition(".")[2] not in CUDA:
        raise NotSupportedError(
            f"cannot use this torch: it was built for {libraries['libcudart'].soname}, and the "
            "stand-ins are for CUDA 12 and 13; install a build of torch for one of them"
        )
    for name, version in _symbols(built, "--undefined-only"):
        library = libraries.get(_owner(name))
        if library:
            library.functions.add(name)
            library.version = version or library.version
    # Functions of the driver are looked up by name while torch runs.
    for found in LOOKED_UP.findall(files.read(torch / "lib" / "libc10_cuda.so")):
        libraries[_owner(found.decode())].functions.add(found.decode())
    # Extensions ask for more than torch does.
    for name in {*known_names(), *answers()}:
        libraries[_owner(name)].others.add(name)
    for library in libraries.values():
        real = sorted(torch.parent.glob(f"nvidia/**/{library.soname}"))
        library.others |= {name for name, _ in _symbols(real, "--defined-only")}
    return libraries


@cache
def known_names() -> dict[str, str]:
    """Return the functions of CUDA that need no code, and what each of them does (names.txt)."""
    found = {}
    for word in " ".join(_lines("names.txt")).split():
        name, _, same = word.lstrip("+*>").partition("=")
        found[name] = same or (word[0] if word[0] in "+*>" else "")
    return found


def _symbols(files: Iterable[Path], which: str) -> Iterable[tuple[str, str]]:
    for file in files:
        for line in _output("nm", "-D", which, file).splitlines():
            name, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if FUNCTION.match(name):
                yield name, version


def _owner(function: str) -> str:
    """Return the library with the longest prefix that fits."""
    fitting = [lib for lib, prefix in PREFIXES.items() if function.lstrip("_").startswith(prefix)]
    return max(fitting, key=lambda library: len(PREFIXES[library]), default="")


def compile_all(libraries: dict[str, Library], folder: Path) -> None:
    """Compile a stand-in for each library."""
    for stem, library in libraries.items():  # libcuda is the first: the others link it
        sources = [NATIVE / name for name in SOURCES.get(stem, [])]
        text = "\n".join(files.read(source).decode() for source in sources)
        rest = (library.functions | library.others) - set(DEFINED.findall(text))
        lines = ['#include "device.h"', "#include <stdio.h>", "#include <string.h>"]
        lines += [_default(name, stem, called=name in library.functions) for name in sorted(rest)]
        generated = folder / f"{stem}.c"
        files.write(generated, "\n".join(lines))
        command = ["gcc", "-w", "-O1", "-fPIC", "-shared", f"-I{NATIVE}"]
        command.append(f"-DCUDA={libraries['libcudart'].soname.rpartition('.')[2]}")
        command += [*map(str, sources), str(generated), f"-Wl,-soname,{library.soname}"]
        # Not libcudart.so: torch looks for that name, and then loads all real libraries itself.
        command += ["-o", str(folder / f"{stem}.phantom"), "-ldl", "-lpthread"]
        linked = {"libcuda": [], "libnccl": ["libcuda", "libcudart"]}.get(stem, ["libcuda"])
        command += [str(folder / f"{other}.phantom") for other in linked]
        if library.version:
            script = folder / f"{stem}.map"
            files.write(script, f"{library.version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise NotSupportedError(f"cannot build the stand-in {library.soname}: {done.stderr}")
    for name in ("libcuda.so", "libcuda.so.1"):  # Triton links with -lcuda
        (folder / name).symlink_to("libcuda.phantom")


def _default(name: str, stem: str, *, called: bool) -> str:
    """Return C code of a function that has none in the sources.

    What torch calls succeeds: kernels are launched, and settings accepted. Where a size would come
    back, where torch would compute with cuDNN, and where nobody checked what comes back, the answer
    is an error.
    """
    does = known_names().get(name, "")
    solver = re.fullmatch(r"cusolverDn(?:[SDCZ](?=[a-z]))?(\w+)_bufferSize", name)
    if name in answers():
        code = answers()[name]
    elif len(does) > 1:  # what another one does
        code = f"long {does}({_GIVEN}); return {does}({_GIVEN.replace('long ', '')});"
    elif name.endswith(("GetErrorString", "GetErrorName", "GetLastError", "GetResultString")):
        code = 'return (long)"not supported by phantomgpu";'
    elif does == "*":
        code = "*(void **)a0 = phantom_handle();"
    elif does == ">":
        code = "phantom_copy((void *)a0, (void *)a1, a2);"
    elif called and solver and solver[1] in workspaces():
        code = f"double d = {int(name[10] in 'DZ')}; {workspaces()[solver[1]]}"
    elif batched := re.fullmatch(r"cublas[SDCZ](geqrf|gels|getrs)Batched", name):
        code = f"*(int *)a{6 if batched[1] == 'geqrf' else 9} = 0;"  # a status on the host
    else:
        refused = not called or re.search("bufferSize|SpGEMM", name) or stem == "libcudnn"
        accepted = does == "+" or name.startswith(("cudnnDestroy", "__cuda")) or not refused
        code = "return 0;"
        if not accepted:  # the script may catch the error
            code = f"phantom_assumed |= 8; return {UNSUPPORTED.get(stem, 801)};"
    launch = "LAUNCH;" * bool(LAUNCHES.search(name))
    return f"long {name}({_GIVEN}) {{ {launch} {code} return 0; }}"


@cache
def answers() -> dict[str, str]:
    """Return the C code of functions that only give an answer (answers.txt)."""
    code: dict[str, str] = defaultdict(str)
    for line in _lines("answers.txt"):
        name, at, kind, value = line.split(None, 3)
        to = {"return": "return ", "do": ""}.get(at, f"if (a{at}) *({kind} *)a{at} = ")
        code[name] += f"{to}{value}; "
    return dict(code)


@cache
def workspaces() -> dict[str, str]:
    """Return the C code of cuSOLVER's functions that say how large workspaces are (solver.txt)."""
    code = {}
    for line in _lines("solver.txt"):
        name, sizes, numbers, formula = line.split(None, 3)
        given = "".join(f"double {one[0]} = (int)a{one[1:]}; " for one in numbers.split(","))
        given += "phantom_assumed |= 1; " * name.endswith("~") + f"double size = {formula}; "
        at, *host = sizes.split(",")
        if name.startswith("X"):  # float, complex double
            given += f"*(size_t *)a{at} = size * (t == 0 ? 4 : t == 5 ? 16 : 8); "
        else:  # CUSOLVER_STATUS_INVALID_VALUE
            given += f"if (size >= 1u << 31) return 3; *(int *)a{at} = size; "
        code[name.rstrip("~")] = given + "".join(f"*(size_t *)a{one} = 0; " for one in host)
    return code


def _lines(file: str) -> list[str]:
    lines = files.read(NATIVE / file).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise PhantomError(f"cannot read {command[-1]}: {done.stderr.strip()}")
    return done.stdout


def setup_folder(version: str) -> Path:
    """Return the folder for a CUDA build of torch beside a CPU build of that version."""
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "torch" / f"{version}-py{python}"


def has_cuda(folder: Path) -> bool:
    """Return whether a folder has a torch with CUDA code; an empty one has none."""
    return (folder / "torch" / "lib" / "libtorch_cuda.so").exists()


def is_ready(version: str, cuda: str | None) -> bool:
    """Return whether the stand-ins can serve a torch, or the build that `setup` put beside it.

    Args:
        version: Of torch, without a local part such as +cpu.
        cuda: The version of CUDA that it was built for; None or "" for a CPU build.
    """
    return (cuda or "").partition(".")[0] in CUDA or has_cuda(setup_folder(version))
