"""One process that takes itself for rank 0 of many, with communication that moves nothing."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d

from stretto.errors import FitError
from stretto.memory.prediction.storage_trace import StorageTrace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOCK = threading.RLock()
"""Held while the process has fake ranks, for that concerns all threads."""
_FIRST_NUMBER = 1_000_000
"""Groups are numbered from here, because those of a real run have numbers, too."""


@contextlib.contextmanager
def fake_ranks(number: int) -> Iterator[DeviceMesh]:
    """Let this process be rank 0 of `number` ranks while the context is active.

    Collectives on the fake process group return at once. Meshes are made of CPUs, because the
    traced tensors say that they are on a CPU; code that asks for a mesh of `cuda` gets one, too.

    Process groups of a real run stay as they are, and are not seen meanwhile.

    Yields:
        A mesh of one dimension with all ranks.

    Raises:
        FitError: this build of torch knows no ranks.
    """
    if not dist.is_available():
        raise FitError.cannot(
            "predict the memory of a sharded model",
            why="this build of torch has no torch.distributed",
            instead="install one that has",
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _LOCK, _own_groups():
        store = FakeStore()
        show_error = sys.excepthook  # init_process_group replaces it
        dist.init_process_group("fake", store=store, rank=0, world_size=number)
        sys.excepthook = show_error
        try:
            with _meshes_of_real_numbers(), unset_fake_temporarily():
                mesh = init_device_mesh("cpu", (number,))
            with _meshes_of_real_numbers(), _own_chunks():
                yield mesh
        finally:
            _forget_shardings()


@contextlib.contextmanager
def _own_chunks() -> Iterator[None]:
    """Let FSDP2 cut only the chunk of rank 0 from a parameter: thousands of fakes take seconds."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def first(tensor: torch.Tensor, number: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // number))]

    with patch.object(_fsdp_param, "_chunk_with_empty", first):
        yield


@contextlib.contextmanager
def _own_groups() -> Iterator[None]:
    """Let process groups that are made now not meet those of a real run, and forget them."""
    empty: dict[str, Any] = {
        "_pg_map": {},
        "_pg_names": {},
        "_pg_group_ranks": {},
        "_pg_backend_config": {},
        "_tags_to_pg": {},
        "_pg_to_tag": {},
        "_backend": None,
        "_default_pg_init_method": None,
        "_group_count": _FIRST_NUMBER,
    }
    with patch.multiple(c10d, **empty), patch.object(c10d._world, "_default_pg", None):
        try:
            yield
        finally:
            for name in c10d._pg_names.values():
                torch._C._distributed_c10d._unregister_process_group(name)


def num_groups() -> int:
    """Return with how many groups of two or more ranks this rank communicates."""
    groups = [group for group in c10d._world.pg_map if group.size() > 1]
    return len(groups)


@contextlib.contextmanager
def following_storages(seen: StorageTrace) -> Iterator[None]:
    """Let a trace see what sharded models do to memory outside of operations.

    FSDP2 frees and allocates parameters by resizing their storages. DTensor finds out about shapes
    by running operations on fake tensors of its own, which take no memory.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize = torch.UntypedStorage.resize_

    def resize_seen(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        seen.resized(storage)
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_seen))
        for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
            quiet = _paused(getattr(ShardingPropagator, name), seen)
            stack.enter_context(patch.object(ShardingPropagator, name, quiet))
        yield


def _paused(function: Callable[..., Any], seen: StorageTrace) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with seen.paused():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _meshes_of_real_numbers() -> Iterator[None]:
    """Let meshes compute with real tensors, also under a fake mode, and be of CPUs."""
    from torch.distributed.device_mesh import DeviceMesh

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*map(_numbers, args), **{k: _numbers(v) for k, v in kwargs.items()})

        return run

    construct = real(DeviceMesh.__init__)

    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        construct(self, "cpu", *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(DeviceMesh, "__init__", init))
        mesh = property(real(DeviceMesh.mesh.fget))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(DeviceMesh, "mesh", mesh))
        for name in ("_flatten", "_unflatten"):
            function = real(getattr(DeviceMesh, name))
            stack.enter_context(patch.object(DeviceMesh, name, function))
        yield


def _numbers(argument: Any) -> Any:
    """Return the numbers of a fake tensor of ranks; unknown ones are all ranks in order."""
    if not isinstance(argument, FakeTensor):
        return argument
    if argument.constant is not None:
        return argument.constant
    return torch.arange(argument.numel(), dtype=torch.int).view(argument.shape)


def _forget_shardings() -> None:
    """Drop the caches of DTensor, whose entries refer to the groups of fake ranks."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
