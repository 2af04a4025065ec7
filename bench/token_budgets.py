"""How batches of unequal samples fit a budget of tokens: `pack`, and Karmarkar-Karp as verl uses it.

Run `python bench/token_budgets.py` (half a minute); the last result lies in
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
import pkgutil
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from machine import processor

from stretto.batching import pack

RESULTS = Path(__file__).parent / "results"
Ranks = list[list[list[int]]]
Balance = Callable[[list[int], int, bool], list[list[int]]]
LONGEST = 4096
SEED = 7


def paragraphs() -> list[int]:
    """Return the bytes of the paragraphs of Python's documents and docstrings, none twice."""
    texts = [topics[name] for name in sorted(topics)]
    for module in sorted(one.name for one in pkgutil.iter_modules() if one.name in WITH_DOCS):
        loaded = importlib.import_module(module)
        for _, value in inspect.getmembers(loaded):
            texts.append(inspect.getdoc(value) or "" if callable(value) else "")
            texts += [inspect.getdoc(member) or "" for _, member in _members(value)]
    found = {" ".join(part.split()) for text in texts for part in text.split("\n\n")}
    return sorted(min(LONGEST, len(part.encode())) for part in found if part)


WITH_DOCS = frozenset(
    "argparse ast asyncio calendar codecs collections concurrent csv datetime decimal difflib email "
    "fractions functools heapq inspect ipaddress itertools json locale logging math multiprocessing "
    "optparse os pathlib pickle random re shutil socket sqlite3 ssl statistics string subprocess "
    "tarfile tempfile textwrap threading tkinter turtle typing unittest urllib uuid zipfile".split()
)


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


def differencing(lengths: list[int], parts: int, equal_size: bool) -> list[list[int]]:
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
    ranks = balance(lengths[:even], world_size, True)
    for rank, place in enumerate(range(even, len(lengths))):
        ranks[-1 - rank].append(place)
    own = [[lengths[place] for place in rank] for rank in ranks]
    parts = max(-(-sum(rank) // budget) for rank in own)
    while True:
        cuts = [balance(rank, min(parts, len(rank)), False) for rank in own]
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
    for kind, lengths in kinds.items():
        for tokens, budget in ((16_384, 4096), (131_072, 8192), (1_048_576, 8192)):
            for world_size in (1, 8, 64):
                if tokens // world_size < 1024:
                    continue  # less than one of the longest for each rank
                some = list(batches(lengths, tokens, few if tokens > 200_000 else 4 * few))
                for packed in (False, True):
                    ours = measured(
                        lambda one: pack(one, budget, world_size, packed=packed),
                        some,
                        packed=packed,
                    )
                    others = measured(
                        lambda one: as_verl(balance, one, budget, world_size),
                        some[: few // 2],
                        packed=packed,
                    )
                    yield {
                        "lengths": kind,
                        "batch": tokens,
                        "budget": budget,
                        "ranks": world_size,
                        "packed": packed,
                        "pack": ours,
                        "verl": others,
                    }


def cost(count: int = 4096) -> float:
    """Return the milliseconds that `pack` takes for so many samples: the fastest of 100 calls."""
    lengths, times = lognormal(count), []
    for _ in range(100):
        began = time.perf_counter()
        pack(lengths, 8192, 8)
        times.append(time.perf_counter() - began)
    return round(1e3 * min(times), 3)


def table(found: dict[str, Any]) -> str:
    """Return the results as text."""
    lines = [
        f"{'lengths':10} {'batch':>9} {'budget':>6} {'ranks':>5} {'joined':6} | "
        + " | ".join(
            f"{who:8} passes computed heaviest waiting largest     ms" for who in ("pack", "verl")
        )
    ]
    for row in found["rows"]:
        sides = [
            f"{'':8} {one['passes']:6.2f} {one['computed']:8.3f} {one['heaviest']:8.3f} {one['waiting']:7.3f} "
            f"{one['largest']:7,.0f} {one['milliseconds']:6.2f}"
            for one in (row["pack"], row["verl"])
        ]
        joined = "packed" if row["packed"] else "padded"
        lines.append(
            f"{row['lengths']:10} {row['batch']:9,} {row['budget']:6,} {row['ranks']:5} {joined:6} | "
            + " | ".join(sides)
        )
    lines.append("")
    lines.append(
        f"pack of 4,096 samples on 8 ranks: {found['milliseconds_4096']} ms, the fastest of 100 calls"
    )
    lines.append(
        "computed: tokens with padding over real ones. heaviest: those of the rank that has most, over"
    )
    lines.append(
        "an even share of the real ones. waiting: the same, if all wait for the slowest in each pass."
    )
    lines.append(f"verl: {found['verl']}. Python {found['python']}, {found['processor']}.")
    return "\n".join(lines) + "\n"


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
        "milliseconds_4096": cost(),
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
