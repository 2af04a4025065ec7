"""The verbs and their options. Each imports what it needs when it runs, so that it starts fast."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stretto.cli.terminal import of_system, open_standard_files, print_json, progress, verb
from stretto.errors import StrettoError

app = typer.Typer(
    name="stretto",
    epilog="With every command: --quiet prints only errors and warnings; --traceback shows where "
    "an error was raised. Exit codes: 0 done; 1 done, but something differs or was not saved; 2 an "
    "error; 130 and 143 stopped by a signal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:  # noqa: FBT001  typer calls it
    if is_wanted:
        from stretto import __version__

        typer.echo(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def stretto(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version)
    ] = False,
) -> None:
    """Train PyTorch models with a batch size that changes, on one exact clock."""


@verb(app, "train", "train run.yaml optimizer.lr=1e-3 --folder runs/a")
def train(
    run_file: list[str] | None = None,
    *,
    folder: Path | None = None,
    resume: str | None = None,
    unpickle: bool = False,
    even_if_stopped: bool = False,
    as_json: bool = False,
) -> None:
    """Train as a run file says; with torchrun, on all its processes.

    Args:
        run_file ([RUN.YAML] [KEY=VALUE]...): A run file (default: the packaged one); then values to
            change, with dots for inner keys: optimizer.lr=1e-3.
        folder: The run folder; by default a new one in runs.
        resume (auto|latest|PATH|URL): Resume from a checkpoint: the newest in the folder if there
            is one (auto), the newest (latest), or this one.
        unpickle: Resume from the weights of a torch.distributed.checkpoint, which can run any code.
        even_if_stopped: Train on if early stopping, or run.stop, has ended the run.
        as_json: Print the results as JSON, and all else to stderr.
    """
    from stretto.cli import training

    given = {"unpickle": unpickle, "even_if_stopped": even_if_stopped}
    training.train(run_file or [], folder, resume, as_json=as_json, **given)


@verb(app, "plan run.yaml", "plan run.yaml --at 50% --json", "plan --against runs/a")
def plan(
    run_file: list[str] | None = None,
    *,
    at: list[str] | None = None,
    html: Path | None = None,
    against: Path | None = None,
    to: Literal["megatron", "bridge", "automodel"] | None = None,
    as_json: bool = False,
) -> None:
    """Show what a run will do, without running it.

    Args:
        run_file ([RUN.YAML] [KEY=VALUE]...): A run file (default: the packaged one), with --html
            several; then values to change, with dots for inner keys: optimizer.lr=1e-3.
        at (TIME): Show only this time: --at 10Ttok --at 50%.
        html: Write a page for a browser.
        against: Compare the plan with the run in a folder, batch by batch; the default run file is
            the run's own.
        to: Print the settings with which Megatron-LM, Megatron-Bridge or NeMo Automodel can follow
            the plan.
        as_json: Print JSON.
    """
    from stretto.cli import planning

    beside = at or against or html
    planning.refuse({"--to": to and beside}, why="it prints no plan", instead="leave it out")
    if html is not None:
        planning.refuse(
            {"--json": as_json, "--against": against, "--at": at},
            why="--html writes a page",
            instead="leave one of them out",
        )
        planning.write_page(html, run_file or [])
    elif against is not None:
        planning.compare_with(against, run_file or [])
    else:
        planning.print_plan(run_file or [], at or [], to, as_json=as_json)


@verb(app, "find-batch-size run.yaml", "find-batch-size run.yaml --gpu h100 --world-size 8")
def find_batch_size(
    run_file: list[str] | None = None,
    *,
    gpu: str | None = None,
    device_memory: str | None = None,
    context: str | None = None,
    world_size: int | None = None,
    shard: str | None = None,
    margin: str | None = None,
    minimum: str = "1",
    maximum: str | None = None,
    multiple_of: int = 1,
    power_of_two: bool = False,
    method: Literal["predict", "bisect", "halve"] = "predict",
    as_json: bool = False,
) -> None:
    """Find the largest micro-batch that a run has memory for, on this device or another.

    Args:
        run_file ([RUN.YAML] [KEY=VALUE]...): A run file (default: the packaged one); then values to
            change, with dots for inner keys: optimizer.lr=1e-3.
        gpu (KIND): The GPU to ask about, such as h100; 'phantomgpu gpus' lists them.
        device_memory (AMOUNT): Memory of that GPU, such as 40GiB; by default that of its kind.
        context (AMOUNT): Memory of the CUDA context; by default as known for the kind.
        world_size: Ask about one of so many ranks.
        shard (fsdp|hsdp:N|ddp): How ranks share the model; by default as in the run file.
        margin (PERCENT|AMOUNT): Memory to keep free: 3% or 512MiB; by default 1.5%, and 1% with the
            phantom.
        minimum (N|TOKENS): The smallest size.
        maximum (N|TOKENS): The largest size; by default all samples there are. Tokens, such as
            64Ktok, ask for a token budget.
        multiple_of: Only multiples of this.
        power_of_two: Only powers of two.
        method: How the search begins: small and along the line of the peaks, in the middle, or with
            the largest, halved until it fits.
        as_json: Print JSON.
    """
    from stretto.cli import finding
    from stretto.cli.planning import read_arguments

    with progress("finding the batch size"):
        text, plain = finding.find(
            read_arguments(run_file or []),
            gpu=gpu,
            device_memory=device_memory,
            context=context,
            world_size=world_size,
            shard=shard,
            margin=margin,
            minimum=minimum,
            maximum=maximum,
            multiple_of=multiple_of,
            power_of_two=power_of_two,
            method=method,
        )
    if as_json:
        print_json(plain)
    else:
        typer.echo(text)


@verb(app, "step-cost run.yaml", "step-cost run.yaml --sizes 8,32,128")
def step_cost(
    run_file: list[str] | None = None, *, sizes: str | None = None, as_json: bool = False
) -> None:
    """Measure what a step costs without samples, and each sample; with torchrun, on all processes.

    Args:
        run_file ([RUN.YAML] [KEY=VALUE]...): A run file (default: the packaged one); then values to
            change, with dots for inner keys: optimizer.lr=1e-3.
        sizes (N[,N...]): Up to five batch sizes; by default, some of those that the run may have.
        as_json: Print JSON.
    """
    from stretto.cli import advising

    with progress("timing steps"):
        text, plain = advising.step_cost(run_file or [], sizes)
    if os.environ.get("RANK", "0") == "0":
        print_json(plain) if as_json else typer.echo(text)


@verb(app, "advise runs/a", "advise runs/a --write sizes.yaml")
def advise(folder: Path, *, write: Path | None = None, as_json: bool = False) -> None:
    """Say which batch size ends soonest, as far as the log of a run tells it.

    Args:
        folder: The folder of a run.
        write: Write the sizes to a new file, as 'batch_size' of a run file.
        as_json: Print JSON.
    """
    from stretto.cli import advising

    text, plain = advising.advise(folder, write)
    print_json(plain) if as_json else typer.echo(text)


@verb(app, "report runs/a", "report runs/a runs/b --html page.html")
def report(paths: list[Path], *, html: Path | None = None, as_json: bool = False) -> None:
    """Show what runs have done.

    Args:
        paths (RUN_FOLDER...): Folders of runs; or a report of 'phantomgpu run --json', with --html.
        html: Write a page for a browser.
        as_json: Print JSON.
    """
    from stretto.errors import DataError
    from stretto.report import page, read_metrics
    from stretto.report.tables import run_report
    from stretto.run_folder import reading_run

    def as_record(folder: Path) -> dict[str, Any]:
        return {"folder": str(folder), **asdict(read_metrics(folder))}

    if html is not None and len(paths) == 1 and paths[0].is_file():
        page.write(html, page.memory_payload(paths[0]))
        typer.echo(f"wrote {html}", err=True)
        return
    read: Callable[[Path], Any] = as_record if as_json else run_report
    read = read if html is None else page.read
    shown, problems = list[Any](), list[str]()
    for folder in paths:
        try:
            with reading_run(folder):
                shown.append(read(folder))
        except DataError as error:  # it does not hide the others
            if len(paths) == 1:
                raise
            problems.append(f"Error: {error}")
            record = {"folder": str(folder), "problem": str(error)}
            shown += [page.read_or_problem(folder)] if html else [record] if as_json else []
    if html is not None:
        page.write(html, page.payload(shown))
        typer.echo(f"wrote {html}", err=True)
    elif as_json:
        print_json(shown if len(paths) > 1 else shown[0])
    else:
        typer.echo("\n\n".join(shown))
    if problems:
        typer.secho("\n".join(problems), err=True, fg=typer.colors.RED)
        raise typer.Exit(1 if len(problems) < len(paths) else MISUSE)


@verb(app, "watch", "watch runs/a --port 8400")
def watch(
    folder: Path = Path("runs"),
    *,
    port: int = 8377,
) -> None:
    """Show runs in a browser while they run.

    Args:
        folder: A folder of runs, or the folder of one run.
        port: The port on 127.0.0.1; 0 takes a free one.
    """
    from stretto.report.page.watch import HOST, server

    with server(folder, port) as listening:  # before its address is said
        address = f"http://{HOST}:{listening.server_port}/"
        typer.echo(f"watching {folder} at {address}  (end with Ctrl+C)")
        listening.serve_forever()


@verb(
    app,
    "branch runs/a --at 20%,50% --sizes 1x,2x,4x,8x --for 2%",
    "branch runs/a 'rule={sqrt: 64}' --at 50% --most 30m",
)
def branch(
    run: Path,
    overrides: list[str] | None = None,
    *,
    at: str,
    sizes: str = "1x,2x,4x,8x",
    as_for: str | None = None,
    seeds: int = 3,
    tolerance: float = 0.01,
    most: str | None = None,
    folder: Path | None = None,
    as_json: bool = False,
) -> None:
    """Find the largest batch that trains as well, by short branches from checkpoints of a run.

    Branches that are done are kept. Run the same command again to continue. Run it twice at the
    same time, and two branches are trained at once.

    Args:
        run (RUN_FOLDER): The folder of a run with checkpoints. It stays as it is.
        overrides ([KEY=VALUE]...): Values to change in its run file.
        at (TIME[,TIME...]): Where branches start: at the nearest checkpoints.
        sizes (N|Nx[,...]): Batch sizes: numbers, or multiples of the run's own at that point.
        as_for (TIME): How long each branch trains; by default, all take 25% of the run together.
        seeds: Orders of the samples; an interval needs two.
        tolerance: The largest excess of the loss over that of the smallest size.
        most (TIME): Begin no branch that would end later than this, such as 30m.
        folder: Where the branches are kept; by default beside the run, with -branches at its name.
        as_json: Print JSON.
    """
    from stretto.cli.branching import Branches

    plain: dict[str, Any] = {}
    branches = Branches(run, overrides or [], folder, orders=seeds, limit=tolerance)
    for line in branches.lines(at, sizes, as_for, most, plain):
        if not as_json:
            typer.echo(line)
    if as_json:
        print_json(plain)
    if plain["missing"]:
        raise typer.Exit(1)


@verb(app, "inspect runs/a", "inspect runs/a/checkpoints/checkpoint-000000000640 --json")
def inspect(checkpoint: Path, *, as_json: bool = False) -> None:
    """Show what is in a checkpoint, when it was written, and whether it is whole.

    Args:
        checkpoint: A checkpoint, or the folder of a run.
        as_json: Print JSON.
    """
    from stretto.checkpoint import describe
    from stretto.checkpoint.folder import candidates
    from stretto.checkpoint.manifest import read_errors
    from stretto.errors import CheckpointError
    from stretto.training.checkpointing.resuming import FOLDER

    path = checkpoint if checkpoint.name else checkpoint.resolve()  # '.'
    with read_errors(path):
        paths = candidates(path / FOLDER) if (path / FOLDER).is_dir() else [path]
    if not paths:
        raise CheckpointError.cannot(
            f"inspect {path}",
            why="the run has no checkpoint",
            instead="write 'checkpoint: {every: 1ep}' in the run file to keep some",
        )
    with progress("reading the checkpoints"):
        found = [describe(path) for path in paths]
    if as_json:
        records = [described.to_json() for described in found]
        print_json(records if len(paths) > 1 else records[0])
    else:
        typer.echo("\n\n".join(map(str, found)))
    if not all(described.is_whole for described in found):
        raise SystemExit(1)


@verb(app, "export runs/a weights --to hf", "export runs/a weights-dcp --to dcp")
def export(
    checkpoint: Path, folder: Path, *, to: Literal["hf", "dcp"], as_json: bool = False
) -> None:
    """Write the weights of a checkpoint in another format.

    Args:
        checkpoint: A checkpoint, or the folder of a run for its newest.
        folder: The folder to create.
        to: Hugging Face's safetensors, or torch.distributed.checkpoint.
        as_json: Print JSON.
    """
    from stretto.checkpoint import export_weights
    from stretto.training.checkpointing.resuming import FOLDER, newest_of

    with progress("exporting"):
        path = newest_of(checkpoint) if (checkpoint / FOLDER).is_dir() else checkpoint
        export_weights(path, folder, to)
    if as_json:
        print_json({"checkpoint": str(path), "folder": str(folder), "format": to})
    else:
        typer.echo(f"wrote the weights of {path} to {folder}")


@verb(
    app,
    "convert 0.1dur --to ep --max-duration 90ep",
    "convert 2Btok --to ba --tokens 1000000 --samples 2000 --batch-size 32",
)
def convert(
    time: str,
    *,
    to: str,
    max_duration: str | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
    as_json: bool = False,
) -> None:
    """Convert a time to another unit.

    Args:
        time: A time such as 0.1dur, 90ep or 2Btok.
        to (ep|ba|sp|tok|dur|sec): The new unit.
        max_duration (TIME): The length of the run.
        samples: Samples in an epoch.
        tokens: Tokens in an epoch.
        batch_size: Samples in a batch.
        drop_last: Drop an epoch's last, smaller batch.
        as_json: Print JSON.
    """
    from stretto.timing import convert as convert_time

    found = convert_time(
        time,
        to,
        dataset_num_samples=samples,
        dataset_num_tokens=tokens,
        max_training_duration=max_duration,
        batch_size=batch_size,
        drop_last=drop_last,
    )
    typer.echo(json.dumps({"time": str(found)}) if as_json else str(found))


@verb(app, "schema > run.schema.json")
def schema() -> None:
    """Print the JSON Schema of run files, for editors."""
    from stretto.config.run import run_file_schema

    print_json(run_file_schema())


TRACEBACK = "--traceback"
"""Shows where an error was raised; works anywhere on the command line."""
QUIET = "--quiet"
"""Prints only errors and warnings; works anywhere on the command line."""
MISUSE = 2
"""Exit code for errors, as for unknown options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours are one clear text, and end with code 2.

    Args:
        arguments: what follows the program's name; by default, those of this process.
    """
    warnings.formatwarning = _one_line
    open_standard_files()
    given = list(sys.argv[1:] if arguments is None else arguments)
    kept = [text for text in given if text not in {TRACEBACK, QUIET}]
    try:
        with ExitStack() as stack:
            if QUIET in given:
                nothing = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(redirect_stdout(nothing))
            app(kept, prog_name="stretto")
    except (StrettoError, OSError) as error:
        if TRACEBACK in given:
            raise
        if isinstance(error, OSError):
            error = of_system(error)
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        typer.secho(f"Error [{error.code}]: {text}", err=True, fg=typer.colors.RED)
        raise SystemExit(MISUSE) from None
    finally:
        # All is done. What torch and others do last is no place for a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Show a warning without its place in the code."""
    return f"Warning: {message}\n"
