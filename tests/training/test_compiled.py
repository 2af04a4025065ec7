"""Training works with `torch.compile`; foreign objects are not asked whether they are true."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.checkpoint import checkpoints, load_weights, read_checkpoint
from stretto.checkpoint.formats import load_dcp_weights
from stretto.training import Callback, Evaluation, Trainer, prepare
from stretto.training.algorithms import ExponentialMovingAverage, LayerFreezing
from stretto.training.algorithms.functions import find_modules

# Of torch itself, when it imports its compiler and writes without processes.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.distributed")
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))


class Plain(nn.Module):
    """An ordinary module: it has no length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def whole() -> Any:
    return torch.compile(Plain(), backend="eager")


def part() -> Any:
    model: Any = Plain()
    model.body = torch.compile(model.body, backend="eager")
    return model


def both() -> Any:
    return torch.compile(part(), backend="eager")


def in_place() -> Any:
    model: Any = Plain()
    model.body.compile(backend="eager")
    model.compile(backend="eager")
    return model


FORMS: dict[str, Callable[[], Any]] = {
    "plain": Plain, "whole": whole, "part": part, "both": both, "in_place": in_place,
}  # fmt: skip


def trainer(model: Any, folder: Path | None = None, **settings: Any) -> Trainer:
    given: dict[str, Any] = {
        "loss": nn.MSELoss(),
        "max_duration": "8ba",
        "batch_size": 4,
        "micro_batch_size": 2,
        "evaluate": Evaluation(DATA, every="4ba"),
        "callbacks": [ExponentialMovingAverage(0.5)],
        "checkpoint": None if folder is None else "4ba",
        "folder": folder,
        "log": {"console": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, DATA, optimizer=optimizer, **given | settings)


def weights(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.state_dict().values()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor]]]:
    """Each form, trained for 8 batches: the folder and the weights."""
    found = {}
    for name, form in FORMS.items():
        folder, model = tmp_path_factory.mktemp(name) / "run", form()
        trainer(model, folder).fit()
        found[name] = folder, weights(model)
    return found


def at(folder: Path, number: int) -> Path:
    return checkpoints(folder / "checkpoints")[number]


def test_names_in_a_checkpoint_are_those_of_the_plain_model(
    trained: Mapping[str, tuple[Path, list[Tensor]]],
) -> None:
    plain = Plain()
    for folder, expected in trained.values():
        found = read_checkpoint(at(folder, -1))
        assert found.tensors["model"].keys() == plain.state_dict().keys()
        for names in found.tensors.values():
            assert not any("_orig_mod" in name for name in names)
        for one, other in zip(expected, trained["plain"][1], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("saved", "now"), [*itertools.product(FORMS, FORMS)])
def test_a_run_resumes_whether_it_is_compiled_or_not(
    saved: str, now: str, trained: Mapping[str, tuple[Path, list[Tensor]]], tmp_path: Path
) -> None:
    folder, expected = trained[saved]
    model = FORMS[now]()
    again = trainer(model, tmp_path / "run")
    again.resume(at(folder, 0))
    assert again.timer.batch == 4
    assert not any(line.startswith("model") for line in again.changes)
    again.fit()
    for one, other in zip(weights(model), expected, strict=True):
        torch.testing.assert_close(one, other)
    other = FORMS[saved]()
    for averaged in (False, True):
        load_weights(model, at(folder, -1), averaged=averaged)
        load_weights(other, at(folder, -1), averaged=averaged)
        assert all(map(torch.equal, weights(model), weights(other)))


@pytest.mark.parametrize("now", FORMS)
def test_a_checkpoint_with_names_of_a_compiled_model_loads(
    now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 1 wrote it."""
    with monkeypatch.context() as old:
        old.setattr("stretto.runtime.compiled.is_compiled", lambda _: False)
        model = both()
        trainer(model, tmp_path / "old").fit()
    path = at(tmp_path / "old", -1)
    assert any("_orig_mod." in name for name in read_checkpoint(path).tensors["model"])
    again = FORMS[now]()
    trainer(again, tmp_path / "new").resume(path)
    assert all(map(torch.equal, weights(again), weights(model)))
    averages = FORMS[now]()
    load_weights(averages, path, averaged=True)
    assert not torch.equal(averages.head.weight, again.head.weight)


@pytest.mark.parametrize("now", FORMS)
def test_weights_of_torch_load_by_plain_names(now: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    source, model = Plain(), FORMS[now]()
    nn.init.constant_(source.head.weight, 3.0)
    save({"model": source.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert load_dcp_weights(model, tmp_path / "dcp") == ()
    assert torch.equal(model.head.weight, source.head.weight)


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_found_by_plain_names(form: str) -> None:
    model, plain = FORMS[form](), Plain()
    for one in (model, plain):
        freezing = LayerFreezing(["body.0"], start="0ba", end="1ba")
        trainer(one, callbacks=[freezing]).fit()
    assert find_modules(model, ["head"], "find") == [model.head]
    assert all(map(torch.equal, weights(model), weights(plain)))


@pytest.mark.parametrize("form", FORMS)
def test_compile_true_trains_as_without(
    form: str, trained: Mapping[str, tuple[Path, list[Tensor]]]
) -> None:
    """By inductor, as users have it, if it is a plain model."""
    model = FORMS[form]()
    trainer(model, compile=True).fit()
    for one, other in zip(weights(model), trained["plain"][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


class Hostile:
    """Whoever asks whether it is true, how long it is or what it equals gets an error."""

    def __bool__(self) -> NoReturn:
        raise AssertionError("asked whether it is true")

    def __len__(self) -> NoReturn:
        raise AssertionError("asked for its length")


class Empty:
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Hostile, Empty])
def test_no_foreign_object_is_asked_whether_it_is_true(kind: type, tmp_path: Path) -> None:
    """Model, optimizer, losses, metrics, callbacks, collate function, data set and schedule."""

    def mixed(base: type, **members: Any) -> Any:
        return type(f"Foreign{base.__name__}", (kind, base), members)

    class Function:
        def __init__(self, call: Callable[..., Any]) -> None:
            self.call = call

        def __call__(self, *given: Any) -> Any:
            return self.call(*given)

    foreign = mixed(Function)
    model = mixed(Plain)()
    data = mixed(TensorDataset)(*DATA.tensors) if kind is Hostile else DATA
    if kind is Hostile:  # a data set must have a length
        setattr(type(data), "__len__", TensorDataset.__len__)  # noqa: B010
    optimizer = mixed(torch.optim.SGD)(model.parameters(), lr=0.1)
    loss = foreign(lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    of_model = foreign(loss)
    made = Trainer(
        model,
        data,
        optimizer=optimizer,
        loss=mixed(nn.MSELoss)(),
        max_duration="2ep",
        batch_size=foreign(lambda timestamp, size: 4),
        micro_batch_size=2,
        schedules={"lr": foreign(lambda timer: 1.0)},
        rule=foreign(lambda size: 1.0),
        loading={"collate_fn": foreign(torch.utils.data.default_collate)},
        evaluate=[
            Evaluation(data, loss=of_model, metrics={"again": of_model}),
            Evaluation(data, name="criterion", loss=mixed(nn.L1Loss)()),
        ],
        callbacks=[mixed(Callback)()],
        checkpoint="1ep",
        folder=tmp_path / "run",
        log={"console": False},
    )
    made.fit()
    made.resume()
    assert made.timer.epoch == 2
    run = prepare(data, 4, max_duration="1ep", optimizer=optimizer, model=model)
    for step in run:
        for micro in step:
            (loss(model, micro.batch) * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.finish()
    assert run.is_done
