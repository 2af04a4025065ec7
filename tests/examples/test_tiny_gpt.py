from __future__ import annotations

import math

import pytest
import torch

from stretto.errors import ConfigError
from stretto.examples.text import PythonDocs, next_byte_loss
from stretto.examples.tiny_gpt import TinyGPT


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def test_a_position_sees_only_what_came_before() -> None:
    model = TinyGPT(2, 32, context=12)
    first = tokens(2, 12)
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 1) % 256
    changed = (model(first) - model(second)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 7 + [True] * 5


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    model = TinyGPT(1, 32, context=12)
    whole = tokens(2, 12)
    torch.testing.assert_close(model(whole[:, :5]), model(whole)[:, :5])


@pytest.mark.parametrize("tied", [False, True])
def test_at_the_start_all_bytes_are_equally_likely(tied: bool) -> None:
    torch.manual_seed(0)
    loss = next_byte_loss(TinyGPT(tied=tied), PythonDocs().get_batch([0, 500, 1000]))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_tied_embeddings_are_one_parameter() -> None:
    model = TinyGPT(1, 16, tied=True)
    assert model.head.weight is model.token_embedding.weight
    count = sum(parameter.numel() for parameter in model.parameters())
    untied = sum(parameter.numel() for parameter in TinyGPT(1, 16).parameters())
    assert untied - count == 256 * 16


def test_without_dropout_training_and_evaluation_agree() -> None:
    model = TinyGPT(1, 16)
    batch = tokens(2, 8)
    assert torch.equal(model.train()(batch), model.eval()(batch))


def test_dropout_acts_in_training_only() -> None:
    model = TinyGPT(1, 16, dropout=0.5)
    batch = tokens(2, 8)
    assert not torch.equal(model.train()(batch), model(batch))
    assert torch.equal(model.eval()(batch), model(batch))


def test_it_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = TinyGPT(1, 32, context=16)
    batch = PythonDocs(16).get_batch([0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(next_byte_loss(model, batch))
        optimizer.step()
    assert next_byte_loss(model, batch).item() < 0.2


@pytest.mark.parametrize(("width", "heads"), [(30, 4), (64, 0)])
def test_a_width_that_heads_cannot_share_is_refused(width: int, heads: int) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        TinyGPT(1, width, heads=heads)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequences"):
        TinyGPT(1, 16, context=8)(tokens(1, 9))
