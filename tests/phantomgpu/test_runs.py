"""Runs on the phantom; skipped where torch has no CUDA code."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import subprocess
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
def server(ranks: int, steps: int | None) -> tuple[Path, Trial]:
    """A process with torch that is forked for each run, as in a search: it saves 4 seconds."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = stack.enter_context(TemporaryDirectory())
    command = stack.enter_context(command_of(call, [folder], None))
    session = Session("h100", "4GiB", Settings(ranks=ranks, steps=steps))
    return Path(folder), stack.enter_context(_served(session, command))


def run(function: Callable[..., Any], *args: Any, **options: Any) -> phantomgpu.Report:
    if options.keys() <= {"ranks"} or options == {"steps": None}:
        folder, trial = server(options.get("ranks", 1), options.get("steps", 3))
        number = len(list(folder.iterdir()))
        (folder / f"{number}.pickle").write_bytes(cloudpickle.dumps((function, args)))
        return trial(number)
    return phantomgpu.run(function, args=args, **{"gpu": "h100", "memory": "4GiB", **options})


def test_a_run_that_fits() -> None:
    report = run(train, 512)
    assert report.fits
    assert report.steps == 3
    bytes_of_parameters = 4 * (2 * 1024 * 4096 + 5 * 1024)
    assert report.categories["parameters"] == pytest.approx(bytes_of_parameters, abs=2048)
    assert report.categories["optimizer"] == pytest.approx(2 * bytes_of_parameters, abs=4096)
    assert report.peak_allocated <= report.peak_reserved <= report.available


def asks_of_many_tensors(count: int) -> None:
    import torch

    from phantomgpu.values import Bytes

    asked: list[int] = []
    state = Bytes.state

    def counted(self: Bytes, tensor: torch.Tensor) -> float | None:
        asked.append(1)
        return state(self, tensor)

    Bytes.state = counted  # type: ignore[method-assign]
    many = [torch.empty(1 << 17, device="cuda") for _ in range(count)]
    torch._foreach_mul_(many, 2.0)
    assert len(asked) < 20 * count


def test_what_is_asked_grows_with_the_number_of_tensors_and_not_its_square() -> None:
    report = run(asks_of_many_tensors, 100, steps=None)
    assert report.fits, report.problem


def evaluates_a_frozen_model() -> None:
    import torch

    asked: list[int] = []

    class Frozen(torch.nn.Sequential):
        def parameters(self, recurse: bool = True) -> Any:
            asked.append(1)
            return super().parameters(recurse)

    model = Frozen(*(torch.nn.Linear(8, 8) for _ in range(20))).cuda().eval().requires_grad_(False)
    asked.clear()
    with torch.no_grad():
        model(torch.ones(1, 8, device="cuda"))
    assert len(asked) == 1


def test_the_weights_of_a_frozen_model_are_not_looked_at_for_each_kernel() -> None:
    report = run(evaluates_a_frozen_model, steps=None)
    assert report.fits, report.problem


def train_as_before_2_10(size: int) -> None:
    import torch

    del torch.library.get_kernel
    train(size)


def test_the_number_is_the_same_without_values() -> None:
    ours, plain = run(train, 512), run(train_as_before_2_10, 512)
    assert any("no values are computed" in note for note in plain.notes)
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


class StartsThreads:
    """A script that normalises its data when it is imported."""

    def __setstate__(self, state: object) -> None:
        import threading

        import torch

        torch.set_num_threads(2)
        values = torch.rand(1 << 20)
        values.sub_(values.mean())
        self.thread = threading.Thread(target=threading.Event().wait, daemon=True)
        self.thread.start()


def train_after_threads(batch_size: int, started: StartsThreads) -> None:
    import torch

    assert isinstance(started, StartsThreads)
    torch.rand(1 << 20).sub_(0.5)
    train(batch_size)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_search_where_an_import_starts_threads(ranks: int) -> None:
    """After a fork, OpenMP waits for threads that are not there."""
    started = StartsThreads()
    started.there = True  # type: ignore[attr-defined]  # without attributes, nothing is called
    answer = phantomgpu.search(
        train_after_threads, args=[started], gpu="h100", largest=2, ranks=ranks, details=False
    )
    assert answer.largest == 2


