"""Runs that measure the noise of their gradient in normalisation layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.batching import NoiseScale
from stretto.errors import TrainingError
from stretto.noise import noise_terms
from stretto.training import Callback, Logging, Stepping, Trainer
from stretto.training.algorithms import NoiseReport, SelectiveBackprop

FROM_NORMS = Stepping(noise_from="norm_layers")
IGNORED = -100


class Listener(Callback):
    """Keeps what was measured, and the weights it was measured with."""

    def __init__(self) -> None:
        self.terms: list[tuple[float | None, ...]] = []
        self.samples: list[list[Any]] = []
        self.states: list[dict[str, Tensor]] = []

    def on_batch_start(self, trainer: Any, step: Any) -> None:
        pieces = [micro.batch for micro in step.micro_batches]
        self.samples.append([(x[None], y[None]) for xs, ys in pieces for x, y in zip(xs, ys)])  # noqa: B905
        self.states.append({k: v.clone() for k, v in trainer.model.state_dict().items()})

    def on_noise(self, trainer: Any, step: Any, signals: Any) -> None:
        numerator, denominator = signals.noise_numerator, signals.noise_denominator
        assert None not in (numerator, denominator, signals.num_samples)
        self.terms.append((numerator, denominator, denominator + numerator / signals.num_samples))


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.RMSNorm(6)
    ).double()


def data(count: int = 60) -> TensorDataset:
    """Sequences of five tokens, of which some are padding; each sample has at least two."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 11, (count, 5), generator=generator)
    labels = inputs % 6
    lengths = torch.randint(2, 6, (count, 1), generator=generator)
    return TensorDataset(inputs, labels.where(torch.arange(5) < lengths, IGNORED))


def by_sample(model: nn.Module, batch: Any) -> Tensor:
    """The mean over samples of the mean over each one's tokens."""
    losses = nn.functional.cross_entropy(
        model(batch[0]).transpose(1, 2), batch[1], ignore_index=IGNORED, reduction="none"
    )
    return (losses.sum(1) / (batch[1] != IGNORED).sum(1)).mean()


def by_token(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED
    )


def count(batch: Any) -> int:
    return int((batch[1] != IGNORED).sum())


def run(*callbacks: Callback, stepping: Stepping = FROM_NORMS, **settings: Any) -> nn.Module:
    trained = settings.pop("model", None) or model()
    defaults: dict[str, Any] = {"loss": by_sample, "max_duration": "3ba", "batch_size": 24}
    Trainer(
        trained,
        settings.pop("data", data()),
        optimizer=torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9),
        stepping=stepping,
        callbacks=callbacks,
        **{**defaults, **settings},
    ).fit()
    return trained


def expected(listener: Listener, loss: Any, units: Any) -> list[tuple[float, ...]]:
    """The terms of each step from the gradients of its samples, each computed by itself."""
    found: list[tuple[float, ...]] = []
    for samples, state in zip(listener.samples, listener.states, strict=True):
        stand_in = model()
        stand_in.load_state_dict(state)
        weights = [*stand_in[1].parameters(), *stand_in[4].parameters()]
        sizes = [units(sample) for sample in samples]
        gradients = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss(stand_in, one), weights)])
                for one in samples
            ]
        )
        factors = torch.tensor(sizes, dtype=torch.float64)[:, None]
        square = float(((gradients * factors).sum(0) / sum(sizes)).square().sum())
        terms = noise_terms(gradients.square().sum(1).tolist(), sizes, square)
        assert terms is not None
        per_sample = sum(sizes) / len(samples)
        found.append((terms.numerator / per_sample, terms.denominator, square))
    return found


@pytest.mark.parametrize("micro", [None, 7, 1], ids=["one pass", "uneven", "single samples"])
@pytest.mark.parametrize("weight", ["samples", "tokens", "sums"])
def test_the_groups_are_the_samples(micro: int | None, weight: str) -> None:
    listener = Listener()
    loss, units = (by_sample, lambda _: 1) if weight == "samples" else (by_token, count)

    def total(model: nn.Module, batch: Any) -> Tensor:
        return by_token(model, batch) * count(batch)

    is_sum = weight == "sums"
    stepping = Stepping(
        noise_from="norm_layers",
        loss_weight="samples" if weight == "samples" else count,
        loss_reduction="sum" if is_sum else "mean",
    )
    run(listener, loss=total if is_sum else loss, stepping=stepping, micro_batch_size=micro)
    # The last batch of the epoch has 12 samples: other sizes than those of the first two.
    assert [len(samples) for samples in listener.samples] == [24, 24, 12]
    for terms, true in zip(listener.terms, expected(listener, loss, units), strict=True):
        assert terms == pytest.approx(true, rel=1e-9)


