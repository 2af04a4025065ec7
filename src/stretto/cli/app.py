"""The verbs and their options; what they do is imported when they run, so that each starts fast."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from stretto._location import local_path
from stretto.errors import ConfigError, StrettoError


def _local(folder: Path | None) -> Path | None:
    """A folder that was named on the command line; a URL is refused."""
    return None if folder is None else local_path(folder, "use", ConfigError)


app = typer.Typer(
    name="stretto",
    help="Train PyTorch models with a batch size that changes, on one exact clock.",
    epilog="Errors are one line; add --traceback anywhere to see where one was raised.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _check_unit(unit: str | None, plot: Path | None) -> None:
    if unit is not None and plot is None:
        raise ConfigError.cannot(
            f"use --unit {unit}",
            why="there is no picture to draw",
            instead="add --plot FILE, or leave it out",
        )


def _show_version(is_wanted: bool) -> None:  # noqa: FBT001  typer calls it
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def stretto(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Train PyTorch models with a batch size that changes, on one exact clock."""


RunFileArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.YAML] [KEY=VALUE]...",
        help="A run file, or none for the packaged one; then values to set anew, with dots "
        "for what is inside: optimizer.lr=1e-3.",
        show_default=False,
    ),
]


@app.command()
def train(
    run_file: RunFileArguments = None,
    *,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to keep the run.", show_default=False, callback=_local),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|latest|PATH",
            help="Go on from a checkpoint: the newest in the folder if there is one (auto), the "
            "newest (latest), or this one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train as a run file says; with torchrun, on all its processes."""
    from rich.console import Console

    from stretto.cli import training as verb
    from stretto.cli.planning import add_working_folder, split_arguments
    from stretto.config.run import read_run_file
    from stretto.config.training import build_trainer
    from stretto.training.loop import exit_code

    add_working_folder()
    named, overrides = split_arguments(run_file or [])
    path = named or verb.unnamed_run_file(folder or verb.overridden_folder(overrides), resume)
    config = read_run_file(path, overrides)
    console = Console(highlight=False)
    is_first = os.environ.get("RANK", "0") == "0"
    folder = verb.choose_folder(config, path.stem, folder, resumes=resume is not None)
    description, results = verb.Description(config), verb.Results()
    trainer = build_trainer(
        verb.with_console(config), folder=folder, callbacks=[description, results]
    )
    description.trainer = trainer
    found = None if resume is None else trainer.resume(resume)
    if is_first:
        for line in verb.introduce(trainer, path, found):
            console.print(line, markup=False, soft_wrap=True)
    trainer.fit(on_signal="return")
    if is_first:
        for line in verb.summarise(trainer, results):
            console.print(line, markup=False, soft_wrap=True)
    if trainer.unsaved is not None:
        raise SystemExit(1)
    if trainer.stop_reason is not None:
        raise SystemExit(exit_code(trainer.stop_reason))


@app.command()
def plan(
    run_file: RunFileArguments = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    batches: Annotated[
        bool, typer.Option("--batches", help="Print a line for every batch, not for every stage.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the plan as PNG, SVG or PDF.", show_default=False),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="ep|ba|sp|tok|dur",
            help="What the picture's axis counts; left out, what max_duration does.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            callback=_local,
            help="Compare the plan with what a run did, batch for batch; without a run file, "
            "the plan is that of the run.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a run will do, without running it."""
    from stretto.cli import planning as verb
    from stretto.cli.planning import add_working_folder, read_arguments
    from stretto.config.plans import build_run, ends_of, plan_of, prepare_run

    _check_unit(unit, plot)
    add_working_folder()
    config = read_arguments(run_file or [], folder=against)
    if against is not None:
        config = verb.as_it_ran(config, against)
    ranks = config.world_size or 1
    run = build_run(config, world_size=ranks)
    prepared = prepare_run(config, run)
    bounds = prepared.decided_between
    if bounds is not None:
        verb.refuse(
            {"--plot": plot, "--against": against, "--batches": batches},
            why="it decides its batch sizes as it goes, so no plan knows each batch",
            instead="leave it out to see what the least and the largest sizes would do, or "
            "see what a run has done with 'stretto report RUN_FOLDER'",
        )
        ends = ends_of(config, run, bounds, world_size=ranks)
        verb.print_ends(run.policy, ends, as_json=json)
        return
    planned = plan_of(config, prepared, world_size=ranks)
    if not planned.is_exact:
        verb.refuse(
            {"--against": against, "--batches": batches},
            why="the number of samples in its data is not known, so any batch may be cut short",
            instead="set data.num_samples, or write last_batch: carry",
        )
    if plot is not None:
        from stretto.report.pictures import draw_plan

        draw_plan(planned, plot, unit=unit)
        typer.echo(f"drew {plot}", err=True)
    if against is not None:
        from stretto.report.ledger import compare

        comparison = compare(planned, against)
        typer.echo(str(comparison))
        if not comparison.agrees:
            raise SystemExit(1)
    elif batches:
        verb.print_batches(planned, as_json=json)
    else:
        typer.echo(verb.as_text(planned) if json else planned.table())


_DeviceMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="What the device has, such as 80GiB; left out, what this one has left.",
        show_default=False,
    ),
]
_Device: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda",
        help="What kind of device that is; left out, cuda where its memory is stated.",
        show_default=False,
    ),
]
_Method: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="auto|predict|probe|try|halve",
        help="On fake tensors, from tiny real steps, by real trials, by halving; or the "
        "cheapest that can tell.",
    ),
]
_Margin: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT|AMOUNT",
        help="What stays free: 3% or 512MiB; by default 1.5%, without a real step 5%, for cuda 1%.",
        show_default=False,
    ),
]
_Gpu: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="The kind of GPU to predict for, such as a100; by default h100.",
        show_default=False,
    ),
]
_Context: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="What the CUDA context takes; by default about as much as nvidia-smi shows.",
        show_default=False,
    ),
]
_WorldSize: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Predict for so many ranks of GPUs; several numbers make a table.",
        show_default=False,
    ),
]
_Shard: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="fsdp|hsdp:N|ddp",
        help="How ranks share the model; by default as the run file says.",
        show_default=False,
    ),
]
_MicroBatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Ask how few ranks will do for micro-batches of this size.", show_default=False
    ),
]
_Maximum: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="The largest size that is wanted; left out, all samples there are.",
        show_default=False,
    ),
]


