"""The tables of the published runs, and their picture: published against ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from published.results import Result
from published.rows import GIB, Family

PAGE = Path(__file__).parents[2] / "docs" / "background" / "published.md"
PICTURE = PAGE.with_suffix(".svg")
README = PAGE.parents[2] / "README.md"
START, END = "<!-- results -->", "<!-- end of results -->"
"""The page and the README are written by hand but for what is between these."""
EXTREMES = 3


class Figure(NamedTuple):
    """A published number and ours, in bytes; None: not measured."""

    name: str
    what: str
    published: float
    ours: float | None
    cause: str
    fitted: bool

    @property
    def percent(self) -> float:
        """How much ours is over the published number."""
        assert self.ours is not None
        return 100 * (self.ours / self.published - 1)


def figures(family: Family, results: Mapping[str, Result]) -> list[Figure]:
    """Return the figures of a family, also of rows without a result."""
    found = []
    for row in family.rows:
        result = results.get(row.name)
        for what, published in row.published.items():
            ours = result["ours"].get(what) if result else None
            if result is None:
                cause = "not run"
            elif ours is None:
                cause = f"failed: {result['problem'].splitlines()[-1][:120]}"
            else:
                is_apart = abs(ours / published - 1) > 0.01
                cause = (
                    "fitted" if row.fitted else (row.known or "not explained") if is_apart else ""
                )
            found.append(Figure(row.name, what, published, ours, cause, row.fitted))
    return found


def summary(given: Sequence[Figure]) -> Iterator[str]:
    """Yield a line for each kind of figure: how many agree, and how well."""
    yield "| what | run | within 1 % | within 2 % | within 5 % | median | worst |"
    yield "|---|---|---|---|---|---|---|"
    for what in dict.fromkeys(figure.what for figure in given):
        rows = [figure for figure in given if figure.what == what and not figure.fitted]
        apart = sorted(abs(figure.percent) for figure in rows if figure.ours is not None)
        counts = " | ".join(str(sum(one <= most for one in apart)) for most in (1, 2, 5))
        ends = f"{statistics.median(apart):.2f} % | {apart[-1]:.2f} %" if apart else "- | -"
        yield f"| {what} | {len(apart)} of {len(rows)} | {counts} | {ends} |"


def cell(text: str) -> str:
    """Return a text that may stand in a table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def table(given: Iterable[Figure]) -> Iterator[str]:
    """Yield the table of the figures."""
    yield "| run | what | published GiB | ours GiB | difference | cause |"
    yield "|---|---|---|---|---|---|"
    for one in given:
        ours = "- | -" if one.ours is None else f"{one.ours / GIB:.3f} | {one.percent:+.2f} %"
        cause = cell(one.cause)
        yield f"| {cell(one.name)} | {one.what} | {one.published / GIB:.3f} | {ours} | {cause} |"


