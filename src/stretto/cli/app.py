"""The verbs and their options. Each imports what it needs when it runs, so that it starts fast."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from stretto._location import local_path
from stretto.errors import Argument, ConfigError, StrettoError


def _local(given: Path | list[Path] | None) -> Path | list[Path] | None:
    """Refuse URLs as folders."""
    if isinstance(given, list):
        return [local_path(folder, "use", ConfigError) for folder in given]
    return None if given is None else local_path(given, "use", ConfigError)


def _option(help: str, metavar: str | None = None, **more: Any) -> Any:  # noqa: A002  as typer's
    return typer.Option(help=help, metavar=metavar, show_default=False, **more)


def _flag(name: str, help: str, **more: Any) -> Any:  # noqa: A002  as typer's
    return typer.Option(name, help=help, **more)


_UNITS = "ep|ba|sp|tok|dur"
_RunFile: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.YAML] [KEY=VALUE]...",
        help="A run file (default: the packaged one); then values to change, with dots for inner "
        "keys: optimizer.lr=1e-3.",
        show_default=False,
    ),
]
_Plot: TypeAlias = Annotated[Path | None, _option("Draw it as PNG, SVG or PDF.", "FILE")]
_Html: TypeAlias = Annotated[Path | None, _option("Write a page for a browser.", "FILE.html")]
_Unit: TypeAlias = Annotated[
    str | None, _option("The unit of the picture's axis; by default it is chosen.", _UNITS)
]
_AsJson: TypeAlias = Annotated[bool, _flag("--json", "Print JSON.")]

_EVERYWHERE = (
    "With every command: --quiet prints only errors and warnings; --traceback shows where an error "
    "was raised. Exit codes: 0 done; 1 done, but something differs or was not saved; 2 an error; "
    "130 and 143 stopped by a signal."
)


def _examples(*commands: str) -> str:
    """Return the last lines of a command's help."""
    return "\n\n".join(["Examples:", *(f"  stretto {command}" for command in commands)])


app = typer.Typer(
    name="stretto",
    epilog=_EVERYWHERE,
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
        bool, _flag("--version", "Print the version.", callback=_show_version)
    ] = False,
) -> None:
    """Train PyTorch models with a batch size that changes, on one exact clock."""


@app.command(
    epilog=_examples(
        "train",
        "train run.yaml optimizer.lr=1e-3 --folder runs/a",
        "train runs/a/run.yaml --resume latest",
    )
)
def train(
    run_file: _RunFile = None,
    *,
    folder: Annotated[
        Path | None, _option("The run folder; by default a new one in runs.", callback=_local)
    ] = None,
    resume: Annotated[
        str | None,
        _option(
            "Resume from a checkpoint: the newest in the folder if there is one (auto), the "
            "newest (latest), or this one.",
            "auto|latest|PATH|URL",
        ),
    ] = None,
    unpickle: Annotated[
        bool,
        _flag(
            "--unpickle",
            "Resume from the weights of a torch.distributed.checkpoint, which can run any code.",
        ),
    ] = False,
    even_if_stopped: Annotated[
        bool,
        _flag("--even-if-stopped", "Train on if early stopping, or run.stop, has ended the run."),
    ] = False,
    as_json: Annotated[
        bool, _flag("--json", "Print the results as JSON, and all else to stderr.")
    ] = False,
) -> None:
    """Train as a run file says; with torchrun, on all its processes."""
    from stretto.cli import training

    training.train(
        run_file or [],
        folder,
        resume,
        unpickle=unpickle,
        even_if_stopped=even_if_stopped,
        as_json=as_json,
    )


