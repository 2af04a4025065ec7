"""Which GPU, what to do, and whether it grew."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import phantomgpu
from phantomgpu import GPUS, Answer, Report
from phantomgpu.cli import app
from phantomgpu.errors import PhantomError
from phantomgpu.files import write
from phantomgpu.gpus import GIB, find_gpu
from phantomgpu.questions import GREW, cheapest, check, command_line, table, why
from phantomgpu.report import build_report
from stretto.memory import phantom

NEEDS = 30 * GIB


def made(gpu: str = "h100", peak: int = NEEDS, **more: Any) -> Report:
    memory = int(find_gpu(gpu).memory * GIB)
    known: dict[str, Any] = {"status": "fits" if peak < memory else "does not fit", "torch": "2.13"}
    known |= {"gpu": gpu, "memory": memory, "context": 0, "peak_allocated": peak}
    return Report(**{**known, "peak_reserved": peak, **more})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Each run needs as much; those with other settings of the allocator a GiB less."""
    seen: list[dict[str, Any]] = []

    def run(
        script: Any, *, gpu: str, variables: dict[str, str] | None = None, **how: Any
    ) -> Report:
        seen.append({"script": script, "gpu": gpu, "variables": variables, **how})
        return made(gpu, peak_reserved=NEEDS - GIB * (variables is not None))

    monkeypatch.setattr("phantomgpu.questions.run", run)
    return seen


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_row_for_each_kind_and_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(command: Any, *, gpu: str, ranks: int, argument: str, **how: Any) -> Answer:
        assert (command, argument) == (["train.py", "--lr", "1"], "--size")
        del how
        return Answer(8 * ranks, {8 * ranks: made(gpu)})

    monkeypatch.setattr("phantomgpu.questions.search", search)
    command = ["train.py", "--lr", "1"]
    rows = table(command, gpus=["L4", "h100"], argument="--size", ranks=(1, 8))
    found = [(row["gpu"], row["ranks"], row["largest"]) for row in rows]
    assert found == [("l4", 1, 8), ("l4", 8, 64), ("h100", 1, 8), ("h100", 8, 64)]
    asked = ("--gpu", "l4,h100", "--argument", "--size", "--ranks", "1,8")
    said = ask("table", *command, *asked).output
    assert "h100      8       64" in said
    assert ask("table", *asked, "--", *command).output == said
    assert json.loads(ask("table", *command, *asked, "--json").output) == rows
    with pytest.raises(phantomgpu.UnknownGPUError):
        table(command, gpus=["l4", "abacus"], argument="--size")


def test_the_smallest_kinds_that_fit(runs: list[dict[str, Any]]) -> None:
    rows = cheapest(["train.py"], ranks=1)
    names = [row["gpu"] for row in rows]
    fitting = sorted((one.memory, name) for name, one in GPUS.items() if one.memory > 31)
    assert len(rows) == 3
    assert [GPUS[name].memory for name in names] == [memory for memory, _ in fitting[:3]]
    assert len(runs) <= 5  # kinds without room for the allocated bytes are not run
    said = ask("cheapest", "train.py", "--lr", "1", "--gpu", "t4,a100-80,h100")
    assert said.exit_code == 0
    assert runs[-1]["script"] == ["train.py", "--lr", "1"]
    assert "t4" not in said.output
    assert "30.00 GiB" in said.output
    none = ask("cheapest", "train.py", "--gpu", "t4,l4")
    assert (none.exit_code, "fits no kind" in none.output) == (3, True)


