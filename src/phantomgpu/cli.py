"""Run any CUDA script without a GPU and see what memory it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from itertools import chain, product
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from phantomgpu import files, standins
from phantomgpu.child import CANNOT_RUN, DOES_NOT_FIT
from phantomgpu.errors import PhantomError, SetupNeededError
from phantomgpu.gpus import GIB, GPUS, UNMEASURED_CONTEXT, find_gpu, parse_memory
from phantomgpu.report import Report
from phantomgpu.searching import TRIAL_SECONDS

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
Command = Annotated[list[str], typer.Argument(help="A Python file, or a command after --.")]
OPEN = {"ignore_unknown_options": True}
"""Options that are not ours are of the script: `phantomgpu run --gpu h100 train.py --lr 1`."""
option = typer.Option
Kind = Annotated[str, option("--gpu", help="Kind of GPU; `phantomgpu gpus` lists them.")]
Memory = Annotated[str | None, option(help="Another size than that kind's, such as 40GiB.")]
Ranks = Annotated[int, option(min=1, help="Run one rank of so many.")]
Steps = Annotated[int, option(min=1, help="End after so many optimizer steps.")]
AsJSON = Annotated[bool, option("--json", help="Print JSON.")]
Whole = Annotated[bool, option("--whole", help="Run the script to its end, or to --timeout.")]
Timeout = Annotated[float | None, option(min=1, help="Seconds that the script may take.")]
Stages = Annotated[bool, option("--every-stage", help="Run a rank of each pipeline stage.")]
Longest = Annotated[bool, option("--longest", help="Let loaders give their longest samples only.")]
Argument = Annotated[str, option(help="The option of the command to vary.")]
Largest = Annotated[int, option(min=1, help="The last number to try.")]
Multiple = Annotated[int, option(min=1, help="Try only multiples of this.")]
Weights = Annotated[Literal["fp32", "bf16"] | None, option(help="fp32 is computed in bf16.")]
NUMBERS = "N[,N...]"


def in_a_folder(file: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything takes time."""
    if str(file) == "--":
        raise ValueError("no file is named before '--'; write one, or - to print it")
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"cannot write {file}: there is no folder {file.parent}")
    return file


@app.command(context_settings=OPEN)
def run(
    command: Command,
    *,
    gpu: Kind,
    memory: Memory = None,
    ranks: Ranks = 1,
    rank: Annotated[int, option(min=0, help="Which of them runs.")] = 0,
    every_stage: Stages = False,
    steps: Steps = 3,
    whole: Whole = False,
    timeout: Timeout = None,
    devices: Annotated[int | None, option(help="GPUs that the process sees.")] = None,
    cudnn: Annotated[bool, option("--cudnn", help="Leave cuDNN on.")] = False,
    longest: Longest = False,
    json: Annotated[Path | None, option(callback=in_a_folder, help="For JSON; - prints.")] = None,
    quiet: Annotated[bool, option("--quiet", help="Hide what the command prints.")] = False,
) -> None:
    """Run a command and report its memory. Exit code 0: fits; 3: does not fit."""
    from phantomgpu.running import run as run_script

    warn(gpu, memory)
    prints = str(json) == "-"
    how: dict[str, Any] = {"gpu": gpu, "memory": memory, "devices": devices, "cudnn": cudnn}
    how |= {"ranks": ranks, "rank": rank, "every_stage": every_stage, "timeout_seconds": timeout}
    how |= {"steps": None if whole else steps, "longest": longest}
    report = run_script(command, quiet=quiet or prints, **how)
    typer.echo(report.to_json() if prints else f"\n{report}")  # progress bars leave a line open
    if json is not None and not prints:
        files.write(json, report.to_json())
    raise typer.Exit(exit_code(report))


