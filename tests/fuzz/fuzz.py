"""Search for inputs that break a target, guided by coverage: `python fuzz.py TARGET SECONDS`.

Needs atheris, which is not among the development tools: install it in an environment of its own,
and let that see this one's packages. What it finds goes to `found/`, as a file to add to the corpus
once it is mended. What is new to reach goes to `grown/`; of it, the corpus has the smallest inputs
that reach each line.
"""

from __future__ import annotations

import hashlib
import runpy
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

HERE = Path(__file__).parent
with atheris.instrument_imports(include=["stretto", "yaml"]):
    TARGETS = runpy.run_path(str(HERE / "targets.py"))["TARGETS"]


def main() -> None:
    """Fuzz one target for a while."""
    name, seconds = sys.argv[1:3]
    grown, found = HERE / "grown" / name, HERE / "found"
    grown.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    options = [f"-artifact_prefix={found}/{name}-", "-timeout=10", "-rss_limit_mb=3000"]
    arguments = [
        f"-max_total_time={seconds}",
        "-max_len=2000",
        *options,
        str(grown),
        str(HERE / "corpus" / name),
    ]
    target = TARGETS[name]

    def run(data: bytes) -> None:
        try:
            target(data)
        except BaseException:
            (found / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
            raise

    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
