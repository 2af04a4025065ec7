"""Write what the docs take from the code (`make golden`), so that pages are read as plain files.

A page has `<!-- generated: NAME -->` before such a part and `<!-- end of generated -->` after it.
NAME is a file of this repository, `run-file`, `command-line` or `versions`. Pictures of the gallery
are drawn by its examples, if these have changed.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from stretto.cli.app import app
from stretto.config.run import run_file_schema

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GALLERY = ROOT / "examples" / "gallery"
PART = re.compile(
    r"(?P<start><!-- generated: (?P<name>\S+) -->\n).*?(?P<end><!-- end of generated -->)",
    re.DOTALL,
)
LANGUAGES = {".diff": "diff", ".py": "python", ".txt": "text", ".yaml": "yaml"}
SECTIONS = {
    "Data": "data",
    "Optimizer": "optimizer",
    "Group": "optimizer.groups.NAME",
    "Loading": "loading",
    "Stepping": "stepping",
    "Evaluate": "evaluate",
    "Checkpointing": "checkpoint",
    "Log": "log",
}
"""The sections of a run file, by their names in the schema."""
NAMED = {"BatchSize": "Batch sizes", "Schedule": "Schedules", "Rule": "Rules"}
"""What a run file writes with a name of Python."""
MEASURED = ("noise",)
"""Run files whose sizes are decided during the run: these are trained, which takes longer."""


def kind(part: Mapping[str, Any]) -> str:
    """Return the type of a key in a few words."""
    if "$ref" in part:
        return str(part["$ref"].rpartition("/")[2]).lower()
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(f"`{one}`" for one in part["enum"])
    several = part.get("anyOf") or part.get("oneOf")
    if several:
        return " or ".join(dict.fromkeys(kind(one) for one in several))
    found = part.get("type", "any")
    return " or ".join(found) if isinstance(found, list) else str(found)


def cell(text: object) -> str:
    """Return a text that may stand in a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def keys(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the keys of a section."""
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    required = part.get("required", [])
    for name, one in part.get("properties", {}).items():
        default = "required" if name in required else one.get("default", "")
        shown = f"`{cell(default)}`" if default not in ("", "required") else default
        meaning = cell(one.get("description", ""))
        yield f"| `{name}` | {cell(kind(one))} | {shown} | {meaning} |"
    yield ""


def run_file() -> str:
    """Return the keys of a run file as Markdown."""
    schema = run_file_schema()
    parts = schema["$defs"]
    lines = ["## All keys", "", *keys(schema)]
    for name, title in SECTIONS.items():
        lines += [f"## {title}", "", parts[name].get("description", ""), "", *keys(parts[name])]
    for name, heading in NAMED.items():
        lines += [f"## {heading}", "", "| name with the arguments that it needs | what it is |"]
        lines.append("|---|---|")
        for form in parts[name]["anyOf"]:
            for kind_name in form.get("properties", ()) if form.get("maxProperties") == 1 else ():
                if kind_name not in parts:
                    continue
                needed = ", ".join(f"{key}: ..." for key in parts[kind_name]["required"])
                meaning = cell(parts[kind_name]["description"])
                lines.append(f"| `{{{kind_name}: {{{needed}}}}}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """Return every verb and option as Markdown."""
    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    lines: list[str] = []
    for name, command in group.commands.items():
        text = inspect.cleandoc(command.help or "").partition("\f")[0].partition("\n\n")[0]
        lines += [f"## stretto {name}", "", text, ""]
        lines += ["| argument or option | meaning |", "|---|---|"]
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            written = ", ".join((*parameter.opts, *parameter.secondary_opts))
            metavar = getattr(parameter, "metavar", None)
            shown = f"{written} {metavar}" if is_option and metavar else metavar or written
            lines.append(f"| `{cell(shown)}` | {cell(getattr(parameter, 'help', '') or '')} |")
        lines.append("")
    return "\n".join(lines)


def code(path: Path) -> str:
    """Return a file as a block of code; a diff without its header, of results the first table."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".diff":
        text = "".join(text.splitlines(keepends=True)[2:])
    elif path.suffix == ".txt":
        text = text.partition("\n\n")[0] + "\n"
    return f"```{LANGUAGES[path.suffix]}\n{text}```\n"


def versions() -> str:
    """Return what `make test-adapters` ran last: the exact versions, and what the tests said."""
    lines = ["| tests of | with | |", "|---|---|---|"]
    for path in sorted((ROOT / "bench" / "results").glob("adapters-*.txt")):
        outcome, packages, _ = path.read_text(encoding="utf-8").split("\n", 2)
        pinned = [one.replace("===", "==").split("==") for one in packages.split() if "==" in one]
        shown = ", ".join(" ".join(one) for one in pinned) or packages
        name = path.stem.removeprefix("adapters-")
        lines.append(f"| {name} | {shown} | {outcome.partition(' in ')[0]} |")
    return "\n".join([*lines, ""])


def part(name: str) -> str:
    """Return what a page takes from the code, by the name in its marker."""
    made = {"run-file": run_file, "command-line": command_line, "versions": versions}
    return made[name]() if name in made else code(ROOT / name)


def renewed(text: str) -> str:
    """Return a page with its generated parts as they are now."""
    return PART.sub(lambda found: f"{found['start']}\n{part(found['name'])}\n{found['end']}", text)


def mark(example: Path) -> str:
    """Return the last line of a picture, which says what it was drawn from."""
    return f"<!-- {example.name}: {hashlib.sha256(example.read_bytes()).hexdigest()} -->\n"


def run(*command: str, folder: str) -> None:
    """Run a command of Python in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)


def draw(example: Path, picture: Path) -> None:
    """Draw an example: the plan of a run file, or the run if only the run knows its sizes."""
    with tempfile.TemporaryDirectory() as folder:
        if example.suffix == ".py":  # draws into the file that it is given
            run(str(example), str(picture), folder=folder)
            return
        source = f"build_plan(read_run_file(Path({str(example)!r})))"
        if example.stem in MEASURED:
            source = "Path('run')"
            run("-m", "stretto", "train", str(example), "--folder", "run", folder=folder)
        statements = (
            "from pathlib import Path; from stretto.config import build_plan, read_run_file; "
            f"from stretto.report import draw; draw({source}, Path({str(picture)!r}))"
        )
        run("-c", statements, folder=folder)


def pictures() -> dict[Path, Path]:
    """Return the picture of each example of the gallery."""
    examples = sorted([*GALLERY.glob("*.py"), *GALLERY.glob("*.yaml")])
    return {one: DOCS / "gallery" / f"{one.stem}.svg" for one in examples}


def is_current(example: Path, picture: Path) -> bool:
    """Whether a picture is there and its example has not changed since it was drawn."""
    return picture.exists() and picture.read_text(encoding="utf-8").endswith(mark(example))


def main() -> None:
    """Write every generated part and every picture that is missing or old."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if renewed(text) != text:
            page.write_text(renewed(text), encoding="utf-8")
            print(page.relative_to(ROOT))
    for example, picture in pictures().items():
        if not is_current(example, picture):
            draw(example, picture)
            picture.write_text(
                picture.read_text(encoding="utf-8") + mark(example), encoding="utf-8"
            )
            print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main()
