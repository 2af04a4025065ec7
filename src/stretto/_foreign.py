"""Names that other libraries use for an argument, and what to write here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial, wraps
from os import PathLike
from typing import Any, TypeVar

from stretto.errors import ConfigError, nearest

_TORCHRUN = "leave it out, and start a process for each device with torchrun"
_UNITS = "leave it out: fractions of the run and periods are exact in any unit of max_duration"
_ANSWERS = {
    "max_epochs epochs num_epochs num_train_epochs max_steps total_steps num_steps max_time":
        ("write max_duration='3ep'", "write max_duration: 3ep"),
    "gradient_clip_val max_grad_norm grad_clip": ("write clip_norm=1.0", "write clip_norm: 1.0"),
    "mixed_precision fp16 bf16 amp": ("write precision='bf16'", "write precision: bf16"),
    "T_max total_iters num_training_steps":
        ("write over='80%' (by default a schedule lasts for the whole run)",
         "write schedules={'lr': Cosine(over='80%')}",
         "write schedules: {lr: {Cosine: {over: 80%}}}"),
    "eta_min": ("write end=0.1 (a factor of the learning rate)",
                "write schedules={'lr': Cosine(end=0.1)}",
                "write schedules: {lr: {Cosine: {end: 0.1}}} (a factor of the learning rate)"),
    "T_0": ("write t_0='1ep'", "write schedules={'lr': CosineRestarts('1ep')}",
            "write schedules: {lr: {CosineRestarts: {t_0: 1ep}}}"),
    "warmup_ratio warmup_steps num_warmup_steps warmup_iters":
        ("write warmup='5%'", "write schedules={'lr': Cosine(warmup='5%')}",
         "write schedules: {lr: {Cosine: {warmup: 5%}}}"),
    "validate_frequency validate_every_n_batches validate_every_n_epochs eval_interval eval_steps "
    "eval_strategy val_check_interval check_val_every_n_epoch val_data eval_dataset "
    "val_dataloaders":
        ("write evaluate=Evaluation(data, every='10%')", "write every={'evaluate': '10%'}",
         "write evaluate: {every: 10%}"),
    "save_steps save_interval save_every":
        ("write checkpoint='1ep'", "write every={'checkpoint': '1ep'}",
         "write checkpoint: {every: 1ep}"),
    "log_every_n_steps logging_steps log_interval":
        ("write log='10ba'", "write every={'log': '10ba'}", "write log: {every: 10ba}"),
    "gradient_accumulation_steps accumulate_grad_batches per_device_train_batch_size "
    "device_train_microbatch_size": ("write micro_batch_size=8", "write micro_batch_size: 8"),
    "lr_scheduler scheduler lr_schedule get_factor":
        ("write schedules={'lr': Cosine(warmup='5%')}",
         "write schedules: {lr: {Cosine: {warmup: 5%}}}"),
    "learning_rate lr": ("write optimizer=SGD(model.parameters(), lr=0.1)",
                         "write optimizer: {target: 'torch.optim:SGD', lr: 0.1}"),
    "global_train_batch_size": ("write batch_size=256", "write batch_size: 256"),
    "batch_rampup inital_global_train_batch_size initial_global_train_batch_size":
        ("write batch_size=DoublingRamp(32, 256, '10%')",
         "write batch_size: {DoublingRamp: {start: 32, end: 256, over: 10%}}"),
    "batch_increase_function max_batch_size":
        ("write batch_size=IncreaseFunction(function, 32, max_batch_size=256)",
         ("write batch_size: {IncreaseFunction: {function: {target: 'my:grow'}, start: 32, "
          "max_batch_size: 256}}")),
    "use_maximum_batch_size":
        ("write micro_batch_size=find_batch_size(step, batch).size", "write batch_size: auto"),
    "periods": ("write schedules={'lr': Periods([('5%', Linear(0, 1)), ('rest', Cosine())])}",
                "write schedules: {lr: {Periods: [[5%, {Linear: {}}], [rest, {Cosine: {}}]]}}"),
    "max_duration_base_units": (_UNITS, _UNITS),
    "gpus devices accelerator": (_TORCHRUN, _TORCHRUN),
    "train_dataloader train_dataloaders train_dataset":
        ("write train_data=data", "write data=data", "write data: {target: 'my.data:make'}"),
    "criterion loss_fn": ("write loss=MSELoss()", "write loss: {target: 'my.models:loss'}"),
}  # fmt: skip
"""Names, and what to write: the argument of Python, or several of which the first that a function
has is named; then the key of a run file. Schedules are in `stretto.schedules`."""
FOREIGN = {name: answers for names, answers in _ANSWERS.items() for name in names.split()}
OLD_WORDS = {
    "even": "{MultipleOf: {policy: {...}, factor: 32}} with world_size * micro_batch_size",
    "ramp": "{DoublingRamp: {start: 8, end: 64, over: 40%}}, or a LinearRamp or a StagedRamp",
    "size": "the number alone, or a wrapper around it: {PowerOfTwo: {policy: 64}}",
    "steps": "the times and sizes alone: '0ep:8 1ep:16'",
    "periods": "{Periods: [[15%, {...}], [rest, {...}]]}, or PeriodSizes for batch sizes",
    "increase": "{IncreaseFunction: {function: {target: 'my:grow'}, start: 8, max_batch_size: 64}}",
    "step": "{StepDecay: {every: 30ep, gamma: 0.1}}",
}
"""Words of earlier run files inside a schedule or a batch size, and what to write."""
F = TypeVar("F", bound=Callable[..., Any])


def arguments_of(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of the `__init__` of a class.

    Python 3.11.2 answers with those of a `__new__` that the class inherits, 3.11.7 does not.
    """
    init = getattr(make, "__init__") if isinstance(make, type) else make  # noqa: B009  mypy
    found = [*inspect.signature(init).parameters.items()]
    return dict(found[1:] if isinstance(make, type) else found)


