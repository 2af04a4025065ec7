"""Every command that a page names is one that its program takes; others are errors.

`test_documents.py` runs what a page shows with its output. Here is what is dear, or needs a
cluster: its program, its options and its files are checked without running it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from tests.docs import pages
from tests.docs.pages import ROOT
from tests.docs.test_documents import COMMAND, differs
from tests.phantomgpu.test_runs import reason

PROGRAMS = ("stretto", "phantomgpu")
EVERYWHERE = ("--quiet", "--traceback")
INLINE = r"(stretto|phantomgpu) (?!cannot)[a-z-]+( |$)|pip install .|(make|torchrun|python) [^.,(=]"
ELSEWHERE = ("export", "chromium", "tune", "docker", "cat", "deepspeed")
"""Programs that are not of Python and not ours: nothing of theirs is checked."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def inline(text: str) -> list[str]:
    """The commands inside sentences of a text, which may leave arguments out."""
    codes = [code["code"] for code in pages.CODE.finditer(pages.prose(text))]
    return [one for one in codes if re.match(INLINE, one)]


def check_ours(program: str, arguments: list[str], *, is_whole: bool = True) -> None:
    """A verb of ours takes these arguments, and what it starts does, too."""
    app = importlib.import_module(f"{program}.cli" + ".app" * (program == "stretto")).app
    group: Any = typer.main.get_command(app)
    arguments = [one for one in arguments if program != "stretto" or one not in EVERYWHERE]
    verb, *given = arguments or ["--help"]
    if verb in ("--help", "--version"):
        return
    assert verb in group.commands, verb
    if is_whole:
        group.commands[verb].make_context(verb, list(given))
        if "--" in given:
            check(given[given.index("--") + 1 :])
    else:
        ours = given[: given.index("--")] if "--" in given else given
        known = {name for parameter in group.commands[verb].params for name in parameter.opts}
        assert {one for one in ours if one.startswith("--")} - known - {"--help"} == set()


def check_pip(arguments: list[str]) -> None:
    """What is installed is here with these extras, or is a name and a version."""
    verb, *wanted = arguments
    assert verb == "install"
    for one in (one for one in wanted if not one.startswith("-")):
        folder = re.fullmatch(r"(?P<path>\.[\w/]*)(\[(?P<extras>[\w,]+)\])?", one)
        path, extras = (
            (ROOT, Requirement(one).extras)
            if folder is None
            else (
                ROOT / folder["path"],
                set((folder["extras"] or "").split(",")) - {""},
            )
        )
        project = tomllib.loads((path / "pyproject.toml").read_text("utf-8"))["project"]
        assert extras <= set(project.get("optional-dependencies", ())), one