@app.command(context_settings=OPEN)
def search(
    command: Command,
    *,
    gpu: Kind,
    argument: Argument,
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    whole: Whole = False,
    timeout: Timeout = TRIAL_SECONDS,
    smallest: Annotated[int, option(min=1, help="The first number to try.")] = 1,
    largest: Largest = 1 << 20,
    multiple: Multiple = 1,
) -> None:
    """Find the largest number, such as a batch size, that fits. Exit code 3: none does."""
    from phantomgpu.searching import search as search_script

    warn(gpu, memory)

    def show(number: int, report: Report) -> None:
        reserved = report.peak_reserved / GIB
        idle = report.fits and not (report.steps or whole)
        said = "no optimizer step" if idle else f"{report.status}{report.in_doubt}"
        typer.echo(f"  {argument} {number}: {said}, reserved {reserved:.2f} GiB", err=True)

    how: dict[str, Any] = {"gpu": gpu, "memory": memory, "ranks": ranks, "argument": argument}
    how |= {"smallest": smallest, "largest": largest, "multiple": multiple}
    how |= {"steps": None if whole else steps, "timeout_seconds": timeout or TRIAL_SECONDS}
    answer = search_script(command, seen=show, **how)
    typer.echo(f"largest that fits: {answer.largest}")
    typer.echo(f"  {answer.bound}", err=True)
    typer.echo(str(answer.report))
    raise typer.Exit(0 if answer.largest is not None else DOES_NOT_FIT)


@app.command()
def model(
    config: Annotated[Path, typer.Argument(help="A config.json, or the folder that holds it.")],
    *,
    gpu: Kind,
    length: Annotated[str, option(metavar=NUMBERS, help="Tokens of a sequence, or the most.")] = "",
    memory: Memory = None,
    ranks: Annotated[str, option(metavar=NUMBERS, help="Ranks that share it by FSDP2.")] = "1",
    checkpointing: Annotated[bool | None, option(help="Blocks again; by default, both.")] = None,
    optimizer: Literal["adamw", "sgd", "adafactor", "adamw8bit"] = "adamw",
    weights: Weights = None,
    generate: Annotated[int | None, option(min=1, help="Write so many tokens.")] = None,
    cache: Annotated[Literal["static", "dynamic"], option(help="Of --generate.")] = "static",
    largest: Largest = 1 << 20,
    as_json: AsJSON = False,
) -> None:
    """Find the largest micro-batch of a model, from its configuration alone."""
    from phantomgpu import models
    from phantomgpu.searching import Processes
    from phantomgpu.searching import search as search_script

    lengths: list[int | None] = [*numbers_of("length", length)] if length else [None]
    numbers, ways = numbers_of("ranks", ranks), [False, True]
    ways = [bool(checkpointing)] if generate or checkpointing is not None else ways
    asked = models.Model(config, optimizer, weights or ("bf16" if generate else "fp32"))
    longest = max(filter(None, lengths), default=0) + (generate or 0)
    what = asked.checked(longest, learns=not generate)
    if generate and (checkpointing or numbers != [1] or lengths == [None]):
        raise ValueError("--generate needs --length, and no option of training, on one GPU")
    warn(gpu, memory)
    rows: list[dict[str, Any]] = []
    how: dict[str, Any] = {"gpu": gpu, "memory": memory, "largest": largest}
    how |= {"steps": None if generate else models.STEPS, "details": bool(generate)}
    with Processes() as processes:
        for tokens, again, shared in product(lengths, ways, numbers):
            args = (asked, tokens, *((generate, cache) if generate else (shared, again)))
            work = models.generate if generate else models.train
            answer = search_script(work, args=args, ranks=shared, processes=processes, **how)
            size = answer.largest
            values = (tokens, again, shared, size, (size or 0) * shared)
            rows.append(answer.report.row(**dict(zip(models.COLUMNS, values, strict=True))))
    text = dumps({"model": what, "rows": rows}, indent=2) if as_json else columns(rows)
    typer.echo(text if as_json else f"{what}\n\n{text}")


