"""What docstrings say of classes and their arguments, for the JSON schema."""

from __future__ import annotations

import inspect
import re


def summary_of(kind: object) -> str:
    """Return the first line of a docstring.

    >>> summary_of(len)
    'Return the number of items in a container.'
    """
    return (kind.__doc__ or "").partition("\n")[0]


def argument_texts(kind: object) -> dict[str, str]:
    """Return what a docstring says of each argument.

    >>> from stretto.batching import StagedRamp
    >>> argument_texts(StagedRamp)["sizes"]
    'two or more sizes in ascending order.'
    """
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
