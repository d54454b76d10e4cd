"""Command line to configuration: every key of config.py is a flag, with its docstring as help.

Later wins: defaults, then the TOML file, then flags. Errors are one line (ConfigError).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import textwrap
import time
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from asyncrl_node import config as config_module
from asyncrl_node.config import Config
from asyncrl_node.config_file import build_config, read_toml
from asyncrl_node.errors import ConfigError

SHORT_FLAGS = {
    "groups_per_batch": "pacing",
    "group_size": "pacing",
    "pipeline_depth": "pacing",
    "max_steps_off_policy": "pacing",
    "streaming": "pacing",
    "rollout_timeout_s": "sampling",
    "max_retries": "sampling",
    "temperature": "sampling",
    "max_new_tokens": "sampling",
    "weight_updates": "sampling",
    "num_substeps": "learner",
    "num_minibatches": "learner",
    "learning_rate": "learner",
    "loss": "learner",
}
"""Keys whose flag may leave the section out."""


class Key(NamedTuple):
    """One configuration key."""

    path: tuple[str, ...]
    type: Any
    default: Any
    doc: str

    @property
    def name(self) -> str:
        """Dotted name."""
        return ".".join(self.path)

    @property
    def flags(self) -> list[str]:
        """Flags that set it, the long form first."""
        flags = ["--" + self.name.replace("_", "-")]
        if len(self.path) == 2 and SHORT_FLAGS.get(self.path[1]) == self.path[0]:
            flags.append("--" + self.path[1].replace("_", "-"))
        return flags


class CommandLine(NamedTuple):
    """What the user asked for."""

    config: Config
    dry_run: bool
    resume: str
    """Run directory to resume; empty for a new run."""


def config_keys(struct: type[msgspec.Struct] = Config, prefix: tuple[str, ...] = ()) -> list[Key]:
    """List every key, sections flattened."""
    docs = _field_docs(struct)
    keys = []
    for field in msgspec.structs.fields(struct):
        path = (*prefix, field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys += config_keys(field.type, path)
        else:
            keys.append(Key(path, field.type, field.default, docs.get(field.name, "")))
    return keys


def parse_command_line(arguments: list[str]) -> CommandLine:
    """Parse the arguments of launch.py. Raises: ConfigError; SystemExit(0) for --help."""
    keys = config_keys()
    parser = _parser(keys)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        after = arguments[arguments.index(unknown[0]) + 1 :]
        raise ConfigError(unknown[0], "unknown flag; see --help", after[0] if after else "nothing")
    values = read_toml(Path(options.config)) if options.config else {}
    for key in keys:
        text = getattr(options, key.name)
        if text is not None:
            _set(values, key, text)
    config = build_config(values)
    if not config.run_dir:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = "fake" if config.engine == "fake" else config.task
        config = msgspec.structs.replace(config, run_dir=f"runs/{Path(name).stem}-{stamp}")
    return CommandLine(config, options.dry_run, options.resume)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag, _, rule = message.removeprefix("argument ").partition(": ")
        raise ConfigError(flag.split("/")[0], rule or message, "nothing")


def _parser(keys: list[Key]) -> _Parser:
    parser = _Parser(
        prog="python launch.py",
        description="Asynchronous RL for language models on one box.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration file")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print placement, memory and what the settings mean; start nothing",
    )
    parser.add_argument("--resume", metavar="RUN_DIR", default="", help="continue a stopped run")
    for key in keys:
        default = "none" if key.default is None else key.default
        parser.add_argument(
            *key.flags,
            dest=key.name,
            metavar=_metavar(key.type),
            help=f"{key.doc} [{default}]".replace("%", "%%"),
            nargs="?" if key.type is bool else None,
            const="true" if key.type is bool else None,
        )
    return parser


def _metavar(kind: Any) -> str:  # noqa: ANN401 - a type expression
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return "|".join(_metavar(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "N,N,..."
    names = {int: "N", float: "X", str: "TEXT", bool: "true|false", types.NoneType: "none"}
    return names.get(kind, "VALUE")


def _set(values: dict[str, Any], key: Key, text: str) -> None:
    section = values
    for part in key.path[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(part, "must be a table", section)
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        raise ConfigError(key.name, "must be UTF-8 text", ascii(text))  # config.toml cannot hold it
    is_list = typing.get_origin(key.type) is tuple
    section[key.path[-1]] = [v for v in text.split(",") if v] if is_list else text


def _field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Read the string under each field from the source: one place for a key and its meaning."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_module)))
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    body = classes[struct.__name__]
    docs = {}
    for field, doc in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(doc, ast.Expr):
            continue
        if isinstance(doc.value, ast.Constant) and isinstance(field.target, ast.Name):
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs
