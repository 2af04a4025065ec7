"""The gradient of each single sample, for the weights of normalisation layers, out of any pass.

Such a layer is `y = x_hat * weight + bias`. So the gradient of a sample is the sum of
`dL/dy * x_hat`, and that of `dL/dy`, over all dimensions but those of the sample and of the
weights: a few passes over what lies in memory, where a Linear would need a product of matrices for
each sample (Gray et al. 2024, arXiv 2411.00999).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto.errors import TrainingError, cannot
from stretto.noise.norms import Norms, read_squares

NormLayer: TypeAlias = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm
_KINDS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""BatchNorm is not among them: it has no gradient of a single sample."""


@final
class NormLayerGradients:
    """Looks at normalisation layers while a model runs, and knows what each sample gave them.

    The samples are the first dimension of what a layer is given. Of a mean loss over n samples a
    sample gives the n-th part of its own gradient. The gradient itself is not touched.

    >>> model = nn.LayerNorm(2)
    >>> gradients = NormLayerGradients(model)
    >>> gradients.begin()
    >>> with gradients.watch(2):
    ...     model(torch.tensor([[1.0, 3.0], [2.0, 0.0]])).sum(1).mean().backward()
    >>> [round(square, 3) for square in gradients.read()]
    [1.0, 1.0, 2.0]

    Args:
        model: its LayerNorm, RMSNorm and GroupNorm layers are looked at, and classes derived from
            them that compute alike.
        parameters: the weights that are trained; None: all of the model.

    Raises:
        TrainingError: no such layer has any of them; or parts of the model are compiled, where
            nobody can look.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        _check_not_compiled(model)
        own = {id(p) for p in (model.parameters() if parameters is None else parameters)}
        # By name, as a sharded model has other parameters in these places while it runs.
        self._weights: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if _is_norm_layer(module):
                named = module.named_parameters(recurse=False)
                self._weights[module] = {key: p for key, p in named if id(p) in own}
                self._names[module] = name.removeprefix("module.")
        weights = [p for by_name in self._weights.values() for p in by_name.values()]
        self._parameters = list({id(p): p for p in weights}.values())
        if not self._parameters:
            raise _without_layers(model)
        self._num_samples = 0
        self._of_pass: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []
        self._total: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self._of_pass, self._norms, self._total = {}, [], {}

    @contextmanager
    def watch(self, num_samples: int) -> Iterator[None]:
        """While open, one micro-batch of `num_samples` runs forward and backward.

        Raises:
            TrainingError: the first dimension of what a layer is given is another one.
        """
        self._num_samples, self._of_pass = num_samples, {}
        # Not for longer: a model that is copied or called elsewhere is as it was.
        handles = [
            layer.register_forward_hook(self._look, with_kwargs=True) for layer in self._weights
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._end_pass()

    @property
    def has_any(self) -> bool:
        """Whether any of the weights has a gradient; all may be frozen for a while."""
        return bool(self._gradients())

    def read(self) -> list[float]:
        """Return the squared norm of what each sample gave; and last that of the gradient now."""
        norms = [norms.to(self._norms[0].device) for norms in self._norms]
        squares = [norm * norm for norm in (torch.cat(norms).tolist() if norms else ())]
        whole = Norms()
        whole.add(self._gradients().values())
        return squares + read_squares([whole])

    def overlap(self) -> float:
        """Return the inner product of what all samples gave and the gradient now.

        In a single process both are the same, unless something else than what flows through the
        layers has a say: then this is not the square of the gradient.
        """
        now = self._gradients()
        both = [(self._total[key], gradient) for key, gradient in now.items() if key in self._total]
        return sum(float((mine * gradient).sum(dtype=mine.dtype)) for mine, gradient in both)

    def _gradients(self) -> dict[int, Tensor]:
        trained = [p for p in self._parameters if p.requires_grad]
        return {id(p): p.grad for p in trained if p.grad is not None}

    def _look(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        # Where activations are checkpointed, a layer runs twice: once of the two without a
        # gradient, or with one that nothing flows back through.
        if not output.requires_grad:
            return
        given: Tensor = (args or tuple(kwargs.values()))[0].detach()
        self._check_shape(layer, given)
        output.register_hook(lambda gradient: self._add(layer, given, gradient))

    def _check_shape(self, layer: nn.Module, given: Tensor) -> None:
        inner = 1 if isinstance(layer, nn.GroupNorm) else len(cast("Any", layer).normalized_shape)
        if given.dim() > inner and len(given) == self._num_samples:
            return
        raise TrainingError(
            cannot(
                f"tell the gradients of {self._num_samples} samples apart",
                why=f"the {_kind(layer)} {self._names[layer]!r} is given the shape "
                f"{list(given.shape)}",
                instead="let samples be the first dimension, or write noise_from='micro_batches'",
            )
        )

    @torch.no_grad()
    def _add(self, layer: nn.Module, given: Tensor, gradient: Tensor) -> None:
        """Add to what each sample gave, shape [samples, weights]; a layer may run several times."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        gradient = gradient.to(wide)
        for name, parameter in self._weights[layer].items():
            if not parameter.requires_grad:
                continue
            part = gradient
            if name == "weight":
                part = gradient * _normalised(cast("NormLayer", layer), given.to(wide))
            inner = range(2, part.dim())
            if not isinstance(layer, nn.GroupNorm):
                inner = range(1, part.dim() - len(parameter.shape))
            part = part.sum(tuple(inner)) if inner else part
            before = self._of_pass.get(id(parameter))
            self._of_pass[id(parameter)] = part if before is None else before + part

    def _end_pass(self) -> None:
        norms = [
            torch.linalg.vector_norm(part.flatten(1), dim=1) for part in self._of_pass.values()
        ]
        norms = [norm.to(norms[0].device) for norm in norms]
        self._norms.append(
            torch.linalg.vector_norm(torch.stack(norms), dim=0)
            if norms
            else torch.zeros(self._num_samples)
        )
        for key, part in self._of_pass.items():
            total = part.sum(0)
            self._total[key] = self._total[key] + total if key in self._total else total
        self._of_pass = {}


def _is_norm_layer(module: nn.Module) -> bool:
    # `fully_shard` and others derive classes; one that computes otherwise is not what is meant.
    if "forward" in vars(module):
        return False
    forward: object = type(module).forward
    return any(isinstance(module, kind) and forward is kind.forward for kind in _KINDS)


def _kind(layer: nn.Module) -> str:
    return next(kind.__name__ for kind in _KINDS if isinstance(layer, kind))


def _normalised(layer: NormLayer, given: Tensor) -> Tensor:
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(given, layer.num_groups, eps=layer.eps)
    shape = list(layer.normalized_shape)
    if isinstance(layer, nn.LayerNorm):
        return functional.layer_norm(given, shape, eps=layer.eps)
    return functional.rms_norm(given, shape, eps=layer.eps)


def _check_not_compiled(model: nn.Module) -> None:
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise TrainingError(
                cannot(
                    "measure the noise of the gradient in normalisation layers",
                    why="the model is compiled, and nobody can look into what runs as one",
                    instead="write noise_from='micro_batches', or do not compile it",
                )
            )


def _without_layers(model: nn.Module) -> TrainingError:
    return TrainingError(
        cannot(
            f"measure the noise of the gradient in normalisation layers of {type(model).__name__}",
            why="no LayerNorm, RMSNorm or GroupNorm in it has weights that are trained",
            instead="write noise_from='micro_batches'",
        )
    )
