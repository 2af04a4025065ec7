"""The table of `docs/how-to/megatron.md`, each row run on the installed packages.

100 iterations that grow from 8 to 16 samples at sample 160; WSD with a warm-up of 10 iterations
and a decay of 20 that ends at 100. How many steps of their schedules that is, the engines
calculate by code of their own, which is cut from their files.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from tests.integrations import megatron_modules as modules

# isort: split
import torch
from megatron.core import num_microbatches_calculator as calculators
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from stretto import WSD, Horizon, plan
from stretto.integrations.megatron import follow

ITERATIONS, WARMUP, DECAY = 100, 10, 20
MICRO = RANKS = 2
RATE = 1e-3
SEQUENCE = 128
"""Tokens of a sample: Megatron-LM counts its schedule of sizes in tokens."""
RAMP = {8: 20, 16: 80}
TESTED = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}

pytestmark = [
    pytest.mark.usefixtures("_no_calculator"),
    pytest.mark.filterwarnings("ignore::UserWarning:megatron"),
]


class Row(NamedTuple):
    """What a run of 100 iterations did; iterations count from 0."""

    sizes: dict[int, int]
    """How many iterations had which size."""
    full_from: int
    """The first iteration at the full rate."""
    decays_from: int
    """The first after it that is below."""
    end: float
    """The rate after the last iteration, as a part of the full one."""
    zero_from: int | None = None
    """The first iteration at a rate of 0, if any."""


@pytest.fixture
def _no_calculator() -> Iterator[None]:
    """Leave Megatron's one calculator as it was found: not there."""
    yield
    calculators.unset_num_microbatches_calculator()


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=RATE)


def run(scheduler: OptimizerParamScheduler) -> Row:
    """Go through a run in the order of calls of Megatron-LM and Megatron-Bridge."""
    group = scheduler.optimizer.param_groups[0]
    rates: list[float] = []
    sizes: list[int] = []
    for _ in range(ITERATIONS):
        calculators.update_num_microbatches(sum(sizes), consistency_check=True)
        sizes.append(calculators.get_num_microbatches() * MICRO * RANKS)
        rates.append(group["lr"])
        scheduler.step(increment=sizes[-1])
    full_from = next(at for at, rate in enumerate(rates) if rate == pytest.approx(RATE))
    decays_from = next(at for at in range(full_from, ITERATIONS) if rates[at] < 0.999 * RATE)
    zero_from = next((at for at in range(full_from, ITERATIONS) if rates[at] == 0), None)
    return Row(Counter(sizes), full_from, decays_from, round(group["lr"] / RATE, 9), zero_from)


def unchanged(package: str) -> str:
    """Say what to mend when a row is another one."""
    return (
        f"{package} {version(package)} is not as {TESTED[package]} was: "
        "mend its row in docs/how-to/megatron.md"
    )


def bridge_configuration() -> SimpleNamespace:
    """Return what a user of Megatron-Bridge writes, as far as it is asked for here."""
    train = SimpleNamespace(
        train_iters=ITERATIONS,
        train_samples=None,
        global_batch_size=16,
        micro_batch_size=MICRO,
        rampup_batch_size=[8, 8, 160],
        decrease_batch_size_if_needed=False,
    )
    scheduler = SimpleNamespace(
        max_steps=None,
        lr_decay_iters=None,
        lr_decay_samples=None,
        lr_decay_style="WSD",
        lr_warmup_fraction=None,
        lr_warmup_iters=WARMUP,
        lr_wsd_decay_iters=DECAY,
    )
    return SimpleNamespace(train=train, scheduler=scheduler, data_parallel_size=RANKS)


def bridge_schedule(configuration: SimpleNamespace) -> OptimizerParamScheduler:
    """Build the schedule whose steps Megatron-Bridge calculates."""
    file = "bridge/training/config.py"
    modules.function(file, "_calculate_scheduler_steps", {"warnings": warnings})(configuration)
    steps = configuration.scheduler
    return OptimizerParamScheduler(
        optimizer(),
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=steps.lr_warmup_steps,
        lr_decay_steps=steps.lr_decay_steps,
        lr_decay_style="WSD",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=steps.wd_incr_steps,
        wd_incr_style="constant",
        wsd_decay_steps=steps.wsd_decay_steps,
        lr_wsd_decay_style="linear",
    )


def calls(name: str) -> Callable[[ast.AST], bool]:
    """Is it a statement that only calls this function?"""
    return lambda node: (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == name
    )


