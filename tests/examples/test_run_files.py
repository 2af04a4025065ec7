"""The packaged run files say what their data are, rightly."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
import yaml

from stretto.examples.digits import DigitClassifier, Digits, accuracy, digit_loss
from stretto.examples.text import PythonDocs, next_byte_loss, unigram_loss
from stretto.examples.tiny_gpt import TinyGPT

TARGETS: dict[str, Any] = {
    "stretto.examples.digits:DigitClassifier": DigitClassifier,
    "stretto.examples.digits:Digits": Digits,
    "stretto.examples.digits:accuracy": accuracy,
    "stretto.examples.digits:digit_loss": digit_loss,
    "stretto.examples.text:PythonDocs": PythonDocs,
    "stretto.examples.text:next_byte_loss": next_byte_loss,
    "stretto.examples.text:unigram_loss": unigram_loss,
    "stretto.examples.tiny_gpt:TinyGPT": TinyGPT,
    "torch.optim:AdamW": torch.optim.AdamW,
    "torch.optim:SGD": torch.optim.SGD,
}


def read(name: str) -> dict[str, Any]:
    text = resources.files("stretto.examples").joinpath(name).read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    return values


def build(section: dict[str, Any], *arguments: Any) -> Any:
    """What a section's target makes of its other keys."""
    settings = {key: value for key, value in section.items() if key != "target"}
    return TARGETS[section["target"]](*arguments, **settings)


@pytest.mark.parametrize("name", ["default.yaml", "digits.yaml"])
def test_everything_that_is_named_fits_together(name: str) -> None:
    run = read(name)
    stated = {
        key: run["data"].pop(key)
        for key in ("num_samples", "tokens_per_sample")
        if key in run["data"]
    }
    data = build(run["data"])
    assert len(data) == stated["num_samples"]
    if "tokens_per_sample" in stated:
        assert data.tokens_per_sample == stated["tokens_per_sample"]
    validation = build({**run["data"], "split": "validation"})
    assert 0 < len(validation) < len(data)

    model = build(run["model"])
    optimizer = build(run["optimizer"], model.parameters())
    loss = TARGETS[run["loss"]["target"]]
    torch.autograd.backward(loss(model, data.get_batch([0, 1])))
    optimizer.step()
    for metric in run["evaluate"]["metrics"].values():
        value = TARGETS[metric["target"]](model, validation.get_batch([0, 1]))
        assert value.shape == ()
        assert value.isfinite()
