"""Memory that others published for real GPUs, beside ours on a GPU that is not there.

    python bench/published_memory.py [FAMILY...] [--only WORD] [--again] [--source PATH] [--page]

Each row trains the same model in the same way with `phantomgpu`, which needs the CUDA build of
torch (`phantomgpu setup`) and no GPU. Results are kept row by row in `results/published`: a run
that was stopped goes on where it stopped. `--page` writes the tables and the picture of the docs
from them, and measures nothing.
"""

from __future__ import annotations

import argparse
import os

import published
from published import page, results
from published.rows import SOURCE


def main(arguments: list[str] | None = None) -> None:
    """Measure what is not measured yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(published.FAMILIES))
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--again", action="store_true", help="also rows that have a result")
    parser.add_argument("--source", help="a clone of the published code, if a family needs one")
    parser.add_argument(
        "--page", action="store_true", help=f"write {page.PAGE.name} and measure nothing"
    )
    given = parser.parse_args(arguments)
    for key in given.families:
        if key not in published.FAMILIES:
            parser.error(f"no family {key!r}; write one of {', '.join(published.FAMILIES)}")
    if given.source:
        os.environ[SOURCE] = given.source
    families = [published.load(key) for key in given.families or published.FAMILIES]
    if given.page:
        if given.families or given.only:
            parser.error("--page writes all families; leave their names and --only out")
        page.write([(family, results.current(family)) for family in families])
        return
    chosen = {f.key: [row for row in f.rows if given.only in row.name] for f in families}
    if not any(chosen.values()):
        parser.error(f"no row has {given.only!r} in its name")
    for family in families:
        results.measure(family, chosen[family.key], again=given.again)
        shown = {row.name for row in chosen[family.key]}
        found = page.figures(family, results.current(family))
        print("\n".join(page.table(one for one in found if one.name in shown)), flush=True)


if __name__ == "__main__":
    main()
