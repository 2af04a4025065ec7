"""What a loss is over the samples of its batch, read from its autograd graph.

A batch may be computed in micro-batches if its loss is the mean over its samples of what each of
them has alone. `read` follows the samples through the graph, from the layers that meet data to the
loss, and passes what is known to be such a mean. It calls no code of the user's.

It takes a layer that keeps the dimension of the samples for one that treats each of them alone. It
sees no value that was computed without gradients, other than factors and divisors: these are in
`Reading.ratios`, to be compared between the micro-batches of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

_Shape: TypeAlias = tuple[int, ...]
_PRODUCTS: Final = ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Cdist", "EuclideanDist")
_ENTRIES: Final = (*_PRODUCTS, "Convolution", "Embedding", "Bilinear")
"""Functions of parameters that take data."""
_VIEWS: Final = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
_PARTS: Final = ("Select", "Unbind", "Slice", "Split", "SplitWithSizes")
_LINEAR: Final = (
    *_VIEWS, *_PARTS, "Neg", "Clone", "ToCopy", "Alias", "Expand", "T", "Transpose", "Permute",
    "Stack", "Cat", "Sum", "Mean", "Add", "Sub", "Mul", "Div",
)  # fmt: skip
"""Functions of a mean over samples that return one; a factor or divisor must be none itself."""
_MEAN, _SUM = 1, 2
"""`reduction="mean"` and `"sum"`, as functions of torch note it."""
_COMPARES: Final = "it compares the samples with each other"
_TAKES_SOME: Final = "it takes some of the samples"


class _Term(NamedTuple):
    """A part of a loss: of all samples, or of one of them."""

    kind: Literal["mean", "sum", "one"]
    size: int = 1
    """Of a sum: the numbers of each sample that it adds up."""
    is_divided: bool = False
    """Of a sum: whether a number divides it, which does not count what it adds up."""


class _Seen(NamedTuple):
    """What a tensor of the graph is, seen from the samples."""

    kind: Literal["constant", "rows", "one", "reduced", "unknown"]
    """Of parameters alone; of each sample alone; of one sample; of all of them; not known."""
    dim: int = 0
    """Of rows: the dimension in which the samples lie."""
    before: int = 1
    """Of rows: how many places of that dimension lie outside of the samples."""
    terms: tuple[_Term, ...] = ()
    """Of what is reduced, or of one sample: what it adds up."""
    why: str = ""


_CONSTANT: Final = _Seen("constant")
_Given: TypeAlias = tuple[_Seen, _Shape]


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What a graph says about a loss."""

    why: str | None = None
    """Why it is not known to be a mean over samples; None: it is."""
    is_sum: bool = False
    """Whether it, or a part of it, is a plain sum over the samples."""
    divisors: tuple[float, ...] = ()
    """What its end is divided by, other than counts of what it adds up."""
    ratios: tuple[float, ...] = ()
    """Factors and divisors without gradients, and counts for each sample. Those of a mean are the
    same in all micro-batches."""


def read(loss: Tensor, num_samples: int) -> Reading:
    """Return what the graph of a loss says about it. Call it before the backward pass.

    >>> x, w = torch.ones(4, 3), nn.Parameter(torch.ones(3, 2))
    >>> read((x @ w).square().mean(), 4).why
    >>> read((x @ w).square().sum(), 4).why
    'it is a sum over the samples'
    >>> read((x @ w).square().mean().sqrt(), 4).why
    'it has the Sqrt of a mean over the samples'

    Args:
        loss: the loss, a scalar.
        num_samples: the rows of its batch.
    """
    if loss.grad_fn is None:
        return Reading()
    reader = _Reader(num_samples)
    found = reader.seen(loss.grad_fn)
    sums = [term for term in found.terms if term.kind == "sum"]
    is_sum, why = not all(term.is_divided for term in sums), found.why or None
    if is_sum:
        why = "it is a sum over the samples"
    elif sums:
        why = "it is a sum, divided by another number than that of the samples"
    elif any(term.kind == "one" for term in found.terms):
        why = "it is not known which of the samples it is computed from"
    divisors = tuple(_divisors(loss.grad_fn, reader.counted))
    return Reading(why, is_sum, divisors, tuple(reader.ratios))


