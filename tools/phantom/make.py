"""Make an environment in which torch's CUDA build runs on a machine without a GPU.

    python tools/phantom/make.py [FOLDER] [--torch 2.13.0]

`FOLDER/venv` gets the CUDA build of torch without its CUDA libraries, this project, and what its
tests and benchmarks need, in the versions that `constraints.txt` says;
`FOLDER/lib` gets stand-ins for these libraries; `FOLDER/replay` replays allocations. Then:

    LD_LIBRARY_PATH=FOLDER/lib FOLDER/venv/bin/python your_script.py

All of torch runs as it does on a GPU: dispatch, autograd, the caching allocator. Memory is counted
as the driver counts it. Kernels are launched and do nothing, and what is read back is zero. End a
script with `os._exit(0)`: some destructors of torch need the real libraries.

| environment variable | meaning | default |
|---|---|---|
| `PHANTOM_KIND` | which device: a100, h100, b200, rtx4090 or rtx5090 | h100 |
| `PHANTOM_MEMORY` | bytes of memory of each device | that kind's |
| `PHANTOM_DEVICES` | number of devices, 0 to 16 | 1 |

Needs gcc, g++, nm, readelf and the headers of CUDA 13 (in `$CUDA_HOME/include`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = "2.13.0"
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
TESTS_NEED = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
BENCHMARKS_NEED = ("psutil", "transformers")
NEED_TORCH = ("accelerate", "peft==0.21.2")
"""For the benchmarks; without their dependencies, because those of torch are missing."""
PREFIXES = {
    # library: how the names of its functions begin
    "libcuda": "cu",
    "libcudart": "cuda",
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcufile": "cuFile",
    "libcupti": "cupti",
    "libcurand": "curand",
    "libcusolver": "cusolver",
    "libcusparse": "cusparse",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libnvidia-ml": "nvml",
    "libnvrtc": "nvrtc",
    "libnvshmem_host": "nvshmem",
}
SOURCES = {
    "libcuda": ["device.c", "driver.c"],
    "libcudart": ["runtime.c"],
    "libcublas": ["cublas.c"],
    "libcublasLt": ["cublaslt.c"],
    "libcudnn": ["cudnn.c"],
    "libnvidia-ml": ["nvml.c"],
}
LOOKED_UP = re.compile(rb"\0((?:cu[A-Z]|nvml)\w+)(?=\0)")
NEED_THE_DRIVER = ("libcudart", "libnvidia-ml")
FUNCTION = re.compile(r"(?:__)?(?:cu|nccl|nvrtc|nvshmem)\w")
DEFINED = re.compile(r"^[\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
CHECK = """
import os, torch
torch.zeros(2, device="cuda")
print("torch", torch.__version__, "runs on", torch.cuda.get_device_name(0))
os._exit(0)
"""


@dataclass
class Library:
    """What torch asks of a CUDA library."""

    soname: str
    functions: set[str] = field(default_factory=set)
    version: str | None = None
    """The version of the symbols, if they have one."""


def main() -> None:
    """Install torch and this project, and build the stand-ins and the replay program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="bench/.venvs/phantom-VERSION")
    parser.add_argument("--torch", default=TORCH, help=f"version of torch ({TORCH})")
    given = parser.parse_args()
    folder = (given.folder or ROOT / "bench" / ".venvs" / f"phantom-{given.torch}").resolve()
    headers = find_headers()
    python = install(folder / "venv", given.torch)
    torch = next((folder / "venv" / "lib").glob("python3*/site-packages/torch"))
    build_libraries(wanted(torch / "lib"), folder / "lib", headers)
    build_replay(folder, torch, headers)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    subprocess.run([python, "-c", CHECK], check=True, env=environment)
    print(f"LD_LIBRARY_PATH={folder}/lib {python} your_script.py")


