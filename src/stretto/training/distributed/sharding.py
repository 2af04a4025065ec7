"""A model spread over the ranks that `torchrun` has started, before its optimizer is built."""

from __future__ import annotations

from torch import nn

from stretto.training.distributed.ranks import Ranks


def shard_blocks(model: nn.Module, *, device: str | None = None) -> nn.Module:
    """Spread a model over the ranks with FSDP2: each block of a `ModuleList`, then the rest.

    One block at a time is whole on a rank while it computes. Build the optimizer afterwards, of
    the parameters that the model has then. On one rank the model stays as it is.

    >>> model = shard_blocks(nn.Sequential(nn.Linear(2, 2)))
    >>> type(model).__name__
    'Sequential'

    Args:
        model: the model, which is changed in place.
        device: where the ranks compute; None: this rank's CUDA device if there is one, else the
            CPU.

    Returns:
        The model.
    """
    ranks = Ranks.from_environment(device)
    if ranks.world_size == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