@app.command("find-batch-size")
def find_batch_size(
    run_file: RunFileArguments = None,
    *,
    device_memory: _DeviceMemory = None,
    device: _Device = None,
    method: _Method = "auto",
    gpu: _Gpu = None,
    context: _Context = None,
    world_size: _WorldSize = None,
    shard: _Shard = None,
    micro_batch_size: _MicroBatchSize = None,
    margin: _Margin = None,
    minimum: Annotated[int, typer.Option(help="The smallest size that is wanted.")] = 1,
    maximum: _Maximum = None,
    multiple_of: Annotated[int, typer.Option(help="What sizes are multiples of.")] = 1,
    power_of_two: Annotated[
        bool, typer.Option("--power-of-two", help="Only powers of two.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Take a real step of the answer, however sure it is.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the memory of each size as PNG, SVG or PDF.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find the largest micro-batch that a run has memory for, on this device or another."""
    import json

    from stretto.cli import finding as verb
    from stretto.cli.planning import add_working_folder, read_arguments
    from stretto.report.memory import memory_table

    spread = verb.Spread.of(world_size, shard, micro_batch_size)
    wishes = {
        "gpu": gpu,
        "context": context,
        "margin": margin,
        "minimum": minimum,
        "maximum": maximum,
        "multiple_of": multiple_of,
        "power_of_two": power_of_two,
        "check": check,
    }
    if plot is not None:
        from stretto.report.drawing import check_format

        check_format(plot)
    add_working_folder()
    config = read_arguments(run_file or [])
    if spread.world_sizes or spread.micro_batch_size is not None:
        if plot is not None:
            raise ConfigError.cannot(
                f"draw {plot}",
                why="a table of ranks has no picture",
                instead="leave --plot out, or ask without --world-size and --micro-batch-size",
                where="--plot",
            )
        said = verb.for_ranks(config, spread, device_memory, method=method, **wishes)
        typer.echo(json.dumps(said.plain, indent=2) if as_json else said.text)
        return
    if device is None and device_memory is not None:
        # Memory that is stated is nearly always that of a GPU.
        device = "cpu" if config.device == "cpu" else "cuda"
    answer = verb.ask(config, method=method, device_memory=device_memory, device=device, **wishes)
    if as_json:
        typer.echo(json.dumps(verb.to_record(answer), indent=2))
    else:
        table = memory_table(answer)
        if table:
            typer.echo(f"{table}\n")
        typer.echo(str(answer))
    if plot is not None:
        from stretto.report.memory import draw_memory

        draw_memory(answer, plot)
        typer.echo(f"drew {plot}", err=True)


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", help="The folder of a run.", callback=_local),
    ],
    *,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the run as PNG, SVG or PDF.", show_default=False),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="ep|ba|sp|tok|dur",
            help="What the picture's axis counts; left out, tokens or samples.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a run has done."""
    from stretto.cli.planning import add_working_folder, read_arguments
    from stretto.config.plans import build_run, plan_of, prepare_run
    from stretto.errors import PlanError
    from stretto.report.run import read_metrics, run_table

    _check_unit(unit, plot)
    typer.echo(run_table(read_metrics(folder), folder))
    if plot is None:
        return
    from stretto.report.pictures import draw_run

    add_working_folder()
    config = read_arguments([], folder=folder)
    run = build_run(config)
    try:
        plan = plan_of(config, prepare_run(config, run))
    except PlanError:
        plan = None  # only the run could tell its batch sizes
    draw_run(folder, plot, horizon=run.horizon, plan=plan, unit=unit)
    typer.echo(f"\ndrew {plot}")


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or the folder of a run.", callback=_local
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a checkpoint is, when it was written, what is in it, and whether it is whole."""
    import json

    from stretto.checkpoint import describe
    from stretto.checkpoint.folder import candidates
    from stretto.checkpoint.manifest import read_errors
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
    found = [describe(one) for one in paths]
    if as_json:
        records = [one.to_json() for one in found]
        typer.echo(json.dumps(records if len(paths) > 1 else records[0], indent=1))
    else:
        typer.echo("\n\n".join(str(one) for one in found))
    if not all(one.is_whole for one in found):
        raise SystemExit(1)


@app.command()
def convert(
    time: Annotated[str, typer.Argument(help="A time such as 0.1dur, 90ep or 2Btok.")],
    *,
    to: Annotated[str, typer.Option(metavar="ep|ba|sp|tok|dur|sec", help="The unit wanted.")],
    max_duration: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The length of the run.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples in an epoch.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in an epoch.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples in a batch.", show_default=False)
    ] = None,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="An epoch's last, smaller batch is dropped.")
    ] = False,
) -> None:
    """Say a time in another unit: stretto convert 0.1dur --to ep --max-duration 90ep."""
    from stretto.cli.planning import as_option
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
    typer.echo(str(found))


@app.command()
def schema() -> None:
    """Print the JSON Schema of run files, for editors that check while one types."""
    import json

    from stretto.config.schema import run_file_schema

    typer.echo(json.dumps(run_file_schema(), indent=2))


@app.command()
def version() -> None:
    """Print the version."""
    from stretto import __version__

    typer.echo(f"stretto {__version__}")


TRACEBACK = "--traceback"
"""Shows where an error was raised; may stand anywhere on the command line."""
MISUSE = 2
"""Exit code where something must be written differently, as with unknown options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of ours are one clear text, and end with code 2.

    Args:
        arguments: what follows the program's name; left out, those of this process.
    """
    warnings.formatwarning = _one_line
    given = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = TRACEBACK in given
    try:
        app([one for one in given if one != TRACEBACK], prog_name="stretto")
    except StrettoError as error:
        if shows_traceback:
            raise
        from stretto.config.yaml import as_key

        in_keys = error.recast(StrettoError, word=as_key)
        text = "\n".join([str(in_keys), *getattr(error, "__notes__", ())])
        typer.secho(f"Error: {text}", err=True, fg=typer.colors.RED)
        raise SystemExit(MISUSE) from None


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """What a warning is on a terminal: whoever reads it there did not write the code."""
    return f"Warning: {message}\n"
