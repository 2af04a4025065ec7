"""Wrong input at the packaged examples."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.examples.digits import Digits
from stretto.examples.text import PythonDocs
from stretto.examples.tiny_gpt import TinyGPT

CASES: list[tuple[str, Callable[[], object]]] = [
    ("examples-text-split", lambda: PythonDocs(split="test")),  # type: ignore[arg-type]
    ("examples-text-length", lambda: PythonDocs(0)),
    ("examples-digits-split", lambda: Digits("test")),  # type: ignore[arg-type]
    ("examples-gpt-heads", lambda: TinyGPT(1, 30, heads=4)),
    (
        "examples-gpt-context",
        lambda: TinyGPT(1, 8, context=4)(torch.zeros(1, 5, dtype=torch.long)),
    ),
]
