"""Batches of unequal samples within a budget of tokens: `pack`, and differencing as verl uses it.

Run `python bench/token_budgets.py` (half a minute); with `--keep`, the result goes to
`bench/results/token_budgets.json` and `.txt`. `--verl` fetches the package of verl, without what it
depends on, and takes the differencing function from there; without it, the same method is here.

The lengths are those of Python's own documents and docstrings, cut into paragraphs (bytes as
tokens), and lognormal ones. Batches are the longest intervals of a shuffled order that hold so many
tokens. Each is shared over ranks and cut into micro-batches of at most a budget:

- *padded*: a micro-batch costs its rows times its longest sample.
- *packed*: it costs the sum of its samples.

verl balances a batch over the ranks and then each rank's samples over micro-batches, both by the
sums of their lengths, and adds micro-batches until all of them are within the budget of real
tokens. With padding, such a micro-batch may exceed the budget.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import importlib
import inspect
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from machine import processor

from stretto.batching import pack

RESULTS = Path(__file__).parent / "results"
Ranks = list[list[list[int]]]
Balance = Callable[..., list[list[int]]]
LONGEST = 4096
SIZES = ((16_384, 4096), (131_072, 8192), (1_048_576, 8192))
"""Tokens of a batch, and of a micro-batch."""
SEED = 7


def paragraphs() -> list[int]:
    """Return the bytes of the paragraphs of Python's documents and docstrings, none twice."""
    texts = [topics[name] for name in sorted(topics)]
    for module in WITH_DOCS:
        loaded = importlib.import_module(module)
        for _, value in inspect.getmembers(loaded):
            texts.append(inspect.getdoc(value) or "" if callable(value) else "")
            texts += [inspect.getdoc(member) or "" for _, member in _members(value)]
    found = {" ".join(part.split()) for text in texts for part in text.split("\n\n")}
    return sorted(min(LONGEST, len(part.encode())) for part in found if part)


WITH_DOCS = """
argparse ast asyncio calendar codecs collections concurrent csv datetime decimal difflib email
fractions functools heapq inspect ipaddress itertools json locale logging math multiprocessing
optparse os pathlib pickle random re shutil socket sqlite3 ssl statistics string subprocess tarfile
tempfile textwrap threading typing unittest urllib uuid zipfile
""".split()  # noqa: SIM905
"""Modules whose docstrings are read."""


def _members(value: Any) -> list[tuple[str, Any]]:
    return inspect.getmembers(value) if inspect.isclass(value) else []


def lognormal(count: int) -> list[int]:
    """Return lengths such as those of conversations, at most 4,096 tokens."""
    chance = random.Random(SEED)
    return [min(LONGEST, max(5, int(chance.lognormvariate(5.5, 0.9)))) for _ in range(count)]


def batches(lengths: list[int], tokens: int, most: int) -> Iterator[list[int]]:
    """Yield the lengths of full batches of at most so many tokens, over shuffled epochs."""
    chance, batch, total = random.Random(SEED), list[int](), 0
    while most:
        for length in chance.sample(lengths, len(lengths)):
            if total + length > tokens:
                yield batch
                batch, total, most = [], 0, most - 1
                if not most:
                    return
            batch.append(length)
            total += length


def differencing(lengths: list[int], parts: int, *, equal_size: bool) -> list[list[int]]:
    """Return a partition by Karmarkar and Karp's largest differencing method, as verl does it."""
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    step = parts if equal_size else 1
    states = []
    for number, first in enumerate(range(0, len(order), step)):
        sets = [(lengths[place], [place]) for place in order[first : first + step]]
        sets = sorted(sets + [(0, [])] * (parts - len(sets)), reverse=True)
        states.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(states)
    while len(states) > 1:
        _, _, one = heapq.heappop(states)
        _, number, other = heapq.heappop(states)
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted(((a + b, left + right) for (a, left), (b, right) in pairs), reverse=True)
        heapq.heappush(states, (joined[-1][0] - joined[0][0], number, joined))
    return [places for _, places in states[0][2]]


