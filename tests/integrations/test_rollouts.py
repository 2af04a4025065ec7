"""The weights of docs/how-to/rollouts.md, on the aggregation of verl, SkyRL and TRL as installed.

Their packages need an inference engine and GPUs. So functions and single statements are cut out of
their sources, by name, and run here in float64; nothing of theirs is imported.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import math
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.batching import pack

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rollouts.md"
CLOSE = 1e-12
Ranks = list[list[list[int]]]
Loss = Callable[["Rollouts"], Tensor]


def source(package: str, file: str) -> Path:
    """Return a file of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: make test-adapters ARGS=rollouts")
    return Path(next(iter(found.submodule_search_locations))) / file


@cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def functions(file: Path, *names: str, **space: Any) -> SimpleNamespace:
    """Return functions and methods of a file, without their decorators."""
    found = {}
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            found[node.name] = node
    assert set(found) == set(names), file
    space |= {"torch": torch, "math": math}
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([*found.values()], []), str(file), "exec", flags)
    exec(code, space)
    return SimpleNamespace(**{name: space[name] for name in names})


def value_of(file: Path, target: str, *mentions: str) -> Callable[..., Any]:
    """Return the right side of the assignment to `target` that mentions all of some names."""
    found = [
        node.value
        for node in nodes(file)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == target
        and all(re.search(rf"\b{name}\b", ast.unparse(node.value)) for name in mentions)
    ]
    assert found, (file, target)
    code = compile(ast.Expression(found[0]), str(file), "eval")
    return lambda **space: eval(code, space)


@dataclass(frozen=True)
class Rollouts:
    """Some rollouts of a step: `values` for each token of the responses, and which count."""

    lengths: list[int]
    """Tokens of prompt and response."""
    values: Tensor
    other: Tensor
    mask: Tensor

    @classmethod
    def random(cls, seed: int, *, count: int | None = None, holes: bool = True) -> Rollouts:
        chance = random.Random(seed)
        count = count or chance.randint(8, 60)
        responses = [min(90, 1 + int(chance.lognormvariate(2.5, 1))) for _ in range(count)]
        generator = torch.Generator().manual_seed(seed)
        shape = count, max(responses)
        values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        mask = torch.arange(shape[1]) < torch.tensor(responses)[:, None]
        if holes:  # what a tool wrote; and now and then a rollout that does not count
            mask &= torch.rand(shape, generator=generator) < 0.8
            mask[torch.rand(count, generator=generator) < 0.1] = False
            mask[0, 0] = True
        lengths = [chance.randint(1, 30) + response for response in responses]
        return cls(lengths, values[0], values[1], mask.double())

    def __getitem__(self, rows: list[int]) -> Rollouts:
        """Return a micro-batch, padded to its own longest response."""
        mask = self.mask[rows]
        width = max(1, int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1)
        tensors = self.values[rows, :width], self.other[rows, :width], mask[:, :width]
        return Rollouts([self.lengths[row] for row in rows], *tensors)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> list[int]:
        """The tokens of each response that count."""
        return [int(tokens) for tokens in self.mask.sum(1)]

    @property
    def present(self) -> list[int]:
        """1 for each rollout with a token that counts."""
        return [min(1, tokens) for tokens in self.tokens]

    def cut(self, seed: int) -> Ranks:
        """Return the page's cut, for 1, 2 or 4 ranks and a random budget."""
        budget = random.Random(seed).randint(max(self.lengths), 3 * max(self.lengths))
        return pack(self.lengths, budget, (1, 2, 4)[seed % 3], packed=seed % 2 == 0)


