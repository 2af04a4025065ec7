"""What the recipe of torchtune gets in its tests: rows that note when they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

N, LENGTH, VOCABULARY = 150, 12, 32


class Tokenizer:
    """Has what the recipe asks of a tokenizer."""

    pad_id = 0


class Rows(list[dict[str, list[int]]]):
    """Rows of tokens of different lengths. Each read row is written to the file `READ`."""

    def __init__(self, _: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(1, VOCABULARY, (N, LENGTH), generator=generator).tolist()
        lengths = [4 + number % (LENGTH - 3) for number in range(N)]
        cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        super().__init__({"tokens": row, "labels": row} for row in cut)

    def __getitem__(self, number: Any) -> Any:
        with Path(os.environ["READ"]).open("a") as file:
            file.write(f"{number}\n")
        return super().__getitem__(number)
