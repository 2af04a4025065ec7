"""Take uPlot, which draws the charts of the run page, from npm into the package.

The build runs it: `pip install .`, `pip install --editable .` and the wheel hold uPlot's files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.6.32"
SHA256 = "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d"
FILES = ("LICENSE", "dist/uPlot.iife.min.js", "dist/uPlot.min.css")
TARGET = Path(__file__).parent.parent / "src" / "stretto" / "report" / "page" / "uplot"


def is_here() -> bool:
    """Return whether the files of this version are in the package."""
    paths = [TARGET / Path(name).name for name in FILES]
    return all(p.is_file() for p in paths) and f"(v{VERSION})" in paths[1].read_text("utf-8")[:2000]


def why_not() -> str | None:
    """Take the files, unless they are here; return why that failed, or None."""
    if is_here():
        return None
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed (on Debian and Ubuntu: apt-get install npm)"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", f"uplot@{VERSION}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"npm pack uplot@{VERSION} failed: {done.stderr.strip() or done.stdout.strip()}"
        (archive,) = Path(folder).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            return f"uplot@{VERSION} from npm has the SHA-256 {found}, not {SHA256}"
        TARGET.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as members:
            licence, script, style = (_read(members, name) for name in FILES)
        # Pages hold a copy of the script, and so its licence.
        for name, text in zip(FILES, (licence, f"/*!\n{licence}*/\n{script}", style), strict=True):
            (TARGET / Path(name).name).write_text(text, "utf-8")
    return None


def _read(members: tarfile.TarFile, name: str) -> str:
    content = members.extractfile(f"package/{name}")
    assert content is not None, name
    return content.read().decode()


def main() -> None:
    """Take the files, or say why not."""
    problem = why_not()
    if problem:
        sys.exit(f"cannot take uPlot for the run page: {problem}")


if __name__ == "__main__":
    main()
