"""`python -m stretto` is the command `stretto`."""

from __future__ import annotations

from stretto.cli import main

if __name__ == "__main__":
    main()
