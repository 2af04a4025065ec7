"""The command `phantomgpu`."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from itertools import product
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from phantomgpu import standins
from phantomgpu.child import CANNOT_RUN, DOES_NOT_FIT
from phantomgpu.errors import PhantomError, SetupNeededError
from phantomgpu.gpus import GIB, GPUS, UNMEASURED_CONTEXT, find_gpu, parse_memory
from phantomgpu.report import Report
from phantomgpu.searching import TRIAL_SECONDS

OptimizerName: TypeAlias = Literal["adamw", "sgd", "adafactor", "adamw8bit"]
WeightsType: TypeAlias = Literal["fp32", "bf16"]
CacheType: TypeAlias = Literal["static", "dynamic"]

app = typer.Typer(
    help="Run any CUDA script without a GPU and see what memory it takes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Command = Annotated[
    list[str],
    typer.Argument(help="A Python file, or a command after --: python train.py --batch-size 16"),
]
OPEN = {"ignore_unknown_options": True}
"""Options that are not ours are of the script: `phantomgpu run --gpu h100 train.py --lr 1`."""
Kind = Annotated[str, typer.Option("--gpu", help="Kind of GPU; `phantomgpu gpus` lists them.")]
Memory = Annotated[str | None, typer.Option(help="Another size than that kind's, such as 40GiB.")]
Ranks = Annotated[int, typer.Option(min=1, help="Run one rank of so many.")]
Steps = Annotated[int, typer.Option(min=1, help="End after so many optimizer steps.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Whole = Annotated[bool, typer.Option("--whole", help="Run the script to its end, or to --timeout.")]
Timeout = Annotated[float | None, typer.Option(min=1, help="Seconds that the script may take.")]


def in_a_folder(file: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything takes time."""
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
    rank: Annotated[int, typer.Option(min=0, help="Which of them runs.")] = 0,
    every_stage: Annotated[
        bool, typer.Option("--every-stage", help="Run a rank of each pipeline stage.")
    ] = False,
    steps: Steps = 3,
    whole: Whole = False,
    timeout: Timeout = None,
    devices: Annotated[int | None, typer.Option(help="GPUs that the process sees.")] = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="Run a second time for the names of modules.")
    ] = False,
    cudnn: Annotated[bool, typer.Option("--cudnn", help="Leave cuDNN on.")] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Let loaders give their longest samples first.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            callback=in_a_folder, help="Write the report as JSON, with memory over time; - prints."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide what the command prints.")] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(callback=in_a_folder, help="Write torch's snapshot, for its memory viewer."),
    ] = None,
) -> None:
    """Run a command and report its memory. Exit code 0: fits; 3: does not fit."""
    from phantomgpu.running import run as run_script

    warn(gpu, memory)
    prints = str(json) == "-"
    report = run_script(
        command,
        gpu=gpu,
        memory=memory,
        ranks=ranks,
        rank=rank,
        every_stage=every_stage,
        steps=None if whole else steps,
        timeout_seconds=timeout,
        devices=devices,
        modules=modules,
        cudnn=cudnn,
        longest=longest,
        snapshot=snapshot,
        quiet=quiet or prints,
    )
    typer.echo(report.to_json() if prints else f"\n{report}")  # progress bars leave a line open
    if json is not None and not prints:
        json.write_text(report.to_json())
    raise typer.Exit(exit_code(report))


@app.command(context_settings=OPEN)
def search(
    command: Command,
    *,
    gpu: Kind,
    argument: Annotated[str, typer.Option(help="The option of the command to vary.")],
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    whole: Whole = False,
    timeout: Timeout = TRIAL_SECONDS,
    smallest: Annotated[int, typer.Option(min=1, help="The first number to try.")] = 1,
    largest: Annotated[int, typer.Option(min=1, help="The last number to try.")] = 1 << 20,
    multiple: Annotated[int, typer.Option(min=1, help="Try only multiples of this.")] = 1,
) -> None:
    """Find the largest number, such as a batch size, that fits. Exit code 3: none does."""
    from phantomgpu.searching import search as search_script

    warn(gpu, memory)

    def show(number: int, report: Report) -> None:
        reserved = report.peak_reserved / GIB
        said = "no optimizer step" if report.fits and not (report.steps or whole) else report.status
        typer.echo(f"  {argument} {number}: {said}, reserved {reserved:.2f} GiB", err=True)

    answer = search_script(
        command,
        gpu=gpu,
        argument=argument,
        memory=memory,
        ranks=ranks,
        steps=None if whole else steps,
        timeout_seconds=TRIAL_SECONDS if timeout is None else timeout,
        smallest=smallest,
        largest=largest,
        multiple=multiple,
        seen=show,
    )
    typer.echo(f"largest that fits: {answer.largest}")
    typer.echo(f"  {answer.bound}", err=True)
    typer.echo(str(answer.report))
    raise typer.Exit(0 if answer.largest is not None else DOES_NOT_FIT)


