"""Import optional packages where they are used, and name the extra when one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from stretto.errors import MissingPackageError, cannot


def import_optional(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: the full name of the module, such as `"matplotlib.pyplot"`.
        extra: the extra of stretto that installs its package, such as `"plot"`.

    Returns:
        The module.

    Raises:
        MissingPackageError: the package is not installed. An installed package that fails to
            import something else keeps its own error: installing the extra would not mend it.

    >>> import_optional("json", "plot").dumps([1])
    '[1]'
    >>> import_optional("no_such_package.pyplot", "plot")
    Traceback (most recent call last):
        ...
    stretto.errors.MissingPackageError: cannot import no_such_package: it is not installed; \
in a clone of stretto, run pip install '.[plot]'
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise missing(package, extra) from None


def missing(package: str, extra: str) -> MissingPackageError:
    """Return the error for a package that is not installed."""
    instead = f"in a clone of stretto, run pip install '.[{extra}]'"
    message = cannot(f"import {package}", why="it is not installed", instead=instead)
    return MissingPackageError(message, name=package)
