"""Asked about CUDA where there is none: what its kernels keep, and what its allocator reserves."""

from __future__ import annotations

from memory_families import FAMILIES

from stretto.memory import predict


def test_the_mask_of_dropout_is_of_bytes() -> None:
    step, make_batch = FAMILIES["GPT, attention by hand, dropout"]()
    here = predict(step, make_batch)
    there = predict(step, make_batch, device="cuda")
    size = 1000
    assert there.curve.peak(size) < 0.95 * here.curve.peak(size)
    assert there.peak(size) >= there.curve.peak(size)
    assert here.certainty_if_verified == "exact"
    assert (there.certainty_if_verified, "outside its caching" in there.reason) == (
        "estimate",
        True,
    )


def test_softmax_is_computed_in_full_precision() -> None:
    step, make_batch = FAMILIES["GPT, by hand, bf16"]()
    here = predict(step, make_batch).at(64)
    there = predict(step, make_batch, device="cuda").at(64)
    assert there.by_module["blocks.0.1"] != here.by_module["blocks.0.1"]


def test_more_is_reserved_than_is_live() -> None:
    step, make_batch = FAMILIES["GPT, SDPA"]()
    reserved = predict(step, make_batch, device="cuda").peak(64)
    live = predict(step, make_batch).peak(64)
    assert live <= reserved < 1.4 * live


def test_all_tensors_are_updated_at_once() -> None:
    step, make_batch = FAMILIES["MLP, AdamW"]()
    together = FAMILIES["MLP, AdamW foreach"]()
    there = predict(step, make_batch, device="cuda")
    assert there.curve.peak(2) == predict(*together, device="cuda").curve.peak(2)
    assert step.optimizers[0].param_groups[0]["foreach"] is None