@app.command()
def model(
    config: Annotated[
        Path, typer.Argument(help="A config.json of transformers or diffusers, or its folder.")
    ],
    *,
    gpu: Kind,
    length: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens of a sequence; by default, the most.")
    ] = "",
    memory: Memory = None,
    ranks: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Ranks that share the model by FSDP2.")
    ] = "1",
    checkpointing: Annotated[
        bool | None, typer.Option(help="Compute blocks again; by default, a row for each.")
    ] = None,
    optimizer: OptimizerName = "adamw",
    weights: Annotated[
        WeightsType | None, typer.Option(help="fp32 (computed in bf16) or, to generate, bf16.")
    ] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="The rank of LoRA (peft).")] = None,
    generate: Annotated[
        int | None, typer.Option(min=1, help="Do not train: write so many tokens.")
    ] = None,
    cache: Annotated[CacheType, typer.Option(help="The KV cache of --generate.")] = "static",
    largest: Annotated[int, typer.Option(min=1, help="The largest micro-batch to try.")] = 1 << 20,
    as_json: AsJSON = False,
) -> None:
    """Find the largest micro-batch of a model, from its configuration alone."""
    from phantomgpu import models
    from phantomgpu.searching import search as search_script

    lengths: list[int | None] = [*numbers_of("length", length)] if length else [None]
    numbers, ways = numbers_of("ranks", ranks), [False, True]
    ways = ways if checkpointing is None else [checkpointing]
    asked = models.Model(config, optimizer, weights or ("bf16" if generate else "fp32"), lora)
    what = asked.checked(max(filter(None, lengths), default=0) + (generate or 0))
    what += "" if generate else asked.trained()
    if generate:
        if lora or checkpointing or numbers != [1] or lengths == [None]:
            raise ValueError("--generate needs --length, and no option of training, on one GPU")
        ways = [False]
    warn(gpu, memory)
    rows: list[dict[str, Any]] = []
    for tokens, again, shared in product(lengths, ways, numbers):
        answer = search_script(
            models.generate if generate else models.train,
            gpu=gpu,
            memory=memory,
            ranks=shared,
            steps=None if generate else models.STEPS,
            largest=largest,
            details=bool(generate),
            args=(asked, tokens, *((generate, cache) if generate else (shared, again))),
        )
        size, peak = answer.largest, answer.report.peak_reserved
        row = {"tokens": tokens, "checkpointing": again, "ranks": shared}
        rows.append({**row, "micro_batch": size, "batch": (size or 0) * shared, "peak_bytes": peak})
        if generate and not as_json:
            said = models.vllm_room(asked.read()[2], answer.report, (tokens or 0) + generate)
            what += f"\n{said}"
    typer.echo(
        dumps({"model": what, "rows": rows}, indent=2) if as_json else f"{what}\n\n{columns(rows)}"
    )


def columns(rows: list[dict[str, Any]]) -> str:
    """Return a table: a line of names, and one for each row."""
    lines = [[name.removesuffix("_bytes").replace("_", "-") for name in rows[0]]]
    lines += [[_cell(name, value) for name, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.rjust, line, widths) for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "none" if name != "tokens" else "most"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:,}" if isinstance(value, int) else str(value)


@app.command(context_settings=OPEN)
def table(
    command: Command,
    *,
    gpu: Annotated[str, typer.Option(metavar="KIND[,KIND...]", help="Kinds of GPU.")],
    argument: Annotated[str, typer.Option(help="The option of the command to vary.")],
    ranks: Annotated[str, typer.Option(metavar="N[,N...]", help="Numbers of ranks.")] = "1",
    largest: Annotated[int, typer.Option(min=1, help="The last number to try.")] = 1 << 20,
    multiple: Annotated[int, typer.Option(min=1, help="Try only multiples of this.")] = 1,
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
    gpu: Annotated[
        str, typer.Option(metavar="KIND[,KIND...]", help="Kinds to choose from; all by default.")
    ] = ",".join(GPUS),
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
    as_json: AsJSON = False,
) -> None:
    """Say what would save memory: tried where the script need not change, else computed."""
    from phantomgpu.questions import why as ask

    try:
        read = loads(report.read_text())
    except ValueError as error:
        raise ValueError(f"{report} is no report: {error}; write it by run --json") from None
    advice = ask(read if isinstance(read, dict) else {})
    if as_json:
        typer.echo(dumps([one._asdict() for one in advice], indent=2))
        return
    typer.echo("tried: fewer reserved bytes, by running it again; computed: at most, of the peak")
    for one in advice:
        typer.echo(str(one))


