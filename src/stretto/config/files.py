"""Run files on the disk: read with overrides, written out whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from stretto.config.run import RunConfig
from stretto.config.source import Source, source_name
from stretto.config.yaml import MAX_BYTES, apply_overrides, check_mapping, parse_scalar, parse_yaml
from stretto.errors import ConfigError


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return what the run file at `path` says, with `key=value` overrides set.

    Raises:
        ConfigError: it cannot be read, or says something else than it should.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower().replace("is a", "it is a", 1)
        raise ConfigError.cannot(
            f"read {str(path)!r}",
            why=why,
            instead="write the path of a run file, or none for the packaged one",
        ) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError.cannot(
            f"read {source_name(path)}",
            why=f"byte {error.start + 1} is not UTF-8",
            instead="save it as UTF-8 text",
        ) from None
    return parse_run_file(text, source_name(path), overrides)


def parse_run_file(text: str, name: str = "run.yaml", overrides: Sequence[str] = ()) -> RunConfig:
    r"""Return what the text of a run file says, with `key=value` overrides set.

    >>> text = "max_duration: 2ep\ndata: {target: my.data:make}\nbatch_size: 64"
    >>> parse_run_file(text, overrides=["batch_size=32"]).batch_size
    32

    Raises:
        ConfigError: it is not YAML, or says something else than it should.
    """
    document = parse_yaml(text, name)
    values = check_mapping(document.value, name)
    values, source = apply_overrides(values, Source(name, document.lines), overrides)
    return RunConfig.parse(values, source)


def dump_run_file(config: RunConfig) -> str:
    """Return the text of a run file that says all of `config`, defaults included.

    >>> config = RunConfig.parse(
    ...     {"max_duration": "2ep", "data": {"target": "my.data:make"}, "batch_size": 64}
    ... )
    >>> parse_run_file(dump_run_file(config)) == config
    True
    """
    values = config.model_dump(mode="json")
    for section, key in ((values, "callbacks"), (values.get("optimizer", {}), "groups")):
        if not section.get(key):
            section.pop(key, None)  # an empty one says nothing
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=90)


class _Dumper(yaml.SafeDumper):
    """Writes what our reader reads back: quotes any text that it would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(parse_scalar(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
