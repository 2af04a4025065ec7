"""A GPT of Megatron Core that trains with tensor and pipeline parallelism, and follows a plan.

    torchrun --nproc-per-node 8 examples/megatron_ramp.py
    phantomgpu run --gpu h100 --ranks 8 --whole -- python examples/megatron_ramp.py

The second needs no GPU: it runs rank 0 of 8. There, sizes, rates and memory are real. Losses and
norms of gradients are not, because large kernels compute nothing. Both print the peak of memory for
each batch size. All tokens of the data are 0: this is a loop to copy from.

Megatron Core 0.19.2 and Triton must be installed; Transformer Engine and Apex are not needed:

    pip install --no-deps megatron-core==0.19.2 triton
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from stretto.integrations.megatron import follow
from stretto.planning import Plan, plan
from stretto.schedules import WSD
from stretto.timing import Horizon

MIB = 1 << 20
MAX_LR, WEIGHT_DECAY = 2e-4, 0.1
MODELS = {
    # layers, hidden size, heads, sequence length, vocabulary
    "tiny": (4, 64, 4, 64, 256),
    "gpt3-1.3b": (24, 2048, 16, 2048, 51_200),
    "gpt3-2.7b": (32, 2560, 32, 2048, 51_200),
}


class Step(NamedTuple):
    """What Megatron did in one step."""

    size: int
    micro_batches: int
    lr: float
    weight_decay: float
    allocated: int
    """The peak of its memory in bytes."""
    reserved: int


def make_plan(steps: int, batch_size: str) -> Plan:
    """Return the plan of a run: what the command line says, and a rate that warms up and decays."""
    return plan(
        Horizon.endless(f"{steps}ba"),
        batch_size,
        schedules={"lr": WSD("20%", warmup="10%")},
    )


def make_model(given: argparse.Namespace) -> list[Any]:
    """Return the parts of the model on this rank: one, or several if the pipeline interleaves."""
    layers, hidden, heads, length, vocabulary = MODELS[given.model]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        tensor_model_parallel_size=given.tensor,
        pipeline_model_parallel_size=given.pipeline,
        virtual_pipeline_model_parallel_size=given.virtual,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    parts = []
    for part in range(given.virtual or 1):
        where = {"ignore_virtual": False, "vp_stage": part if given.virtual else None}
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocabulary,
            length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            vp_stage=where["vp_stage"],
        )
        narrow = Float16Module(config, model.cuda())
        parts.append(DistributedDataParallel(config, ddp, narrow, disable_bucketing=part > 0))
    return parts


def make_batches(micro_batch_size: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches."""
    tokens = torch.zeros(micro_batch_size, length, dtype=torch.long, device="cuda")
    places = torch.arange(length, device="cuda").expand_as(tokens)
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)[None, None]
    while True:
        yield {
            "input_ids": tokens,
            "position_ids": places,
            "attention_mask": hidden,
            "labels": tokens,
        }


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Return what a micro-batch gives, and how its loss follows."""
    return model(**next(batches)), lambda losses: (losses.float().mean(), {})


def train(given: argparse.Namespace, planned: Plan) -> list[Step]:
    """Train the whole run, and return what each step had."""
    parts = make_model(given)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=MAX_LR,
            min_lr=0.0,  # the plan says where a rate ends
            weight_decay=WEIGHT_DECAY,
            bf16=True,
            use_distributed_optimizer=True,
        ),
        parts,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=MAX_LR,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=planned.num_samples,
        lr_decay_style="constant",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=planned.num_samples,
        wd_incr_style="constant",
    )
    data_ranks = parallel_state.get_data_parallel_world_size()
    follow(planned, scheduler, 0, given.micro_batch_size, data_ranks)
    length = MODELS[given.model][3]
    batches = [make_batches(given.micro_batch_size, length) for _ in parts]
    forward_backward = get_forward_backward_func()
    consumed, steps = 0, list[Step]()
    while consumed < planned.num_samples:
        torch.cuda.reset_peak_memory_stats()
        calculator.update_num_microbatches(consumed)
        size, count = calculator.get_current_global_batch_size(), calculator.get_num_microbatches()
        for part in parts:
            part.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches if given.virtual else batches[0],
            model=parts if given.virtual else parts[0],
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=given.micro_batch_size,
        )
        optimizer.step()
        group = optimizer.param_groups[0]
        memory = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        steps.append(Step(size, count, group["lr"], group["weight_decay"], *memory))
        scheduler.step(increment=size)
        consumed += size
    return steps


def is_planned(planned: Plan, number: int, step: Step, micro_batches_of_all: int) -> bool:
    """Return whether a step was as the plan says."""
    size = planned.sample_at_batch(number + 1) - planned.sample_at_batch(number)
    lr = MAX_LR * planned.values_at(number)["lr"]
    return (step.size, step.lr) == (size, lr) and step.micro_batches * micro_batches_of_all == size


def table(steps: list[Step]) -> str:
    """Return a line for each batch size, in the order of the run."""
    lines = [
        "stage    steps  batch  micro-batches  learning rate         peak MiB  reserved MiB",
    ]
    first = 0
    for number, (size, group) in enumerate(groupby(steps, lambda step: step.size), 1):
        own = list(group)
        which = f"{first}-{first + len(own) - 1}"
        rates = f"{own[0].lr:.3g} to {own[-1].lr:.3g}"
        allocated = max(step.allocated for step in own) / MIB
        reserved = max(step.reserved for step in own) / MIB
        lines.append(
            f"{number:>5}  {which:>7}  {size:>5}  {own[0].micro_batches:>13}  {rates:<20}"
            f"  {allocated:>8,.1f}  {reserved:>12,.0f}"
        )
        first += len(own)
    return "\n".join(lines)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description="A GPT of Megatron Core that follows a plan.")
    parser.add_argument("--model", choices=MODELS, default="gpt3-1.3b")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--pipeline", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--virtual", type=int, help="parts of each stage: interleave")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", default="0ba:4 10ba:8 20ba:16 35ba:32")
    parser.add_argument("--json", type=Path, help="write what each step had")
    given = parser.parse_args()
    planned = make_plan(given.steps, given.batch_size)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(given.tensor, given.pipeline, given.virtual)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    steps = train(given, planned)
    data_ranks = parallel_state.get_data_parallel_world_size()
    unit = given.micro_batch_size * data_ranks
    if torch.distributed.get_rank() == 0:
        same = sum(is_planned(planned, number, step, unit) for number, step in enumerate(steps))
        ranks = f"tensor {given.tensor} x pipeline {given.pipeline} x data {data_ranks}"
        print(f"{given.model}, {ranks}, micro-batches of {given.micro_batch_size}")
        print(f"{same} of {planned.num_batches} steps as the plan says")
        print(table(steps))
        if given.json:
            given.json.write_text(json.dumps([step._asdict() for step in steps]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
