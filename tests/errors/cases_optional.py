"""Wrong input at the optional packages."""

from __future__ import annotations

from collections.abc import Callable

from stretto._optional import import_optional

CASES: list[tuple[str, Callable[[], object]]] = [
    ("optional-missing", lambda: import_optional("no_such_package.pyplot", "plot")),
]
