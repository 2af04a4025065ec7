"""The verbs and their options; what they do is imported when they run, so that each starts fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from stretto._location import local_path
from stretto.errors import ConfigError


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


def _show_version(is_wanted: bool) -> None:  # noqa: FBT001  typer calls it
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def main(
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
    from stretto.cli.training import train as run

    run(run_file or [], folder=folder, resume=resume)


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
    from stretto.cli.planning import plan as run

    run(run_file or [], as_json=json, batches=batches, plot=plot, unit=unit, against=against)


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
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find the largest micro-batch that a run has memory for, on this device or another."""
    from stretto.cli.finding import Spread
    from stretto.cli.finding import find as run

    run(
        run_file or [],
        method=method,
        device_memory=device_memory,
        device=device,
        spread=Spread.of(world_size, shard, micro_batch_size),
        gpu=gpu,
        context=context,
        margin=margin,
        minimum=minimum,
        maximum=maximum,
        multiple_of=multiple_of,
        power_of_two=power_of_two,
        check=check,
        plot=plot,
        as_json=json,
    )


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
    from stretto.cli.reporting import report as run

    run(folder, plot=plot, unit=unit)


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or the folder of a run.", callback=_local
        ),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a checkpoint is, when it was written, what is in it, and whether it is whole."""
    from stretto.cli.reporting import inspect as run

    run(path, as_json=json)


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
    from stretto.cli.planning import convert as run

    run(
        time,
        to,
        max_duration=max_duration,
        samples=samples,
        tokens=tokens,
        batch_size=batch_size,
        drop_last=drop_last,
    )


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