def start_bridge_calculator(configuration: SimpleNamespace) -> None:
    """Start Megatron's calculator as `initialize_megatron` of Megatron-Bridge does."""
    names = {
        "cfg": configuration,
        "train_config": configuration.train,
        "get_rank_safe": lambda: 1,  # rank 0 logs that the ramp is ignored
        "init_num_microbatches_calculator": calculators.init_num_microbatches_calculator,
    }
    modules.cut("bridge/training/initialize.py", calls("init_num_microbatches_calculator"), names)


def test_bridge_ignores_its_ramp() -> None:
    configuration = bridge_configuration()
    start_bridge_calculator(configuration)
    seen = run(bridge_schedule(configuration))
    assert seen == Row({16: 100}, 10, 81, 0), unchanged("megatron-bridge")


def test_a_schedule_of_sizes_moves_the_rates_of_bridge() -> None:
    """Megatron-Bridge#2609: the calculator can still ramp, and the steps are those of one size."""
    calculators.init_num_microbatches_calculator(
        1, None, 16, MICRO, RANKS, step_batch_size_schedule="0:8 160:16"
    )
    seen = run(bridge_schedule(bridge_configuration()))
    assert seen == Row(RAMP, 20, 91, 0.5), unchanged("megatron-bridge")


def megatron_lm_arguments() -> SimpleNamespace:
    """Return the arguments of a run of Megatron-LM, as far as they are asked for here."""
    return SimpleNamespace(
        rank=1,
        micro_batch_size=MICRO,
        data_parallel_size=RANKS,
        gtp_weight_remat_size=1,
        global_batch_size=None,  # refused beside a schedule of sizes
        decrease_batch_size_if_needed=False,
        step_batch_size_schedule=f"0:8 {160 * SEQUENCE}:16",
        seq_length=SEQUENCE,
        train_iters=ITERATIONS,
        train_samples=None,
        lr=RATE,
        min_lr=0.0,
        lr_decay_style="WSD",
        lr_decay_iters=None,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
        lr_warmup_iters=WARMUP,
        lr_wsd_decay_iters=DECAY,
        lr_wsd_decay_style="linear",
        start_weight_decay=0.1,
        end_weight_decay=0.1,
        weight_decay_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )


def start_megatron_lm(arguments: SimpleNamespace) -> None:
    """Complete the arguments and start the calculator as Megatron-LM does."""

    def sets_the_size(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == (
            "args.global_batch_size is None"
        )

    names = {"args": arguments, "print_rank_0": lambda text: None}
    modules.cut("training/arguments.py", sets_the_size, names)
    start = calculators.init_num_microbatches_calculator
    names = {"args": arguments, "init_num_microbatches_calculator": start}
    modules.cut("training/global_vars.py", calls("init_num_microbatches_calculator"), names)


def megatron_lm_schedule(arguments: SimpleNamespace) -> OptimizerParamScheduler:
    """Build the schedule by Megatron-LM's own function."""
    names = {"get_args": lambda: arguments, "OptimizerParamScheduler": OptimizerParamScheduler}
    build = modules.function("training/training.py", "get_optimizer_param_scheduler", names)
    built: OptimizerParamScheduler = build(optimizer())
    return built


def test_a_schedule_of_sizes_ends_the_rates_of_megatron_lm_early() -> None:
    """Iterations are multiplied by the size of one micro-batch on each rank, 4."""
    arguments = megatron_lm_arguments()
    start_megatron_lm(arguments)
    seen = run(megatron_lm_schedule(arguments))
    assert seen == Row(RAMP, 5, 31, 0, zero_from=35), unchanged("megatron-core")


@pytest.mark.parametrize("engine", ["bridge", "megatron-lm"])
def test_a_plan_has_the_rates_that_were_asked_for(engine: str) -> None:
    planned = plan(
        Horizon.endless("100ba"), "0sp:8 160sp:16", schedules={"lr": WSD("20ba", warmup="10ba")}
    )
    if engine == "bridge":
        configuration = bridge_configuration()
        start_bridge_calculator(configuration)
        scheduler = bridge_schedule(configuration)
    else:
        arguments = megatron_lm_arguments()
        arguments.global_batch_size, arguments.step_batch_size_schedule = 16, None
        start_megatron_lm(arguments)
        scheduler = megatron_lm_schedule(arguments)
    follow(planned, scheduler, 0, MICRO, RANKS)
    assert run(scheduler) == Row(RAMP, 10, 81, 0)
