"""Errors of run files."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stretto.config.yaml import Source, as_key, show_path
from stretto.errors import ConfigError, Message, StrettoError, cannot, nearest, shown

MAX_ERRORS = 20
"""Most errors that one message lists."""


def explain(error: ValidationError, source: Source) -> ConfigError:
    """Return all that pydantic found in a run file, one message each."""
    found = error.errors(include_url=False)
    messages = list(dict.fromkeys(_message(details, source) for details in found))
    explained = ConfigError(*messages[:MAX_ERRORS])
    if len(messages) > MAX_ERRORS:
        explained.add_note(f"and {len(messages) - MAX_ERRORS} more")
    return explained


def _message(details: ErrorDetails, source: Source) -> Message:
    # Names of shapes, and the mark of a key's own error, are pydantic's and not the file's.
    path = tuple(
        part for part in details["loc"] if part != "[key]" and not str(part).startswith("<")
    )
    where, context = source.where(path), details.get("ctx", {})
    if details["type"] == "value_error":
        error: StrettoError = context["error"]
        return error.message.recast(where, as_key)
    said = details["msg"]
    asked = said.removeprefix("Input should be ")
    number = "a value " if asked.startswith(("greater", "less")) else ""
    instead = said[:1].lower() + said[1:] if said == asked else f"write {number}{asked}"
    if details["type"] == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(details["input"], choices)
        instead = f"did you mean '{near}'?" if near else instead
    return cannot(
        f"use {shown(details['input'])} as {show_path(path)}",
        why="it is not valid here",
        instead=instead,
        where=where,
    )
