"""Training and evaluation mode: which modules train, and how the modes come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from stretto.runtime.compiled import uncompiled

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def train_mode(model: nn.Module) -> None:
    """Put a model into the mode in which a run trains it.

    A model in eval mode, as `from_pretrained` returns it, is switched whole. Parts in eval mode
    inside a model in training mode stay so: somebody has frozen them, such as batch normalisation.
    A wrapper, such as `DistributedDataParallel`, has no mode of its own: the model inside decides.

    >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
    >>> train_mode(model)
    >>> model.training, model[0].training
    (True, False)
    """
    inner = uncompiled(model)
    inner = inner.module if isinstance(inner, _WRAPPERS) else inner
    frozen = [one for one in inner.modules() if not one.training] if inner.training else []
    model.train()  # called in any case: a model's own `train` may freeze parts
    for module in frozen:
        module.training = False


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Give each module its mode back when the block ends.

    The modes are set as attributes: `train` and `eval` of a module may do more.

    >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
    >>> with kept_modes(model):
    ...     _ = model.eval()
    >>> model.training, model[0].training
    (True, False)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
