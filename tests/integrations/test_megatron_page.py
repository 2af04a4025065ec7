"""The code of `docs/how-to/megatron.md`, run on Megatron's own classes and lines."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.integrations import megatron_modules as modules

# isort: split
import torch
from megatron.bridge.training.callbacks import CallbackContext, normalize_callbacks
from megatron.core import num_microbatches_calculator as calculators
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from stretto.errors import TrainingError

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "megatron.md"
PLAN, BRIDGE, MEGATRON_LM, LOOP = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
MICRO = RANKS = 2
RATE = 1e-3

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron")


@pytest.fixture(autouse=True)
def _calculator() -> Iterator[None]:
    """Start Megatron's one calculator as its own initialization does, and end it."""
    calculators.init_num_microbatches_calculator(1, None, 16, MICRO, RANKS)
    yield
    calculators.unset_num_microbatches_calculator()


@pytest.fixture
def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what the page has made when its plan is written."""
    found: dict[str, Any] = {"scheduler": scheduler()}
    exec(PLAN, found)
    return found


def scheduler() -> OptimizerParamScheduler:
    """Build a schedule as Megatron does for 100 iterations of 16."""
    parameters = [torch.zeros(1, requires_grad=True)]
    return OptimizerParamScheduler(
        torch.optim.AdamW([{"params": parameters, "max_lr": RATE, "min_lr": 0.0, "wd_mult": 1.0}]),
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1600,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=1600,
        wd_incr_style="constant",
    )


def run(names: dict[str, Any], consumed: int = 0) -> tuple[list[int], list[float]]:
    """Go through the rest of a run by the page's loop; return sizes and rates."""
    sizes: list[int] = []
    rates: list[float] = []
    group = names["scheduler"].optimizer.param_groups[0]

    def train_step(micro_batches: int) -> None:
        sizes.append(micro_batches * MICRO * RANKS)
        rates.append(group["lr"] / RATE)

    loop = LOOP.replace("follow(planned", "# ")  # whoever follows, the loop is the same
    exec(loop, {**names, "train_step": train_step, "consumed_samples": consumed})
    assert group["lr"] == 0
    return sizes, rates


def assert_as_planned(names: dict[str, Any], consumed: int = 0) -> None:
    sizes, rates = run(names, consumed)
    planned = [one for one in names["planned"].batches() if one.timestamp.sample >= consumed]
    assert sizes == [one.size for one in planned]
    assert rates == pytest.approx([one.values["lr"] for one in planned], rel=1e-12)
    if consumed == 0:
        assert Counter(sizes) == {8: 20, 16: 80}
        assert rates.index(1) == 10
        assert rates[80] == 1 > rates[81]


def bridge_context(names: dict[str, Any], config: SimpleNamespace) -> CallbackContext:
    state = SimpleNamespace(step=0, consumed_train_samples=0)
    return CallbackContext(
        state=SimpleNamespace(cfg=config, train_state=state),
        model=[],
        user_state={},
        optimizer=names["scheduler"].optimizer,
        scheduler=names["scheduler"],
    )


def bridge_config(**train: Any) -> SimpleNamespace:
    """Return a configuration as a recipe of Megatron-Bridge makes it, as far as is asked for."""
    sizes = {"train_iters": 300_000, "train_samples": None, "global_batch_size": 8}
    ramp = {"rampup_batch_size": None, "decrease_batch_size_if_needed": False}
    return SimpleNamespace(
        train=SimpleNamespace(**{**sizes, **ramp, "micro_batch_size": MICRO, **train}),
        dataset=SimpleNamespace(dataloader_type="single", seq_length=4096),
        model=SimpleNamespace(
            seq_length=4096,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
        ),
        scheduler=SimpleNamespace(max_steps=None),
        data_parallel_size=RANKS,
    )


def test_a_loop_of_ones_own(names: dict[str, Any]) -> None:
    exec(LOOP.partition("while")[0], {**names, "consumed_samples": 0})
    assert_as_planned(names)