@app.command(context_settings=OPEN)
def check(
    command: Command,
    *,
    gpu: Kind,
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    timeout: Timeout = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            callback=in_a_folder, help="A file with the peak to compare; written if absent."
        ),
    ] = None,
    tolerance: Annotated[str, typer.Option(help="By how much it may grow.")] = "64MiB",
    update: Annotated[bool, typer.Option("--update", help="Write the baseline again.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Check a command in CI, in one line. Exit code 3: does not fit; 5: its peak grew."""
    from phantomgpu.questions import GREW
    from phantomgpu.questions import check as ask

    allowed = parse_memory(tolerance)
    how = {"gpu": gpu, "memory": memory, "ranks": ranks, "timeout_seconds": timeout}
    found = ask(command, baseline=baseline, update=update, steps=steps, **how)
    report = {"fits": found.report.fits, "peak_allocated": found.report.peak_allocated}
    more = {**report, "grew": found.grew, "notes": found.notes, "line": found.line()}
    typer.echo(dumps(more) if as_json else found.line())
    grew = GREW if found.grew is not None and found.grew > allowed else 0
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
    for gpu in GPUS.values():
        context = f"{UNMEASURED_CONTEXT:.2f}*" if gpu.context is None else f"{gpu.context:.2f} "
        typer.echo(
            f"{gpu.key:<14} {gpu.memory:>6.2f} GiB  {gpu.source:<7} {context:>7}  {gpu.name}"
        )
    typer.echo("source: a public out-of-memory message, torch's printed properties, or the box")
    typer.echo("* not measured; the other contexts are each from one public out-of-memory message")


@app.command()
def setup(
    version: Annotated[
        str | None, typer.Option(help="The version of torch; by default, the installed one.")
    ] = None,
    *,
    triton: Annotated[
        bool, typer.Option("--triton", help="Install Triton, too: torch.compile needs it.")
    ] = False,
) -> None:
    """Download the CUDA build of torch for use beside an installed CPU build."""
    standins.check_system()
    version = version or metadata.version("torch").partition("+")[0]
    folder = standins.setup_folder(version)
    wanted = {"torch", "triton"} if triton else {"torch"}
    there = wanted & {one.name for one in folder.glob("*")}
    if "torch" not in there or trouble(folder, there):
        typer.echo(f"downloading the CUDA build of torch {version} (about 530 MB) into {folder}")
        install(folder, [f"torch==={version}"])  # === takes no local version such as 2.13.0+cpu
    if triton and "triton" not in there:
        found = [one.requires or [] for one in metadata.distributions(path=[str(folder)])]
        needs = [need.partition(";")[0] for needs in found for need in needs]
        install(folder, [need for need in needs if need.startswith("triton")])
    problem = trouble(folder, wanted)
    if problem:
        raise SetupNeededError(f"cannot set up: {problem}; delete {folder} and try again")
    typer.echo("ready: phantomgpu run --gpu h100 -- python train.py")


def install(folder: Path, packages: list[str]) -> None:
    """Install packages into a folder, without what they need; all of them or nothing."""
    with standins.beside(folder) as scratch:
        new, old = scratch / "new", scratch / "old"
        pip = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", "--target", str(new)]
        done = subprocess.run([*pip, *packages], check=False)  # noqa: S603
        is_torch = packages[0].startswith("torch")
        if done.returncode or (is_torch and not standins.has_cuda(new)):
            raise SetupNeededError(
                f"cannot set up: pip found no {'CUDA build of ' * is_torch}{packages[0]}; pip's "
                "configuration decides where packages come from (pip config list)"
            )
        old.mkdir()
        folder.mkdir(exist_ok=True)
        for one in new.iterdir():
            if (folder / one.name).exists():
                (folder / one.name).rename(old / one.name)
            one.rename(folder / one.name)


def trouble(folder: Path, names: set[str]) -> str | None:
    """Import what is installed in a folder; return what fails."""
    from phantomgpu.running import run as run_script

    lines = [f"import sys; sys.path.insert(0, {str(folder)!r})", "import torch; torch.cuda.init()"]
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
        typer.echo(
            f"warning: {memory} is more than the {kind.memory} GiB that a program sees of a "
            f"{kind.name}",
            err=True,
        )


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