def evaluated(where: str, seconds: float = 0) -> None:
    """A run whose peak is in evaluation, generation or saving; a teacher is no evaluation."""
    import time
    from tempfile import TemporaryFile

    import torch

    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout()).cuda()
    teacher = torch.nn.Linear(512, 512).cuda().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    def generate(prompt: torch.Tensor) -> torch.Tensor:
        return model(prompt).softmax(-1)

    for _ in range(3):
        with torch.no_grad():
            teacher(torch.randn(1024 if where == "no_grad" else 8, 512, device="cuda"))
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            data = torch.randn(2048 if where == "evaluation" else 8, 512, device="cuda")
            model(data).softmax(-1)
            if where == "generation":
                generate(torch.randn(4096, 512, device="cuda"))
        model.train()
        time.sleep(seconds)
    with TemporaryFile() as file:
        copies = 20 if where == "save" else 0
        torch.save([{k: v.clone() for k, v in model.state_dict().items()}] * copies, file)


@pytest.mark.parametrize("where", ["evaluation", "generation", "no_grad", "optimizer"])
def test_the_phase_of_the_peak_of_a_whole_run(where: str) -> None:
    report = run(evaluated, where, steps=None)
    assert report.phase == where
    assert {"forward", "backward", "optimizer", "evaluation"} <= set(report.peaks_by_phase)
    assert ("generation" in report.peaks_by_phase) == (where == "generation")
    assert report.peaks_by_phase[where] == max(report.peaks_by_phase.values())
    assert "nothing was allocated in" in str(report)
    assert not report.depends_on_values


def test_a_whole_run_ends_at_its_limit_with_a_report() -> None:
    report = run(evaluated, "optimizer", 60, steps=None, timeout_seconds=12)
    assert report.fits, report.problem
    assert f"ended after 12 seconds, in step {report.steps + 1}, at " in str(report)
    assert "in the first 12 seconds" in report.lines()[0]


def train_a_little(batch_size: int) -> None:
    import torch

    data = torch.utils.data.TensorDataset(torch.randn(200, 64))
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for (batch,) in torch.utils.data.DataLoader(data, batch_size, drop_last=True):
        model(batch.cuda()).sum().backward()
        optimizer.step()


def test_a_search_ends_with_the_data() -> None:
    answer = phantomgpu.search(train_a_little, gpu="h100")
    assert answer.largest == 200
    assert "201" in answer.bound
    assert len(answer.trials) < 20


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