@app.command(
    epilog=_examples(
        "plan run.yaml", "plan run.yaml batch_size=256 --plot plan.png", "plan --against runs/a"
    )
)
def plan(
    run_file: _RunFile = None,
    *,
    as_json: _AsJson = False,
    batches: Annotated[
        bool, _flag("--batches", "Print a line for every batch instead of every stage.")
    ] = False,
    plot: _Plot = None,
    unit: _Unit = None,
    html: _Html = None,
    against: Annotated[
        Path | None,
        _option(
            "Compare the plan with a run, batch by batch; the default run file is the run's own.",
            "RUN_FOLDER",
            callback=_local,
        ),
    ] = None,
) -> None:
    """Show what a run will do, without running it."""
    from stretto.cli import planning as verb
    from stretto.cli.terminal import progress
    from stretto.config.checking import check_targets
    from stretto.config.plans import plan_of, prepare_checked

    if html is not None:
        others = {"--json": as_json, "--batches": batches, "--plot": plot, "--against": against}
        verb.refuse(others, why="--html writes a page", instead="leave one of them out")
        verb.write_page(html, run_file or [])
        return
    config = verb.read_arguments(run_file or [], folder=against)
    if against is not None:
        config = verb.as_it_ran(config, against)
    with progress("reading the data"):
        run, prepared = prepare_checked(config, resumes=against is not None)
        prepared, since = verb.as_resumed(prepared, against)
        verb.print_notes(check_targets(config) if against is None else ())
    if prepared.decided_between is not None:
        verb.refuse(
            {"--plot": plot, "--against": against, "--batches": batches},
            why="its batch sizes are decided during the run",
            instead="leave it out, or see a finished run with 'stretto report RUN_FOLDER'",
        )
        verb.print_ends(config, run, prepared.decided_between, as_json=as_json)
        return
    planned = plan_of(config, prepared)
    if not planned.is_exact:
        verb.refuse(
            {"--against": against, "--batches": batches},
            why="the number of samples in its data is not known, so any batch may be cut short",
            instead="set data.num_samples, or write last_batch: carry",
        )
    if plot is not None:
        from stretto.report.pictures import draw

        draw(planned, plot, unit=unit)
        typer.echo(f"drew {plot}", err=True)
    if against is not None:
        from stretto.report.ledger import compare

        comparison = compare(planned, against, since=since)
        typer.echo(str(comparison))
        if not comparison.agrees:
            raise SystemExit(1)
    elif batches:
        verb.print_batches(planned, as_json=as_json)
    elif as_json:
        verb.print_json(planned.to_json())
    else:
        typer.echo(planned.table())


