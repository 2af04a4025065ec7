"""The command `phantomgpu`."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from phantomgpu import standins
from phantomgpu.child import CANNOT_RUN, DOES_NOT_FIT
from phantomgpu.errors import PhantomError, SetupNeededError
from phantomgpu.gpus import GIB, GPUS, UNMEASURED_CONTEXT, find_gpu, parse_memory
from phantomgpu.report import Report, draw

app = typer.Typer(
    help="Run any CUDA script without a GPU and see what memory it takes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Command = Annotated[
    list[str], typer.Argument(help="The command, after --: python train.py --batch-size 16")
]
Kind = Annotated[str, typer.Option("--gpu", help="Kind of GPU; `phantomgpu gpus` lists them.")]
Memory = Annotated[str | None, typer.Option(help="Another size than that kind's, such as 40GiB.")]
Ranks = Annotated[int, typer.Option(min=1, help="Run rank 0 of so many.")]
Steps = Annotated[int, typer.Option(min=1, help="End after so many optimizer steps.")]


@app.command()
def run(
    command: Command,
    *,
    gpu: Kind,
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    devices: Annotated[int | None, typer.Option(help="GPUs that the process sees.")] = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="Run a second time for the names of modules.")
    ] = False,
    cudnn: Annotated[bool, typer.Option("--cudnn", help="Leave cuDNN on.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the report as JSON, with memory over time; - prints.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide what the command prints.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw memory over time (PNG).")] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write torch's snapshot, for its memory viewer.")
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
        steps=steps,
        devices=devices,
        modules=modules,
        cudnn=cudnn,
        snapshot=snapshot,
        quiet=quiet or prints,
    )
    typer.echo(report.to_json() if prints else f"\n{report}")  # progress bars leave a line open
    if json is not None and not prints:
        json.write_text(report.to_json())
    if picture is not None:
        draw(report, str(picture))
    raise typer.Exit(exit_code(report))


@app.command()
def search(
    command: Command,
    *,
    gpu: Kind,
    argument: Annotated[str, typer.Option(help="The option of the command to vary.")],
    memory: Memory = None,
    ranks: Ranks = 1,
    steps: Steps = 3,
    smallest: Annotated[int, typer.Option(min=1, help="The first number to try.")] = 1,
    largest: Annotated[int, typer.Option(min=1, help="The last number to try.")] = 1 << 20,
    multiple: Annotated[int, typer.Option(min=1, help="Try only multiples of this.")] = 1,
) -> None:
    """Find the largest number, such as a batch size, that fits. Exit code 3: none does."""
    from phantomgpu.searching import search as search_script

    warn(gpu, memory)

    def show(number: int, report: Report) -> None:
        reserved = report.peak_reserved / GIB
        typer.echo(f"  {argument} {number}: {report.status}, reserved {reserved:.2f} GiB", err=True)

    answer = search_script(
        command,
        gpu=gpu,
        argument=argument,
        memory=memory,
        ranks=ranks,
        steps=steps,
        smallest=smallest,
        largest=largest,
        multiple=multiple,
        seen=show,
    )
    typer.echo(f"largest that fits: {answer.largest}")
    typer.echo(str(answer.report))
    raise typer.Exit(0 if answer.largest is not None else DOES_NOT_FIT)


@app.command()
def gpus() -> None:
    """List the kinds of GPU, with the memory that a program sees."""
    typer.echo(f"{'gpu':<9} {'memory':>10} {'context':>9}  name")
    for gpu in GPUS.values():
        context = f"{gpu.context:.2f}" if gpu.context is not None else f"{UNMEASURED_CONTEXT:.2f}*"
        typer.echo(f"{gpu.key:<9} {gpu.memory:>6.2f} GiB {context:>9}  {gpu.name}")
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
    library = folder / "torch" / "lib" / "libtorch_cuda.so"
    # === takes no local version such as 2.13.0+cpu.
    wanted = [] if library.exists() else [f"torch==={version}"]
    if wanted:
        typer.echo(f"downloading the CUDA build of torch {version} (about 530 MB) into {folder}")
        install(folder, wanted)
    if not library.exists():
        raise SetupNeededError(
            f"cannot set up: pip found no CUDA build of torch {version}; pip's configuration "
            "decides where packages come from (pip config list)"
        )
    if triton and not (folder / "triton").exists():
        found = [one.requires or [] for one in metadata.distributions(path=[str(folder)])]
        needs = [need.partition(";")[0] for needs in found for need in needs]
        install(folder, [need for need in needs if need.startswith("triton")])
    standins.build(folder / "torch")
    typer.echo("ready: phantomgpu run --gpu h100 -- python train.py")


def install(folder: Path, packages: list[str]) -> None:
    """Install packages into a folder, without what they need."""
    pip = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *packages], check=False)  # noqa: S603


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
    except (PhantomError, ValueError) as error:
        typer.echo(f"phantomgpu: {error}", err=True)
        raise SystemExit(CANNOT_RUN) from None