def check_launcher(arguments: list[str]) -> None:
    """torchrun knows its options; a program of ours knows its own."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    if options.no_python:
        check([options.training_script, *options.training_script_args])


def check_python(arguments: list[str]) -> None:
    """An example is here and has these options."""
    script, *options = arguments
    if script.startswith(("examples/", "bench/", "tools/", "tests/")):
        source = (ROOT / script).read_text("utf-8")
        names = [one for one in options if one.startswith("--")]
        assert [one for one in names if f'"{one.partition("=")[0]}"' not in source] == []


def check(words: list[str]) -> None:
    """A command is one that its program takes."""
    program, *arguments = words
    if program in PROGRAMS:
        check_ours(program, arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program == "make":
        assert [one for one in arguments if "=" not in one and one not in TARGETS] == []
    elif program == "torchrun":
        check_launcher(arguments)
    elif program.rpartition("/")[2] == "python" and arguments[:1] == ["-m"]:
        assert arguments[1] in ("pytest", "torch.distributed.run", "phantomgpu", "stretto")
    elif program.rpartition("/")[2] == "python":
        check_python(arguments)
    elif program in ("sbatch", "git", "accelerate"):
        assert [
            one for one in arguments if one.startswith("examples/") and not (ROOT / one).exists()
        ] == []
        if "torchrun" in arguments:
            check(arguments[arguments.index("torchrun") :])
    else:
        assert program in ELSEWHERE, f"nobody checks {program}"


WHOLE = [
    (str(path.relative_to(ROOT)), command)
    for path in pages.PAGES
    for command in dict.fromkeys(pages.commands(path.read_text("utf-8")))
]
INSIDE = [
    (str(path.relative_to(ROOT)), command)
    for path in pages.PAGES
    if path.parent.name != "decisions"  # they name what was decided against, too
    for command in dict.fromkeys(inline(path.read_text("utf-8")))
]


@pytest.mark.parametrize(("page", "command"), WHOLE, ids=[": ".join(one) for one in WHOLE])
def test_a_command(page: str, command: str) -> None:
    check(shlex.split(command, comments=True))


@pytest.mark.parametrize(("page", "command"), INSIDE, ids=[": ".join(one) for one in INSIDE])
def test_a_command_inside_a_sentence(page: str, command: str) -> None:
    program, *arguments = shlex.split(command.replace("...", ""))
    if program in PROGRAMS:
        check_ours(program, arguments, is_whole=False)
    elif program != "torchrun":
        check([program, *arguments])


@pytest.mark.parametrize(
    "command",
    [
        "stretto trian run.yaml",
        "stretto train --foldr a",
        "phantomgpu run --gpus h100 -- python train.py",
        "phantomgpu run --gpu h100 -- stretto trian",
        "pip install '.[plots]'",
        "pip install ./phantoms",
        "make tests",
        "torchrun --nproc 8 --no-python stretto train --foldr a",
        "python examples/absent.py",
        "nobody knows",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(command))


EXTRA = re.compile(r"^\| (?P<extras>`\w+`(?:, `\w+`)*) \|", re.MULTILINE)


def test_the_table_of_extras_is_that_of_the_project() -> None:
    table = pages.section("docs/index.md", "Install")
    named = {one for row in EXTRA.finditer(table) for one in re.findall(r"\w+", row["extras"])}
    assert named == EXTRAS - {"dev", "docs"}


PHANTOM = ("phantomgpu.md", "phantomgpu/time.md", "phantomgpu/ranks.md", "phantomgpu/questions.md")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize("name", PHANTOM)
def test_the_commands_of_phantomgpu_print_what_is_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)  # of torchrun
    (script, *_) = pages.blocks(pages.text_of("docs/phantomgpu.md"), "python")
    Path("train.py").write_text(script)
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    sizes["max_position_embeddings"] = 8192
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(".")
    for block in pages.blocks(pages.text_of(f"docs/{name}"), "console"):
        for shown in COMMAND.finditer(block):
            program, *arguments = shlex.split(shown["command"], comments=True)
            arguments = [sys.executable if one == "python" else one for one in arguments]
            command = [sys.executable, "-m", program, *arguments]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert done.returncode == 0, (shown["command"], done.stderr[-2000:])
            if shown["output"].strip():
                assert differs(shown["output"], done.stdout.strip()) is None


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no clone")
def test_a_clone_is_installed_in_an_empty_environment(tmp_path: Path) -> None:
    """As the pages say; the packages that it requires are those of this environment."""
    said = {command for _, command in WHOLE + INSIDE}
    clone, own = tmp_path / "clone", tmp_path / "own" / "bin"
    origin = ROOT.as_uri()
    subprocess.run(["git", "clone", "-q", "--depth", "1", origin, str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "own"], cwd=tmp_path, check=True)
    packages = next((tmp_path / "own/lib").glob("python3*/site-packages"))
    here = importlib.metadata.distribution("torch").locate_file("")
    (packages / "here.pth").write_text(f"{here}\n")
    for command in ("pip install ./phantom", "pip install .", "pip install '.[plot]'"):
        assert command in said
        pip = [str(own / "python"), "-m", *shlex.split(command), "--ignore-installed", "--no-deps"]
        subprocess.run(pip, cwd=clone, check=True)
        subprocess.run([str(own / "phantomgpu"), "gpus"], cwd=tmp_path, check=True)
    subprocess.run([str(own / "stretto"), "plan", "max_duration=1ep"], cwd=tmp_path, check=True)
