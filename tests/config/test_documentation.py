"""Every piece of a run file that the documentation shows is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stretto.config.run import RunConfig, run_file_schema
from stretto.config.yaml import parse_yaml

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-file.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
PIECES = [
    piece for block in BLOCKS for piece in block.split("---\n") if not piece.startswith("# yaml")
]
LEAST: dict[str, Any] = {"max_duration": "2ep", "data": {"target": "a:b"}, "batch_size": 8}


@pytest.mark.parametrize("piece", PIECES)
def test_pieces_are_read_and_accepted(piece: str) -> None:
    value = parse_yaml(piece, "piece")[0]
    assert isinstance(value, dict)
    RunConfig.parse(LEAST | value)
    jsonschema.Draft202012Validator(run_file_schema()).validate(LEAST | value)