def test_advice_is_tried_or_computed(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    sizes = {"activations": 8 * GIB, "optimizer": 4 * GIB, "parameters": 2 * GIB}
    again = {"script": ["python", "x.py"], "gpu": "h100", "folder": str(Path.cwd())}
    report = asdict(made(categories=sizes, again=again)) | {"fits": True}
    assert {one.how for one in why(report)} == {"computed"}
    assert not runs
    advice = why(report, rerun=True)
    assert [one.saves for one in advice] == sorted((one.saves for one in advice), reverse=True)
    assert {one.how for one in advice} == {"tried", "computed"}
    tried = [one for one in advice if one.how == "tried"]
    assert len(tried) == len(runs) == 2
    assert {one.saves for one in tried} == {GIB}
    assert any("expandable_segments" in run["variables"]["PYTORCH_CUDA_ALLOC_CONF"] for run in runs)
    computed = {one.text.partition(":")[0]: one.saves / GIB for one in advice}
    assert computed["activation checkpointing"] == 8
    assert computed["8-bit Adam"] == 3
    assert computed["FSDP2 over 8 ranks"] == 6 * 7 / 8
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert "computed    8.00 GiB  activation checkpointing" in ask("why", file).output
    assert json.loads(ask("why", file, "--json").stdout)[0]["saves"] == 8 * GIB
    assert len(runs) == 2


def test_a_report_that_why_cannot_use(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    huge = f'{{"categories": {{"logits": {"9" * 400}}}}}'
    texts = {"{": "report", "[]": "report", '{"categories": {}}': "bytes", huge: "bytes"}
    for text, word in texts.items():
        file.write_text(text)
        assert f"no {word}" in str(ask("why", file).exception)
    again = {"folder": "/elsewhere", "script": ["true"], "gpu": "h100"}
    report = asdict(made(categories={"activations": 1}, again=again)) | {"fits": True}
    with pytest.raises(phantomgpu.PhantomError, match="/elsewhere"):
        why(report, rerun=True)
    assert why({**report, "again": {}, "categories": {"activations": GIB}})
    with pytest.raises(phantomgpu.PhantomError, match="names none"):  # of a function
        why({**report, "again": {}}, rerun=True)


def test_a_peak_is_held_against_its_baseline(
    runs: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peak.json"
    asked = ("check", "--gpu", "h100", "--baseline", file, "train.py")
    first = ask(*asked)
    assert (first.exit_code, "baseline was written" in first.output) == (0, True)
    assert "peak as in the baseline" in ask(*asked).output
    now = json.loads(file.read_text())
    file.write_text(json.dumps({**now, "peak_allocated": NEEDS - 3 * GIB, "torch": "2.12"}))
    grown = ask(*asked)
    assert grown.exit_code == GREW
    assert "peak grew by 3.00 GiB since the baseline; torch is 2.13 and was 2.12" in grown.output
    assert ask(*asked, "--tolerance", "4GiB").exit_code == 0
    assert json.loads(ask(*asked, "--json").output)["grew"] == 3 * GIB
    assert ask(*asked, "--update").exit_code == 0
    assert json.loads(file.read_text()) == now
    assert len(runs) == 6
    with pytest.raises(phantomgpu.PhantomError, match="cannot compare: gpu"):
        check(["train.py"], gpu="a100-80", baseline=file)
    file.write_text("[]")
    with pytest.raises(phantomgpu.PhantomError, match="no baseline"):
        check(["train.py"], gpu="h100", baseline=file)
    report = made(decides=("train.py:3",))
    monkeypatch.setattr("phantomgpu.questions.run", lambda *_, **__: report)
    assert "depends on values" in check(["train.py"], gpu="h100").line()


NOTED: dict[str, Any] = {
    "notes": ("the script ran out of memory",),
    "doubts": ("out of memory once",),
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has a note."""

    def run(script: Any, *, gpu: str, **how: Any) -> Report:
        del script, how
        return made(gpu, **NOTED)

    def search(script: Any, *, gpu: str, **how: Any) -> Answer:
        del script, how
        return Answer(8, {8: made(gpu, **NOTED)})

    monkeypatch.setattr("phantomgpu.questions.run", run)
    monkeypatch.setattr("phantomgpu.questions.search", search)


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize(
    "words",
    [
        "cheapest train.py --gpu h100,h200",
        "table train.py --gpu h100,h200 --argument --size",
        "check train.py --gpu h100",
        "why report.json",
    ],
)
def test_each_face_has_the_notes_of_its_reports(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = asdict(made(categories={"activations": GIB}, **NOTED)) | {"fits": True}
    Path("report.json").write_text(json.dumps(report))
    said = ask(*words.split()).stdout
    assert said.count("note: the script ran out of memory") == 1
    found = json.loads(ask(*words.split(), "--json").stdout)
    for row in found if isinstance(found, list) else [found]:
        assert row["notes"] == [*NOTED["notes"]]


def test_a_note_of_some_rows_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(script: Any, *, gpu: str, **how: Any) -> Report:
        del script, how
        return made(gpu, notes=("of all", *["of one"] * (gpu == "h200")))

    monkeypatch.setattr("phantomgpu.questions.run", run)
    said = ask("cheapest", "train.py", "--gpu", "h100,h200,b200").output
    assert "  note: of all\n  note of row 2: of one\n" in said


def test_kinds_that_torch_has_no_code_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(script: Any, *, gpu: str, **how: Any) -> Report:
        del script, how
        kind, facts = find_gpu(gpu), {"status": "fits", "torch": "2.13.0+cu130"}
        memory = int(kind.memory * GIB)
        facts |= {"peak_allocated": 11 * GIB, "peak_reserved": 11 * GIB}  # type: ignore[dict-item]
        return build_report(facts, kind, gpu=gpu, memory=memory, context=0, ranks=1)

    monkeypatch.setattr("phantomgpu.questions.run", run)
    rows = cheapest(["train.py"])
    assert len(rows) == 3
    assert all(GPUS[row["gpu"]].capability >= (7, 5) for row in rows)
    assert all("no code for p100-12," in row["notes"][-1] for row in rows)
    with pytest.raises(PhantomError, match="no code for v100-32; use"):
        cheapest(["train.py"], gpus=["v100-32"])


def test_a_run_that_allocated_nothing_is_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phantomgpu.questions.run", lambda *_, **__: made(peak=0))
    file = tmp_path / "peak.json"
    for update in (False, True):
        with pytest.raises(PhantomError, match="used no memory"):
            check(["train.py"], gpu="h100", baseline=file, update=update)
    assert not file.exists()
    file.write_text(json.dumps({"peak_allocated": 0, "torch": "2.13"}))
    monkeypatch.setattr("phantomgpu.questions.run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(PhantomError, match="no baseline"):
        check(["train.py"], gpu="h100", baseline=file)


@pytest.mark.parametrize(
    "again",
    [
        {"script": ["bash", "-c", "touch PWNED"], "folder": "HERE", "gpu": "h100"},
        {"script": ["echo", "\x1b[2J"], "folder": "HERE", "gpu": "h100", "args": ["-x"]},
        {"script": "touch PWNED", "folder": "HERE", "gpu": "h100"},
        {"script": [], "folder": "HERE", "gpu": "h100"},
        {"script": ["touch", "PWNED"], "gpu": "h100"},
        {"script": ["touch", "PWNED"], "folder": "HERE", "gpu": 3},
    ],
)
def test_a_report_runs_nothing_unasked(
    again: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr("phantomgpu.questions.run", lambda script, **_: seen.append(script))
    again = {name: str(tmp_path) if one == "HERE" else one for name, one in again.items()}
    report = {"categories": {"activations": GIB}, "peak_reserved": 1, "fits": True, "ranks": 1}
    Path("report.json").write_text(json.dumps({**report, "again": again}))
    said = ask("why", "report.json")
    assert not seen
    if said.exception is None:  # it is as `run` writes it
        assert f"--rerun to try settings of the allocator, which runs: cd {tmp_path}" in said.stderr
        assert "bash -c 'touch PWNED'" in said.stderr
    else:
        assert isinstance(said.exception, PhantomError)
        assert isinstance(ask("why", "report.json", "--rerun").exception, PhantomError)
        assert not seen


def test_the_command_of_a_report_is_safe_to_print() -> None:
    again = {"script": ["echo", "\x1b[2J\n", "a b"], "folder": "/x y", "gpu": "h100"}
    line = command_line({"peak_reserved": 1, "fits": True, "again": again})
    assert line == "cd '/x y' && echo '\\x1b[2J\\n' 'a b'"


@pytest.mark.long
def test_a_command_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = phantom.setup_problem()
    if missing is not None:
        pytest.skip(missing)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch\nm = torch.nn.Linear(4096, 4096).cuda()\n"
        "o = torch.optim.AdamW(m.parameters())\n"
        "for _ in range(4):\n"
        "    m(torch.randn(1024, 4096, device='cuda')).sum().backward()\n    o.step()\n"
    )
    done = ask("run", "--gpu", "l4", "--json", "r.json", "--quiet", "train.py")
    assert done.exit_code == 0, done.output
    assert "tried  " in ask("why", "r.json", "--rerun").output
    assert ask("check", "--gpu", "l4", "train.py").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(PhantomError, match="cannot write /dev/full: No space left"):
        write(Path("/dev/full"), "{}")