@pytest.fixture(scope="module")
def weights() -> Callable[[Ranks, list[int]], list[list[float]]]:
    """The function that the page shows."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    space: dict[str, Any] = {}
    exec(next(block for block in blocks if "def weights" in block), space)
    return space["weights"]


def pieces(ranks: Ranks) -> Iterator[tuple[int, int, list[int]]]:
    return (
        (rank, number, micro)
        for rank, passes in enumerate(ranks)
        for number, micro in enumerate(passes)
    )


def added(ranks: Ranks, shares: list[list[float]], rollouts: Rollouts, loss: Loss) -> Tensor:
    """Return the loss of a step: the mean over ranks of what each sums, as FSDP averages it."""
    total = torch.zeros((), dtype=torch.float64)
    for rank, number, micro in pieces(ranks):
        if shares[rank][number]:
            total += loss(rollouts[micro]) * shares[rank][number] * len(ranks)
    return total / len(ranks)


SEEDS = range(12)


# verl


@pytest.fixture(scope="module")
def agg_loss() -> Callable[..., Tensor]:
    helpers = functions(source("verl", "utils/torch_functional.py"), "masked_sum")
    file = source("verl", "trainer/ppo/core_algos.py")
    return functions(file, "agg_loss", verl_F=helpers).agg_loss


VERL = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", VERL)
def test_verl_with_weights(mode: str, agg_loss: Any, weights: Any) -> None:
    def loss(some: Rollouts) -> Tensor:
        return agg_loss(some.values, some.mask, mode, loss_scale_factor=128)

    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        ranks = rollouts.cut(seed)
        shares = weights(ranks, rollouts.tokens if mode == "token-mean" else rollouts.present)
        assert abs(added(ranks, shares, rollouts, loss) - loss(rollouts)) < CLOSE


@pytest.mark.parametrize("mode", [*VERL, "token-sum"])
def test_verl_by_itself_is_exact_in_any_cut(mode: str, agg_loss: Any) -> None:
    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        ranks = rollouts.cut(seed)
        facts = {
            "batch_num_tokens": sum(rollouts.tokens),
            "global_batch_size": len(rollouts),
            "loss_scale_factor": 128,
        }
        parts = [
            agg_loss(some.values, some.mask, mode, dp_size=len(ranks), **facts) / len(ranks)
            for some in (rollouts[micro] for *_, micro in pieces(ranks) if micro)
        ]
        whole = agg_loss(rollouts.values, rollouts.mask, mode, **facts)
        assert abs(sum(parts) - whole) < CLOSE * max(1.0, float(abs(whole)))


def test_verl_divides_by_the_width_of_the_micro_batch_without_a_factor(agg_loss: Any) -> None:
    rollouts = Rollouts.random(1)
    parts = [
        agg_loss(some.values, some.mask, VERL[3], global_batch_size=len(rollouts))
        for some in (rollouts[micro] for *_, micro in pieces(pack(rollouts.lengths, 120)))
    ]
    whole = agg_loss(rollouts.values, rollouts.mask, VERL[3], global_batch_size=len(rollouts))
    assert abs(sum(parts) - whole) > 0.1 * abs(whole)


# SkyRL


@pytest.fixture(scope="module")
def skyrl() -> SimpleNamespace:
    file = source("skyrl", "backends/skyrl_train/utils/ppo_utils.py")
    found = functions(file, "reduce_loss", "apply_loss_reduction_to_advantages_minibatch")
    helpers = source("skyrl", "backends/skyrl_train/utils/torch_utils.py")
    worker = source("skyrl", "backends/skyrl_train/workers/worker.py")
    return SimpleNamespace(
        scale=found.apply_loss_reduction_to_advantages_minibatch,
        reduce=found.reduce_loss,
        masked_mean=functions(helpers, "masked_mean").masked_mean,
        weight=value_of(worker, "microbatch_weight", "microbatch", "data"),
        loss=value_of(worker, "loss", "policy_loss", "entropy_loss_term"),
    )


SKYRL = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")


@pytest.mark.parametrize("mode", SKYRL)
def test_the_policy_loss_of_skyrl_is_exact_in_any_cut(mode: str, skyrl: Any) -> None:
    """Its advantages are scaled before the step is cut."""
    for seed in SEEDS:
        rollouts = Rollouts.random(seed, count=24)
        groups = [(first, first + 4) for first in range(0, 24, 4)]
        scaled = skyrl.scale(rollouts.values, rollouts.mask, mode, 1, 128, groups)
        step = Rollouts(rollouts.lengths, scaled, rollouts.other, rollouts.mask)
        parts = [
            skyrl.reduce(some.values * some.other, some.mask)
            for some in (step[micro] for *_, micro in pieces(rollouts.cut(seed)) if micro)
        ]
        whole = (rollouts.values * rollouts.other * rollouts.mask).sum(1)
        tokens = rollouts.mask.sum(1)
        match mode:
            case "token_mean":
                expected = whole.sum() / tokens.sum()
            case "sequence_mean":
                expected = (whole / tokens.clamp(min=1)).mean()
            case "seq_mean_token_sum_norm":
                expected = (whole / 128).mean()
            case _:
                by_prompt = whole.view(-1, 4).sum(1) / tokens.view(-1, 4).sum(1).clamp(min=1)
                expected = by_prompt.mean()
        assert abs(sum(parts) - expected) < CLOSE


def test_a_legacy_token_mean_depends_on_the_size_of_micro_batches(skyrl: Any) -> None:
    rollouts = Rollouts.random(3, count=24)
    one, four = (
        skyrl.scale(rollouts.values, rollouts.mask, "token_mean_legacy", size, 128)
        for size in (1, 4)
    )
    assert not torch.allclose(one, four)


def entropy_terms(skyrl: Any, data: Rollouts, micro: list[int], ranks: int) -> Tensor:
    """What a micro-batch of a rank's `data` adds to the loss of a step, as SkyRL's worker does."""
    some, zero = data[micro], torch.zeros(())
    return -skyrl.loss(
        policy_loss=zero,
        grad_sum_correction_factor=ranks,
        kl_loss_term=zero,
        entropy_loss_term=skyrl.masked_mean(some.values, some.mask),
        microbatch_weight=skyrl.weight(microbatch=micro, data=data, len=len),
    )


def skyrl_packer() -> ModuleType:
    file = source("skyrl", "train/dataset/bin_packing.py")
    spec = importlib.util.spec_from_file_location("skyrl_bin_packing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["skyrl_bin_packing"] = module  # its dataclasses and enums look there
    spec.loader.exec_module(module)
    return module


def test_the_entropy_of_skyrl_depends_on_the_packing(skyrl: Any, weights: Any) -> None:
    """How much a token counts, in units of its share; the numbers are on the page."""
    packer, seen, mended = skyrl_packer(), [], []
    for seed, count, budget in ((0, 64, 4096), (1, 64, 8192), (2, 256, 8192)):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(count, generator=generator).mul(0.8).add(6.2).exp().tolist()
        lengths = [int(min(4096, max(16, length))) for length in drawn]
        cut = [packer.make_seq_packer("balanced", bin_capacity=budget).pack(lengths)]
        shares = weights(cut, lengths)[0]
        for micro, share in zip(cut[0], shares, strict=True):
            tokens = sum(lengths[row] for row in micro)
            weight = skyrl.weight(microbatch=micro, data=lengths, len=len)
            seen.append(weight / tokens * sum(lengths))
            mended.append(share / tokens * sum(lengths))
    assert (round(min(seen), 2), round(max(seen), 1)) == (0.18, 4.4)
    assert f"{min(seen):.2f} to {max(seen):.1f} times" in PAGE.read_text(encoding="utf-8")
    assert all(abs(times - 1) < CLOSE for times in mended)


def test_the_entropy_of_skyrl_with_weights(skyrl: Any, weights: Any) -> None:
    differences = []
    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        ranks = rollouts.cut(seed)
        shares = weights(ranks, rollouts.tokens)
        whole = skyrl.masked_mean(rollouts.values, rollouts.mask)

        def entropy(some: Rollouts) -> Tensor:
            return skyrl.masked_mean(some.values, some.mask)

        assert abs(added(ranks, shares, rollouts, entropy) - whole) < CLOSE
        parts = [entropy_terms(skyrl, rollouts, micro, 1) for *_, micro in pieces(ranks) if micro]
        differences.append(float(abs(sum(parts) - whole)))
    assert max(differences) > 0.01  # its own weight: the share of the rollouts


def test_the_kl_of_skyrl_with_its_own_weight(skyrl: Any) -> None:
    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        parts = [
            skyrl.masked_mean(some.values, some.mask, dim=-1).mean()
            * skyrl.weight(microbatch=some, data=rollouts, len=len)
            for some in (rollouts[micro] for *_, micro in pieces(rollouts.cut(seed)) if micro)
        ]
        whole = skyrl.masked_mean(rollouts.values, rollouts.mask, dim=-1).mean()
        assert abs(sum(parts) - whole) < CLOSE


# TRL


class Trl:
    """`GRPOTrainer._compute_loss`, for a model whose log-probabilities and entropies are given."""

    def __init__(self) -> None:
        file = source("trl", "trainer/grpo_trainer.py")
        found = functions(
            file,
            "_compute_loss",
            "get_gamma_weights",
            nanmin=torch.min,
            nanmax=torch.max,
        )
        self.compute, self.gamma = found._compute_loss, found.get_gamma_weights

    def loss(
        self,
        some: Rollouts,
        mode: str,
        *,
        entropy: float = 0.0,
        accumulation: int = 1,
        ranks: int = 1,
        items: int | None = None,
    ) -> Tensor:
        """Return the loss of a micro-batch; `items`: the tokens of the step."""
        nothing = torch.zeros(len(some), 0)
        args = SimpleNamespace(
            delta=None,
            steps_per_generation=accumulation,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        )
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (some.values, some.other, None),
            get_gamma_weights=self.gamma,
            accelerator=SimpleNamespace(
                gather=lambda tensor: tensor,
                reduce=lambda tensor, **_: tensor,
                num_processes=ranks,
                sync_gradients=False,
            ),
            args=args,
            model=SimpleNamespace(training=True),
            loss_type=mode,
            importance_sampling_level="token",
            current_gradient_accumulation_steps=accumulation,
            max_completion_length=128,
            epsilon_low=0.2,
            epsilon_high=0.2,
            beta=0.0,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            use_vllm=False,
            _entropy_bonus_enabled=entropy != 0,
            use_adaptive_entropy=False,
            entropy_coef=entropy,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        inputs = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": some.mask,
            "completion_mask": some.mask,
            "advantages": some.other[:, 0],
            "old_per_token_logps": some.values + some.other / 4,
            "num_items_in_batch": torch.tensor(float(items or sum(some.tokens))),
        }
        return self.compute(trainer, None, inputs)


@pytest.fixture(scope="module")
def trl() -> Trl:
    return Trl()


BY_TOKENS = ("bnpo", "dapo", "cispo", "vespo")
BY_ROLLOUTS = ("grpo", "sapo", "luspo", "dr_grpo")


@pytest.mark.parametrize("mode", BY_TOKENS + BY_ROLLOUTS)
def test_trl_with_weights(mode: str, trl: Trl, weights: Any) -> None:
    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        ranks = rollouts.cut(seed)
        counts = rollouts.tokens if mode in BY_TOKENS else [1] * len(rollouts)
        whole = trl.loss(rollouts, mode)
        found = added(ranks, weights(ranks, counts), rollouts, lambda some: trl.loss(some, mode))
        assert abs(found - whole) < CLOSE * max(1.0, float(abs(whole)))


def test_the_entropy_of_trl_with_weights(trl: Trl, weights: Any) -> None:
    def bonus(some: Rollouts) -> Tensor:
        return trl.loss(some, "grpo") - trl.loss(some, "grpo", entropy=1.0)

    for seed in SEEDS:
        rollouts = Rollouts.random(seed)
        ranks = rollouts.cut(seed)
        found = added(ranks, weights(ranks, rollouts.tokens), rollouts, bonus)
        assert abs(found - bonus(rollouts)) < CLOSE


@pytest.mark.parametrize(
    ("mode", "entropy", "exact"),
    [
        *((mode, 0.0, mode != "bnpo") for mode in BY_TOKENS + BY_ROLLOUTS),
        ("grpo", 1.0, False),
    ],
)
def test_trl_by_itself(mode: str, entropy: float, exact: bool, trl: Trl) -> None:
    """On 2 ranks, with 3 micro-batches of equally many rollouts."""
    differences = []
    for seed in SEEDS:
        rollouts = Rollouts.random(seed, count=24)
        parts = [
            trl.loss(
                rollouts[[*range(first, first + 4)]],
                mode,
                entropy=entropy,
                accumulation=3,
                ranks=2,
                items=sum(rollouts.tokens),
            )
            / 2
            for first in range(0, 24, 4)
        ]
        whole = trl.loss(rollouts, mode, entropy=entropy)
        differences.append(float(abs(sum(parts) - whole) / max(1.0, float(abs(whole)))))
    assert max(differences) < CLOSE if exact else max(differences) > 0.001


def compared(file: Path, function: str, name: str) -> set[str]:
    """Return the texts that a function compares a name with, but for inequality."""
    (body,) = (n for n in nodes(file) if isinstance(n, ast.FunctionDef) and n.name == function)
    return {
        str(constant.value)
        for node in ast.walk(body)
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == name
        if not isinstance(node.ops[0], ast.NotEq)
        for constant in ast.walk(node.comparators[0])
        if isinstance(constant, ast.Constant)
    }


@pytest.mark.parametrize(
    ("package", "file", "function", "name", "modes"),
    [
        ("verl", "trainer/ppo/core_algos.py", "agg_loss", "loss_agg_mode", {*VERL, "token-sum"}),
        (
            "skyrl",
            "backends/skyrl_train/utils/ppo_utils.py",
            "apply_loss_reduction_to_advantages_minibatch",
            "loss_reduction",
            {*SKYRL, "token_mean_legacy"},
        ),
        (
            "trl",
            "trainer/grpo_trainer.py",
            "_compute_loss",
            "self.loss_type",
            {*BY_TOKENS, *BY_ROLLOUTS},
        ),
    ],
    ids=["verl", "skyrl", "trl"],
)
def test_the_page_has_every_way_to_aggregate(
    package: str, file: str, function: str, name: str, modes: set[str]
) -> None:
    assert compared(source(package, file), function, name) == modes
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{mode}`" in text for mode in modes)
