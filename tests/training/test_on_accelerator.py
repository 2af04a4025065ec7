"""Whole runs on an accelerator, where there is one: what is promised of a CPU holds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.batching import LinearRamp, NoiseScale, Signals
from stretto.schedules import Cosine
from stretto.training import Callback, Checkpointing, Run, Stepping, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
DEVICE = "cuda"


class Listener(Callback):
    """Keeps what was measured."""

    def __init__(self) -> None:
        self.heard: list[Signals] = []

    def on_noise(self, run: Run, step: Any, signals: Signals) -> None:
        del run, step
        self.heard.append(signals)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def run(device: str, *, compiled: bool = False, **more: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))
    if compiled:
        model.compile()
    settings: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss": loss,
        "max_duration": "3ep",
        "batch_size": LinearRamp(8, 64, "2ep"),
        "schedules": {"lr": Cosine(warmup="10%")},
        "stepping": Stepping(device=device),
        **more,
    }
    return Trainer(model, TensorDataset(*samples()), **settings)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's compiler uses torch.jit
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_ramp_trains(precision: Any, compiled: bool) -> None:
    stepping = Stepping(device=DEVICE, precision=precision, clip_norm=1.0)
    trainer = run(DEVICE, compiled=compiled, stepping=stepping)
    trainer.fit()
    assert all(parameter.device.type == DEVICE for parameter in trainer.model.parameters())
    inputs, targets = samples()
    trainer.model.eval()
    with torch.no_grad():
        answers = trainer.model(inputs.to(DEVICE)).argmax(1).cpu()
    assert (answers == targets).float().mean() > 0.9


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run(DEVICE)
    whole.fit()
    run(DEVICE, folder=tmp_path, callbacks=[_Stop()], checkpoint=Checkpointing()).fit()
    again = run(DEVICE, folder=tmp_path, checkpoint=Checkpointing())
    again.resume()
    again.fit()
    assert torch.equal(weights(whole), weights(again))


class _Stop(Callback):
    def on_batch_end(self, run: Run, step: Any) -> None:
        del step
        if run.timer.batch == 20:
            run.stop("half way")


def test_the_noise_is_that_of_a_cpu() -> None:
    found = {}
    for device in (DEVICE, "cpu"):
        listener = Listener()
        trainer = run(device, callbacks=[listener], micro_batch_size=4, max_duration="5ba")
        for module in trainer.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # other generators, other masks
        trainer.fit()
        found[device] = [(one.noise_numerator, one.noise_denominator) for one in listener.heard]
    assert len(found["cpu"]) == 5
    for here, there in zip(found[DEVICE], found["cpu"], strict=True):
        assert here == pytest.approx(there, rel=1e-2)


def test_a_batch_follows_the_noise() -> None:
    listener = Listener()
    policy = NoiseScale(8, 64, c=4.0, window=10)
    trainer = run(DEVICE, batch_size=policy, micro_batch_size=4, callbacks=[listener])
    trainer.fit()
    assert len(listener.heard) == trainer.timer.batch
    assert trainer.timer.batch < 3 * 512 / 8