def find_headers() -> Path:
    """Return the folder of the CUDA headers; check that all tools are there."""
    missing = [tool for tool in ("gcc", "g++", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(
            f"cannot build the stand-ins: {', '.join(missing)} not found; "
            "install gcc, g++ and binutils (apt-get install g++ binutils)"
        )
    home = os.environ.get("CUDA_HOME")
    for folder in [Path(home)] if home else sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        headers = folder / "include"
        if (headers / "cuda_runtime_api.h").exists():
            return headers
    raise SystemExit(
        f"cannot build the stand-ins: no CUDA headers in {home or '/usr/local/cuda*'}; "
        "install cuda-cudart-dev-13-0 and cuda-crt-13-0, or set CUDA_HOME to the folder "
        "that holds include/cuda_runtime_api.h"
    )


def install(venv: Path, version: str) -> str:
    """Return the Python of an environment with that torch and this project."""
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-warn-conflicts"]  # torch misses the CUDA libraries
    if not (venv / "complete").exists():
        print(f"installing torch {version} into {venv} (a download of about 530 MB)")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        # From PyPI alone: a local index may prefer a CPU build, which has no CUDA code.
        ours = {k: v for k, v in os.environ.items() if k not in LOCAL_INDEXES}
        alone = {**ours, "PIP_CONFIG_FILE": os.devnull}
        wheel = [f"torch=={version}", "--no-deps", "--index-url", "https://pypi.org/simple"]
        subprocess.run([*pip, *wheel], check=True, env=alone)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    packages = (*TORCH_NEEDS, *project_needs(), *TESTS_NEED, *BENCHMARKS_NEED)
    # Written last: without it, or with another content, something is missing.
    content = "\n".join((*packages, *NEED_TORCH, CONSTRAINTS.read_text(encoding="utf-8")))
    complete = venv / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8") != content:
        pip += ["--constraint", str(CONSTRAINTS)]
        subprocess.run([*pip, *packages], check=True)
        subprocess.run([*pip, "--no-deps", *NEED_TORCH], check=True)
        complete.write_text(content, encoding="utf-8")
    return python


LOCAL_INDEXES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX")


def project_needs() -> list[str]:
    """Return the requirements of this project but torch."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needs: list[str] = tomllib.loads(text)["project"]["dependencies"]
    return [need for need in needs if not need.startswith("torch")]


def wanted(folder: Path) -> dict[str, Library]:
    """Return what the libraries of torch need of the CUDA libraries."""
    libraries = {
        "libcuda": Library("libcuda.so.1"),
        "libnvidia-ml": Library("libnvidia-ml.so.1"),
    }
    files = sorted(folder.glob("lib*.so"))
    for file in files:
        for soname in re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-d", file)):
            stem = soname.partition(".so")[0]
            if stem in PREFIXES:
                libraries.setdefault(stem, Library(soname))
    for file in files:
        for line in output("nm", "-D", "--undefined-only", file).splitlines():
            name, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if FUNCTION.match(name) and owner(name) in libraries:
                library = libraries[owner(name)]
                library.functions.add(name)
                library.version = version or library.version
    # Functions of the driver are looked up by name while torch runs; none may be missing.
    for found in LOOKED_UP.findall((folder / "libc10_cuda.so").read_bytes()):
        name = found.decode()
        libraries[owner(name)].functions.add(name)
    return libraries


def owner(function: str) -> str:
    """Return the library with the longest prefix that fits."""
    fitting = [lib for lib, prefix in PREFIXES.items() if function.lstrip("_").startswith(prefix)]
    return max(fitting, key=lambda library: len(PREFIXES[library]), default="")


def build_libraries(libraries: dict[str, Library], folder: Path, headers: Path) -> None:
    """Build a stand-in for each library; functions without source code return 0."""
    folder.mkdir(exist_ok=True)
    for stem, library in libraries.items():  # libcuda is the first: others need it
        sources = [HERE / name for name in SOURCES.get(stem, [])]
        ours = {name for source in sources for name in DEFINED.findall(source.read_text())}
        others = sorted(library.functions - ours)
        rest = folder / f"{library.soname}.c"
        rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in others))
        command = ["gcc", "-w", "-O1", "-fPIC", "-shared", f"-I{headers}", *map(str, sources)]
        command += [str(rest), f"-Wl,-soname,{library.soname}", "-o", str(folder / library.soname)]
        if stem in NEED_THE_DRIVER:
            command += [str(folder / "libcuda.so.1"), "-ldl", "-Wl,-rpath,$ORIGIN"]
        if library.version:
            script = folder / f"{library.soname}.map"
            script.write_text(f"{library.version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def build_replay(folder: Path, torch: Path, headers: Path) -> None:
    """Build the program that replays allocations against torch's own allocator."""
    library = torch / "lib"
    command = ["g++", "-O1", "-std=c++20", "-w", str(HERE / "replay.cpp"), f"-I{headers}"]
    command += [f"-I{torch / 'include'}", f"-L{library}", "-lc10_cuda", "-lc10"]
    command += [str(folder / "lib" / "libcuda.so.1"), f"-L{folder / 'lib'}"]
    command += [
        f"-Wl,-rpath,{folder / 'lib'}:{library}",
        "-Wl,--disable-new-dtags,--allow-shlib-undefined",
    ]
    subprocess.run([*command, "-o", str(folder / "replay")], check=True)


def output(*command: str | Path) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
