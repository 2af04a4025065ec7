"""Gradients of single samples in normalisation layers: those of a loop over the samples."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.errors import TrainingError
from stretto.noise import NormLayerGradients, noise_terms

Model = Callable[[], nn.Module]


def norms_of(layer: nn.Module, *shape: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A layer with weights that are not 1, and the shape of a sample."""
    layer.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.5)
    return layer, shape


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "LayerNorm 2-D": lambda: norms_of(nn.LayerNorm(5), 5),
    "LayerNorm 3-D": lambda: norms_of(nn.LayerNorm(5), 7, 5),
    "LayerNorm without bias": lambda: norms_of(nn.LayerNorm(5, bias=False, eps=0.1), 7, 5),
    "LayerNorm of two dimensions": lambda: norms_of(nn.LayerNorm((4, 5)), 3, 4, 5),
    "RMSNorm 2-D": lambda: norms_of(nn.RMSNorm(5), 5),
    "RMSNorm 3-D": lambda: norms_of(nn.RMSNorm(5, eps=0.1), 7, 5),
    "GroupNorm 2-D": lambda: norms_of(nn.GroupNorm(2, 6), 6),
    "GroupNorm 3-D": lambda: norms_of(nn.GroupNorm(3, 6), 6, 4),
    "GroupNorm 4-D": lambda: norms_of(nn.GroupNorm(2, 6, eps=0.1), 6, 4, 3),
}


class Network(nn.Module):
    """Two different norms and one that runs twice, between layers that are not looked at."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inside = nn.Linear(4, 6)
        self.first, self.second = nn.LayerNorm(6), nn.RMSNorm(6)
        self.outside = nn.Linear(6, 2)
        self.reentrant = reentrant
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.5)

    def block(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(input=hidden).tanh() + self.second(hidden)).relu_()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inside(inputs)
        if self.reentrant is None:
            return self.outside(self.block(hidden))
        return self.outside(checkpoint(self.block, hidden, use_reentrant=self.reentrant))


def samples(count: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, *shape, dtype=torch.float64, generator=generator)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten(1).sin().square().sum(1).mean()


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    return [p for m in model.modules() if isinstance(m, kinds) for p in m.parameters()]


def one_by_one(model: nn.Module, data: Tensor) -> Tensor:
    """The gradient of each sample by itself, `[samples, weights]`."""
    rows = []
    for sample in data.split(1):
        gradients = torch.autograd.grad(mean_loss(model, sample), weights_of(model))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def measured(model: nn.Module, data: Tensor, sizes: Sequence[int]) -> list[float]:
    """What a step of micro-batches gives, as parts of the gradient of the mean over all."""
    model.zero_grad()
    gradients = NormLayerGradients(model)
    gradients.begin()
    for micro in data.split(list(sizes)):
        with gradients.watch(len(micro)):
            (mean_loss(model, micro) * len(micro) / len(data)).backward()
    found = gradients.read()
    assert gradients.overlap() == pytest.approx(found[-1], rel=1e-10)
    return found


def expected(model: nn.Module, data: Tensor) -> list[float]:
    """Squares of the parts of single samples, and that of their sum."""
    parts = one_by_one(model, data) / len(data)
    return [*parts.square().sum(1).tolist(), float(parts.sum(0).square().sum())]


@pytest.mark.parametrize("sizes", [[9], [4, 4, 1], [1] * 9], ids=["one pass", "uneven", "single"])
@pytest.mark.parametrize("name", LAYERS)
def test_squares_are_those_of_a_loop_over_samples(name: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]()
    data = samples(9, *shape)
    assert measured(layer, data, sizes) == pytest.approx(expected(layer, data), rel=1e-10)


@pytest.mark.parametrize("shape", [(4,), (5, 4)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
def test_a_network_whose_activations_may_be_recomputed(
    reentrant: bool | None, shape: tuple[int, ...]
) -> None:
    data = samples(7, *shape)
    found = measured(Network(reentrant=reentrant), data, [3, 3, 1])
    assert found == pytest.approx(expected(Network(), data), rel=1e-10)


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]
)
def test_what_samples_gave_is_the_gradient(dtype: torch.dtype, within: float) -> None:
    model, data = Network().to(dtype), samples(24, 5, 4).to(dtype)
    gradients = NormLayerGradients(model)
    gradients.begin()
    with gradients.watch(24):
        mean_loss(model, data).backward()
    assert gradients.overlap() == pytest.approx(gradients.read()[-1], rel=within)


def test_the_gradient_is_not_touched() -> None:
    data, plain, watched = samples(6, 5, 4), Network(), Network()
    mean_loss(plain, data).backward()
    measured(watched, data, [6])
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_only_what_is_trained_counts() -> None:
    model, data = Network(), samples(6, 4)
    gradients = NormLayerGradients(model, [model.first.weight, model.second.weight])
    model.second.weight.requires_grad_(False)
    gradients.begin()
    with gradients.watch(6):
        mean_loss(model, data).backward()
    *squares, whole = gradients.read()
    parts = torch.stack(
        [
            torch.autograd.grad(mean_loss(model, one), [model.first.weight])[0]
            for one in data.split(1)
        ]
    )
    assert squares == pytest.approx((parts / 6).square().sum(1).tolist())
    assert whole == pytest.approx(float(parts.mean(0).square().sum()))
    model.first.weight.requires_grad_(False)
    gradients.begin()
    with gradients.watch(6):
        mean_loss(model, data).backward()
    assert not gradients.has_any
    assert gradients.read() == [0.0] * 7


def test_passes_without_a_gradient_are_not_looked_at() -> None:
    model, data = Network(), samples(6, 4)
    gradients = NormLayerGradients(model)
    gradients.begin()
    with gradients.watch(6):
        with torch.no_grad():
            model(data[:2])  # as a teacher would, of another size
        mean_loss(model, data).backward()
    assert gradients.read() == pytest.approx(expected(model, data))


def test_nothing_stays_in_the_model() -> None:
    model, data = Network(), samples(6, 4)
    gradients = NormLayerGradients(model)
    with gradients.watch(6):
        mean_loss(model, data).backward()
    with pytest.raises(ZeroDivisionError), gradients.watch(6):
        _ = 1 / 0
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)(data[:3])


def test_what_is_known_of_the_gradient_comes_out() -> None:
    """The mean over many steps lies within two standard errors of a known truth."""
    generator = torch.Generator().manual_seed(5)
    steps, size, width = 600, 6, 6
    scales, means = torch.linspace(1.0, 2.0, width), torch.linspace(0.2, 0.7, width)
    draws = torch.randn(steps, size, width, generator=generator, dtype=torch.float64)
    draws = draws * scales + means
    layer = nn.LayerNorm(width).double()
    given = torch.arange(width, dtype=torch.float64).expand(size, width)
    normalised = nn.functional.layer_norm(given[0], [width])
    gradients = NormLayerGradients(layer)
    seen = []
    for step in draws:
        layer.zero_grad()
        gradients.begin()
        for micro, rows in zip(step.split(4), given.split(4), strict=True):
            with gradients.watch(len(micro)):
                ((layer(rows) * micro).sum(1).mean() * len(micro) / size).backward()
        *squares, whole = gradients.read()
        terms = noise_terms([square * size**2 for square in squares], [1] * size, whole)
        assert terms is not None
        seen.append(terms)
    # The gradient of the bias is the draw itself, that of the weight the draw times x_hat.
    factors = normalised.square() + 1
    true = float((scales.square() * factors).sum()), float((means.square() * factors).sum())
    for values, value in zip(zip(*seen, strict=True), true, strict=True):
        error = statistics.stdev(values) / math.sqrt(steps)
        assert abs(statistics.fmean(values) - value) < 2 * error


def test_what_else_flows_into_the_weights_is_seen() -> None:
    model, data = Network(), samples(6, 4)
    gradients = NormLayerGradients(model)
    gradients.begin()
    with gradients.watch(6):
        (mean_loss(model, data) + sum(p.square().sum() for p in model.parameters())).backward()
    assert abs(gradients.overlap() / gradients.read()[-1] - 1) > 0.1


class Permuted(nn.LayerNorm):
    """A norm over channels that are not last, as in some convolutional networks."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.transpose(1, -1)).transpose(1, -1)