def section(family: Family, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield the part of a family on the page."""
    found = figures(family, results)
    torch = sorted({result["torch"] for result in results.values()})
    yield from (f"## {family.title}", "", family.text.strip(), "")
    yield from (f"Source: <{family.source}>. Ours: torch {', '.join(torch) or '-'}.", "")
    yield from (*summary(found), "", *table(found), "")


def overview(given: Iterable[tuple[Family, Mapping[str, Result]]]) -> Iterator[str]:
    """Yield one table with the lines of all families."""
    for index, (family, results) in enumerate(given):
        head, rule, *lines = summary(figures(family, results))
        if index == 0:
            yield from (f"| family {head}", f"|---{rule}")
        yield from (f"| {cell(family.title)} {line}" for line in lines)


def tables(given: Iterable[tuple[Family, Mapping[str, Result]]]) -> str:
    """Return the part of the page that is written from results."""
    given = list(given)
    lines = [line for family, results in given for line in section(family, results)]
    return "\n".join([START, "", *overview(given), "", *lines, END])


def filled(page: str, text: str) -> str:
    """Return a page whose part between the marks is another."""
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    return before + text + after


def extremes(given: Iterable[tuple[Family, Mapping[str, Result]]]) -> str:
    """Return the part of the README: how many figures agree, and the best and worst of them."""
    every = [
        one
        for family, results in given
        for one in figures(family, results)
        if one.ours is not None and not one.fitted
    ]
    every.sort(key=lambda one: abs(one.percent))
    near = sum(abs(one.percent) <= 1 for one in every)
    lines = [
        f"{near} of {len(every)} published figures agree within 1 percent; the best and worst:",
        "",
    ]
    lines += ["| run | what | published GiB | ours | difference |", "|---|---|---|---|---|"]
    for one in every[:EXTREMES] + every[-EXTREMES:]:
        sizes = f"{one.published / GIB:.3f} | {(one.ours or 0) / GIB:.3f}"
        lines.append(f"| {cell(one.name)} | {one.what} | {sizes} | {one.percent:+.2f} % |")
    return "\n".join([START, *lines, END])


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's: told apart by colour-blind readers, legible on white and on dark."""
STYLE = """
svg { font: 13px system-ui, sans-serif }
.paper { fill: #ffffff } .line { stroke: #d0d0d0 } .axis { stroke: #606060 } text { fill: #202020 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1a1c1e } .line { stroke: #3c3f42 } .axis { stroke: #a0a0a0 }
  text { fill: #e4e4e4 }
}
"""
WIDTH, LEFT, TOP, SIDE = 780, 64, 40, 420
BELOW, LOW = TOP + SIDE + 60, 150
MOST_PERCENT = 6.0


def picture(given: Iterable[tuple[Family, Mapping[str, Result]]]) -> str:
    """Return an SVG: ours against published on logarithmic axes; below, the difference."""
    groups = [
        (family.title, [one for one in figures(family, results) if one.ours is not None])
        for family, results in given
    ]
    every = [one for _, found in groups for one in found]
    sizes = [size / GIB for one in every for size in (one.published, one.ours or 0)] or [1, 100]
    ends = math.log2(min(sizes) * 0.9), math.log2(max(sizes) * 1.1)

    def place(size: float) -> float:
        return (math.log2(size / GIB) - ends[0]) / (ends[1] - ends[0]) * SIDE

    def height(percent: float) -> float:
        shown = max(-MOST_PERCENT, min(MOST_PERCENT, percent))
        return BELOW + LOW * (0.5 - shown / (2 * MOST_PERCENT))

    lines = list(_axes(ends, height))
    for index, (title, found) in enumerate(groups):
        colour = COLOURS[index % len(COLOURS)]
        y = TOP + 16 + 22 * index
        lines.append(f'<circle cx="{LEFT + SIDE + 24}" cy="{y - 4}" r="5" fill="{colour}"/>')
        lines.append(f'<text x="{LEFT + SIDE + 36}" y="{y}">{title} ({len(found)})</text>')
        dot = f'r="3.5" fill="{colour}" fill-opacity="0.65"'
        for one in found:
            x = LEFT + place(one.published)
            both = (TOP + SIDE - place(one.ours or 0), height(one.percent))
            lines += [f'<circle cx="{x:.1f}" cy="{at:.1f}" {dot}/>' for at in both]
    high = BELOW + LOW + 54
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}">'
    paper = f'<rect class="paper" width="{WIDTH}" height="{high}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *lines, "</svg>", ""])


def _axes(ends: tuple[float, float], height: Callable[[float], float]) -> Iterator[str]:
    right, bottom = LEFT + SIDE, TOP + SIDE
    yield f'<text x="{LEFT}" y="{TOP - 14}">GiB on a GPU that is not there</text>'
    yield f'<text x="{LEFT}" y="{BELOW - 12}">difference in percent</text>'
    yield f'<text x="{right}" y="{BELOW + LOW + 38}" text-anchor="end">published GiB</text>'
    for power in range(math.ceil(ends[0]), math.floor(ends[1]) + 1):
        at = (power - ends[0]) / (ends[1] - ends[0]) * SIDE
        x, y, label = LEFT + at, bottom - at, f"{2.0**power:g}"
        yield f'<path class="line" d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}"/>'
        yield f'<path class="line" d="M{x:.1f} {BELOW}V{BELOW + LOW}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{x:.1f}" y="{BELOW + LOW + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}L{right} {TOP}"/>'
    for percent in (-5, -1, 0, 1, 5):
        y, kind = height(percent), "line" if percent else "axis"
        yield f'<path class="{kind}" d="M{LEFT} {y:.1f}H{right}"/>'
        if percent:  # 0 would lie on 1
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent:+d}</text>'
    note = f"a point on an edge differs by {MOST_PERCENT:g} percent or more"
    yield f'<text x="{LEFT}" y="{BELOW + LOW + 38}">{note}</text>'


def write(given: Sequence[tuple[Family, Mapping[str, Result]]]) -> None:
    """Write the tables into the page, the picture beside it, and the README's part."""
    for file, text in ((PAGE, tables(given)), (README, extremes(given))):
        file.write_text(filled(file.read_text("utf-8"), text), "utf-8")
    PICTURE.write_text(picture(given), "utf-8")