@app.command(
    "find-batch-size",
    epilog=_examples(
        "find-batch-size run.yaml",
        "find-batch-size run.yaml --gpu h100 --world-size 8,64",
    ),
)
def find_batch_size(
    run_file: _RunFile = None,
    *,
    device_memory: Annotated[
        str | None,
        _option("Memory of that GPU, such as 40GiB; by default that of its kind.", "AMOUNT"),
    ] = None,
    gpu: Annotated[
        str | None,
        _option("The GPU to ask about, such as h100; 'phantomgpu gpus' lists them.", "KIND"),
    ] = None,
    context: Annotated[
        str | None,
        _option("Memory of the CUDA context; by default as known for the kind.", "AMOUNT"),
    ] = None,
    world_size: Annotated[
        str | None, _option("Ask about one of so many ranks; several make a table.", "N[,N...]")
    ] = None,
    shard: Annotated[
        str | None,
        _option("How ranks share the model; by default as in the run file.", "fsdp|hsdp:N|ddp"),
    ] = None,
    micro_batch_size: Annotated[
        int | None, _option("Find the fewest ranks for micro-batches of this size.")
    ] = None,
    margin: Annotated[
        str | None,
        _option(
            "Memory to keep free: 3% or 512MiB; by default 1.5%, and 1% with the phantom.",
            "PERCENT|AMOUNT",
        ),
    ] = None,
    minimum: Annotated[int, typer.Option(help="The smallest size.")] = 1,
    maximum: Annotated[
        int | None, _option("The largest size; by default all samples there are.")
    ] = None,
    multiple_of: Annotated[int, typer.Option(help="Only multiples of this.")] = 1,
    power_of_two: Annotated[bool, _flag("--power-of-two", "Only powers of two.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Find the largest micro-batch that a run has memory for, on this device or another."""
    from stretto.cli import finding as verb
    from stretto.cli.planning import print_json, read_arguments
    from stretto.cli.terminal import progress

    asked: dict[str, Any] = {
        "world_size": world_size,
        "shard": shard,
        "maximum": maximum,
        "device_memory": device_memory,
        "gpu": gpu,
        "context": context,
        "margin": margin,
        "minimum": minimum,
        "multiple_of": multiple_of,
        "power_of_two": power_of_two,
    }
    with progress("finding the batch size"):
        config = read_arguments(run_file or [])
        answer = verb.find(config, micro_batch_size=micro_batch_size, **asked)
    if as_json:
        print_json(answer.plain)
    else:
        typer.echo(answer.text)


@app.command(epilog=_examples("report runs/a", "report runs/a runs/b --html page.html"))
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_FOLDER...",
            help="Folders of runs; or a report of 'phantomgpu run --json', with --html.",
            callback=_local,
        ),
    ],
    *,
    as_json: _AsJson = False,
    html: _Html = None,
    plot: _Plot = None,
    unit: _Unit = None,
) -> None:
    """Show what runs have done."""
    from stretto.report import page
    from stretto.report.run import read_metrics, run_table

    if html is not None:
        if len(paths) == 1 and paths[0].is_file():
            shown = page.memory_payload(paths[0])
        else:
            shown = page.payload(map(page.read if len(paths) == 1 else page.read_or_problem, paths))
        page.write(html, shown)
        typer.echo(f"wrote {html}", err=True)
        return
    found = {folder: read_metrics(folder) for folder in paths}
    if as_json:
        from stretto.cli.planning import print_json

        records = [{"folder": str(folder), **asdict(one)} for folder, one in found.items()]
        print_json(records if len(paths) > 1 else records[0])
        return
    typer.echo("\n\n".join(run_table(one, folder) for folder, one in found.items()))
    if plot is not None:
        from stretto.report.pictures import draw

        if len(paths) > 1:
            why = "a picture shows one run"
            raise ConfigError.bad(
                "--plot", str(plot), why, "write --html to lay runs over each other"
            )
        draw(paths[0], plot, unit=unit)
        typer.echo(f"drew {plot}", err=True)


@app.command(epilog=_examples("watch", "watch runs/a --port 8400"))
def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder of runs, or the folder of one run.", callback=_local
        ),
    ] = Path("runs"),
    *,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port on 127.0.0.1.")] = 8377,
) -> None:
    """Show runs in a browser while they run."""
    from stretto.report.page.watch import HOST, serve

    typer.echo(f"watching {folder} at http://{HOST}:{port}/  (end with Ctrl+C)")
    serve(folder, port)


@app.command(
    epilog=_examples("inspect runs/a", "inspect runs/a/checkpoints/checkpoint-000000000640 --json")
)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or the folder of a run.", callback=_local
        ),
    ],
    *,
    as_json: _AsJson = False,
) -> None:
    """Show what is in a checkpoint, when it was written, and whether it is whole."""
    from stretto.checkpoint import describe
    from stretto.checkpoint.folder import candidates
    from stretto.checkpoint.manifest import read_errors
    from stretto.cli.planning import print_json
    from stretto.cli.terminal import progress
    from stretto.errors import CheckpointError
    from stretto.training.checkpointing.resuming import FOLDER

    path = path if path.name else path.resolve()  # '.'
    with read_errors(path):
        paths = candidates(path / FOLDER) if (path / FOLDER).is_dir() else [path]
    if not paths:
        raise CheckpointError.cannot(
            f"inspect {path}",
            why="the run has no checkpoint",
            instead="write 'checkpoint: {every: 1ep}' in the run file to keep some",
        )
    with progress("reading the checkpoints"):
        found = [describe(one) for one in paths]
    if as_json:
        records = [one.to_json() for one in found]
        print_json(records if len(paths) > 1 else records[0])
    else:
        typer.echo("\n\n".join(map(str, found)))
    if not all(one.is_whole for one in found):
        raise SystemExit(1)