def columns(rows: list[dict[str, Any]]) -> str:
    """Return a table: a line of names, one for each row, and the notes."""
    names = [name for name in rows[0] if name != "notes"]
    lines = [[name.removesuffix("_bytes").replace("_", "-") for name in names]]
    lines += [[_cell(name, row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.rjust, line, widths) for line in lines]
    return "\n".join(["  ".join(line).rstrip() for line in padded] + footnotes(rows))


def footnotes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the notes of rows, each once, with the numbers of the rows unless all have it."""
    found: dict[str, list[str]] = {}
    for number, row in enumerate(rows, 1):
        for note in row["notes"]:
            found.setdefault(note, []).append(str(number))
    of = {note: f" of row {', '.join(which)}" for note, which in found.items()}
    return [f"  note{of[one] * (len(found[one]) < len(rows))}: {one}" for one in found]


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "most" if name == "tokens" else {None: "none", True: "on", False: "off"}[value]
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:,}" if isinstance(value, int) else str(value)


@app.command(context_settings=OPEN)
def table(
    command: Command,
    *,
    gpu: Annotated[str, option(metavar="KIND[,KIND...]", help="Kinds of GPU.")],
    argument: Argument,
    ranks: Annotated[str, option(metavar=NUMBERS, help="Numbers of ranks.")] = "1",
    largest: Largest = 1 << 20,
    multiple: Multiple = 1,
    as_json: AsJSON = False,
) -> None:
    """Find the largest number that fits for each kind of GPU and number of ranks."""
    from phantomgpu.questions import table as ask

    how: dict[str, Any] = {"argument": argument, "largest": largest, "multiple": multiple}
    rows = ask(command, gpus=gpu.split(","), ranks=numbers_of("ranks", ranks), **how)
    typer.echo(dumps(rows, indent=2) if as_json else columns(rows))


@app.command(context_settings=OPEN)
def cheapest(
    command: Command,
    *,
    gpu: Annotated[str, option(metavar="KIND[,KIND...]", help="Of which.")] = ",".join(GPUS),
    ranks: Ranks = 1,
    steps: Steps = 3,
    as_json: AsJSON = False,
) -> None:
    """List the three smallest kinds of GPU that a command fits. Exit code 3: none."""
    from phantomgpu.questions import cheapest as ask

    rows = ask(command, gpus=gpu.split(","), ranks=ranks, steps=steps)
    text = columns(rows) if rows else "it fits no kind of GPU"
    typer.echo(dumps(rows, indent=2) if as_json else text)
    raise typer.Exit(0 if rows else DOES_NOT_FIT)


@app.command()
def why(
    report: Annotated[Path, typer.Argument(help="What `phantomgpu run --json FILE` wrote.")],
    *,
    rerun: Annotated[bool, option("--rerun", help="Run the command that FILE names.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Say what would save memory, computed; with --rerun, tried if no script need change."""
    from phantomgpu import questions

    read = files.read_json(report, "report (write it by run --json)", categories=dict)
    if line := questions.command_line(read):
        says = "running" if rerun else "add --rerun to try settings of the allocator, which runs"
        typer.echo(f"{says}: {line}", err=True)
    advice = questions.why(read, rerun=rerun)
    rows = [one._asdict() for one in advice]
    first = "tried: fewer reserved bytes, by running it again; computed: at most, of the peak"
    lines = [first, *map(str, advice), *footnotes(rows)]
    typer.echo(dumps(rows, indent=2) if as_json else "\n".join(lines))


@app.command(context_settings=OPEN)
def check(
    command: Command,
    *,
    gpu: Kind,
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    timeout: Timeout = None,
    baseline: Annotated[Path | None, option(callback=in_a_folder, help="To compare with.")] = None,
    tolerance: Annotated[str, option(help="By how much it may grow.")] = "64MiB",
    update: Annotated[bool, option("--update", help="Write the baseline again.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check a command in CI: a line, and notes. Exit code 3: does not fit; 5: its peak grew."""
    from phantomgpu import questions

    allowed = parse_memory(tolerance)
    how = {"gpu": gpu, "memory": memory, "ranks": ranks, "timeout_seconds": timeout}
    found = questions.check(command, baseline=baseline, update=update, steps=steps, **how)
    report = {"fits": found.report.fits, "peak_allocated": found.report.peak_allocated}
    notes = [*found.notes, *found.report.notes]
    more = {**report, "grew": found.grew, "notes": notes, "line": found.line()}
    said = "\n".join([found.line(), *(f"  note: {one}" for one in found.report.notes)])
    typer.echo(dumps(more) if as_json else said)
    grew = questions.GREW if found.grew is not None and found.grew > allowed else 0
    raise typer.Exit(exit_code(found.report) or grew)


def numbers_of(option: str, text: str) -> list[int]:
    """Read numbers with commas between them."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--{option} {text} is not a list of numbers: write 64 or 8,16,64")
    return list(map(int, numbers))


@app.command()
def gpus() -> None:
    """List the kinds of GPU, with the memory that a program sees."""
    typer.echo(f"{'gpu':<14} {'memory':>10}  {'source':<7} {'context':>7}  name")
    for one in GPUS.values():
        context = f"{UNMEASURED_CONTEXT:.2f}*" if one.context is None else f"{one.context:.2f} "
        sizes = f"{one.memory:>6.2f} GiB  {one.source:<7} {context:>7}"
        typer.echo(f"{one.key:<14} {sizes}  {one.name}")
    typer.echo("source: a public out-of-memory message, torch's printed properties, or the box")
    typer.echo("* not measured; the other contexts are each from one public out-of-memory message")


@app.command()
def setup(
    version: Annotated[str | None, option(help="Of torch; by default, the installed one.")] = None,
    *,
    triton: Annotated[bool, option("--triton", help="For torch.compile: Triton, too.")] = False,
) -> None:
    """Download the CUDA build of torch for use beside an installed CPU build."""
    standins.check_system()
    try:
        version = version or metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        why = "no torch is installed beside phantomgpu; install one, or add --version"
        raise SetupNeededError(f"cannot set up: {why}") from None
    folder = standins.setup_folder(version)
    wanted = {"torch", "triton"} if triton else {"torch"}
    there = wanted & {one.name for one in folder.glob("*")}
    if not standins.has_cuda(folder) or trouble(folder, there):
        typer.echo(f"downloading the CUDA build of torch {version} (about 530 MB) into {folder}")
        install(folder, [f"torch==={version}"])  # === takes no local version such as 2.13.0+cpu
    if triton and not (folder / "triton").exists():
        requires = [one.requires or [] for one in metadata.distributions(path=[str(folder)])]
        needs = [need.partition(";")[0] for need in chain(*requires) if need.startswith("triton")]
        install(folder, needs, beside=True)
    if problem := trouble(folder, wanted):
        raise SetupNeededError(f"cannot set up: {problem}; delete {folder} and try again")
    typer.echo("ready: phantomgpu run --gpu h100 -- python train.py")


def install(folder: Path, packages: list[str], *, beside: bool = False) -> None:
    """Install packages, without what they need, into a new folder, which then takes its place.

    Two processes may do so at once, and each may be ended at any time.

    Args:
        folder: The folder; what is there is replaced.
        packages: The packages.
        beside: Keep what is there beside them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        if beside:
            shutil.copytree(folder, new, copy_function=os.link)
        options = ["--no-deps", "--upgrade", "--target", str(new)]
        pip = [sys.executable, "-P", "-m", "pip", "install", *options, *packages]
        # What pip unpacks lies beside the folder, so that it can be renamed.
        done = subprocess.run(pip, check=False, env={**os.environ, "TMPDIR": scratch})  # noqa: S603
        if done.returncode or not standins.has_cuda(new):
            where = "pip's configuration decides where packages come from (pip config list)"
            said = f"cannot set up: pip found no CUDA build of {packages[0]}"
            raise SetupNeededError(f"{said}; {where}")
        with suppress(FileNotFoundError):
            folder.rename(old)
        with suppress(OSError):  # another process was faster
            new.rename(folder)


def trouble(folder: Path, names: set[str]) -> str | None:
    """Import what is installed in a folder; return what fails."""
    from phantomgpu.running import run as run_script

    lines = [
        f"import sys; sys.path.insert(0, {str(folder)!r})",
        "import torch; torch.nn.Linear(1, 1).cuda()",
    ]
    code = "\n".join([*lines, *(f"import {name}" for name in sorted(names))])
    try:
        report = run_script([sys.executable, "-c", code], gpu="h100", steps=None)
    except PhantomError as error:
        return str(error)
    return None if report.fits else report.problem


def warn(gpu: str, memory: str | None) -> None:
    """Warn of more memory than that kind of GPU has."""
    kind = find_gpu(gpu)
    if memory is not None and parse_memory(memory) > kind.memory * GIB:
        sees = f"the {kind.memory} GiB that a program sees of a {kind.name}"
        typer.echo(f"warning: {memory} is more than {sees}", err=True)


def exit_code(report: Report) -> int:
    """Return 0 for fits, 3 for does not fit, and else what the script returned."""
    if report.fits:
        return 0
    return DOES_NOT_FIT if report.status == "does not fit" else report.exit_code or 1


def main() -> None:
    """Run the command line; errors are one line."""
    try:
        app()
    except (PhantomError, ValueError, OSError) as error:
        typer.echo(f"phantomgpu: {error}", err=True)
        raise SystemExit(CANNOT_RUN) from None