class Derived(nn.LayerNorm):
    """Another name for the same."""


def compiled_inside() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.LayerNorm(4, elementwise_affine=False),
        lambda: nn.BatchNorm1d(4),
        lambda: Permuted(4),
    ],
    ids=["none", "without weights", "over the batch", "of its own making"],
)
def test_a_model_without_such_layers_is_refused(make: Model) -> None:
    with pytest.raises(TrainingError, match="no LayerNorm, RMSNorm or GroupNorm in it"):
        NormLayerGradients(make())


def test_layers_that_nobody_trains_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(TrainingError, match="has weights that are trained"):
        NormLayerGradients(model, model[0].parameters())


def test_a_derived_class_is_what_it_is() -> None:
    torch.manual_seed(0)
    layer, shape = norms_of(Derived(5), 3, 5)
    data = samples(4, *shape)
    assert measured(layer, data, [4]) == pytest.approx(expected(layer, data), rel=1e-10)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.compile(nn.Sequential(nn.LayerNorm(4)), backend="eager"), compiled_inside],
    ids=["whole", "a part"],
)
def test_a_compiled_model_is_refused(make: Model) -> None:
    with pytest.raises(TrainingError, match="the model is compiled"):
        NormLayerGradients(make())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(4), (3, 6, 4)),
        (nn.LayerNorm(4), (18, 4)),
        (nn.LayerNorm((6, 4)), (6, 4)),
        (nn.GroupNorm(1, 4), (3, 4, 6)),
    ],
    ids=["time first", "folded", "no samples", "other samples"],
)
def test_samples_that_are_not_first_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    gradients = NormLayerGradients(layer)
    with (
        pytest.raises(TrainingError, match=r"6 samples apart: the \w+Norm '' is given the shape"),
        gradients.watch(6),
    ):
        layer(torch.randn(shape))