@app.command(
    epilog=_examples("export runs/a weights --to hf", "export runs/a weights-dcp --to dcp")
)
def export(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or the folder of a run for its newest.",
            callback=_local,
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to create.", callback=_local)
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|dcp",
            help="Hugging Face's safetensors, or torch.distributed.checkpoint.",
        ),
    ],
    as_json: _AsJson = False,
) -> None:
    """Write the weights of a checkpoint in another format."""
    from stretto.checkpoint import export_weights
    from stretto.cli.planning import print_json
    from stretto.cli.terminal import progress
    from stretto.training.checkpointing.resuming import FOLDER, newest_of

    with progress("exporting"):
        path = newest_of(path) if (path / FOLDER).is_dir() else path
        export_weights(path, folder, to)
    if as_json:
        print_json({"checkpoint": str(path), "folder": str(folder), "format": to})
    else:
        typer.echo(f"wrote the weights of {path} to {folder}")


_ARGUMENTS = {
    "dataset_num_samples": "--samples",
    "dataset_num_tokens": "--tokens",
    "max_training_duration": "--max-duration",
    "batch_size": "--batch-size",
}
"""The options of `convert` by the arguments of `stretto.convert`."""


def as_option(argument: Argument) -> str:
    """Return the option of an argument that a message names."""
    return _ARGUMENTS.get(argument.name, str(argument))


@app.command(
    epilog=_examples(
        "convert 0.1dur --to ep --max-duration 90ep",
        "convert 2Btok --to ba --tokens 1000000 --samples 2000 --batch-size 32",
    )
)
def convert(
    time: Annotated[str, typer.Argument(help="A time such as 0.1dur, 90ep or 2Btok.")],
    *,
    to: Annotated[str, typer.Option(metavar=f"{_UNITS}|sec", help="The new unit.")],
    max_duration: Annotated[str | None, _option("The length of the run.", "TIME")] = None,
    samples: Annotated[int | None, _option("Samples in an epoch.")] = None,
    tokens: Annotated[int | None, _option("Tokens in an epoch.")] = None,
    batch_size: Annotated[int | None, _option("Samples in a batch.")] = None,
    drop_last: Annotated[
        bool, _flag("--drop-last", "Drop an epoch's last, smaller batch.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Convert a time to another unit."""
    from stretto.errors import ConversionError
    from stretto.timing import convert as convert_time

    try:
        found = convert_time(
            time,
            to,
            dataset_num_samples=samples,
            dataset_num_tokens=tokens,
            max_training_duration=max_duration,
            batch_size=batch_size,
            drop_last=drop_last,
        )
    except ConversionError as error:
        raise error.recast(ConversionError, word=as_option) from error
    typer.echo(json.dumps({"time": str(found)}) if as_json else str(found))


@app.command(epilog=_examples("schema > run.schema.json"))
def schema() -> None:
    """Print the JSON Schema of run files, for editors."""
    from stretto.cli.planning import print_json
    from stretto.config.schema import run_file_schema

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
    given = list(sys.argv[1:] if arguments is None else arguments)
    kept = [one for one in given if one not in {TRACEBACK, QUIET}]
    try:
        with ExitStack() as stack:
            if QUIET in given:
                nothing = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(redirect_stdout(nothing))
            app(kept, prog_name="stretto")
    except StrettoError as error:
        if TRACEBACK in given:
            raise
        from stretto.config.yaml import as_key

        in_keys = error.recast(StrettoError, word=as_key)
        text = "\n".join([str(in_keys), *getattr(error, "__notes__", ())])
        typer.secho(f"Error [{error.code}]: {text}", err=True, fg=typer.colors.RED)
        raise SystemExit(MISUSE) from None
    finally:
        # All is done. What torch and others do last is no place for a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Show a warning without its place in the code."""
    return f"Warning: {message}\n"