def _divisors(node: Any, counted: set[Any]) -> Iterator[float]:
    """Yield what the end of a loss is divided by, other than counts."""
    while (name := _op(node)) in ("Div", "Mul", "Neg", "ToCopy", "Clone"):
        inner = [before for before, _ in node.next_functions if before is not None]
        if len(inner) != 1:
            return
        operand = _operand(node, name)
        number = _number(operand)
        is_whole = isinstance(operand, Tensor) and not operand.is_floating_point()
        # An average of some terms is divided by a whole number, as `len` is.
        is_average = is_whole and number == _num_terms(inner[0])
        if name == "Div" and number is not None and node not in counted and not is_average:
            yield number
        node = inner[0]


def _num_terms(node: Any) -> int:
    """Return how many terms a function adds up."""
    left, count = [node], 0
    while left:
        node = left.pop()
        is_added = _op(node) in ("Add", "Sub")
        left += [one for one, _ in node.next_functions if is_added and one is not None]
        count += not is_added
    return count


@final
@dataclass(slots=True)
class _Reader:
    """Follows the samples through a graph."""

    num_samples: int
    ratios: list[float] = field(default_factory=list)
    counted: set[Any] = field(default_factory=set)
    """Divisions of a sum by how many it adds up."""
    _seen: dict[tuple[Any, int], _Seen] = field(default_factory=dict)

    def seen(self, root: Any) -> _Seen:
        """Return what the result of a function is, and of all before it."""
        left, done = [(root, False)], set[Any]()
        while left:
            node, is_open = left.pop()
            if is_open:
                for number in range(len(node._input_metadata)):
                    self._seen[node, number] = self._result(node, _shape(node, number))
            elif node not in done:
                done.add(node)
                left.append((node, True))
                left += [(before, False) for before, _ in node.next_functions if before is not None]
        found = self._seen[root, 0]
        return found if found.kind != "rows" else _unknown("it is no number")

    def _result(self, node: Any, shape: _Shape) -> _Seen:
        name = _op(node)
        if name == "AccumulateGrad":
            is_data = not isinstance(node.variable, nn.Parameter) and len(shape) > 1
            return _Seen("rows") if is_data and shape[0] == self.num_samples else _CONSTANT
        given = [
            None if before is None else (self._seen[before, at], _shape(before, at))
            for before, at in node.next_functions
        ]
        known = [one for one in given if one is not None]
        kinds = {seen.kind: seen for seen, _ in known}
        if "unknown" in kinds:
            return kinds["unknown"]
        if "reduced" in kinds and "rows" in kinds:
            return _unknown("it joins each sample with a mean over the samples")
        if "one" in kinds and "rows" in kinds:
            return _unknown("it joins the samples with what may be one of them")
        if "rows" in kinds:
            return self._of_rows(node, name, given, shape)
        is_added = name in ("Add", "Sub", "Stack") and not known[0][1]
        if "reduced" in kinds or ("one" in kinds and is_added):
            return self._of_reduced(node, name, given)
        if "one" in kinds:
            return kinds["one"]
        return self._of_constants(node, name, given, shape)

    def _of_constants(
        self, node: Any, name: str, given: Sequence[_Given | None], shape: _Shape
    ) -> _Seen:
        """Return the result of parameters, perhaps with data."""
        if name in ("Index", "Embedding", "IndexSelect", "Gather", "EmbeddingBag"):
            places = _saved(node, "indices")
            is_data = not (isinstance(places, Tensor) and self._are_places(places))
            return self._entry(name, shape) if is_data else _CONSTANT
        if None not in given:
            return _CONSTANT
        if name == "Mv" and given[0] is None:
            name = "Mm"  # the matrix is the data
        size = max((math.prod(one[1]) for one in given if one is not None), default=0)
        # A function without a number in its name is one of Python, or compiled.
        is_opaque = "Rnn" in name or not node.name()[-1].isdigit()
        is_entry = name in _ENTRIES or is_opaque or size < math.prod(shape)
        return self._entry(name, shape) if is_entry else _CONSTANT

    def _are_places(self, indices: Tensor) -> bool:
        """Return whether indices are places in a sequence, and not data."""
        if indices.ndim > 1:
            return len(indices) == 1 < self.num_samples
        return len(indices) > 1 and bool((indices.diff() == 1).all())

    def _entry(self, name: str, shape: _Shape) -> _Seen:
        """Return what comes out of a layer that takes data."""
        if "Rnn" in name and len(shape) > 2:  # kernels of torch have time first
            return _Seen("rows", 1)
        if shape and shape[0] % self.num_samples == 0 and name != "Mv":
            return _Seen("rows")
        dims = [dim for dim, size in enumerate(shape) if size == self.num_samples]
        is_vector = len(shape) < 2 or not dims
        return _Seen("one", terms=(_Term("one"),)) if is_vector else _Seen("rows", dims[0])

    def _of_reduced(self, node: Any, name: str, given: Sequence[_Given | None]) -> _Seen:
        """Return the result of a function of means or sums over the samples."""
        varying = [one is not None and one[0].kind != "constant" for one in given]
        is_product = name == "Mul" and sum(varying) > 1
        if name not in _LINEAR or is_product or (name == "Div" and any(varying[1:])):
            return _unknown(f"it has the {name} of a mean over the samples")
        known = [one for one in given if one is not None]
        terms = tuple(chain.from_iterable(seen.terms for seen, _ in known))
        operand, are_sums = _operand(node, name), any(term.kind == "sum" for term in terms)
        self._note(operand, of_each=are_sums and name == "Div")
        if name == "Mean":  # of a stack
            terms = self._divided(node, terms, math.prod(known[0][1]), is_stack=True)
        elif name == "Div":
            terms = self._divided(node, terms, _number(operand))
        return _Seen("reduced", terms=terms)

    def _divided(
        self, node: Any, terms: tuple[_Term, ...], divisor: float | None, *, is_stack: bool = False
    ) -> tuple[_Term, ...]:
        """Return terms that a number divides: means, if that counts what they add up."""
        ones = sum(term.kind == "one" for term in terms)
        are_all = ones > 0 == ones % self.num_samples and divisor in (ones, self.num_samples)
        each = 0.0 if divisor is None or is_stack else divisor / self.num_samples
        found = list[_Term]()
        for term in terms:
            is_count = each >= 1 and term.size % each == 0 if term.kind == "sum" else are_all
            if term.kind != "mean" and is_count:
                self.counted.add(node)
                found.append(_Term("mean"))
            else:
                found.append(term._replace(is_divided=term.is_divided or not is_stack))
        return tuple(found)

    def _note(self, operand: Tensor | float | None, *, of_each: bool = False) -> None:
        """Note a factor or divisor that may be one of the data, or counts what a sum adds up."""
        if operand is not None and (of_each or not _is_plain(operand)):
            flat = torch.as_tensor(operand).detach().double().flatten()
            # Weights of classes in another order are others.
            number = float(flat @ torch.arange(1.0, len(flat) + 1).to(flat))
            self.ratios.append(number / (self.num_samples if of_each else 1))

    def _is_normalized(self, factors: Tensor) -> bool:
        """Return whether factors of samples have a mean of 0 or 1, which is not so by chance.

        Weights of classes are few numbers, and may have it by chance.
        """
        if factors.numel() != self.num_samples or len(each := factors.unique()) < 4:
            return False
        mean, most = float(factors.double().mean()), 1e-6 * float(each.double().abs().max())
        return 2 * len(each) > self.num_samples and min(abs(mean), abs(mean - 1)) < most

    def _of_rows(
        self, node: Any, name: str, given: Sequence[_Given | None], shape: _Shape
    ) -> _Seen:
        """Return the result of a function of samples."""
        rows = [one for one in given if one is not None and one[0].kind == "rows"]
        first, size = rows[0]
        dim, own = first.dim, _dims(node, len(size))
        operand = _operand(node, name)
        self._note(None if isinstance(operand, Tensor) and operand.ndim else operand)
        if isinstance(operand, Tensor) and self._is_normalized(operand):
            return _unknown("its factors are normalized over the samples")
        if name in _PRODUCTS:
            return self._product(name, given, shape)
        reduction = _saved(node, "reduction")
        is_reduced = name in ("Sum", "Mean", "Dot") or reduction in (_MEAN, _SUM)
        if is_reduced and dim in (own or range(len(size))):
            is_mean = reduction == _MEAN or name == "Mean"
            return self._reduced(node, name, rows, own, is_mean=is_mean)
        found = None if is_reduced else self._moved(node, name, given, shape)
        if found is not None:
            return found
        if len(shape) < len(size):
            moved = dim - sum(one < dim for one in own)
            is_kept = len(rows) == 1 and moved < len(shape) and shape[moved] == size[dim]
            return first._replace(dim=moved) if is_kept else _hidden(name)
        return self._aligned(name, rows, shape, has_data=None in given)

    def _moved(
        self, node: Any, name: str, given: Sequence[_Given | None], shape: _Shape
    ) -> _Seen | None:
        """Return the result of a function that moves, takes or joins samples; None: it does not."""
        first, size = next(one for one in given if one is not None and one[0].kind == "rows")
        dim, own = first.dim, _dims(node, len(size))
        if name == "CtcLoss":
            return _Seen("rows") if dim == len(size) - 2 else _unknown(_COMPARES)
        if name in ("ViewAsReal", "ViewAsComplex") and dim < min(len(size), len(shape)):
            return first  # the last dimension has the two parts of a number
        if name in _VIEWS:
            return self._viewed(first, size, shape)
        if name in ("T", "Transpose", "Permute"):
            return first._replace(dim=_order(node, name, len(size)).index(dim))
        if name == "Stack":
            return first._replace(dim=dim + (_dims(node, len(shape))[0] <= dim))
        if name == "Index":
            return self._indexed(node, first, size)
        if name in ("Select", "Unbind") and dim in own:
            return _Seen("one", terms=(_Term("one"),))
        if (name in _PARTS or name == "Cat") and dim in own:
            is_whole = shape[dim] % (self.num_samples * first.before) == 0
            is_whole = is_whole and all(one is not None and one[0] == first for one in given)
            return first if is_whole else _unknown(_TAKES_SOME)
        runs_over_all = not own and name not in _PARTS and hasattr(node, "_saved_dim")
        is_over = dim in own or runs_over_all
        return _unknown(f"it has the {name} over the samples") if is_over else None

    def _reduced(
        self, node: Any, name: str, rows: Sequence[_Given], own: _Shape, *, is_mean: bool
    ) -> _Seen:
        """Return a mean or a sum over the samples."""
        if len({(seen, len(size)) for seen, size in rows}) > 1:
            return _unknown(_COMPARES)
        size = rows[0][1]
        each = math.prod(size[one] for one in own or range(len(size))) // self.num_samples
        if is_mean:
            total = _saved(node, "total_weight") if name.startswith("NllLoss") else None
            self.ratios.append(each if total is None else float(total) / self.num_samples)
            if total is not None and _saved(node, "weight") is not None:
                return _unknown("it is divided by the weights of the classes in the micro-batch")
        return _Seen("reduced", terms=(_Term("mean") if is_mean else _Term("sum", each),))

    def _viewed(self, seen: _Seen, size: _Shape, shape: _Shape) -> _Seen:
        """Return samples in another shape of the same order."""
        is_kept = len(shape) == len(size) and shape[: seen.dim] == size[: seen.dim]
        if is_kept and not shape[seen.dim] % (seen.before * self.num_samples):
            return seen
        before, done = math.prod(size[: seen.dim]) * seen.before, 1
        dims = [at for at, one in enumerate(shape) if one == self.num_samples]
        exact = next((at for at in dims if math.prod(shape[:at]) == before), None)
        if exact is not None:
            return _Seen("rows", exact)
        for dim, one in enumerate(shape):
            if before % done == 0 and one % (before // done * self.num_samples) == 0:
                return _Seen("rows", dim, before // done)
            done *= one
        if before == 1 and dims:  # a layer that took time first has the samples inside
            return _Seen("rows", dims[0])
        return _unknown("it takes the samples in another order")

    def _indexed(self, node: Any, seen: _Seen, size: _Shape) -> _Seen:
        """Return what is taken by indices, such as the logits of the targets."""
        places = _saved(node, "indices") or ()
        used = [at for at, one in enumerate(places) if one is not None]
        if not used or seen.dim not in used:
            return seen if used and used[0] > seen.dim else _unknown(_TAKES_SOME)
        own = places[seen.dim]
        each = torch.arange(size[seen.dim], device=own.device)
        is_each = own.dtype != torch.bool and own.shape[:1] == each.shape == own.flatten().shape
        is_each = is_each and bool((own.flatten() == each).all())
        return seen._replace(dim=used[0]) if is_each else _unknown(_TAKES_SOME)

    def _product(self, name: str, given: Sequence[_Given | None], shape: _Shape) -> _Seen:
        """Return the result of a product of matrices, or of distances between their rows."""
        left, right = (
            one[0] if one is not None and one[0].kind == "rows" else None for one in given[-2:]
        )
        rows, columns = max(0, len(shape) - 2), len(shape) - 1
        each = [one for one in (left, right) if one is not None]
        if not each:  # only what is added has samples
            return self._aligned(name, [one for one in given[:1] if one], shape)
        is_batched = len(shape) > 2 and all(one.dim == 0 for one in each)
        if is_batched and shape[0] % self.num_samples == 0:
            return each[0]
        if left is not None and right is not None:
            return _unknown(_COMPARES)
        is_distance = name in ("Cdist", "EuclideanDist")
        wanted = columns if left is None and not is_distance else rows
        if each[0].dim != wanted:
            return _unknown("it adds up products over the samples")
        to, crossing = (columns, rows) if left is None else (rows, columns)
        has_data = None in given[-2:] and name != "Mv"
        if has_data and self._is_suspect(shape[crossing]):
            return _unknown(_COMPARES)
        return each[0]._replace(dim=to)

    def _is_suspect(self, size: int) -> bool:
        """Return whether a dimension that data have added may be that of the samples again."""
        return size in (self.num_samples, 2 * self.num_samples)

    def _aligned(
        self, name: str, rows: Sequence[_Given], shape: _Shape, *, has_data: bool = False
    ) -> _Seen:
        """Return the result of a function that keeps the dimension of the samples."""
        found = set[_Seen]()
        for seen, size in rows:
            offset = len(shape) - len(size)
            dim = seen.dim + offset
            if dim < 0 or shape[dim] != size[seen.dim]:
                return _hidden(name)
            old = (1,) * offset + size
            pairs = enumerate(zip(old, shape, strict=True))
            added = [two for at, (one, two) in pairs if at != dim and one == 1 < two]
            if has_data and any(map(self._is_suspect, added)):
                return _unknown(_COMPARES)
            found.add(_Seen("rows", dim, seen.before))
        # Attention over the samples keeps their dimension.
        is_mixed = name.startswith("ScaledDotProduct") and dim >= len(shape) - 2
        return _unknown(_COMPARES) if is_mixed or len(found) > 1 else found.pop()


def _unknown(why: str) -> _Seen:
    return _Seen("unknown", why=why)


def _hidden(name: str) -> _Seen:
    return _unknown(f"it is not known how {name} computes it from the samples")


def _op(node: Any) -> str:
    """Return the name of a function without `Backward0`."""
    name: str = node.name().removeprefix("torch::autograd::")
    return name.rstrip("0123456789").removesuffix("Backward")


def _shape(node: Any, number: int) -> _Shape:
    return tuple(node._input_metadata[number].shape)


def _saved(node: Any, name: str) -> Any:
    """Return what a function has saved; None: nothing, or the backward pass has freed it."""
    with suppress(RuntimeError):
        return getattr(node, f"_saved_{name}", None)
    return None


def _operand(node: Any, name: str) -> Tensor | float | None:
    """Return a factor or divisor that has no gradient; None: there is none."""
    edges = node.next_functions
    if name not in ("Mul", "Div") or sum(before is not None for before, _ in edges) != 1:
        return None
    found: Tensor | float | None = _saved(node, "other" if edges[0][0] is not None else "self")
    return found


def _number(operand: Tensor | float | None) -> float | None:
    """Return a factor or divisor if it is one number."""
    is_one = not isinstance(operand, Tensor) or operand.numel() == 1
    return float(operand) if operand is not None and is_one else None


def _is_plain(number: Tensor | float) -> bool:
    """Return whether a number of the graph was written as one, and is no tensor of the user's.

    Torch keeps a Python number as a tensor that gives way to the type of any other.
    """
    if not isinstance(number, Tensor) or number.ndim:
        return not isinstance(number, Tensor)
    other = torch.ones((), dtype=torch.float16 if number.is_floating_point() else torch.int8)
    return torch.result_type(other, number) == other.dtype


def _signed(number: int) -> int:
    """Return a dimension: torch saves -1 as a number without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _dims(node: Any, ndim: int) -> _Shape:
    """Return the dimensions that a function runs over; empty: it runs over all, or over none."""
    found = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    each = (found,) if isinstance(found, int) else found or ()
    return tuple(_signed(one) % ndim if ndim else 0 for one in each)


def _order(node: Any, name: str, ndim: int) -> Sequence[int]:
    """Return the old places of dimensions that changed places."""
    if name == "Permute":
        return _dims(node, ndim)
    pair = (0, ndim - 1) if name == "T" else (node._saved_dim0, node._saved_dim1)
    first, other = (_signed(one) % ndim for one in pair)
    order = list(range(ndim))
    order[first], order[other] = other, first
    return order
