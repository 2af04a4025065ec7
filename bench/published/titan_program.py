"""Runs torchtitan's own `train.py` of a commit, in the process that has the phantom.

    python titan_program.py FOLDER LENGTH [argument of torchtitan ...]

FOLDER holds the code as published. What is changed, and nothing else: token ids are made up
(no tokenizer, no data set); packages that only read data or write logs are empty modules; pipeline
stages are told the shapes that they exchange, since no neighbour is there to tell them; symmetric
memory is a block outside torch's allocator, as it is with other ranks; Inductor
does not assert strides, for in torch 2.13 those of the gradients of flash attention are not what it
expects where one head of keys is expanded to all (70B and 405B with TP 8).
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

VOCABULARY = 128256
ABSENT = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "tiktoken": ("Encoding",),
    "tiktoken.load": ("load_tiktoken_bpe",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}
"""Modules that the code imports and that the run does not need, with what is imported of them."""


def leave_out() -> None:
    """Put empty modules in the place of those that are not needed."""
    for name, members in ABSENT.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {}))
        sys.modules[name] = module


class Tokenizer:
    """Knows only the size of its vocabulary, and a few ids."""

    n_words = VOCABULARY
    bos_id, eos_id, pad_id = range(VOCABULARY - 3, VOCABULARY)


class Tokens:
    """Batches of made-up token ids, and the same ids one to the left as labels."""

    def __init__(self, batch: int, length: int, *, named: bool) -> None:
        self.batch, self.length, self.named = batch, length, named

    def __iter__(self) -> Iterator[Any]:
        import torch

        while True:
            ids = torch.randint(0, VOCABULARY, (self.batch, self.length + 1))
            inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
            yield ({"input": inputs} if self.named else inputs), labels

    def state_dict(self) -> dict[str, Any]:
        """Return nothing; torchtitan asks for it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget it."""


def tell_shapes(pipeline: Any, config: Any) -> None:
    """Tell the pipeline stages what they exchange: a micro-batch of one shard of the sequence."""
    import torch

    training, experimental = config.training, config.experimental
    pipes = experimental.pipeline_parallel_degree
    micro_batches = experimental.pipeline_parallel_microbatches or pipes
    batch = training.batch_size // micro_batches
    shards = training.tensor_parallel_degree * experimental.context_parallel_degree
    stage = pipeline.PipelineStage

    def told(module: Any, index: int, count: int, device: Any, **options: Any) -> Any:
        width = next(iter(module.layers.values())).dim
        between = torch.empty(
            batch, training.seq_len // shards, width, dtype=torch.bfloat16, device="meta"
        ).requires_grad_()
        length = training.seq_len // experimental.context_parallel_degree
        ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
        logits = torch.empty(
            batch, length, VOCABULARY, dtype=torch.bfloat16, device="meta"
        ).requires_grad_()
        is_first, is_last = index == 0, index == count - 1
        gradient = between.detach()
        made = stage(
            module,
            index,
            count,
            device,
            input_args=(ids,) if is_first else (between,),
            output_args=(logits,) if is_last else (between,),
            input_grads=(None,) if is_first else (gradient,),
            output_grads=(logits.detach(),) if is_last else (gradient,),
            **options,
        )
        vote = torch.ones(1, dtype=torch.int32, device=device)  # that all stages know their shapes
        made._warmup_forward_vote = made._warmup_backward_result = lambda *_, **__: vote
        return made

    pipeline.PipelineStage = told


class Workspace:
    """Symmetric memory of ranks that are not there: one block, outside torch's allocator as theirs.

    torch 2.13 exchanges addresses through sockets between processes, which nobody answers here.
    """

    blocks: ClassVar[dict[str, Workspace]] = {}

    def __init__(self, group: str, size: int) -> None:
        import torch

        address = ctypes.c_void_p()
        if ctypes.CDLL(None).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)):
            raise torch.OutOfMemoryError(f"no room for {size} bytes of symmetric memory")
        data = (address.value, False)
        described = {"shape": (size,), "typestr": "|u1", "data": data, "version": 2}
        self.__cuda_array_interface__ = described
        self.bytes = torch.as_tensor(self, device="cuda")
        groups: Any = importlib.import_module("torch.distributed.distributed_c10d")
        named = groups._resolve_process_group(group)
        self.world_size, self.rank, self.size = named.size(), named.rank(), size

    @classmethod
    def of(cls, group: str, min_size: int) -> Workspace:
        """Return the workspace of a group; a larger one takes its place, as in torch."""
        if group not in cls.blocks or cls.blocks[group].size < min_size:
            cls.blocks[group] = cls(group, min_size)
        return cls.blocks[group]

    def get_buffer(self, rank: int, sizes: Any, dtype: Any, storage_offset: int = 0) -> Any:
        """Return a part of it: that of any rank is our own."""
        del rank
        start = storage_offset * dtype.itemsize
        count = math.prod(sizes) * dtype.itemsize
        return self.bytes[start : start + count].view(dtype).view(sizes)

    def barrier(self, channel: int = 0) -> None:
        """Wait for nobody."""


def run_2024(arguments: list[str]) -> None:
    """Run `train.py` of December 2024."""
    sys.argv[1:] = arguments
    train = importlib.import_module("train")
    train.build_tokenizer = lambda *_: Tokenizer()  # type: ignore[attr-defined]
    train.build_hf_data_loader = (  # type: ignore[attr-defined]
        lambda *given: Tokens(*given[3:5], named=False)
    )
    config = train.JobConfig()
    config.parse_args()
    if config.experimental.pipeline_parallel_degree > 1:
        tell_shapes(importlib.import_module("torchtitan.parallelisms.pipeline_llama"), config)
    if config.experimental.enable_async_tensor_parallel:
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        memory.get_symm_mem_workspace = Workspace.of
    train.main(config)


def run_2025(arguments: list[str]) -> None:
    """Run `torchtitan/train.py` of June 2025."""
    train = importlib.import_module("torchtitan.train")
    specs = importlib.import_module("torchtitan.protocols.train_spec")
    models = importlib.import_module("torchtitan.models.llama3")
    del models  # registers its specification
    manager = importlib.import_module("torchtitan.config_manager")
    config = manager.ConfigManager().parse_args(arguments)
    spec = specs.get_train_spec(config.model.name)
    training = config.training
    spec.build_tokenizer_fn = lambda _: Tokenizer()
    spec.build_dataloader_fn = lambda **_: Tokens(
        training.local_batch_size, training.seq_len, named=True
    )
    train.Trainer(config).train()


def main(folder: str, *arguments: str) -> None:
    """Run the code in a folder."""
    sys.path.insert(0, folder)
    os.environ["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
    leave_out()
    is_old = Path(folder, "train.py").exists()
    (run_2024 if is_old else run_2025)(list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