def check_foreign(given: Iterable[str], own: Collection[str] = (), owner: str = "stretto") -> None:
    """Refuse names of other libraries, and unknown ones if the `own` names of an owner are known.

    Raises:
        ConfigError: there is one.
    """
    for name in given:
        if name in own:
            continue
        near = None if name in FOREIGN else nearest(name, own)
        alike = get_close_matches(name, FOREIGN, 1, 0.85) if own and not near else []
        if name in FOREIGN or alike:
            answers = FOREIGN[(alike or [name])[0]][:-1]
            fitting = [one for one in answers if re.split(r"\W", one)[1] in {*own, "it"}]
            instead = fitting[0] if fitting else f"{answers[-1]} in Trainer"
        elif own:
            names = [one for one in own if one != "self"]
            instead = f"did you mean {near!r}?" if near else f"write {' or '.join(names)}"
        else:
            continue
        raise ConfigError.cannot(
            f"use {name}=...", why=f"{owner} has no argument of that name", instead=instead
        )


def names_of(function: Callable[..., Any]) -> Collection[str]:
    """Return the names that a function takes; none if it takes any."""
    own = inspect.signature(function).parameters
    return () if any(one.kind is one.VAR_KEYWORD for one in own.values()) else own


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "None": ("None", lambda one: one is None),
    # numpy has truth values of its own.
    "bool": ("True or False", lambda one: type(one).__name__ in ("bool", "bool_")),
    "str": ("a text", lambda one: isinstance(one, str) or "device" in _classes(one)),
    "Path": ("a path", lambda one: isinstance(one, PathLike)),
    "Mapping": ("a mapping such as {'name': ...}", lambda one: hasattr(one, "keys")),
    "Sequence": (
        "a list",
        lambda one: (
            isinstance(one, Collection)
            and not isinstance(one, (str, bytes, Mapping))
            and not hasattr(one, "dtype")
        ),
    ),
    "nn.Module": (
        "a torch.nn.Module",
        lambda one: hasattr(one, "named_modules") and not isinstance(one, type),
    ),
    "Optimizer": ("an optimizer", lambda one: hasattr(one, "param_groups")),
    **dict.fromkeys(("Callable", "LossFunction", "Predict"), ("a function", callable)),
    **{
        name: (f"a {name}", partial(lambda kind, one: kind in _classes(one), name))
        for name in ("Horizon", "Loading", "TrainStep", "Strategy")
    },
}
"""What an annotation begins with, in words, and whether a value is of that kind."""


def _classes(value: object) -> list[str]:
    return [one.__name__ for one in type(value).__mro__]


def _check_kinds(annotations: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse values of another kind than the annotations say, as far as they are simple.

    Raises:
        ConfigError: there is one.
    """
    for name, value in given.items():
        text = str(annotations.get(name, "Any"))
        heads = re.sub(r"\[.*?\](?=$| )", "", text).split(" | ")
        kinds = [_KINDS[head] for head in heads if head in _KINDS]
        fits = len(kinds) < len(heads) or any(one(value) for _, one in kinds)
        inner = re.search(r"Sequence\[(\w+)\]", text)
        if fits and inner and inner[1] in _KINDS and isinstance(value, Collection):
            fits = all(map(_KINDS[inner[1]][1], value))
        if not fits:
            words = " or ".join(dict.fromkeys(word for word, _ in kinds))
            raise ConfigError.bad(name, value, f"it is a {type(value).__name__}", f"pass {words}")


def knows_foreign(function: F) -> F:
    """Decorate a function or a class so that arguments that it does not have are answered.

    So are those of another kind than the annotations say.
    """
    if isinstance(function, type):
        function.__init__ = knows_foreign(function.__init__)  # type: ignore[misc]
        return function
    own, signature = names_of(function), inspect.signature(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        check_foreign(named, own, function.__qualname__.removesuffix(".__init__"))
        with suppress(TypeError):  # Python says itself what is missing
            _check_kinds(function.__annotations__, signature.bind(*given, **named).arguments)
        return function(*given, **named)

    return call  # type: ignore[return-value]
