"""What a run file names in Python."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.config.targets import (
    Target,
    accepts,
    bound_target,
    call_target,
    import_target,
)
from stretto.config.yaml import Source
from stretto.errors import ConfigError


def target(text: str, **arguments: Any) -> Target:
    return Target(target=text, arguments=arguments)


def test_imports_what_it_names(project: str) -> None:
    assert import_target(f"{project}:NUMBER") == 3
    assert import_target(f"{project}:Line.loss").__name__ == "loss"


def test_calls_with_arguments(project: str) -> None:
    made = call_target(target(f"{project}:Points", count=7), split="validation")
    assert (len(made), made.split) == (7, "validation")


def test_binds_arguments_to_functions_and_builds_classes(project: str) -> None:
    assert bound_target(target(f"{project}:follow"))(16) == 2.0
    partly = bound_target(target(f"{project}:halve_each_epoch", base=2))
    assert partly.keywords == {"base": 2}
    assert bound_target(target(f"{project}:Points", count=3))[2][1].shape == (1,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("json.nothing:x", "No module named 'json.nothing'"),
        ("my_project:Lin", "my_project has no 'Lin'; did you mean 'Line'?"),
        ("my_project:zzz", "has no 'zzz'; write a name that my_project has"),
        ("my_project:Line.los", "did you mean 'loss'?"),
        ("my_broken:x", "bad start"),
        ("my_needy:x", "not_a_real_package_at_all"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_cannot_be_imported(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_target(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "my_project:Line", "widht": 3}, "widht"),
        ({"target": "my_project:Line", "zzz": 3}, "zzz"),
        ({"target": "my_project:follow"}, "'size'"),
        ({"target": "my_project:broken"}, "it raised RuntimeError: the disk is gone"),
        ({"target": "my_project:Line", "width": "x"}, "it raised TypeError"),
        (
            {"target": "stretto.timing:Time", "value": "3"},
            r"it has no unit; .* \(model in run.yaml\)",
        ),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_cannot_be_called(arguments: dict[str, Any], message: str) -> None:
    section = target(arguments.pop("target"), **arguments)
    with pytest.raises(ConfigError, match=message), Source("run.yaml").at("model"):
        call_target(section)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"target": "my_project:NUMBER"},
            "callable",
        ),
        ({"target": "my_project:follow", "sice": 3}, "sice"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_cannot_be_bound(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bound_target(target(arguments.pop("target"), **arguments))


def test_signatures_written_in_c_are_not_checked() -> None:
    assert call_target(target("builtins:dict", a=1)) == {"a": 1}
    assert not accepts(dict, "split")
