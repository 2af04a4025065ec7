"""`python -m stretto` is the command `stretto`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the working folder first for `-m`. What is installed must not be shadowed by it.
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  before any other import
        sys.path.append(sys.path.pop(0))
    from stretto.cli import main

    main()
