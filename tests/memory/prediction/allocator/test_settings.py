"""The options of the caching allocator: torch's syntax, and what torch would refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ConfigError
from stretto.memory.prediction.allocator.settings import AllocatorSettings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False,", {}),
        (" max_split_size_mb : 30 ", {"max_split_size": 30 * MIB}),
        ("max_split_size_mb:30,max_split_size_mb:60", {"max_split_size": 60 * MIB}),
        ("max_non_split_rounding_mb:25", {"max_non_split_rounding": 25 * MIB}),
        (
            "max_split_size_mb:32,large_segment_size_mb:32",
            {
                "max_split_size": 32 * MIB,
                "large_segment_size": 32 * MIB,
                "max_non_split_rounding": 32 * MIB,
            },
        ),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("per_process_memory_fraction:1.0", {}),
        ("backend:native,throw_on_cudamalloc_oom:True,pinned_num_register_threads:8", {}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            {"roundup_power2_divisions": (1,) * 9 + (2, 4) + (8,) * 5},
        ),
        (
            "roundup_power2_divisions:[2:16,8:0,4:1]",
            {"roundup_power2_divisions": (16, 16, 1) + (0,) * 13},
        ),
        ("roundup_power2_divisions:[>:2]", {"roundup_power2_divisions": (0,) + (2,) * 15}),
    ],
)
def test_texts(text: str, fields: dict[str, Any]) -> None:
    assert AllocatorSettings.from_text(text) == AllocatorSettings(**fields)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("expandable_segments", "max_split_size_mb:128"),
        ("expandable_segments=True", "max_split_size_mb:128"),
        ("expandable_segments:True;max_split_size_mb:30", "max_split_size_mb:128"),
        ("expandable_segments:True,,", "max_split_size_mb:128"),
        ("expandable_segments:true", "expandable_segments:True"),
        ("max_split_size_mb:10", "20"),
        ("max_split_size_mb:x", "20"),
        ("max_split_size_mb:-1", "20"),
        ("max_split_size_mb:[30]", "20"),
        ("max_split_size_mb:30,large_segment_size_mb:32", "32"),
        ("max_non_split_rounding_mb:10", "20"),
        ("large_segment_size_mb:10", "11"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("per_process_memory_fraction:2", "between 0 and 1"),
        ("roundup_power2_divisions:3", "one number"),
        ("roundup_power2_divisions:0", "one number"),
        ("roundup_power2_divisions:[256:3]", "one number"),
        ("roundup_power2_divisions:[100:4]", "one number"),
        ("roundup_power2_divisions:[256:1", "max_split_size_mb:128"),
        ("backend:foo", "backend:native"),
        ("backend:cudaMallocAsync", "leave it out"),
    ],
)
def test_what_torch_refuses(text: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": text})
    assert "PYTORCH_ALLOC_CONF" in str(caught.value)
    assert instead in str(caught.value.message.instead)


def test_an_unknown_option_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="expandable_segments"):
        settings = AllocatorSettings.from_text("expandable_segment:True")
    assert settings == AllocatorSettings()


def test_the_variable_of_cuda_is_read_first() -> None:
    both = {
        "PYTORCH_ALLOC_CONF": "large_segment_size_mb:32",
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40",
    }
    assert AllocatorSettings.from_environment(both).large_segment_size == 40 * MIB
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorSettings.from_environment(both).large_segment_size == 32 * MIB
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


@given(st.text())
def test_any_text_fails_only_with_our_error(text: str) -> None:
    try:
        AllocatorSettings.from_text("max_split_size_mb:" + text)
        AllocatorSettings.from_text("roundup_power2_divisions:" + text)
    except ConfigError:
        pass
    except UserWarning:
        pass  # another option after a comma


@given(st.integers(1, 1 << 37), st.sampled_from([(), (1,), (2,), (8,)]))
def test_rounding(size: int, divisions: tuple[int, ...]) -> None:
    settings = AllocatorSettings(roundup_power2_divisions=divisions * 16)
    rounded = settings.round_up(size)
    assert rounded >= size
    assert rounded % 512 == 0
    assert settings.round_up(rounded) == rounded


def test_repr_evaluates_back() -> None:
    settings = AllocatorSettings(max_split_size=40 * MIB, expandable_segments=True)
    assert eval(repr(settings)) == settings
    assert repr(AllocatorSettings()) == "AllocatorSettings()"
