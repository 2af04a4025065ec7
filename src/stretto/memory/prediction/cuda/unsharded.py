"""A model of a real run that `fully_shard` has sharded, copied as it was before.

Such a model cannot be copied with `copy.deepcopy`: its modules refer to process groups. So their
copies get back their own class and leave out what FSDP2 has added, and the copy is sharded again
over fake ranks in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import nn

from stretto.checkpoint.sharding import is_dtensor
from stretto.errors import FitError
from stretto.memory.prediction.cuda.sharding import Sharding
from stretto.runtime.gradients import is_fully_sharded

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS_OF_STATE = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class _Call(NamedTuple):
    """One call of `fully_shard`."""

    path: str
    mesh_shape: tuple[int, ...]
    options: dict[str, Any]


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return how a model of a real run is sharded; None: it is not.

    Raises:
        FitError: it is sharded by other means than `fully_shard`.
    """
    calls = [_call(path, module) for path, module in _children_first(model, "")]
    if not calls:
        if any(map(is_dtensor, model.parameters())):
            raise _refused("its parameters are not sharded by fully_shard")
        return None
    shape = calls[-1].mesh_shape
    for parameter in model.parameters():
        if is_dtensor(parameter) and parameter.device_mesh.shape != shape:
            raise _refused("it is sharded over several meshes")

    def shard(copied: nn.Module, mesh: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        whole = mesh if len(shape) == 1 else init_device_mesh("cpu", shape)
        for path, _, options in calls:
            fully_shard(copied.get_submodule(path), mesh=whole, **options)

    return Sharding(math.prod(shape), shard)


@contextlib.contextmanager
def copied_unsharded(model: nn.Module) -> Iterator[None]:
    """Let `copy.deepcopy` copy sharded modules as they were before."""
    classes = {type(module) for module in model.modules() if _is_sharded(module)}
    with contextlib.ExitStack() as stack:
        for one in classes:
            stack.enter_context(patch.object(one, "__deepcopy__", _copied))
        yield


def _is_sharded(module: nn.Module) -> bool:
    return is_fully_sharded(module) and not hasattr(module, "_orig_mod")


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    if _is_sharded(module):
        yield path, module


def _call(path: str, module: Any) -> _Call:
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        raise _refused(f"{path or 'the model'} has no parameters of its own to shard")
    after = group.post_forward_mesh_info
    is_same = after is None or after is group.mesh_info
    options = {
        "reshard_after_forward": after is not None if is_same else after.shard_mesh_size,
        "mp_policy": group.mp_policy,
        "offload_policy": group.offload_policy,
    }
    return _Call(path, tuple(group.mesh_info.mesh.shape), options)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    original: Any = type(module).__mro__[2]  # after the class made by FSDP2 and FSDPModule
    result: nn.Module = original.__new__(original)
    memo[id(module)] = result
    state = {k: v for k, v in vars(module).items() if k not in {REGISTRY_KEY, STATE_KEY}}
    for name in _HOOKS:
        state[name] = OrderedDict((k, hook) for k, hook in state[name].items() if _is_own(hook))
    for name in _HOOKS_OF_STATE:
        state[name] = OrderedDict()
    result.__dict__.update(copy.deepcopy(state, memo))
    return result


def _is_own(hook: Any) -> bool:
    """Return whether a hook is not one of FSDP2."""
    return type(getattr(hook, "__self__", None)).__name__ != "FSDPState"


def _refused(why: str) -> FitError:
    return FitError.cannot(
        "predict the memory of this sharded model",
        why=why,
        instead="predict before it is sharded, with ranks and shard",
    )
