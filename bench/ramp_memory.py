"""The peak of memory for each batch size of a ramp: Megatron Core's GPT on GPUs that are not there.

Run `python bench/ramp_memory.py` (10 minutes; `--quick`: a tiny model) after `phantomgpu setup`,
with Megatron Core 0.19.2 and Triton installed. It runs `examples/megatron_ramp.py` as rank 0 of 8.
Sizes, rates and memory are real; losses are not, because large kernels compute nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "bench" / "results" / "ramp_memory.txt"
RUNS = [
    ["--model", "gpt3-1.3b"],
    ["--model", "gpt3-1.3b", "--batch-size", "4", "--steps", "20"],
    ["--model", "gpt3-1.3b", "--virtual", "2", "--batch-size", "0ba:8 10ba:16 25ba:32"],
    ["--model", "gpt3-2.7b"],
]
QUICK = [["--model", "tiny", "--steps", "10", "--batch-size", "0ba:4 4ba:8 7ba:16"]]


def ran(arguments: list[str]) -> str:
    """Return what the example prints on a phantom H100, and the first line of the report."""
    phantom = [str(Path(sys.executable).parent / "phantomgpu"), "run", "--gpu", "h100"]
    script = [sys.executable, str(ROOT / "examples" / "megatron_ramp.py"), *arguments]
    command = [*phantom, "--ranks", "8", "--whole", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)
    lines = done.stdout.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(arguments[1]))
    end = next(at for at, line in enumerate(lines) if line.startswith("fits"))
    return "\n".join([f"$ megatron_ramp.py {' '.join(arguments)}", *lines[begin : end + 1]])


def main() -> None:
    """Run all, and write what they print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; write no results")
    quick = parser.parse_args().quick
    # The phantom runs the CUDA build of that version of torch, whichever build is installed.
    torch = version("torch").partition("+")[0]
    texts = [f"megatron-core {version('megatron-core')}, torch {torch}"]
    for arguments in QUICK if quick else RUNS:
        texts.append(ran(arguments))
        print(texts[-1], flush=True)
    if not quick:
        RESULT.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