def of_verl() -> tuple[Balance, str]:
    """Return the function of verl's package, and the package's version."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "verl", "--no-deps", "-q", "-d", folder]
        subprocess.run(command, check=True)
        [wheel] = Path(folder).glob("verl-*.whl")
        source = zipfile.ZipFile(wheel).read("verl/utils/seqlen_balancing.py").decode()
        version = wheel.name.split("-")[1]
    # The module needs torch, ray and tensordict; this function of it needs none.
    tree = ast.parse(source)
    names = ("karmarkar_karp",)
    tree.body = [node for node in tree.body if getattr(node, "name", "") in names]
    space: dict[str, Any] = {"heapq": heapq}
    exec(compile(tree, "seqlen_balancing.py", "exec"), space)  # noqa: S102
    return space["karmarkar_karp"], version


def as_verl(balance: Balance, lengths: list[int], budget: int, world_size: int) -> Ranks:
    """Return the micro-batches that verl makes of a batch, by rank and pass."""
    even = len(lengths) - len(lengths) % world_size  # its batches divide
    ranks = balance(lengths[:even], world_size, equal_size=True)
    for rank, place in enumerate(range(even, len(lengths))):
        ranks[-1 - rank].append(place)
    own = [[lengths[place] for place in rank] for rank in ranks]
    parts = max(-(-sum(rank) // budget) for rank in own)
    while True:
        cuts = [balance(rank, min(parts, len(rank)), equal_size=False) for rank in own]
        if all(
            sum(rank[i] for i in piece) <= budget
            for rank, cut in zip(own, cuts, strict=True)
            for piece in cut
        ):
            break
        parts += 1
    return [
        [[rank[i] for i in piece] for piece in cut] for rank, cut in zip(ranks, cuts, strict=True)
    ]


def measured(
    share: Callable[[list[int]], Ranks], some: list[list[int]], *, packed: bool
) -> dict[str, float]:
    """Return means over batches: what is computed, per real token, and the time of a step."""
    rows = []
    for lengths in some:
        began = time.perf_counter()
        ranks = share(lengths)
        spent = time.perf_counter() - began
        assert sorted(i for rank in ranks for one in rank for i in one) == [*range(len(lengths))]
        costs = [
            [_price([lengths[i] for i in one], packed=packed) for one in rank] for rank in ranks
        ]
        costs = [sorted(rank, reverse=True) for rank in costs]
        passes, world = max(map(len, costs)), len(costs)
        filled = [rank + [0] * (passes - len(rank)) for rank in costs]
        total = sum(lengths)
        rows.append(
            {
                "computed": sum(map(sum, costs)) / total,
                "heaviest": max(map(sum, costs)) * world / total,
                "waiting": sum(map(max, zip(*filled, strict=True))) * world / total,
                "passes": passes,
                "largest": max(map(max, filled)),
                "milliseconds": 1e3 * spent,
                "samples": len(lengths),
            }
        )
    found = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    found["largest"] = max(row["largest"] for row in rows)
    return {name: round(value, 4) for name, value in found.items()}


def _price(lengths: list[int], *, packed: bool) -> int:
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def measure(balance: Balance, few: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of lengths, batch, number of ranks and way of joining samples."""
    kinds = {"paragraphs": paragraphs(), "lognormal": lognormal(100_000)}
    for (kind, lengths), (tokens, budget) in product(kinds.items(), SIZES):
        some = list(batches(lengths, tokens, few if tokens > 200_000 else 4 * few))
        for world_size, packed in product((1, 8, 64), (False, True)):
            if tokens // world_size < 1024:
                continue  # some ranks would have no sample
            ours = partial(pack, budget=budget, world_size=world_size, packed=packed)
            theirs = partial(as_verl, balance, budget=budget, world_size=world_size)
            yield {
                "lengths": kind,
                "batch": tokens,
                "budget": budget,
                "ranks": world_size,
                "packed": packed,
                "pack": measured(ours, some, packed=packed),
                "verl": measured(theirs, some[: few // 2], packed=packed),
            }


def cost(*, packed: bool, count: int = 4096) -> float:
    """Return the milliseconds that `pack` takes for so many samples: the fastest of 100 calls."""
    lengths, times = lognormal(count), []
    for _ in range(100):
        began = time.perf_counter()
        pack(lengths, 8192, 8, packed=packed)
        times.append(time.perf_counter() - began)
    return round(1e3 * min(times), 2)


HEAD = f"{'lengths':10} {'batch':>9} {'budget':>6} {'ranks':>5} {'joined':6}"
COLUMNS = {
    "passes": 7,
    "computed": 9,
    "heaviest": 9,
    "waiting": 8,
    "largest": 8,
    "milliseconds": 10,
}
LEGEND = """\
computed: tokens with padding over real ones. heaviest: those of the rank that has most, over an
even share of the real ones. waiting: the same, if all ranks wait for the slowest in each pass.
largest: tokens of the largest micro-batch. ms: the time of a step in Python.
"""


def table(found: dict[str, Any]) -> str:
    """Return the results as text."""
    names = "".join(f"{name.replace('milliseconds', 'ms'):>{COLUMNS[name]}}" for name in COLUMNS)
    lines = [f"{HEAD} | pack {names} | verl {names}"]
    for row in found["rows"]:
        joined = "packed" if row["packed"] else "padded"
        start = (
            f"{row['lengths']:10} {row['batch']:9,} {row['budget']:6,} {row['ranks']:5} {joined}"
        )
        sides = [
            "     "
            + "".join(f"{one[name]:{wide},.{PLACES[name]}f}" for name, wide in COLUMNS.items())
            for one in (row["pack"], row["verl"])
        ]
        lines.append(" | ".join((start, *sides)))
    took = " and ".join(f"{time} ms {name}" for name, time in found["milliseconds_4096"].items())
    lines += ["", f"pack of 4,096 samples on 8 ranks, the fastest of 100 calls: {took}"]
    end = f"verl: {found['verl']}. Python {found['python']}, {found['processor']}.\n"
    return "\n".join(lines) + "\n" + LEGEND + end


PLACES = {
    "passes": 2,
    "computed": 3,
    "heaviest": 3,
    "waiting": 3,
    "largest": 0,
    "milliseconds": 2,
}


def main() -> None:
    """Measure, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", action="store_true", help="take differencing from verl's package")
    parser.add_argument("--few", type=int, default=8, help="batches of a row; smaller ones 4 times")
    parser.add_argument("--keep", action="store_true", help="write the result to bench/results")
    asked = parser.parse_args()
    balance, version = of_verl() if asked.verl else (differencing, "")
    found = {
        "rows": list(measure(balance, asked.few)),
        "milliseconds_4096": {
            "padded": cost(packed=False),
            "packed": cost(packed=True),
        },
        "verl": f"differencing of verl {version}" if version else "its method, written here",
        "python": platform.python_version(),
        "processor": processor(),
    }
    text = table(found)
    print(text, end="")
    if asked.keep:
        (RESULTS / "token_budgets.json").write_text(
            json.dumps(found, indent=1) + "\n", encoding="utf-8"
        )
        (RESULTS / "token_budgets.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
