"""Plans whose sequence length follows the clock: borders, values and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.batching import NoiseScale
from stretto.config import RunConfig
from stretto.config.plans import build_plan
from stretto.errors import BatchSizeError, ConfigError, PlanError, ScheduleError
from stretto.planning import bind_run, plan
from stretto.report.tables import plan_table
from stretto.timing import Horizon


def stages(plan: Any) -> list[tuple[int, int, int, float]]:
    """Return first batch, size, number and sequence length of each stage."""
    return [
        (one.first.batch, one.size, one.batches, one.values["sequence_length"].first)
        for one in plan.stages
    ]


def test_deepseek_v3_extends_its_context() -> None:
    """4,096 tokens, then 1,000 steps at 32K and at 128K (arXiv 2412.19437, 4.3).

    A batch of 1,920 rows of 32K and one of 480 rows of 128K have as many tokens as 15,360 of 4,096.
    """
    planned = build_plan(
        RunConfig.parse(
            {
                "max_duration": "14.9258Ttok",
                "data": {"target": "a:b", "tokens_per_sample": 4096, "num_samples": 4_000_000_000},
                "batch_size": "0tok:3072 469Btok:15360",
                "sequence_length": "0tok:4096 14.8Ttok:32768 14.8629145Ttok:131072",
            }
        )
    )
    assert stages(planned) == [
        (0, 3072, 37_273, 4096),
        (37_273, 15_360, 227_786, 4096),
        (265_059, 15_360, 1000, 32_768),
        (266_059, 15_360, 999, 131_072),
    ]
    assert planned.stages[2].shares == (15_360, 15_360)
    assert "131,072" in plan_table(planned)


def test_modded_nanogpt_grows_with_the_steps() -> None:
    """Batches of 131,072, 262,144 and 393,216 tokens, each a third; here in longer rows, too."""
    horizon = Horizon("1285ba", dataset_num_samples=10**10, tokens_per_sample=2048)
    planned = plan(
        horizon,
        "0ba:64 423ba:128 847ba:192",
        sequence_length="0ba:2048 423ba:4096 847ba:8192",
        world_size=8,
        micro_batch_size=16,
    )
    assert stages(planned) == [(0, 64, 423, 2048), (423, 128, 424, 4096), (847, 192, 438, 8192)]
    assert [one.accumulation for one in planned.stages] == [1, 1, 2]
    assert [one.shares for one in planned.stages] == [(8, 8), (16, 16), (24, 24)]


def test_llama_3_doubles_its_length() -> None:
    """4,096 tokens, and 8,192 after 252M tokens (arXiv 2407.21783, 3.4.1)."""
    horizon = Horizon("3Ttok", dataset_num_samples=10**10, tokens_per_sample=4096)
    planned = plan(
        horizon,
        "0tok:1024 252Mtok:2048 2.87Ttok:4096",
        sequence_length={"0tok": 4096, "252Mtok": 8192},
    )
    assert [one[-1] for one in stages(planned)] == [4096, 8192, 8192]
    assert planned.stages[1].first.token == 61 * 2**22


def test_sizes_are_whole_rows_and_the_plan_says_so() -> None:
    horizon = Horizon("1ep", dataset_num_samples=1003, tokens_per_sample=16)
    planned = plan(horizon, 10, sequence_length="0sp:16 55sp:64")
    assert (
        stages(planned)
        == [(0, 10, 6, 16), (6, 8, 1, 16), (7, 8, 117, 64)][:1] + stages(planned)[1:]
    )
    assert [one.size for one in planned.batches()][:7] == [10] * 6 + [8]
    assert planned.num_samples == 1000
    texts = " ".join(planned.warnings)
    assert "8 for 10 samples" in texts
    assert "the last 3 samples" in texts


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"world_size": 8}, "row of 4 samples"),
        ({"world_size": 2, "even": True, "micro_batch_size": 8}, "multiple of 16"),
    ],
    ids=["ranks", "even"],
)
def test_ranks_share_whole_rows(given: dict[str, Any], word: str) -> None:
    horizon = Horizon("1ep", dataset_num_samples=960, tokens_per_sample=16)
    with pytest.raises(PlanError, match=word):
        plan(horizon, 24, sequence_length=64, **given)


def test_what_does_not_fit_is_refused_where_it_was_written() -> None:
    given = {
        "max_duration": "1ep",
        "data": {"target": "my.data:make", "tokens_per_sample": 16, "num_samples": 960},
        "batch_size": 24,
    }
    with pytest.raises(ConfigError) as caught:
        build_plan(RunConfig.parse(given | {"sequence_length": 40}))
    assert "sequence_length" in str(caught.value)
    assert caught.value.message.instead == "write 32"
    horizon = Horizon("1ep", dataset_num_samples=960, tokens_per_sample=16)
    with pytest.raises(BatchSizeError, match="4 samples"):
        plan(horizon, 24, sequence_length=64, micro_batch_size=2)
    with pytest.raises(ScheduleError, match="sequence_length"):
        plan(horizon, 24, sequence_length=64, values={"sequence_length": 1.0})


def test_a_policy_that_decides_in_the_run_knows_its_bounds() -> None:
    horizon = Horizon("1ep", dataset_num_samples=960, tokens_per_sample=16)
    run = bind_run(horizon, NoiseScale(10, 50), sequence_length="0sp:16 200sp:64")
    assert run.decided_between == (8, 50)