def without_storage() -> None:
    import torch
    from torch import nn

    device = "cuda"
    large = torch.rand(320, 384, device=device)
    for layout in ("", "_csr", "_csc"):
        assert getattr(large, f"to_sparse{layout}")().layout != torch.strided
    assert large.to_sparse_bsr((16, 16)).layout == torch.sparse_bsr
    assert (large > 0.5).to_sparse().is_sparse
    ids = torch.randint(0, 10_000, (192,), device=device)
    for kind in (nn.Embedding, nn.EmbeddingBag):
        table = kind(10_000, 32, sparse=True, device=device)
        table(ids.view(64, 3)).sum().backward()
        assert getattr(table.weight.grad, "is_sparse", False)
        torch.optim.SparseAdam(table.parameters()).step()
    rows = [large, large[:200].clone()]
    linear = nn.Linear(384, 8, device=device)
    nested = linear(torch.nested.nested_tensor(rows))
    assert torch.nested.to_padded_tensor(nested, 0.0).shape == (2, 320, 8)
    jagged = linear(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert jagged.values().shape == (520, 8)


def whole_numbers() -> None:
    import torch
    from torch.nn import functional

    without_storage()
    numbers = torch.arange(10, device="cuda")
    mask = numbers > 4
    assert mask.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    assert numbers[mask].cumsum(0).tolist() == [5, 11, 18, 26, 35]
    assert (numbers * 2 + 1).sum().item() == 100
    assert torch.tensor([3, 1, 3], device="cuda").unique().tolist() == [1, 3]
    assert torch.tensor([1.5, 2.5], device="cuda").tolist() == [1.5, 2.5]
    assert functional.one_hot(torch.tensor([1], device="cuda"), 3).tolist() == [[0, 1, 0]]
    assert torch.ones(3, 3, dtype=torch.bool, device="cuda").tril()[0].tolist() == [1, 0, 0]
    places = torch.tensor([[0, 2, 2], [1, 0, 0]], device="cuda")
    sparse = torch.sparse_coo_tensor(places, torch.ones(3, device="cuda"), (3, 2), dtype=torch.half)
    assert sparse.coalesce().values().shape == (2,)
    assert (torch.tensor(2.0, device="cuda", dtype=torch.float16) / 3.0).dtype == torch.float16
    many = torch.arange(3_000_000, device="cuda")  # 24 MB, more than a copy keeps
    assert many.sum().item() == 3_000_000 * 2_999_999 // 2
    many[::2] = 1
    assert (many == 1).nonzero().shape == (1_500_001, 1)
    labels = (many == 1).float()  # of boxes, as detectors have them
    labels[many > 2_999_990] = -1
    assert torch.where(labels >= 1)[0].shape == (1_500_001,)
    assert (labels.mul(2).sum().item(), labels.min().item()) == (2 * 1_500_001 - 2 * 5, -1)
    assert torch.randperm(1_000_000, device="cuda").bincount().shape == (1_000_000,)
    del numbers, mask, many
    for _ in range(20):  # blocks are used again: nothing of the above may be read
        assert not torch.empty(10, dtype=torch.long, device="cuda").any().item()


def traced() -> None:
    """Run operations while `torch.compile` traces, and in a frame that it leaves alone."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    total = torch.zeros(2, device="cuda")
    with FakeTensorMode():
        assert torch.tensor(2.0, device="cuda").is_cuda

    @torch.compile(backend="eager")
    def step(total: torch.Tensor) -> None:
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: the frame is not compiled
            count = torch.tensor(0, device="cuda")
            count += 1
            total.add_(1).mul_(1 - 0.5**count)

    step(total)
    assert total.tolist() == [0.75, 0.75]


def reduced() -> None:
    """Reduce in a frame that `torch.compile` leaves alone."""
    import warnings

    import torch
    from torch import distributed

    warnings.simplefilter("ignore")
    distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    wholes = [torch.zeros(8, device="cuda"), torch.zeros(4, device="cuda")]

    @torch.compile(backend="eager")
    @torch.no_grad()
    def step() -> None:
        for whole in wholes:
            part = torch.empty_like(whole[: len(whole) // 2])
            work = distributed.reduce_scatter_tensor(part, whole, async_op=True)
            work.get_future().wait()
            whole.copy_(part.add(1).repeat(2))

    step()
    assert wholes[1].tolist() == [1.0] * 4


def test_what_torch_compile_does_is_not_disturbed() -> None:
    assert run(traced).status == "fits"


def test_collectives_in_a_compiled_step() -> None:
    assert run(reduced, ranks=2).status == "fits"


def test_whole_numbers_are_computed() -> None:
    report = run(whole_numbers)
    assert report.fits
    assert len(report.decides) == 4  # torch.empty, and what of unknown numbers is not zero


def more_whole_numbers_than_are_kept() -> None:
    import torch

    kept = [torch.arange(4_000_000, device="cuda") for _ in range(40)]  # 1.2 GiB
    assert kept[0].sum().item() == 4_000_000 * 3_999_999 // 2
    assert kept[39].sum().item() != 4_000_000 * 3_999_999 // 2


def test_whole_numbers_that_are_lost_are_noted() -> None:
    report = run(more_whole_numbers_than_are_kept)
    assert report.fits
    assert report.decides


def floats() -> None:
    """Numbers that decide sizes and branches: right if small, random between 0 and 1 if not."""
    import math

    import torch
    from torch import distributions

    filled = torch.ones(300, 300, device="cuda")
    assert filled[1, :9].sum().item() == 9
    filled.zero_()
    assert filled[1, :9].sum().item() == 0
    mask = torch.bernoulli(torch.full((64, 256), 0.15, device="cuda")).bool()
    assert 0.1 < mask.sum().item() / mask.numel() < 0.2
    assert mask.nonzero().shape[0] == mask.sum().item()
    chances = torch.full((64, 4096), 0.15, device="cuda")  # of a usual batch of tokens
    chances.masked_fill_(torch.zeros_like(chances, dtype=torch.bool), 0.0)
    assert 0.1 < torch.bernoulli(chances).bool().sum().item() / chances.numel() < 0.2
    boxes = torch.tensor([[0.0, 0.0, 2.0, 3.0]], device="cuda") * 1.5
    assert not (boxes[:, 2:] <= boxes[:, :2]).any()
    policy = distributions.Categorical(logits=torch.randn(32, 6, device="cuda"))
    assert policy.log_prob(policy.sample()).exp().max().item() <= 1
    assert (torch.arange(8, device="cuda") % 3).tolist() == [0, 1, 2] * 2 + [0, 1]
    assert (2.0 ** torch.arange(3, device="cuda").float()).tolist() == [1, 2, 4]
    square = torch.nn.init.orthogonal_(torch.empty(64, 64, device="cuda"))
    assert torch.allclose((square @ square.T).cpu(), torch.eye(64), atol=1e-4)
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    before = torch.get_rng_state()
    (parameter * torch.rand(2, device="cuda").mul(0).add(2)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    optimizer.step()
    assert parameter.tolist() == [0.5, 1.5]
    large = torch.randn(3000, 1000, device="cuda")
    assert torch.linalg.qr(large[:300, :300])[0].shape == (300, 300)
    assert torch.isfinite(large).all()
    drawn = torch.empty(512, 256, device="cuda")  # until no number lies outside
    assert torch.nn.init.trunc_normal_(drawn, std=0.1, a=-0.2, b=0.2) is drawn
    loss = large.square().mean()
    assert math.log10(1 / loss.item()) >= 0
    assert loss.item() == loss.item() > 0
    kept = large > 0.5
    assert 0.25 < kept.nonzero().shape[0] / kept.numel() < 0.36  # as of normal numbers
    assert 0.9 < large.cpu().std() < 1.1  # what runs on the CPU gets random numbers, too


def test_floats_that_decide_are_computed_or_named() -> None:
    report = run(floats)
    assert report.fits, report.problem
    lines, first = inspect.getsourcelines(floats)
    begin = next(number for number, line in enumerate(lines) if "trunc_normal_" in line)
    read = {first + at for at, line in enumerate(lines) if at >= begin and "assert" in line}
    assert {f"test_runs.py:{number}" for number in read} == {
        place.partition(" ")[0] for place in report.unknown
    }
    assert "test_runs.py" in str(report)


def masks() -> None:
    """Masks above the sizes that are computed select as many elements as on a GPU."""
    import torch

    big = (3000, 3000)
    numbers = torch.randn(big, device="cuda")
    chosen = torch.rand(big, device="cuda") < 0.15
    count = numbers.numel()
    assert abs(chosen.nonzero().shape[0] / count - 0.15) < 0.01
    assert abs(torch.masked_select(numbers, chosen & (numbers > 0)).shape[0] / count - 0.075) < 0.01
    assert abs(chosen.sum().item() / count - 0.15) < 0.01
    chances = torch.full(big, 0.15, device="cuda").masked_fill_(torch.zeros_like(chosen), 0.0)
    assert abs(numbers[torch.bernoulli(chances).bool()].shape[0] / count - 0.15) < 0.01
    for shape in ((512, 512), big):  # SHiRA of PEFT
        mask = torch.zeros(shape, device="cuda").reshape(1, -1)
        places = torch.randperm(mask.numel())[:5000].unsqueeze(0).cuda()
        mask = mask.scatter_(1, places, torch.ones(1, 5000, device="cuda")).reshape(shape)
        assert torch.where(mask == 1.0)[0].shape == (5000,)
    for size in (256, 2000, 3000):
        values = torch.rand(size, size, device="cuda", requires_grad=True)
        dropped = torch.nn.functional.dropout(values, 0.3) / 2
        assert abs((dropped == 0).float().mean().item() - 0.3) < 0.01
        assert abs(dropped.nonzero().shape[0] / values.numel() - 0.7) < 0.01
        chosen = torch.rand_like(values) < 0.2
        for kept in (
            values * chosen,
            torch.where(chosen, values, 0.0),
            values.masked_fill(~chosen, 0),
        ):
            assert abs(kept.count_nonzero().item() / values.numel() - 0.2) < 0.01
        assert (dropped + values == 0).sum().item() == 0
    train(8)


def logged() -> None:
    import torch

    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(64, 2048, device="cuda")).square().mean()
        assert torch.isfinite(loss)
        loss.backward()
        print(loss.item())
        optimizer.step()


def test_masks_have_their_expected_size() -> None:
    report = run(masks)
    assert report.fits, report.problem
    assert report.depends_on_values
    assert "(depends on values)" in report.lines()[0]


def test_a_loss_that_is_logged_decides_nothing() -> None:
    report = run(logged)
    assert report.unknown
    assert not report.depends_on_values, report.decides


def decomposed() -> None:
    """Sizes of workspaces in elements, as cuSOLVER 12.0.4's own functions return them."""
    import ctypes

    import torch

    torch.linalg.svd(torch.randn(100, 100, device="cuda"))
    library, size = ctypes.CDLL("libcusolver.so.12"), ctypes.c_int()
    for name, arguments, at, elements in (
        ("Sgesvd", {1: 4096, 2: 1024}, 3, 16_850_176),
        ("Dgesvdj", {2: 1, 3: 3072, 4: 3072}, 12, 19_112_032),
        ("Sgesvdj", {2: 1, 3: 8192, 4: 3072}, 12, 38_344_960),
        ("Sgeqrf", {1: 4096, 2: 1024}, 5, 1_572_864),
        ("Sorgqr", {1: 8192, 2: 3072, 3: 3072}, 7, 1_851_648),
        ("Sormqr", {3: 4096, 4: 1024, 5: 1024}, 11, 6_882_560),
        ("Ssyevd", {3: 2048}, 7, 17_070_275),
        ("CheevjBatched", {3: 4, 9: 512}, 7, 538_116),  # measured: github.com/cupy/cupy#7261
    ):
        words = [ctypes.c_void_p(arguments.get(one, 0)) for one in range(18)]
        words[at] = ctypes.cast(ctypes.byref(size), ctypes.c_void_p)
        assert getattr(library, f"cusolverDn{name}_bufferSize")(*words) == 0
        assert abs(size.value / elements - 1) < 0.01, (name, size.value)
    for shape in ((64, 8, 8), (4, 512, 512), (1500, 1000)):
        matrices = torch.randn(*shape, device="cuda")
        q, r = torch.linalg.qr(matrices)
        _, values, _ = torch.linalg.svd(matrices, full_matrices=False)
        assert (q @ r).shape == matrices.shape
        assert values.shape == (*shape[:-2], min(shape[-2:]))
    torch.linalg.eigh(torch.eye(600, device="cuda"))
    torch.linalg.eig(torch.eye(600, device="cuda"))


def test_workspaces_of_decompositions() -> None:
    report = run(decomposed)
    assert report.fits, report.problem
    assert "Xgeev (four matrices)" in str(report)
    assert report.peak_allocated > 4 * 8_000_000


def transformed() -> None:
    import torch

    for kind, size in ((torch.complex64, 80_000), (torch.complex128, 160_000)):
        data = torch.zeros(100, 100, dtype=kind, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.fft.fft2(data)
        grown = torch.cuda.max_memory_allocated() - before
        assert 2 * size <= grown < 2 * size + 2048, grown  # the result, and as much to work in


def test_workspaces_of_fourier_transforms_are_as_large_as_the_data() -> None:
    report = run(transformed)
    assert report.fits, report.problem
    assert "cuFFT (as the data; 1D: 0)" in str(report)


def fits_line(size: int) -> None:
    """Neural style, in short: L-BFGS with its history."""
    import torch

    weights = torch.nn.Parameter(torch.randn(size, device="cuda"))
    optimizer = torch.optim.LBFGS([weights], history_size=10, max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = weights.square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)


def test_lbfgs_keeps_its_history() -> None:
    for size in (1 << 10, 1 << 20):
        report = run(fits_line, size, steps=None)
        assert report.steps == 20
        assert report.peak_allocated > 20 * 4 * size
        assert report.unknown if size > 1 << 16 else not report.unknown
        assert any("lbfgs.py" in place for place in report.unknown) or size < 1 << 16


def clipped(by_hand: bool) -> None:
    import torch

    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(9):
        model(torch.ones(1, 2048, device="cuda")).sum().backward()
        if by_hand:
            _ = [
                torch.stack([p.grad.float()] * 9) for p in model.parameters() if p.grad is not None
            ]
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def test_what_happens_between_backward_and_the_step_is_no_forward_pass() -> None:
    assert run(clipped, True).phase == "the part after backward"
    report = run(clipped, False)
    assert report.phase != "forward"
    assert "backward" in report.peaks_by_phase  # its kernels are seen although dynamo wraps ours


def test_the_report_says_where_the_run_was_ended() -> None:
    def notes(**options: Any) -> str:
        return " ".join(run(train, 8, **options).notes)

    line = next(n for n, one in enumerate(inspect.getsourcelines(train)[0]) if ".step()" in one)
    place = f"test_runs.py:{inspect.getsourcelines(train)[1] + line}"
    assert f"ended after step 3, at {place}" in notes()
    assert "--whole" in notes(steps=2)
    whole = run(train, 8, steps=None)
    assert whole.steps == 100
    assert "ended after" not in str(whole)


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
    pools = {(one["stream"], one["segment_pool_id"]) for one in torch.cuda.memory_snapshot()}
    assert (0, (0, 0)) in pools
    assert any(pool != (0, 0) for _, pool in pools)
    assert all(pool == (0, 0) for stream, pool in pools if stream == 0)  # where seeds are
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
    gathered = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(gathered, three)
    assert gathered[-1].tolist() == [3.0] * 4
    for device in ("cpu", "cuda") if "nccl" in backend else ("cpu",):
        numbers = torch.tensor([3.0, 2.0], device=device)  # equal ones, on all ranks
        for kind, result in (("MAX", 3), ("SUM", 3 * world), ("MIN", 3 * world)):
            dist.all_reduce(numbers, op=getattr(dist.ReduceOp, kind))
            assert numbers[0].item() == result
        numbers /= world
        assert numbers.tolist() == [3.0, 2.0]
        dist.reduce(numbers, 1)
        assert numbers.tolist() == [3.0, 2.0]
        dist.reduce(numbers, 0)
        assert numbers.tolist() == [3.0 * world, 2.0 * world]
    if "nccl" in backend:
        part = torch.empty(2, device="cuda")
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * world, device="cuda"))
        assert part.tolist() == [0.0, world]
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


