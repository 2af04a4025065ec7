"""torchtitan's published tables, by torchtitan's own code of that commit."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import phantomgpu
from published.packages import first, installed
from published.rows import GIB, Family, Row, source

PROGRAM = Path(__file__).with_name("titan_program.py")
REQUIREMENTS: dict[str, tuple[str, ...]] = {"2024": (), "2025": ("tyro==0.9.24",)}
ALONE = {
    "2024": ("torchao==0.8.0", "torchdata==0.11.0"),
    "2025": ("torchao==0.18.0", "torchdata==0.11.0"),
}
"""What the code of a year needs beside torch; this torchao fits that code and our torch."""
COMMITS = {
    "2024": "9dec370ad26b5f8e9a7333a0e36165018262644b",
    "2025": "e7c0cae934df78d6e9c2835f42ff1f757dc3fddc",
}
PARTS = {
    "2024": ("train.py", "torchtitan", "train_configs"),
    "2025": ("torchtitan",),
}
CONFIGURATIONS = {"2024": "train_configs", "2025": "torchtitan/models/llama3/train_configs"}

FLOAT8 = (
    "--float8.enable_float8_linear --float8.enable_fsdp_float8_all_gather "
    "--float8.precompute_float8_dynamic_scale_for_fsdp"
)
COMPILE = "--training.compile"
FULL = "--activation_checkpoint.mode full"
ASYNC = "--experimental.enable_async_tensor_parallel"


def row(name: str, gib: float, size: str, ranks: int, *arguments: str, **options: Any) -> Row:
    """Return a row of the tables; `arguments` are those of torchtitan."""
    known = options.pop("known", "")
    settings = {"year": "2024", "gpu": "h100", "memory": "95.04GiB", "rank": 0, **options}
    settings |= {"size": size, "ranks": ranks, "arguments": " ".join(arguments)}
    return Row(name, {"reserved": gib * GIB}, settings, known)


def small(name: str, gib: float, ranks: int, *arguments: str, **options: Any) -> Row:
    """Return a row of the 8B model with two samples a rank and selective checkpointing."""
    text = f"8B, {ranks} GPUs, {name}"
    return row(text, gib, "8b", ranks, "--training.batch_size 2", *arguments, **options)


def long(gib: float, context: int) -> Row:
    """Return a row of the 8B model with context parallelism."""
    return row(
        f"8B, FSDP {8 // context}, CP {context}, {32768 * context} tokens, compile, Float8",
        gib,
        "8b",
        8,
        f"--training.batch_size 1 --training.seq_len {32768 * context}",
        f"--experimental.context_parallel_degree {context}",
        FULL,
        COMPILE,
        FLOAT8,
    )


def large(name: str, gib: float, schedule: str, *arguments: str) -> Row:
    """Return a row of the 405B model: 512 GPUs, TP 8, PP 8."""
    return row(
        f"405B, 512 GPUs, TP 8, PP 8, {name}",
        gib,
        "405b",
        512,
        "--training.tensor_parallel_degree 8 --experimental.pipeline_parallel_degree 8",
        f"--experimental.pipeline_parallel_schedule {schedule}",
        *arguments,
        FULL,
        COMPILE,
        FLOAT8,
        ASYNC,
    )


def largest(gib: float, context: int) -> Row:
    """Return a row of the 405B model with context parallelism."""
    return large(
        f"FSDP {8 // context}, CP {context}, 1F1B, {32768 * context} tokens",
        gib,
        "1F1B",
        f"--training.batch_size 8 --training.seq_len {32768 * context}",
        f"--experimental.context_parallel_degree {context}",
    )


def trainy(nodes: int, gib: float) -> Row:
    """Return a row of Trainy's H200 nodes."""
    return row(
        f"8B, {8 * nodes} H200, FSDP, compile, Float8",
        gib,
        "8b",
        8 * nodes,
        "--training.local_batch_size 2",
        COMPILE,
        "--model.converters float8 --float8.enable_fsdp_float8_all_gather",
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
        "--float8.force_recompute_fp8_weight_in_bwd",
        year="2025",
        gpu="h200",
        memory=None,
    )


TWO_DIMENSIONS = (
    "--training.batch_size 16 --training.tensor_parallel_degree 8",
    FULL,
    COMPILE,
    FLOAT8,
)
ROWS = (
    small("FSDP", 82.4, 8),
    small("FSDP, compile", 77.0, 8, COMPILE),
    small("FSDP, compile, Float8", 76.8, 8, COMPILE, FLOAT8),
    long(83.9, 1),
    long(84.2, 2),
    long(84.0, 4),
    long(84.5, 8),
    small("FSDP", 67.0, 128),
    small("FSDP, compile", 62.0, 128, COMPILE),
    small("FSDP, compile, Float8", 61.8, 128, COMPILE, FLOAT8),
    row("70B, FSDP 32, TP 8, compile, Float8", 71.9, "70b", 256, *TWO_DIMENSIONS),
    row("the same, async TP", 67.6, "70b", 256, *TWO_DIMENSIONS, ASYNC),
    large("FSDP 8, 1F1B, 32 samples", 82.5, "1F1B", "--training.batch_size 32"),
    large("the same, interleaved", 72.7, "Interleaved1F1B", "--training.batch_size 32"),
    largest(75.3, 1),
    largest(75.9, 2),
    largest(77.1, 4),
    largest(84.9, 8),
    trainy(4, 47.96),
    trainy(8, 46.97),
)


def unpack(year: str, folder: Path) -> None:
    """Write the code of a commit into a folder; a clone without files of its own will do."""
    command = ["git", "-C", str(source()), "archive", COMMITS[year], *PARTS[year]]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def configuration(year: str, size: str, folder: Path) -> Path:
    """Return the published configuration, without traces and TensorBoard."""
    file = folder / CONFIGURATIONS[year] / f"llama3_{size}.toml"
    text = file.read_text("utf-8")
    for name in ("enable_profiling", "enable_tensorboard"):
        text = text.replace(f"{name} = true", f"{name} = false")
    file.write_text(text, "utf-8")
    return file


def measure(row: Row) -> dict[str, float]:
    """Train three steps with the code of the row's commit."""
    given = row.settings
    year = given["year"]
    with tempfile.TemporaryDirectory(prefix="titan-") as made:
        folder = Path(made)
        unpack(year, folder)
        file = configuration(year, given["size"], folder)
        ours = ["--job.config_file", file, "--job.dump_folder", folder / "out"]
        with first(installed(f"titan_{year}", REQUIREMENTS[year], ALONE[year])):
            report = phantomgpu.run(
                PROGRAM,
                gpu=given["gpu"],
                memory=given["memory"],
                ranks=given["ranks"],
                rank=given["rank"],
                args=[folder, *ours, *given["arguments"].split()],
            )
    if not report.fits:
        raise RuntimeError(report)
    return {"allocated": report.peak_allocated, "reserved": report.peak_reserved}


FAMILY = Family(
    key="titan",
    title="torchtitan",
    source="https://github.com/pytorch/torchtitan/tree/main/benchmarks",
    text="""\
torchtitan's own `train.py` at the published commits (9dec370 of December 2024, e7c0cae of June
2025), as one rank of up to 512, for three optimizer steps. Changed: token ids are made up, and
pipeline stages are told the shapes that they exchange. Published: the most that any rank reserved;
ours: the rank that is named. torchao 0.8 and 0.18 stand for its commits of then, torch for the
nightly of then.""",
    rows=ROWS,
    measure=measure,
)