@pytest.mark.parametrize("micro", [None, 7, 1])
def test_weights_are_those_of_a_run_that_does_not_measure(micro: int | None) -> None:
    plain = run(micro_batch_size=micro, max_duration="2ep")
    listener = Listener()
    measured = run(listener, micro_batch_size=micro, max_duration="2ep")
    assert len(listener.terms) == 6
    for one, other in zip(plain.parameters(), measured.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_of_a_single_pass_stays_one_and_is_logged(tmp_path: Path) -> None:
    passes = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        passes.append(len(batch[0]))
        return by_sample(model, batch)

    report = NoiseReport(window=20, confidence=0.5)
    run(
        report,
        loss=loss,
        data=data(400),
        batch_size=20,
        max_duration="60ba",
        folder=tmp_path,
        log=Logging("20ba"),
    )
    assert set(passes) == {20}
    assert len(passes) == 60
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["noise_scale_low"] < lines[-1]["noise_scale"] < lines[-1]["noise_scale_high"]


def test_a_batch_size_follows_it() -> None:
    listener = Listener()
    policy = NoiseScale(4, 40, c=0.5, minimum=2, window=6, confidence=0.2)
    run(listener, batch_size=policy, max_duration="4ep", stepping=FROM_NORMS)
    assert len({len(samples) for samples in listener.samples}) > 2


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")  # torch's own, under autocast
def test_loss_scaling_changes_nothing() -> None:
    seen = []
    for precision in ("fp32", "fp16", "bf16"):
        listener = Listener()
        stepping = Stepping(noise_from="norm_layers", precision=precision, clip_norm=0.1)
        run(listener, model=model().float(), stepping=stepping, max_duration="1ba")
        seen.append(listener.terms[0])
    assert seen[1] == pytest.approx(seen[0], rel=0.05)
    assert seen[2] == pytest.approx(seen[0], rel=0.1)


def test_an_overflow_is_no_measurement() -> None:
    listener = Listener()
    run(
        listener,
        loss=lambda model, batch: model(batch[0]).square().mean() * torch.inf,
        stepping=Stepping(noise_from="norm_layers", non_finite="skip"),
    )
    assert listener.terms == []


def test_layers_that_are_frozen_for_a_while_measure_nothing() -> None:
    class Freeze(Callback):
        def on_batch_start(self, trainer: Any, step: Any) -> None:
            for parameter in (*trainer.model[1].parameters(), *trainer.model[4].parameters()):
                parameter.requires_grad_(step.timestamp.batch != 1)

    listener = Listener()
    run(listener, Freeze())
    assert len(listener.terms) == 2


def test_batches_that_lose_samples_on_their_way() -> None:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([by_sample(model, (x[None], y[None])) for x, y in zip(*batch)])  # noqa: B905

    listener = Listener()
    run(listener, SelectiveBackprop(losses, start="0ba", end="100ba", keep=0.25))
    assert all(terms[0] is not None and terms[0] > 0 for terms in listener.terms)


def test_once_in_so_many_steps() -> None:
    listener = Listener()
    run(listener, stepping=Stepping(noise_from="norm_layers", measure_noise=2))
    assert len(listener.terms) == 2


def penalised(model: nn.Module, batch: Any) -> Tensor:
    return by_sample(model, batch) + sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": nn.Sequential(nn.Embedding(11, 6))}, "no LayerNorm, RMSNorm or GroupNorm in it"),
        ({"model": torch.compile(model(), backend="eager")}, "the model is compiled"),
        ({"loss": penalised}, "more flows into the gradients of their weights"),
        (
            {"loss": lambda model, batch: model(batch[0].mT).mean()},
            "tell the gradients of 24 samples apart: the LayerNorm '1' is given the shape",
        ),
        (
            {"stepping": Stepping(noise_from="norm_layers", loss_weight=lambda batch: 7)},
            "tell how much each sample weighs: those of a micro-batch have 168 units one by one",
        ),
    ],
    ids=["no layers", "compiled", "a penalty", "samples are not first", "units do not add up"],
)
def test_what_cannot_be_right_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        run(Listener(), **settings)


def test_where_nobody_listens_nothing_is_refused() -> None:
    trained = nn.Sequential(nn.Embedding(11, 6))
    before = trained[0].weight.detach().clone()  # type: ignore[operator]
    run(model=trained)
    assert not torch.equal(before, trained[0].weight)  # type: ignore[arg-type]


def test_there_are_two_choices() -> None:
    wrong: Any = "layers"
    with pytest.raises(TrainingError, match=r"noise_from='layers'.*'micro_batches', 'norm_layers'"):
        Stepping(noise_from=wrong)