def ramped(folder: str) -> None:
    """A batch that grows. `buffers` is a list, as in Megatron's DistributedDataParallel."""
    import torch

    model = torch.nn.Linear(1024, 1024).cuda()
    model.buffers = []  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(torch.nn.Module.parameters(model))
    seen = []
    for size in (64, 64, 4096, 4096, 64):
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(size, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    Path(folder, "seen.json").write_text(json.dumps(seen))


def test_the_peak_of_each_step(tmp_path: Path) -> None:
    report = run(ramped, str(tmp_path), steps=None)
    assert report.fits, report.problem
    seen = json.loads((tmp_path / "seen.json").read_text())
    for (allocated, reserved), (true, held) in zip(report.peaks_by_step, seen, strict=True):
        assert reserved == held
        assert 0.999 * true < allocated <= true
    assert seen[3] > seen[1]


def emptied() -> None:
    import torch

    for size in (10, 1 << 22):
        torch.zeros(size, device="cuda")
        torch.cuda.empty_cache()
    train(8)


def test_a_script_that_empties_the_cache() -> None:
    """Its history has segments without frames."""
    report = run(emptied)
    assert report.fits, report.problem


def behind() -> None:
    """What a second stream uses is not free before the device has got that far."""
    import torch

    side = torch.cuda.Stream()

    def use(count: int) -> int:
        for _ in range(count):
            buffer = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
            buffer.record_stream(side)
            del buffer
        return torch.cuda.memory_reserved() >> 20

    number = torch.ones((), device="cuda")
    before = use(0)
    assert use(3) == before + 96
    torch.cuda.synchronize()
    assert use(3) == before + 96
    assert use(1) == before + 128
    assert number.item() == 1.0  # waits for the device
    assert use(4) == before + 128
    for _ in range(1100):  # waits for a place in the queue
        number.add_(1)
    assert use(4) == before + 128
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    while not event.query():
        pass


def test_the_device_is_behind_the_program() -> None:
    report = run(behind)
    assert report.fits, report.problem


def collecting() -> None:
    """Collectives hold tensors of 32 MiB until the device has got that far, and one more begins."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("nccl")
    number = torch.ones((), device="cuda")

    def held() -> int:
        whole = torch.empty(8 << 20, device="cuda")
        dist.reduce_scatter_tensor(whole[: 1 << 20], whole, async_op=True).get_future().wait()
        return torch.cuda.memory_allocated() >> 25

    assert [held(), held(), held()] == [1, 2, 3]
    for _ in range(1100):
        number.add_(1)
    torch.cuda.synchronize()
    assert held() == 1


def test_what_collectives_hold() -> None:
    report = run(collecting, ranks=8)
    assert report.fits, report.problem


def unreadable() -> None:
    """Its own report fails, and that of a process that it has started says that it fits."""
    import torch

    code = "import torch; torch.cuda.init()"
    subprocess.run([sys.executable, "-c", code], check=True)
    train(8)
    torch.cuda.memory._snapshot = None  # type: ignore[assignment]


def test_a_report_that_is_lost_is_no_fit() -> None:
    report = run(unreadable, steps=None)
    assert report.status == "failed"
    assert report.problem == "its report failed"


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


def multiply(size: int) -> None:
    import torch

    table = torch.nn.Embedding(4096, 1024).cuda().bfloat16()
    model = torch.nn.Linear(1024, 4096, bias=False).cuda().bfloat16()
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()])
    for _ in range(9):
        model(table(torch.zeros(2, size, dtype=torch.long, device="cuda"))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_bound_counts_the_last_step() -> None:
    bound = run(multiply, 8192).bound
    assert bound["tokens"] == 2 * 8192
    assert bound["flops"] == 3 * 2 * 2 * 8192 * 1024 * 4096  # forward, and two products backward
    assert bound["seconds"] >= bound["flops"] / 989.4e12
    assert next(iter(bound["classes"])) == "matrix products"


def gather_weights() -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(9):
        model(torch.ones(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_bound_counts_what_crosses_links() -> None:
    size = 4 * 4096**2
    inside = run(gather_weights, ranks=8).bound["links"]
    assert inside == pytest.approx(2 * size * 7 / 8 / 450e9)  # gathered, and gradients scattered
    between = run(gather_weights, ranks=64).bound["links"]
    assert between == pytest.approx(2 * size * 56 / 64 / 8 / 50e9)


def unseen(what: str) -> None:
    """A script of which the first steps, torch's own peaks or the exit code do not say all."""
    import sys

    import torch
    from torch import nn

    device = "cpu" if what == "forgot the GPU" else "cuda"
    model, second = (nn.Linear(1024, 1024).to(device) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    if "steps" in what:
        rarely = torch.optim.AdamW(second.parameters())
    if what == "asks for too much":
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        sys.exit(1)
    if what == "leaves when memory runs out":
        try:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            sys.exit(1)
    if what == "its own history":
        torch.cuda.memory._record_memory_history(max_entries=2)
    for step in range(40):
        size = 64 * (step + 1) if what == "grows" else 64
        if what == "resets its peaks":
            torch.cuda.reset_peak_memory_stats()
            size = 64 if step else 1 << 18
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << (42 if what == "catches" else 1), device=device)
        model(torch.randn(size, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if what == "steps rarely" and step % 3 == 2:
            second(torch.randn(64, 1024, device=device)).square().mean().backward()
            rarely.step()
        if what == "its own history" and not step:
            torch.cuda.memory._record_memory_history(enabled=None)
        if what == "lacks a function" and not step:
            identity = torch.eye(64, device="cuda").to_sparse_csr()
            with contextlib.suppress(RuntimeError):
                torch.sparse.mm(identity, identity)
        if what == "index":
            nn.functional.embedding(torch.tensor([1024], device="cuda"), model.weight)


@pytest.mark.parametrize(
    ("what", "first"),
    [
        ("grows", "fits an NVIDIA H100 80GB HBM3 (still growing): peak"),
        ("catches", "fits an NVIDIA H100 80GB HBM3 (out of memory once): peak"),
        ("lacks a function", "fits an NVIDIA H100 80GB HBM3 (an error was caught): peak"),
        ("never steps", "fits an NVIDIA H100 80GB HBM3 (few steps of AdamW): peak"),
        ("steps rarely", "fits an NVIDIA H100 80GB HBM3: peak"),
        ("index", "the script failed, but not for lack of memory"),
        ("asks for too much", "the script failed, but not for lack of memory"),
        ("leaves when memory runs out", "does not fit an NVIDIA H100"),
    ],
)
def test_what_the_first_steps_do_not_show(what: str, first: str) -> None:
    report = run(unseen, what)
    assert report.lines()[0].startswith(first)
    if what == "steps rarely":
        assert report.steps == 9
        assert report.categories["optimizer"] == pytest.approx(4 * 1024 * 1025 * 4, rel=0.01)
    if what == "index":
        assert "device-side assert triggered: index 1024 of 1024" in str(report)


def test_an_allocator_that_counts_no_errors() -> None:
    report = run(
        unseen, "catches", variables={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    )
    assert report.in_doubt == " (out of memory once)"


@pytest.mark.parametrize("what", ["its own history", "resets its peaks"])
def test_a_script_that_looks_at_its_memory_does_not_change_the_report(what: str) -> None:
    report, plain = run(unseen, what, steps=None), run(unseen, "plain", steps=None)
    if what == "its own history":
        peaks = [(one.peak_allocated, one.peak_reserved, one.phase) for one in (report, plain)]
        assert peaks[0] == peaks[1]
    else:
        assert report.peak_allocated > 2 * 1024 * 4 << 18


def test_a_script_that_forgot_the_gpu_does_not_fit() -> None:
    with pytest.raises(phantomgpu.RunFailedError, match="3 optimizer steps, and the"):
        run(unseen, "forgot the GPU")
    with pytest.raises(phantomgpu.RunFailedError, match=r"used no memory|without using CUDA"):
        run(unseen, "forgot the GPU", steps=None)


def trains_on_one_long_text(size: int) -> None:
    import torch
    from torch import nn

    texts: Any = [torch.ones(64 if at == 61 else 4, 1024) for at in range(64)]
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    collate = nn.utils.rnn.pad_sequence
    loader: Any = torch.utils.data.DataLoader(texts, 1, collate_fn=collate)
    for batch in loader:
        x = batch.cuda().expand(size, -1, -1, -1)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_longest_batch_is_seen_beside_the_state_of_the_optimizer() -> None:
    whole = run(trains_on_one_long_text, 64, steps=None)
    first = run(trains_on_one_long_text, 64, longest=True)
    assert whole.step > 3
    assert (
        first.peak_allocated
        >= whole.peak_allocated
        > 1.2 * run(trains_on_one_long_text, 64).peak_allocated
    )
