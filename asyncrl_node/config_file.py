"""Reading and writing config.toml, with errors of one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl_node.config import Config
from asyncrl_node.errors import ConfigError

_AT_PATH = re.compile(r"(?P<rule>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises: ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("config", f"must be a readable file: {error.strerror}", path) from error
    except (ValueError, RecursionError) as error:  # of the form, the encoding, or a long number
        raise ConfigError("config", f"must be valid TOML: {error}", path) from error


def build_config(values: dict[str, Any]) -> Config:
    """Turn nested values into a Config. "none" stands for no value, which TOML does not have.

    Raises: ConfigError naming the key, for unknown keys and wrong types.
    """
    try:
        return msgspec.convert(_without_none(values), Config, strict=False)
    except msgspec.ValidationError as error:
        raise _config_error(str(error), values) from error


def read_config(path: Path) -> Config:
    """Read a whole configuration from its file."""
    return build_config(read_toml(path))


def encode_config(config: Config) -> bytes:
    """Write a whole configuration as TOML; no value is written as "none"."""
    return tomli_w.dumps(_with_none(msgspec.to_builtins(config))).encode()


def _without_none(value: Any) -> Any:  # noqa: ANN401 - any TOML value
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items()}
    if isinstance(value, str) and value.lower() == "none":
        return None
    return value


def _with_none(value: Any) -> Any:  # noqa: ANN401 - any builtin value
    if isinstance(value, dict):
        return {key: _with_none(item) for key, item in value.items()}
    return "none" if value is None else value


def _config_error(text: str, values: dict[str, Any]) -> ConfigError:
    match = _AT_PATH.match(text)
    assert match is not None
    key = (match["path"] or "").lstrip(".")
    rule = match["rule"]
    unknown = _UNKNOWN.match(rule)
    if unknown is not None:
        key = ".".join(filter(None, (key, unknown["field"])))
        return ConfigError(key, "unknown key", _look_up(values, key))
    return ConfigError(key, rule[:1].lower() + rule[1:], _look_up(values, key))


def _look_up(values: Any, key: str) -> object:  # noqa: ANN401 - any TOML value
    for part in key.split("."):
        values = values.get(part, "nothing") if isinstance(values, dict) else values
    return values