def pretrain_bridge(names: dict[str, Any], config: SimpleNamespace) -> None:
    """Run the page's lines for Megatron-Bridge up to its event before the data are made."""

    def pretrain(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        context = bridge_context(names, config)
        manager = normalize_callbacks(callbacks)
        manager.fire("on_data_init_start", context)
        manager.fire("on_train_start", context)

    exec(BRIDGE, {**names, "config": config, "pretrain": pretrain, "forward_step": None})


def test_megatron_bridge(names: dict[str, Any]) -> None:
    pretrain_bridge(names, bridge_config())
    assert_as_planned(names)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Put stand-ins there for the modules of Megatron-LM that need a GPU, with 3 steps done."""
    args = SimpleNamespace(
        iteration=0,
        consumed_train_samples=0,
        micro_batch_size=MICRO,
        data_parallel_size=RANKS,
        global_batch_size=16,
        train_iters=100,
        train_samples=None,
    )
    made = scheduler()

    def setup_model_and_optimizer(model_type: Any, **options: Any) -> tuple[Any, Any, Any]:
        args.iteration, args.consumed_train_samples = 3, 24  # by load_checkpoint
        return [], made.optimizer, made

    package, module = ModuleType("megatron.training"), ModuleType("megatron.training.training")
    vars(module)["setup_model_and_optimizer"] = setup_model_and_optimizer
    vars(package).update(training=module, get_args=lambda: args)
    variables = ModuleType("megatron.training.global_vars")
    vars(variables)["_GLOBAL_ARGS"] = args
    for one in (package, module, variables):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return SimpleNamespace(args=args, module=module, scheduler=made)


def sets_up(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "setup_model_and_optimizer"
        and ast.unparse(node.targets[0]) == "(model, optimizer, opt_param_scheduler)"
    )


def test_megatron_lm(names: dict[str, Any], training: SimpleNamespace) -> None:
    """The line of `pretrain` that sets up is Megatron's own; it sees its module's names."""
    exec(MEGATRON_LM, names)
    options = dict.fromkeys(("model_type", "model_provider", "checkpointing_context"))
    seen = {**vars(training.module), **options, "cfg_container": None, "pg_collection": ()}
    modules.cut("training/training.py", sets_up, seen)
    assert seen["opt_param_scheduler"] is training.scheduler
    assert_as_planned({**names, "scheduler": training.scheduler}, consumed=24)


def test_pretrain_looks_the_function_up_when_it_calls_it_after_the_checkpoint_and_before_data() -> (
    None
):
    tree = ast.parse((modules.FOLDER / "training/training.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [
        node.func.id
        for node in ast.walk(functions["pretrain"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    # A global name of the module, no import of its own.
    space: dict[str, Any] = {}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, functions["pretrain"]], []), "training.py", "exec"), space)
    code = space["pretrain"].__code__
    assert "setup_model_and_optimizer" in code.co_names
    assert "setup_model_and_optimizer" not in code.co_varnames
    lines = {
        name: min(
            node.lineno
            for node in ast.walk(functions["pretrain"])
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name
        )
        for name in ("setup_model_and_optimizer", "build_train_valid_test_data_iterators", "train")
    }
    assert list(lines.values()) == sorted(lines.values())
    setup = {
        ast.unparse(node.func)
        for node in ast.walk(functions["setup_model_and_optimizer"])
        if isinstance(node, ast.Call)
    }
    assert "load_checkpoint" in setup
    assert calls.count("setup_model_and_optimizer") == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.rampup_batch_size", [8, 8, 160]),
        ("train.decrease_batch_size_if_needed", True),
        ("train.train_samples", 1600),
        ("dataset.dataloader_type", "batch"),
        ("scheduler.max_steps", 1_000_000),
        ("model.cuda_graph_impl", "full_iteration"),
    ],
)
def test_what_the_page_says_is_refused(names: dict[str, Any], setting: str, value: object) -> None:
    config = bridge_config()
    part, _, name = setting.partition(".")
    setattr(getattr(config, part), name, value)
    with pytest.raises(TrainingError, match=name):
        pretrain_bridge(names, config)


def test_more_data_than_a_plan_reads_mixes_epochs() -> None:
    """Megatron's own order of documents: all epochs but the last are shuffled together."""
    order = modules.function("core/datasets/gpt_dataset.py", "_build_document_index", {"numpy": np})
    documents = np.arange(100, dtype=np.int32)
    of_two = order(documents, 2, np.random.RandomState(1), True)
    assert sorted(of_two[:100]) == list(range(100))
    of_three = order(documents, 3, np.random.RandomState(1), True)
    assert len(set(of_three[:100])) < 90
