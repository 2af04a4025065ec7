"""GPT-2 small and ResNet-20: shortened, and whole with the numbers that they say."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from examples import resnet_digits


def numbers(text: str) -> list[float]:
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def said(example: ModuleType) -> str:
    """What the head of an example says that it prints."""
    assert example.__doc__
    return "\n".join(line for line in example.__doc__.splitlines() if line.startswith("    "))


@pytest.fixture(autouse=True)
def _threads_stay() -> None:
    torch.set_num_threads(1)  # as the examples do


def test_resnet_20_has_as_many_parameters_as_it_says() -> None:
    count = sum(one.numel() for one in resnet_digits.resnet().parameters())
    assert count == numbers(said(resnet_digits))[0]
    assert resnet_digits.resnet()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_shorter_resnet_learns(capsys: pytest.CaptureFixture[str]) -> None:
    resnet_digits.main("2ep", blocks=1)
    assert numbers(capsys.readouterr().out)[-1] > 0.7


def test_gpt2_small_has_as_many_parameters_as_it_says() -> None:
    pytest.importorskip("transformers")
    from examples import gpt2_small
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    assert model.num_parameters() == numbers(said(gpt2_small))[0]


def test_a_smaller_gpt2_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from examples import gpt2_small

    small = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256}
    gpt2_small.main(256, **small, bos_token_id=0, eos_token_id=0)
    first, *later = re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)
    assert float(first) == pytest.approx(5.55, abs=0.4)  # the logarithm of 256
    assert float(later[-1]) < 5.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2_small", "resnet_digits"])
def test_it_prints_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures, with room for other versions of Python, whose manual differs, and of torch."""
    pytest.importorskip("transformers" if name == "gpt2_small" else "sklearn")
    example = getattr(__import__(f"examples.{name}"), name)
    example.main()
    found = capsys.readouterr().out
    assert numbers(found) == pytest.approx(numbers(said(example)), rel=0.05, abs=0.1)
