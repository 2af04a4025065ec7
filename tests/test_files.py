"""Who opens a path that it is given, and who takes one away: one opener and one writer, by name.

A path that a user, a run folder or another machine names may lead to a pipe, a device, a link or a
file of 100 GB. `_location` opens it; what else reads or writes a file stands here with a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "stretto"

MODES = {*"rwxab", *(a + b for a in "rwxa" for b in "b+t"), "r+b", "w+b", "x+b", "a+b"}
PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
LIBRARIES = {
    *(
        "np.load",
        "np.loadtxt",
        "np.genfromtxt",
        "np.fromfile",
        "np.memmap",
        "np.save",
        "np.savetxt",
    ),
    *("torch.load", "torch.save", "torch.from_file", "numpy.load", "numpy.memmap", "io.open"),
    *("os.open", "os.fdopen", "os.mkfifo", "tempfile.NamedTemporaryFile", "tempfile.mkstemp"),
    *("safe_open", "save_file", "load_file", "figure.savefig", "pd.read_csv", "read_csv"),
    *(
        "FileIO",
        "io.FileIO",
        "ZipFile",
        "tarfile.open",
        "gzip.open",
        "codecs.open",
        "runpy.run_path",
    ),
}
REMOVERS = {"unlink", "rmdir", "rmtree", "remove", "removedirs", "move", "replace", "rename"}

OPENS: dict[tuple[str, str], str] = {
    ("_location.py", "open_plain"): "the opener",
    ("_location.py", "_descriptor"): "the opener",
    ("checkpoint/reading.py", "__init__"): "a file whose size and kind the manifest has proved",
    ("checkpoint/parts.py", "save_plain"): "a file that `open_plain` has just made",
    ("checkpoint/writing.py", "synchronize"): "it reads nothing, and does not wait for a pipe",
    ("cli/app.py", "main"): "the null device",
    ("cli/terminal.py", "drop_output"): "the null device",
    ("cli/terminal.py", "open_standard_files"): "the null device",
    ("memory/limits.py", "_read"): "files of the kernel and of its control groups",
    ("report/page/__init__.py", "build"): "parts of the page, in the package",
    ("report/pictures.py", "_save"): "into a file that `replacing` has opened",
    ("run_folder.py", "parsed_ledger"): "lines, and no path",
    ("runtime/out_of_memory.py", "peak_memory"): "a file of the kernel",
}
TAKES_AWAY: dict[tuple[str, str], str] = {
    ("_location.py", "replacing"): "a file of a name of its own",
    ("checkpoint/formats.py", "export_weights"): "a folder of a name of its own",
    ("checkpoint/writing.py", "abandon_checkpoint"): "what this process has begun",
    ("checkpoint/writing.py", "begin_checkpoint"): "what a kill has left under the name",
    ("checkpoint/writing.py", "delete_checkpoint"): "for `keep`",
    ("checkpoint/writing.py", "finish_checkpoint"): "the folder that it has made",
    ("checkpoint/writing.py", "remove"): "for the others here",
    ("data/lengths.py", "_counted"): "a file that it has locked, or of a name of its own",
    ("run_folder.py", "set_aside"): "renamed, to a name that is free",
    ("training/checkpointing/copies.py", "fetch"): "a folder of a name of its own",
    ("training/checkpointing/copies.py", "finish"): "a folder of a name of its own",
    ("training/checkpointing/copies.py", "submit"): "such folders that a kill has left",
    ("training/checkpointing/resuming.py", "_fetched_folder"): "a folder of a name of its own",
    ("training/checkpointing/resuming.py", "set_others_aside"): "what a kill has left of the run's",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of a module with the function that it stands in."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call):
                yield name, child
            yield from walk(child, name)

    return walk(tree, "")


def opens(call: ast.Call) -> bool:
    """Return whether a call opens a file by its path, as far as its words tell."""
    name, words = ast.unparse(call.func), [ast.unparse(one) for one in call.args]
    last = name.rpartition(".")[2]
    texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
    if last == "open" and name != "open":
        is_path = len(texts) == len(call.args) and set(texts) <= MODES
        return is_path or name in LIBRARIES or "devnull" in name
    # `partial(safe_open, ...)` opens, too.
    return name == "open" or last in PATH_METHODS or name in LIBRARIES or "safe_open" in words


def takes_away(call: ast.Call) -> bool:
    """Return whether a call deletes or renames a path; `str.replace` has two arguments."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in {"remove", "rmtree"}
    if not isinstance(function, ast.Attribute) or function.attr not in REMOVERS:
        return any("rmtree" in ast.unparse(one) for one in call.args)
    if function.attr == "remove" and ast.unparse(function.value) != "os":
        return False  # of a list
    if function.attr in ("replace", "rename") and ast.unparse(function.value) not in (
        "os",
        "shutil",
    ):
        return len(call.args) == 1 and not call.keywords
    return True


def found(asked: str) -> set[tuple[str, str]]:
    judge = {"opens": opens, "takes away": takes_away}[asked]
    return {
        (path.relative_to(SOURCE).as_posix(), function)
        for path in sorted(SOURCE.rglob("*.py"))
        for function, call in calls(ast.parse(path.read_text("utf-8")))
        if judge(call)
    }


@pytest.mark.parametrize(("asked", "known"), [("opens", OPENS), ("takes away", TAKES_AWAY)])
def test_only_those_that_stand_here_do_it(asked: str, known: dict[tuple[str, str], str]) -> None:
    assert found(asked) == known.keys()


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open('rb')",
        "path.open()",
        "Path(path).read_text('utf-8')",
        "(folder / name).write_bytes(b'')",
        "np.load(path)",
        "torch.from_file(str(path))",
        "cache(partial(safe_open, framework='pt'))",
    ],
)
def test_an_opener_is_seen(line: str) -> None:
    assert any(opens(call) for _, call in calls(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["path.unlink()", "shutil.rmtree(path)", "a.replace(b)", "os.replace(a, b)", "a.rename(b)"],
)
def test_what_takes_a_path_away_is_seen(line: str) -> None:
    assert any(takes_away(call) for _, call in calls(ast.parse(line)))


@pytest.mark.parametrize("line", ["text.replace('a', 'b')", "store.open(name, file, target)"])
def test_what_is_no_path_is_not(line: str) -> None:
    assert not any(takes_away(call) or opens(call) for _, call in calls(ast.parse(line)))
