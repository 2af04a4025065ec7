"""Runs on the phantom; skipped where torch has no CUDA code."""

from __future__ import annotations

import atexit
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner

import phantomgpu
from phantomgpu import standins
from phantomgpu.child import Settings
from phantomgpu.cli import app
from phantomgpu.running import Session, command_of
from phantomgpu.searching import Trial, _served


def why_not() -> str | None:
    if sys.platform != "linux":
        return "needs Linux"
    spec = util.find_spec("torch")
    assert spec
    assert spec.origin
    made = standins.setup_folder(metadata.version("torch").partition("+")[0])
    folders = (Path(spec.origin).parent, made / "torch")
    if any((folder / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return None
    return "needs the CUDA build of torch; run `phantomgpu setup`"


reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(reason is not None, reason=str(reason))]


def train(batch_size: int, width: int = 1024) -> None:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        model(torch.randn(batch_size, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def call(number: int, folder: str) -> None:
    function, args = cloudpickle.loads(Path(folder, f"{number}.pickle").read_bytes())
    function(*args)


@cache
def server() -> tuple[Path, Trial]:
    """A process with torch that is forked for each run, as in a search: it saves 4 seconds."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(TemporaryDirectory())
    command = stack.enter_context(command_of(call, [folder], None))
    return Path(folder), stack.enter_context(
        _served(Session("h100", "4GiB"), Settings(""), command)
    )


def run(function: Callable[..., Any], *args: Any, **options: Any) -> phantomgpu.Report:
    if not options:
        folder, trial = server()
        number = len(list(folder.iterdir()))
        (folder / f"{number}.pickle").write_bytes(cloudpickle.dumps((function, args)))
        return trial(number)
    return phantomgpu.run(function, args=args, **{"gpu": "h100", "memory": "4GiB", **options})


def test_a_run_that_fits(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    report = run(train, 512, snapshot=snapshot)
    assert report.fits
    assert report.steps == 3
    bytes_of_parameters = 4 * (2 * 1024 * 4096 + 5 * 1024)
    assert report.categories["parameters"] == pytest.approx(bytes_of_parameters, abs=2048)
    assert report.categories["optimizer"] == pytest.approx(2 * bytes_of_parameters, abs=4096)
    assert report.peak_allocated <= report.peak_reserved <= report.available
    assert "device_traces" in pickle.loads(snapshot.read_bytes())


def test_the_number_is_the_same_without_values() -> None:
    ours, plain = run(train, 512), run(train, 512, values=False)
    assert (ours.peak_allocated, ours.peak_reserved) == (plain.peak_allocated, plain.peak_reserved)


def test_a_run_that_does_not_fit() -> None:
    report = run(train, 1 << 16)
    assert report.status == "does not fit"
    assert report.problem
    assert "Tried to allocate" in report.problem


def test_a_script_that_fails() -> None:
    report = run(train, "many")
    assert report.status == "failed"
    assert report.problem
    assert "TypeError" in report.problem


def test_search() -> None:
    seen = {}
    answer = phantomgpu.search(
        train,
        gpu="h100",
        memory="2GiB",
        multiple=64,
        seen=lambda size, one: seen.update({size: one}),
    )
    assert answer.largest
    bare = seen[answer.largest]
    assert not bare.categories
    assert (bare.peak_allocated, bare.peak_reserved) == (
        answer.report.peak_allocated,
        answer.report.peak_reserved,
    )
    assert answer.report.categories["optimizer"]
    assert answer.trials[answer.largest].fits
    assert not answer.trials[answer.largest + 64].fits


class StartsCuda:
    """Imports of some packages ask for the device: torchao, bitsandbytes."""

    def __setstate__(self, state: object) -> None:
        import torch

        torch.ones(1, device="cuda")


def train_after_cuda(batch_size: int, started: StartsCuda) -> None:
    del started
    train(batch_size)


def test_a_search_where_an_import_starts_cuda() -> None:
    how = {"gpu": "h100", "memory": "2GiB", "largest": 128, "multiple": 64}
    started = StartsCuda()
    started.there = True  # type: ignore[attr-defined]  # without attributes, nothing is called
    answer = phantomgpu.search(train_after_cuda, args=[started], **how)  # type: ignore[arg-type]
    assert answer.largest == 128
    assert answer.report.categories["optimizer"]


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n"
        "    model(torch.ones(int(sys.argv[1]), 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    command = ["run", "--gpu", "h100", "--memory", "2GiB", "--json", "-", "--", sys.executable]
    fits = CliRunner().invoke(app, [*command, str(script), "64"])
    assert fits.exit_code == 0, fits.output
    assert '"fits": true' in fits.output
    assert CliRunner().invoke(app, [*command, str(script), "1000000"]).exit_code == 3


def whole_numbers() -> None:
    import torch
    from torch.nn import functional

    numbers = torch.arange(10, device="cuda")
    mask = numbers > 4
    assert mask.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    assert numbers[mask].cumsum(0).tolist() == [5, 11, 18, 26, 35]
    assert (numbers * 2 + 1).sum().item() == 100
    assert torch.tensor([3, 1, 3], device="cuda").unique().tolist() == [1, 3]
    assert torch.tensor([1.5, 2.5], device="cuda").tolist() == [1.5, 2.5]
    assert functional.one_hot(torch.tensor([1], device="cuda"), 3).tolist() == [[0, 1, 0]]
    assert torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()[0].tolist() == [1, 0, 0]
    assert (torch.tensor(2.0, device="cuda", dtype=torch.float16) / 3.0).dtype == torch.float16
    del numbers, mask
    for _ in range(20):  # blocks are used again: nothing of the above may be read
        assert not torch.empty(10, dtype=torch.long, device="cuda").any().item()


def test_whole_numbers_are_computed() -> None:
    assert run(whole_numbers).fits


def scaled() -> None:
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler()
    for _ in range(9):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 65536


def test_a_scaler_never_skips_a_step() -> None:
    assert run(scaled).steps == 3


def recurrent() -> None:
    import torch

    model = torch.nn.LSTM(64, 64, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(9):
        model(torch.randn(8, 4, 64, device="cuda"))[0].sum().backward()
        optimizer.step()


def test_an_lstm_runs_without_cudnn_and_is_refused_with_it() -> None:
    assert run(recurrent).fits
    report = run(recurrent, cudnn=True)
    assert report.status == "failed"
    assert report.problem
    assert "cuDNN" in report.problem


def recomputed() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    layers = [torch.nn.Linear(64, 64).cuda() for _ in range(3)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()])
    for _ in range(9):
        x = torch.randn(8, 64, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            for layer in layers:  # recomputation stops early, with an exception inside backward
                x = checkpoint(
                    lambda y, one=layer: one(one(y).relu()).relu(), x, use_reentrant=False
                )
        x.float().sum().backward()
        optimizer.step()


def test_checkpointing() -> None:
    assert run(recomputed).steps == 3


def captured() -> None:
    import torch

    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.randn(8, 256, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(x).sum().backward()
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
        optimizer.step()
    graph.replay()


def test_cuda_graphs() -> None:
    assert run(captured).fits


def test_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(train, 512)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert run(train, 512, steps=3).peak_allocated == plain.peak_allocated
    assert run(train, 1 << 16, steps=3).status == "does not fit"


def sharded(kind: str) -> None:
    import torch
    from torch import distributed as dist

    dist.init_process_group("nccl")
    world = dist.get_world_size()
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    assert gathered == [{"rank": 0}] * world
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(9):
        model(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_rank_of_many() -> None:
    whole, two, many = (run(sharded, kind, ranks=n) for kind, n in SHARDED)
    assert many.ranks == 64
    assert many.categories["parameters"] < two.categories["parameters"]
    assert two.categories["parameters"] < whole.categories["parameters"]


SHARDED = (("ddp", 2), ("fsdp", 2), ("fsdp", 64))


def on_the_host(backend: str) -> None:
    import torch
    from torch import distributed as dist

    dist.init_process_group(backend)
    world = dist.get_world_size()
    three = torch.full((4,), 3.0)
    dist.all_reduce(three)
    gathered = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(gathered, three)
    assert gathered[-1].tolist() == [3.0] * 4
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, "one")
    assert objects == ["one"] * world
    dist.barrier()
    group = dist.new_group(backend="gloo")
    dist.all_reduce(three, group=group, async_op=True).wait()
    dist.monitored_barrier(group)
    if "nccl" in backend:
        dist.all_reduce(three.cuda())
    train(8)


@pytest.mark.parametrize(("backend", "buffers"), [("gloo", 0), ("cpu:gloo,cuda:nccl", 688 << 20)])
def test_collectives_of_gloo_need_no_other_rank(backend: str, buffers: int) -> None:
    report = run(on_the_host, backend, ranks=8)
    assert report.fits, report.problem
    assert report.nccl == buffers


def wrapped() -> None:
    import torch

    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        raise ValueError("no") from error


def test_a_wrapped_error_is_still_out_of_memory() -> None:
    assert run(wrapped).status == "does not fit"


def test_memory_over_time_holds_the_peak() -> None:
    report = run(train, 512)
    columns = [one["bytes"] for one in report.timeline["categories"]]
    totals = [sum(sizes) for sizes in zip(*columns, strict=True)]
    at = {mark["text"]: mark["at"] for mark in report.timeline["marks"]}
    assert totals[at["peak"]] == max(totals) == report.peak_allocated
    assert {"backward", "optimizer step"} <= set(at)


def test_modules_are_named_in_backward_too() -> None:
    places = run(train, 1 << 14, modules=True).places
    assert {"0", "1", "2"} & set(places)
    assert "backward" not in places


def meshed(kind: str) -> None:
    """Train with the Trainer on a mesh of all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from stretto.training import Trainer

    torch.distributed.init_process_group("nccl")
    world = torch.distributed.get_world_size()
    shape, names = {
        "fsdp": ((world, 1), ("dp", "tp")),
        "hsdp": ((world // 8, 8), ("dp_replicate", "dp_shard")),
        "tpfsdp": ((world // 8, 8), ("dp", "tp")),
    }[kind]
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    layers = [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
    model = torch.nn.Sequential(*layers).cuda()
    if kind == "tpfsdp":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh if kind == "hsdp" else mesh["dp"])
    Trainer(
        model,
        torch.randn(640, 1024),
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=lambda model, batch: model(batch).square().mean(),
        max_duration="10ba",
        batch_size=128,
        clip_norm=1.0,
        mesh=mesh,
    ).fit()


def test_the_trainer_on_a_mesh_of_64() -> None:
    """A rank has 1/64 of the model, 1/8 with HSDP of 8 x 8, and 1/64 with TP 8 x FSDP 8."""
    fsdp, hsdp, both = (run(meshed, kind, ranks=64) for kind in ("fsdp", "hsdp", "tpfsdp"))
    whole = 4 * (2 * 1024 * 4096 + 5 * 1024)
    assert fsdp.fits
    assert hsdp.fits
    assert both.fits
    for report, parts in ((fsdp, 64), (hsdp, 8), (both, 64)):
        assert report.ranks == 64
        assert report.categories["optimizer"] == pytest.approx(2 * whole / parts, rel=0.1)
    assert both.peak_allocated < fsdp.peak_allocated  # FSDP2 alone gathers whole layers
