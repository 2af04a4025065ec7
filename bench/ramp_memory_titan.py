"""Run torchtitan's Llama configurations with a ramp as rank 0 of 8, without a GPU.

All 50 steps are compared with the plan, and the peak of memory of each stage is printed and kept in
`bench/results/ramp_memory_titan.txt`. `python bench/ramp_memory_titan.py 8B` runs one case; the
environment is that of `make test-adapters ARGS=torchtitan`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / one) for one in ("src", "tools", ".")]

RANKS, STEPS, RATE = 8, 50, 3e-4
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A configuration of torchtitan and a ramp."""

    configuration: str
    """Its name in `torchtitan.models.llama3.config_registry`."""
    micro_batch_size: int
    stages: tuple[int, ...] = (1, 2, 4)
    """Samples of each data-parallel rank, in the stages of the ramp."""

    @property
    def batch_size(self) -> str:
        """The sizes over time: each stage but the last has 15 steps."""
        text, at = "", 0
        for samples in self.stages:
            text += f" {at}sp:{samples * RANKS}"
            at += 15 * samples * RANKS
        return text.strip()


CASES = {
    "debugmodel": Case("llama3_debugmodel", 8, (4, 8, 16)),
    "8B": Case("llama3_8b", 2),
}


def schedules() -> dict[str, Any]:
    """Return what is scheduled."""
    from stretto.schedules import Cosine

    return {"lr": Cosine(end=0.1, warmup="10%")}


def train(name: str, out: Path) -> None:
    """Train on the device that is here; write a row for each step."""
    import torch
    from tests.integrations.titan_toys import NoTokenizer, Rows
    from torchtitan.models.llama3 import config_registry

    from stretto.integrations.torchtitan import RunTrainer, Schedules, StepDataLoader

    class Noted(RunTrainer):
        @dataclass(kw_only=True, slots=True)
        class Config(RunTrainer.Config):
            pass

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            step = self.dataloader.run.step
            assert step is not None, "just finished"
            (rate,) = {group["lr"] for one in self.optimizers for group in one.param_groups}
            rows.append([step.timestamp.sample, step.num_samples, rate, len(step)])

    case, rows = CASES[name], list[list[float]]()
    config = getattr(config_registry, case.configuration)()
    config.training.local_batch_size = case.micro_batch_size
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable, config.validator.enable = False, False
    config.profiler.enable_profiling = config.metrics.enable_tensorboard = False
    config.metrics.log_freq = 10 * STEPS
    (group,) = config.optimizer.param_groups
    group.optimizer_kwargs["lr"] = RATE
    whole = {field.name: getattr(config, field.name) for field in fields(config)}
    whole |= {
        "tokenizer": NoTokenizer.Config(),
        "dump_folder": str(out.parent),
        "lr_scheduler": Schedules.Config(schedules=schedules()),
        "dataloader": StepDataLoader.Config(
            make_data=lambda _, length: Rows(length),
            batch_size=case.batch_size,
            max_duration=f"{STEPS}ba",
            loading={"last_batch": "carry"},
        ),
    }
    Noted(Noted.Config(**whole)).train()
    assert torch.cuda.is_available(), "a phantom"
    out.write_text(json.dumps(rows))


def measure(name: str) -> list[str]:
    """Run a case on a phantom; return the lines of its table."""
    from test_adapters import python_for

    import phantomgpu
    from stretto.planning import plan
    from stretto.timing import Horizon

    case = CASES[name]
    python = str(python_for("torchtitan"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [python, __file__, "--inside", name, str(out)]
        report = phantomgpu.run(command, gpu="h100", ranks=RANKS, steps=None)
        if not report.fits:
            return [f"{name}: {report}"]
        rows = json.loads(out.read_text())
    horizon = Horizon(f"{STEPS}ba", dataset_num_samples=203, last_batch="carry")
    planned = plan(horizon, case.batch_size, schedules=schedules(), base={"lr": RATE}).batches()
    each = case.micro_batch_size * RANKS
    expected = [
        [step.timestamp.sample, step.size, step.values["lr"], -(-step.size // each)]
        for step in planned
    ]
    assert rows == expected, "sizes, rates or micro-batches are not those of the plan"
    peaks = report.peaks_by_step
    assert len(peaks) >= len(rows) == STEPS, (len(peaks), len(rows))
    ranks = f"{RANKS} data-parallel ranks"
    lines = [f"{name}: {case.configuration}, {ranks}; torch {report.torch}"]
    lines += ["  steps    batch  micro-batches  allocated   reserved"]
    for size in dict.fromkeys(row[1] for row in rows):
        at = [number for number, row in enumerate(rows) if row[1] == size]
        passes = {rows[number][3] for number in at}
        allocated, reserved = (max(peaks[number][which] for number in at) for which in (0, 1))
        lines.append(
            f"  {at[0] + 1:>2} to {at[-1] + 1:<2} {size:>6}  {max(passes):>13}  "
            f"{allocated / GIB:>5.2f} GiB  {reserved / GIB:>5.2f} GiB"
        )
    return lines


def main(names: list[str]) -> None:
    """Run the cases; keep what they print."""
    lines = [
        "torchtitan 0.3.0 as rank 0 of 8 on a phantom H100: sizes, rates and micro-batches of all",
        f"{STEPS} steps equal the plan. Peaks are those of torch's allocator.",
    ]
    for name in names or CASES:
        found = measure(name)
        print(*found, sep="\n", flush=True)
        lines += ["", *found]
    if not names:
        result = ROOT / "bench" / "results" / "ramp_memory_titan.txt"
        result.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
