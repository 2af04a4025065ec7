"""One of two ranks runs out of memory: both end, and none waits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("distributed_memory.py")

spec = importlib.util.spec_from_file_location("distributed_memory", SCRIPT)
assert spec is not None
assert spec.loader is not None
pairs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pairs)

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

Reports = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, launch_ranks: Callable[..., Any]) -> Reports:
    """How both ranks of each pair ended: nothing for one that had to be killed."""
    out = tmp_path_factory.mktemp("memory")
    launch_ranks(SCRIPT, out, ranks=1)

    def read(name: str) -> list[dict[str, Any]]:
        files = [out / f"{name}.{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    return read


@pytest.mark.parametrize("case", pairs.CASES, ids=lambda case: case.name)
def test_both_ranks_end_with_errors(reports: Reports, case: Any) -> None:
    both = reports(case.name)
    kind, message = both[case.rank]["error"]
    assert kind == "TrainingError"
    assert f"memory ran out on rank {case.rank}" in message
    assert message.endswith("with micro_batch_size=2")
    kind, message = both[1 - case.rank]["error"]
    assert kind == "TrainingError"
    assert "one of them has ended" in message
