"""Reference pages that are written from the code: the keys of a run file, the command line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from stretto.cli.app import app
from stretto.config.run import run_file_schema

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


def run_file_page() -> str:
    """Return the keys of a run file as Markdown."""
    schema = run_file_schema()
    parts = schema["$defs"]
    lines = ["## All keys", "", *keys(schema)]
    for name, title in SECTIONS.items():
        lines += [f"## {title}", "", parts[name].get("description", ""), "", *keys(parts[name])]
    for name, heading in NAMED.items():
        lines += [
            f"## {heading}",
            "",
            "| name with the arguments that it needs | what it is |",
            "|---|---|",
        ]
        for form in parts[name]["anyOf"]:
            for kind_name in form.get("properties", ()) if form.get("maxProperties") == 1 else ():
                if kind_name not in parts:
                    continue
                needed = ", ".join(f"{key}: ..." for key in parts[kind_name]["required"])
                meaning = cell(parts[kind_name]["description"])
                lines.append(f"| `{{{kind_name}: {{{needed}}}}}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def command_line_page() -> str:
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
            shown = cell(shown).replace("\\|", "\\|")
            lines.append(f"| `{shown}` | {cell(getattr(parameter, 'help', '') or '')} |")
        lines.append("")
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write the pages; a file that has not changed keeps its time, so that builds stay quick."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"run-file.md": run_file_page(), "command-line.md": command_line_page()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
