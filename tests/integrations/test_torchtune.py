"""The recipe of torchtune with the diff of `examples/`, against the real package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtune", reason="needs torchtune: make test-adapters")

import torch
from tests.integrations.torchtune_toys import LENGTH, VOCABULARY, N, Rows, Tokenizer
from torchtune.data import padded_collate_sft
from torchtune.models.llama3_2 import llama3_2

from stretto.ordering import SampleOrder
from stretto.planning import Plan, plan
from stretto.schedules import Cosine
from stretto.timing import Horizon

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
SIZES, MICRO, SEED, RATE = "0sp:8 65sp:18 200sp:40", 6, 3, 1e-2
CLOSE = 2e-6  # the recipe trains in float32
SHAPE = {
    "vocab_size": VOCABULARY,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "embed_dim": 16,
    "intermediate_dim": 32,
    "max_seq_len": LENGTH,
}


def the_plan() -> Plan:
    horizon = Horizon("2ep", dataset_num_samples=N, last_batch="drop")
    return plan(horizon, SIZES, schedules={"lr": Cosine(end=0.1)}, base={"lr": RATE})


def planned_ids() -> list[list[int]]:
    order, found = SampleOrder(N, seed=SEED), []
    for batch in the_plan().batches():
        start = batch.timestamp.sample
        found.append([order[at] for at in range(start, start + batch.size)])
    return found


def first_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: 0.3 * one for name, one in llama3_2(**SHAPE).state_dict().items()}


class Recipe:
    """One run of the recipe, in a folder of its own."""

    def __init__(
        self, folder: Path, first: Path, weights: str = "model.bin", **changed: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        checkpointer = {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(first),
            "checkpoint_files": [weights],
            "output_dir": str(folder / "out"),
            "model_type": "LLAMA3_2",
            "should_load_recipe_state": changed.get("resume_from_checkpoint", False),
        }
        config = {
            "output_dir": str(folder / "out"),
            "tokenizer": {"_component_": "tests.integrations.torchtune_toys.Tokenizer"},
            "dataset": {"_component_": "tests.integrations.torchtune_toys.Rows"},
            "model": {"_component_": "torchtune.models.llama3_2.llama3_2", **SHAPE},
            "checkpointer": checkpointer,
            "optimizer": {"_component_": "torch.optim.SGD", "lr": RATE},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(folder / "log"),
            },
            "optimizer_in_bwd": False,
            "seed": SEED,
            "shuffle": True,
            "batch_size": MICRO,
            "global_batch_size": SIZES,
            "epochs": 2,
            "max_steps_per_epoch": None,
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": None,
            "compile": False,
            "resume_from_checkpoint": False,
            "device": "cpu",
            "dtype": "fp32",
            "enable_activation_checkpointing": False,
            "enable_activation_offloading": False,
            "log_every_n_steps": 1,
            "log_peak_memory_stats": False,
            **changed,
        }
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML, too
        self.folder = folder
        tune = str(Path(sys.executable).with_name("tune"))
        self._call(tune, "cp", "full_finetune_single_device", "recipe.py")
        self._call("git", "apply", str(ROOT / "examples" / "torchtune_recipe.diff"))
        self._call(sys.executable, "recipe.py", "--config", "config.yaml")
        read = (folder / "read").read_text().split()
        self.ids = [int(one) for one in read]
        text = "".join(path.read_text() for path in (folder / "log").glob("*.txt"))
        self.log = [
            {key: float(value) for key, value in re.findall(r"(\w+):([-\d.e+]+)", line)}
            for line in text.splitlines()
            if line.startswith("Step")
        ]

    def _call(self, *command: str) -> None:
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        names = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "READ": str(self.folder / "read")}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **names},
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / "out" / f"epoch_{epoch}").glob("*.bin")
        found: dict[str, torch.Tensor] = torch.load(file)
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("torchtune")
    (folder / "first").mkdir()
    torch.save(first_weights(), folder / "first" / "model.bin")
    return Recipe(folder / "whole", folder / "first")


def test_the_recipe_follows_the_plan(whole: Recipe) -> None:
    batches = list(the_plan().batches())
    assert [sample for step in planned_ids() for sample in step] == whole.ids
    assert [line["batch_size"] for line in whole.log] == [batch.decided for batch in batches]
    assert [line["lr"] for line in whole.log] == [batch.values["lr"] for batch in batches]
    assert [line["ba"] for line in whole.log] == list(range(1, len(batches) + 1))


def test_its_weights_are_those_of_one_big_batch(whole: Recipe) -> None:
    """The recipe divides by the tokens of the whole step, so padding does not matter."""
    model = llama3_2(**SHAPE)
    model.load_state_dict(first_weights())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    os.environ["READ"] = os.devnull
    rows = Rows(Tokenizer())
    for ids, batch in zip(planned_ids(), the_plan().batches(), strict=True):
        optimizer.param_groups[0]["lr"] = batch.values["lr"]
        together = padded_collate_sft([rows[one] for one in ids])
        labels = torch.nn.functional.pad(together["labels"][:, 1:], (0, 1), value=-100)
        optimizer.zero_grad()
        logits = model(together["tokens"])
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels).backward()
        optimizer.step()
    for name, value in whole.weights(1).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=CLOSE)


def test_it_resumes_after_an_epoch(whole: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(whole.folder / "out", folder / "out")
    shutil.rmtree(folder / "out" / "epoch_1")
    (tmp_path / "first").mkdir()
    settings = {"resume_from_checkpoint": True, "batch_size": 4}
    run = Recipe(folder, tmp_path / "first", "epoch_0/model-00001-of-00001.bin", **settings)
    first = sum(one.size for one in the_plan().batches() if one.timestamp.epoch == 0)
    assert run.ids == whole.ids[first:]
    for name, value in run.weights(1).items():
        torch.testing.assert_close(value, whole.weights(1)[name], rtol=0, atol=CLOSE)
