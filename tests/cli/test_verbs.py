"""The verbs that train nothing: plan, convert, schema, version; and how errors are said."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto import __version__
from stretto.cli.app import app
from stretto.cli.planning import packaged_run_file
from stretto.config.run import run_file_schema

Stretto = Callable[..., Any]

STATED = """\
max_duration: 2ep
data: {target: no.such:thing, num_samples: 1000, tokens_per_sample: 4}
optimizer: {target: no.such:Optimizer, lr: 0.1}
schedules: {lr: {Linear: {}}}
batch_size: {DoublingRamp: {start: 8, end: 32, over: 50%}}
"""


@pytest.fixture
def stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file that states the sizes of its data, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("stated.yaml").write_text(STATED)
    return Path("stated.yaml")


def test_version(stretto: Stretto) -> None:
    assert stretto("--version") == (0, f"stretto {__version__}\n", "")


def test_schema(stretto: Stretto) -> None:
    said = stretto("schema")
    assert json.loads(said.out) == run_file_schema()
    assert (said.code, said.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("0.1dur --to ep --max-duration 90ep", "9ep"),
        ("0.1dur --to ba --max-duration 90ep --samples 50000 --batch-size 128", "3519ba"),
        (
            "0.1dur --to ba --max-duration 90ep --samples 50000 --batch-size 128 --drop-last",
            "3510ba",
        ),
        ("2Mtok --to ep --tokens 1000000", "2ep"),
        ("1h --to dur --max-duration 10h", "0.1dur"),
    ],
)
def test_convert(arguments: str, answer: str, stretto: Stretto) -> None:
    assert stretto("convert", *arguments.split()) == (0, f"{answer}\n", "")


def test_plans_are_laid_over_each_other_on_a_page(stated: Path, stretto: Stretto) -> None:
    Path("other.yaml").write_text(stated.read_text())
    said = stretto("plan", stated, "other.yaml", "micro_batch_size=2", "--html", "plans.html")
    assert (said.code, said.out, said.err.splitlines()[-1]) == (0, "", "wrote plans.html")
    text = Path("plans.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    runs = json.loads(text)["runs"]
    assert [(run["name"], run["kind"]) for run in runs] == [("stated", "plan"), ("other", "plan")]
    assert ["micro batch size", "2"] in runs[1]["facts"]
    for change in (BY_NOISE, "max_duration=1h"):
        refused = stretto("plan", stated, change, "--html", "plans.html")
        assert refused.code == 2
        assert "cannot use --html" in refused.err
    assert stretto("plan", stated, "--json", "--html", "plans.html").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("0.1dur --to ba --max-duration 90ep --batch-size 8", "set dataset_num_samples"),
        ("0.1dur --to ba", "set max_training_duration"),
        ("1ep --to ba --samples 100", "set batch_size"),
        ("1ep --to tok --samples 100", "set dataset_num_tokens"),
        (
            "1ep --to ba --samples 100 --batch-size 0",
            "cannot use batch_size=0",
        ),
        ("1epoch --to ba", "write '1ep'"),
        ("1ep --to epoch", "there is no such unit"),
        ("1ep", "Missing option '--to'"),
        ("1ep --to ba --samples x", "--samples"),
    ],
)
def test_convert_refuses(arguments: str, message: str, stretto: Stretto) -> None:
    said = stretto("convert", *arguments.split())
    assert said.code == 2
    assert said.out == ""
    assert message in said.err
    assert "Traceback" not in said.err


def test_plan_prints_a_table(stated: Path, stretto: Stretto) -> None:
    said = stretto("plan", stated)
    assert said.code == 0
    assert said.out.startswith("run of 2ep: 126 batches, 2,000 samples")
    assert "8,000" in said.out, "tokens are counted"


def test_plan_takes_overrides(stated: Path, stretto: Stretto) -> None:
    assert (
        "run of 4ep: 32 batches"
        in stretto("plan", stated, "max_duration=4ep", "batch_size=125").out
    )


def test_plan_of_the_packaged_file(stretto: Stretto) -> None:
    assert stretto("plan").out == stretto("plan", packaged_run_file()).out
    assert "run of 1ep" in stretto("plan", "max_duration=1ep").out


def test_plan_as_json(stated: Path, stretto: Stretto) -> None:
    plan = json.loads(stretto("plan", stated, "--json").out)
    assert plan["num_batches"] == 126
    assert [stage["size"] for stage in plan["stages"]] == [8, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.yaml", "cannot read 'nowhere.yaml': no such file"),
        ("stated.yaml max_duration", "key=value"),
        ("stated.yaml max_duratoin=1ep", "did you mean 'max_duration'? (max_duratoin on the"),
        ("stated.yaml batch_size=5000 last_batch=drop", "write AtMost(policy, 1000)"),
        ("stated.yaml data.num_samples=null", "No module named 'no'"),
        ("stated.yaml --html plan.gif", "end it in .html"),
        ("stated.yaml --against runs/none", "cannot read runs/none/ledger.csv"),
        ("--against runs/none", "cannot read 'runs/none/run.yaml'"),
        ("stated.yaml max_duration=1h batch_size={0s:", "expected"),
        ("stated.yaml batch_size={0s:8,1m:16}", "'0s:8' has no value; write '0s: 8', with a space"),
        ("stated.yaml --fruit", "No such option"),
        ("stated.yaml max_duration=1e199ep --json", "(max_duration on the command line)"),
        (f"stated.yaml max_duration={10**300}ep", "(max_duration on the command line)"),
        (f"max_duration={10**300}ep", "(max_duration on the command line)"),
    ],
)
@pytest.mark.usefixtures("stated")
def test_plan_refuses(arguments: str, message: str, stretto: Stretto) -> None:
    said = stretto("plan", *arguments.split())
    assert said.code == 2
    assert said.out == ""
    assert message in said.err
    assert "Traceback" not in said.err


def test_each_mistake_is_a_line_of_its_own(stated: Path, stretto: Stretto) -> None:
    said = stretto("plan", stated, "seed=-1", "last_batch=kep")
    assert [line[:12] for line in said.err.splitlines()] == ["Error [confi", "cannot use s"]


def test_a_traceback_can_be_had(stated: Path) -> None:
    from stretto.cli import main
    from stretto.errors import ConfigError

    with pytest.raises(ConfigError, match="seed"):
        main(["plan", str(stated), "--traceback", "seed=-1"])


BY_NOISE = "batch_size={NoiseScale: {start: 8, maximum: 64}}"


def test_plan_of_a_run_that_decides_its_sizes(stated: Path, stretto: Stretto) -> None:
    said = stretto("plan", stated, BY_NOISE, "world_size=2").out
    assert said.startswith("batch sizes are decided during the run: NoiseScale(start=8, maximum=64")
    smallest, largest = said.split("if it stayed at the largest size:")
    assert "\nrun of 2ep: 250 batches, 2,000 samples on 2 ranks\n" in smallest
    assert "\nrun of 2ep: 32 batches, 2,000 samples on 2 ranks\n" in largest
    ends = json.loads(stretto("plan", stated, BY_NOISE, "--json").out)
    assert [ends[end]["num_batches"] for end in ("least", "largest")] == [250, 32]
    for option in (["--html", "plan.html"], ["--against", "."]):
        refused = stretto("plan", stated, BY_NOISE, *option)
        assert refused.code == 2
        assert f"cannot use {option[0]} for this run: its batch sizes" in refused.err
    assert "16 ranks" in stretto("plan", stated, BY_NOISE, "world_size=16").err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["plan", "--help"]])
def test_help(arguments: list[str], stretto: Stretto) -> None:
    said = stretto(*arguments)
    assert "plan" in said.out + said.err


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_verbs_without_a_model_import_no_torch(stated: Path) -> None:
    code = (
        "import sys\n"
        "from stretto.cli import main\n"
        "for line in ('plan', 'plan stated.yaml', 'convert 1ep --to ep', 'schema'):\n"
        "    try:\n"
        "        main(line.split())\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_python(code, stated.parent)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_seen_enough(stated: Path) -> None:
    code = "from stretto.cli import main; main(['schema'])"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" | head -1'],
        cwd=stated.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_the_page_on_security_names_every_verb() -> None:
    page = (Path(__file__).parents[2] / "docs" / "background" / "security.md").read_text("utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert any(f"`stretto {name}" in line.split("|")[1] for line in table), name


@pytest.mark.usefixtures("project")
def test_the_verbs_that_follow_a_folders_run_file_are_those_that_security_names(
    stretto: Stretto,
) -> None:
    code = (
        "from pathlib import Path\ndef size(now, current):\n    Path('ran').touch()\n    return 4"
    )
    Path("evil.py").write_text(code)
    Path("given").mkdir()
    run = Path("run.yaml").read_text()
    text = re.sub("batch_size: .*", "batch_size: {target: 'evil:size'}", run)
    Path("given", "run.yaml").write_text(text)
    for verb in (("report", "given"), ("inspect", "given")):
        stretto(*verb)
        assert not Path("ran").exists()
    stretto("plan", "--against", "given")
    assert Path("ran").exists()


@pytest.mark.parametrize("entry", ["-m stretto", "-Pc 'import stretto.cli as c; c.main()'"])
def test_a_folder_of_somebody_else_shadows_nothing_that_is_installed(
    entry: str, tmp_path: Path
) -> None:
    """`python -m` and `-c` put the working folder first; targets are found there all the same."""
    for name in ("numpy", "typer", "torch", "yaml", "pydantic"):
        (tmp_path / f"{name}.py").write_text("open('shadowed', 'w')\n")
    (tmp_path / "of_mine.py").write_text("def size(timer, current):\n    return 8\n")
    text = "max_duration: 2ep\nbatch_size: {target: of_mine:size}\n"
    text += "data: {target: stretto.examples.digits:Digits, num_samples: 63}\n"
    (tmp_path / "own.yaml").write_text(text)
    command = [sys.executable, *shlex.split(entry), "plan", "own.yaml"]
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(command, cwd=tmp_path, check=False, env=source, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not (tmp_path / "shadowed").exists()


def test_a_target_with_the_name_of_an_installed_module_is_to_be_renamed(
    stated: Path, stretto: Stretto
) -> None:
    Path("fractions.py").write_text("def size(timer, current):\n    return 8\n")
    said = stretto("plan", str(stated), "batch_size={target: fractions:size}")
    assert said.code == 2
    assert "rename" in said.err
    assert "fractions.py" in said.err


def test_a_plan_at_some_times(stretto: Stretto, stated: Path) -> None:
    said = stretto("plan", stated, "--at", "50%", "--at", "1ep", "--at", "100ba", "--at", "3000tok")
    assert said.out.splitlines() == [
        "     at  stage  batch size  in tokens  from batch  sample  token  epoch  of run      lr",
        " 0.5dur      3          32        128          94   1,000  4,000      1   50.0%    0.05",
        "    1ep      3          32        128          94   1,000  4,000      1   50.0%    0.05",
        "  100ba      3          32        128         100   1,192  4,768  1.192   59.6%  0.0404",
        "3000tok      2          16         64          79     760  3,040   0.76   38.0%   0.062",
    ]
    record = json.loads(stretto("plan", stated, "--at", "50%", "--json").out)[0]
    assert (record["at"], record["size"], record["tokens"]) == ("0.5dur", 32, 128)
    assert (record["first"]["batch"], record["values"]) == (94, {"lr": 0.05})
    assert stretto("plan", stated, "--at", "2ep").code == 2
    assert "leave one of them out" in stretto("plan", stated, "--at", "1ep", "--html", "a.html").err


FOLLOWED = """
max_duration: 100ba
data: {tokens_per_sample: 128}
optimizer: {target: "torch.optim:AdamW", lr: 1.0e-3}
schedules: {lr: {WSD: {decay: 20ba, warmup: 10ba, end: 0}}}
batch_size: {from_megatron: "0:8 160:16"}
micro_batch_size: 2
world_size: 2
"""


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file for Megatron, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("followed.yaml").write_text(FOLLOWED)
    return Path("followed.yaml")


def test_settings_of_an_engine_can_be_pasted(followed: Path, stretto: Stretto) -> None:
    said = stretto("plan", followed, "--to", "megatron")
    assert said.code == 0
    assert said.out.splitlines() == [
        "--train-iters=100",
        "--micro-batch-size=2",
        "--global-batch-size=16",
        "--lr-decay-style=constant",
        "--lr-warmup-iters=0",
        "--min-lr=0.0",
        "--lr=0.001",
        "--seq-length=128",
        "--dataloader-type=single",
    ]
    assert all(line.startswith("note: ") for line in said.err.splitlines())
    said = stretto("plan", followed, "--to", "bridge", "--json")
    assert json.loads(said.out)["train.global_batch_size"] == 16
    for part in (
        "warm-up ends at iteration 20 rather than 10",
        "begins to fall at iteration 91 rather than 81",
        "ends at 0.0005 rather than 0",
    ):
        assert part in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--at 5ba", "cannot use --to"),
        ("--html page.html", "cannot use --to"),
        ("--against folder", "cannot use --to"),
        ("micro_batch_size=3", "8 samples: it is not a multiple of 6"),
        ("batch_size=0sp:16,160sp:8", "let the batch size shrink"),
        ("micro_batch_size=auto", "micro_batch_size"),
        ("schedules.betas.0=0.5", "follow betas.0"),
        (BY_NOISE, "decided during the run"),
    ],
)
def test_what_an_engine_cannot_follow(
    arguments: str, message: str, followed: Path, stretto: Stretto
) -> None:
    extra = [arguments] if "=" in arguments else arguments.split()
    said = stretto("plan", followed, *extra, "--to", "bridge")
    assert (said.code, said.out) == (2, "")
    assert message in said.err
