"""`stretto branch`: it trains the same samples at several sizes, and changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.cli.branching import smoothed
from stretto.config.run import read_run_file
from stretto.run_folder import metrics_lines

Stretto = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("trained")

PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

SEEN = []


class Points(TensorDataset):
    def __init__(self, count=200, width=3, noise=1.0):
        chance = torch.Generator().manual_seed(1)
        inputs = torch.randn(count, width, generator=chance)
        weight = torch.randn(width, 1, generator=chance) / width**0.5
        outputs = inputs @ weight + noise * torch.randn(count, 1, generator=chance)
        super().__init__(inputs, outputs, torch.arange(count))


class Line(nn.Module):
    def __init__(self, width=3, drop=0.1):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1))
        self.drop = nn.Dropout(drop)


def stream(count=200):
    for row in zip(*Points(count).tensors):
        yield [one[None] for one in row]


class Stream:
    def __iter__(self):
        return stream()


def loss(model, batch):
    SEEN.extend(batch[2].tolist())
    return nn.functional.mse_loss(model.drop(batch[0]) @ model.weight, batch[1])


def steep(size):
    return 1.0 if size == 4 else 1e30
"""
RUN = """\
max_duration: 4ep
model: {target: "branch_project:Line"}
data: {target: "branch_project:Points"}
loss: {target: "branch_project:loss"}
optimizer: {target: "torch.optim:AdamW", lr: 0.02}
schedules: {lr: {Cosine: {warmup: 5%}}}
batch_size: 4
last_batch: carry
rule: {sqrt: 4}
checkpoint: {every: 25%, keep: 9}
evaluate: {every: 50%, data: {target: "branch_project:Points"}}
log: {every: 1ba, loggers: []}
"""
BRANCH = ("branch", "runs/a", "--at", "25%,50%", "--sizes", "1x,2x,16", "--for", "10%")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended."""
    folder = tmp_path_factory.mktemp("branching")
    (folder / "branch_project.py").write_text(PROJECT)
    (folder / "run.yaml").write_text(RUN)
    path = list(sys.path)
    with contextlib.chdir(folder), contextlib.suppress(SystemExit):
        sys.path.insert(0, str(folder))
        main(["train", "run.yaml", "--folder", "runs/a", "--quiet"])
    sys.path[:] = path
    sys.modules.pop("branch_project", None)
    return folder


@pytest.fixture
def trained(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of it, to work in."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("branch_project", None)
    yield tmp_path
    sys.modules.pop("branch_project", None)


def digests(folder: Path) -> dict[Path, tuple[str, int]]:
    return {
        path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def results(folder: str = "runs/a-branches") -> dict[str, dict[str, float]]:
    """The results by the names of the branches' folders."""
    files = sorted(Path(folder).glob("*/branch.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in files}


def losses(folder: str = "runs/a-branches") -> dict[str, float]:
    """The losses by the names, without what stands for the question."""
    return {name.rpartition("-")[0]: one["loss"] for name, one in results(folder).items()}


def seen() -> list[int]:
    found: list[int] = sys.modules["branch_project"].SEEN
    copy = found[:]
    found.clear()
    return copy


def test_prints_the_largest_size_writes_its_plan_and_leaves_the_run_alone(stretto: Stretto) -> None:
    before = digests(Path("runs/a"))
    said = stretto(*BRANCH, "--seeds", 2, "--tolerance", 0.5)
    assert (said.code, said.err) == (0, "")
    assert digests(Path("runs/a")) == before
    cost, *lines = said.out.splitlines()
    assert cost.startswith("12 branches to train: 1,264 samples (158% of the run), 0:")
    assert [line.split()[:2] for line in lines[1:4]] == [["25%", "4"], ["25%", "8"], ["25%", "16"]]
    assert lines[4].startswith("25%: 16 (not crossed; 90% interval ")
    assert "25%: 6 steps of 16 show the switch more than the size" in lines
    assert "constant, 16: no growth is shown" in said.out
    assert "12 of 12 branches are done: 1,264 samples (158% of the run), " in said.out
    assert lines[-2].startswith("seconds saved here: ")
    planned = Path("runs/a-branches/run.yaml")
    assert (
        read_run_file(planned).batch_size == read_run_file("run.yaml", ["batch_size=16"]).batch_size
    )
    trained = stretto("train", planned, "max_duration=1ep", "--folder", "runs/b")
    assert trained.code == 0
    assert "13 batches of 16" in trained.out


def test_branches_see_the_same_samples_in_the_same_order(stretto: Stretto) -> None:
    stretto(
        "train",
        "run.yaml",
        "max_duration=2ep",
        "schedules={}",
        "evaluate=[]",
        "--folder",
        "runs/again",
    )
    orders = [seen()[200:360]]
    options = ("branch", "runs/a", "--at", "25%", "--for", "20%", "--seeds", "2")
    assert stretto(*options, "--sizes", "4,8,16").code == 0
    both = seen()
    for _ in range(2):
        each = list[list[int]]()
        for size in (4, 8, 16):
            each.append(both[:160])
            both = both[160 + size :]
        assert each[0] == each[1] == each[2]
        orders.append(each[0])
    assert both == []
    assert orders[0] == orders[1], "the first order is that of the run"
    assert orders[2] != orders[1]


def test_the_branch_with_the_size_of_the_run_is_the_run(stretto: Stretto) -> None:
    stretto(*BRANCH, "--seeds", 1)
    lines = [line for line in metrics_lines(Path("runs/a")) if "loss" in line]
    run = [(int(line["sp"]) - 4, line["loss"]) for line in lines]
    # From the middle of the branch, at sample 248, to its end, and one batch more.
    expected = smoothed(run, 248, 296)
    assert losses()["000000000200-4-0"] == pytest.approx(expected, rel=1e-12)
    plain = json.loads(stretto(*BRANCH, "--seeds", 1, "--json").out)
    tried = plain["25%"]["tried"]
    assert tried[0] | {"loss": 0} == {"size": 4, "loss": 0, "excess": 0, "reach": None}
    assert tried[0]["loss"] == pytest.approx(expected, rel=1e-12)
    assert plain["plan"]["0%"] in (4, 8, 16)
    assert (plain["done"], plain["missing"]) == (6, [])


def test_killed_it_goes_on_branch_by_branch(trained: Path, stretto: Stretto) -> None:
    whole = stretto(*BRANCH, "--seeds", 2, "--folder", "whole")
    command = [sys.executable, "-m", "stretto", *BRANCH, "--seeds", "2"]
    process = subprocess.Popen(command, cwd=trained, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while len(results()) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    process.wait()
    kept = digests(Path("runs/a-branches"))
    done = results()
    assert 2 <= len(done) < 12
    again = stretto(*BRANCH, "--seeds", 2)
    assert again.code == 0
    assert losses() == losses("whole")
    after = digests(Path("runs/a-branches"))
    assert all(after[path] == kept[path] for path in kept if path.name == "branch.json")

    def table(said: Any) -> list[str]:
        return [line.rpartition(" ")[0] for line in said.out.splitlines() if "+0" in line]

    assert table(again) == table(whole)


def test_a_budget_stops_it_and_it_says_what_is_missing(stretto: Stretto) -> None:
    said = stretto(*BRANCH, "--seeds", 1, "--most", "0.000001sec")
    assert said.code == 1
    assert "25%: not known yet" in said.out
    assert "0 of 6 branches are done: 0 samples" in said.out
    assert "missing: 25% with 4 (order 0), 25% with 8" in said.out
    assert not Path("runs/a-branches/run.yaml").exists()
    assert stretto(*BRANCH, "--seeds", 1, "--most", "1h").code == 0


def test_results_of_other_settings_are_kept_and_do_not_count(stretto: Stretto) -> None:
    stretto(*BRANCH, "--seeds", 1)
    before = results()
    stretto(*BRANCH, "--seeds", 1, "optimizer.lr=0.03")
    after = results()
    assert before.items() < after.items()
    assert len(after) == 2 * len(before)
    assert "0 branches to train" in stretto(*BRANCH, "--seeds", 1).out


def test_a_size_that_diverges_is_beyond(stretto: Stretto) -> None:
    steep = ("rule={target: 'branch_project:steep'}", "--seeds", 1)
    assert "25%: 4 (crossed near 4; one order, so no interval)" in stretto(*BRANCH, *steep).out
    said = stretto(*BRANCH[:5], "8,16", *BRANCH[6:], *steep)
    assert said.code == 2
    assert "batches of 8, the smallest, diverged at 25%" in said.err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--at", "38%"], "no checkpoint is within 5% of 38%; there are 25%, 50%, 75%, 100%"),
        (["--at", "100%"], "the run ends before"),
        (["--at", "50%,50%"], "has a point twice"),
        (["--sizes", "2,4"], "add micro_batch_size=2"),
        (["--sizes", "0.3x,1x"], "is no whole batch size"),
        (["--sizes", "4"], "one size cannot be compared"),
        (["--for", "2%"], "write --for 8%, or smaller sizes"),
        (["--seeds", "0"], "write --seeds 3"),
        (["--tolerance", "nan"], "write --tolerance 0.01"),
        (["rule=null"], "rule={sqrt: 64}"),
        (["schedules={lr: {Cosine: {warmup: 10ba}}}"], "lr reads batches"),
        (["max_duration=200ba"], "max_duration reads batches"),
        (["batch_size=8"], "write --sizes"),
        (["last_batch=drop"], "add last_batch=carry"),
        (["loading.shuffle=false"], "write --seeds 1"),
        (["optimizer.lr=1.0", "nothing=1"], "nothing"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refuses_before_it_trains(stretto: Stretto, options: list[str], word: str) -> None:
    given = dict(zip(BRANCH[2::2], BRANCH[3::2], strict=True))
    named = dict(zip(options[::2], options[1::2], strict=True)) if options[0][0] == "-" else {}
    rest = ["micro_batch_size=4", *([] if named else options)]
    said = stretto(
        "branch", "runs/a", *rest, *[t for pair in (given | named).items() for t in pair]
    )
    assert said.code == 2
    assert word in said.err
    assert not Path("runs/a-branches").exists()


def test_a_rule_that_the_run_did_not_follow_must_leave_its_own_rate(stretto: Stretto) -> None:
    file = Path("runs/a/run.yaml")
    file.write_text(file.read_text().replace("rule:\n  SquareRootRule:\n    reference: 4\n", ""))
    assert read_run_file(file).rule is None
    assert "no rule says" in stretto(*BRANCH).err
    assert "write 4 in the rule" in stretto(*BRANCH, "rule={sqrt: 8}").err
    assert stretto(*BRANCH, "rule={sqrt: 4}", "--seeds", "1").code == 0


def test_refuses_a_run_without_a_run_file_and_several_ranks(
    stretto: Stretto, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "it has no run.yaml" in stretto("branch", "runs", "--at", "50%").err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "there are 2 ranks" in stretto(*BRANCH).err
    monkeypatch.delenv("WORLD_SIZE")
    shutil.rmtree("runs/a/checkpoints")
    assert "it has no checkpoint" in stretto(*BRANCH).err


def test_by_default_all_branches_take_a_quarter_of_the_run(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "max_duration=8ep", "--folder", "runs/l")
    said = stretto("branch", "runs/l", "--at", "25%,50%", "--sizes", "1x,2x", "--seeds", "2")
    assert said.out.startswith("8 branches to train: 304 samples (19% of the run), ")
    assert said.out.count("of the run)") == 2
    sizes = ("--sizes", "1x,16x", "--seeds", "3")
    assert "fewer than 4 times 64; write --for 32%" in stretto(*BRANCH[:4], *sizes).err


@pytest.mark.long
def test_two_processes_share_the_branches(trained: Path, stretto: Stretto) -> None:
    stretto(*BRANCH, "--seeds", 2, "--folder", "whole")
    command = [sys.executable, "-m", "stretto", *BRANCH, "--seeds", "2"]
    process = subprocess.Popen(command, cwd=trained, stdout=subprocess.DEVNULL)
    stretto(*BRANCH, "--seeds", 2)
    process.wait()
    assert stretto(*BRANCH, "--seeds", 2).out.startswith("0 branches to train: 0 samples")
    assert losses() == losses("whole")


def test_sizes_are_multiples_of_the_run_s_own_at_each_point(stretto: Stretto) -> None:
    stretto("train", "run.yaml", "batch_size={0ep: 4, 2ep: 8}", "--folder", "runs/r")
    said = stretto("branch", "runs/r", "--at", "25%,75%", "--sizes", "1x,2x", "--for", "10%")
    rows = [line.split() for line in said.out.splitlines()]
    sizes = [row[:2] for row in rows if row[0] in ("25%", "75%")]
    assert sizes == [["25%", "4"], ["25%", "8"], ["75%", "8"], ["75%", "16"]]


def test_data_of_a_single_order_have_no_interval(stretto: Stretto) -> None:
    data = "data={target: 'branch_project:Stream', num_samples: 200}"
    stretto("train", "run.yaml", data, "--folder", "runs/s")
    one = ("branch", "runs/s", "--at", "50%", "--sizes", "1x,2x", "--for", "10%")
    assert "write --seeds 1" in stretto(*one).err
    assert "one order, so no interval" in stretto(*one, "--seeds", 1).out


def test_muon(stretto: Stretto) -> None:
    muon = ("optimizer={target: torch.optim:Muon, lr: 0.01}", "checkpoint={every: 25%, keep: 9}")
    stretto("train", "run.yaml", *muon, "--folder", "runs/m")
    said = stretto("branch", "runs/m", *BRANCH[2:], "--seeds", 2)
    assert said.code == 0
    assert all(map(math.isfinite, losses("runs/m-branches").values()))


def test_the_smoothed_loss_has_no_lag() -> None:
    """Of weights that improve evenly, batches of every size show the same mean."""
    means = {
        size: smoothed([(at, 5 - 0.01 * at) for at in range(0, 129, size)], 64, 128)
        for size in (1, 8, 32)
    }
    assert list(means.values()) == pytest.approx([5 - 0.96] * 3)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "rate"), [("AdamW", 0.003), ("Muon", 0.0012)])
def test_a_ramp_where_the_critical_size_grows_and_a_constant_where_it_does_not(
    stretto: Stretto, kind: str, rate: float
) -> None:
    """Far from the optimum every step counts; at the floor of the noise, only samples do."""
    options = ("max_duration=6144sp", "batch_size=8", "rule={sqrt: 8}", "schedules={}")
    data = "data={target: 'branch_project:Points', count: 8192, width: 64, noise: 0.5}"
    model = "model={target: 'branch_project:Line', width: 64, drop: 0.0}"
    optimizer = f"optimizer={{target: 'torch.optim:{kind}', lr: {rate}, weight_decay: 0.0}}"
    keep = ("checkpoint={every: 5%, keep: 20}", "evaluate=[]", "log={every: 20%, loggers: []}")
    stretto("train", "run.yaml", *options, data, model, optimizer, *keep, "--folder", "runs/g")
    branches = ("branch", "runs/g", "--sizes", "1x,2x,4x", "--for", "5%", "--seeds", "3")
    grows = stretto(*branches, "--at", "5%,50%").out
    assert "batch_size: {0%: 8, 50%: 32}" in grows
    same = stretto(*branches, "--at", "50%,75%").out
    assert "constant, " in same, same


def test_nothing_is_written_into_a_run_or_over_a_file_of_the_user(stretto: Stretto) -> None:
    before = digests(Path("runs/a"))
    said = stretto(*BRANCH, "--seeds", 1, "--folder", "runs/a")
    assert (said.code, "runs/a is a run" in said.err) == (2, True)
    assert digests(Path("runs/a")) == before
    Path("mine").mkdir()
    Path("mine/run.yaml").write_text("seed: 1\n")
    said = stretto(*BRANCH, "--seeds", 1, "--folder", "mine")
    assert (said.code, "name a new file" in said.err) == (2, True)
    assert Path("mine/run.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize("kind", ["lock", "result"])
def test_a_branch_that_cannot_be_kept_says_why_in_one_line(kind: str, stretto: Stretto) -> None:
    """A lock that cannot be opened is not that of another process."""
    stretto(*BRANCH, "--seeds", 1)
    place = next(Path("runs/a-branches").glob("*-0-*"))
    (place / "branch.json").unlink()
    if kind == "lock":
        (place / "run.lock").unlink()
        (place / "run.lock").symlink_to("/nowhere/else")
    else:
        (place / "branch.json").mkdir()
    said = stretto(*BRANCH, "--seeds", 1)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert ("link" if kind == "lock" else "directory") in said.err
