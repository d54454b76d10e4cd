"""Command line and configuration file: every key, every flag, and errors of one line."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl_node.cli import SHORT_FLAGS, Key, config_keys, parse_command_line
from asyncrl_node.config import Config, PacingConfig
from asyncrl_node.config_file import build_config, encode_config, read_config
from asyncrl_node.errors import ConfigError

KEYS = config_keys()

PROMISED = [
    "--run-dir", "--steps", "--seed", "--task", "--model", "--engine", "--samplers", "--learners",
    "--groups-per-batch", "--group-size", "--pipeline-depth", "--max-steps-off-policy",
    "--rollout-timeout-s", "--num-substeps", "--num-minibatches", "--save-every", "--eval-every",
    "--learning-rate", "--loss", "--gpus", "--fake.latencies", "--fake.train-s",
]  # fmt: skip
"""The flags that always exist, beside --dry-run and --resume."""


def parse(*arguments: str) -> Config:
    return parse_command_line(list(arguments)).config


def parse_here(*arguments: str) -> Config:
    """Parse with a run directory of our own instead of one named by the clock."""
    return parse("--run-dir", "here", *arguments)


def value_of(config: Config, key: Key) -> Any:
    value: Any = config
    for part in key.path:
        value = getattr(value, part)
    return value


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert re.fullmatch(r"[^:]+: .+ \(got .*\)", text), text
    return text


# -- examples of every type ----------------------------------------------------------------------


def examples(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a configuration key's type."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return st.one_of([examples(part) for part in typing.get_args(kind)])
    if typing.get_origin(kind) is tuple:
        return st.lists(examples(typing.get_args(kind)[0]), max_size=4).map(tuple)
    text = st.text(st.characters(codec="utf-8")).filter(lambda t: t.lower() != "none")
    return {
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: text,
        types.NoneType: st.none(),
    }[kind]


def structs(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = {}
    for field in msgspec.structs.fields(struct):
        section = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        fields[field.name] = structs(field.type) if section else examples(field.type)
    return st.builds(struct, **fields)


def as_flag(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


# -- keys and flags ------------------------------------------------------------------------------


def test_every_promised_flag_exists() -> None:
    flags = {flag for key in KEYS for flag in key.flags}
    assert set(PROMISED) <= flags


def test_every_key_is_a_flag_and_no_flag_is_two_keys() -> None:
    names = []
    for section in msgspec.structs.fields(Config):
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct):
            names += [f"{section.name}.{f.name}" for f in msgspec.structs.fields(section.type)]
        else:
            names.append(section.name)
    assert [key.name for key in KEYS] == names
    flags = [flag for key in KEYS for flag in key.flags]
    assert len(set(flags)) == len(flags)
    short = {flag for key in KEYS for flag in key.flags[1:]}
    assert len(short) == len(SHORT_FLAGS), "a short form names a key that is not there"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_flag_sets_its_own_key(key: Key) -> None:
    example = {
        int: "7",
        float: "0.125",
        bool: "true",
        str: "word",
        tuple[int, ...]: "1,2",
        float | None: "0.125",
    }.get(key.type, "7")
    for kind in (key.type, *typing.get_args(key.type)):
        if typing.get_origin(kind) is typing.Literal and typing.get_args(kind) != ("auto",):
            example = str(next(v for v in typing.get_args(kind) if v != key.default))
        elif kind is float:
            example = "0.125"
    default = Config(run_dir="here")
    for flag in key.flags:
        for arguments in ((f"{flag}={example}",), (flag, example)):
            config = parse_here(*arguments)
            assert as_flag(value_of(config, key)) == example
            others = [k for k in KEYS if k != key]
            assert all(value_of(config, k) == value_of(default, k) for k in others)


@settings(max_examples=60)
@given(data=st.data())
def test_any_value_of_any_key_arrives_unchanged(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(KEYS))
    value = data.draw(examples(key.type))
    if (key.name, value) == ("run_dir", ""):
        return
    assert value_of(parse_here(f"{key.flags[0]}={as_flag(value)}"), key) == value


def test_help_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for flag in ("--dry-run", "--resume"):
        assert flag in words
    for key in KEYS:
        assert key.flags[0] in words
        # argparse breaks lines after a hyphen
        joined = re.sub(r"- ", "-", key.doc)
        assert joined in re.sub(r"- ", "-", words), key.name


SPEAKING = {
    "seed", "task", "samplers", "learners", "sampling.temperature", "learner.learning_rate",
    "learner.weight_decay", "learner.adam_beta1", "learner.adam_beta2", "learner.max_grad_norm",
    "learner.clip_low", "logging.tensorboard", "logging.wandb", "logging.wandb_project",
}  # fmt: skip
"""Keys whose name says it all; their neighbour's docstring may cover them."""


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_has_a_docstring_unless_its_name_says_it_all(key: Key) -> None:
    assert key.doc or key.name in SPEAKING


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["none", "None", "NONE"])
def test_none_takes_a_limit_away(text: str) -> None:
    config = parse("--max-steps-off-policy", text, "--epochs", text)
    assert config.pacing.max_steps_off_policy is None
    assert config.epochs is None
    assert config.pacing.depth == 1


def test_the_pipeline_depth_follows_the_bound() -> None:
    assert parse().pacing.depth == 1
    assert parse("--max-steps-off-policy", "0").pacing.depth == 0
    assert parse("--max-steps-off-policy", "0", "--pipeline-depth", "3").pacing.depth == 3


def test_lists_and_switches() -> None:
    config = parse("--fake.raise-problems", "3,1,4", "--streaming", "--logging.wandb", "false")
    assert config.fake.raise_problems == (3, 1, 4)
    assert config.pacing.streaming is True
    assert config.logging.wandb is False
    assert parse("--fake.raise-problems", "").fake.raise_problems == ()


def test_dry_run_and_resume_are_not_keys() -> None:
    line = parse_command_line(["--dry-run", "--resume", "runs/x"])
    assert (line.dry_run, line.resume) == (True, "runs/x")
    plain = parse_command_line(["--steps", "3"])
    assert (plain.dry_run, plain.resume) == (False, "")


def test_a_run_gets_a_directory_of_its_own_unless_it_is_resumed() -> None:
    assert re.fullmatch(r"runs/sort_digits-.+", parse().run_dir)
    assert parse("--engine", "fake", "--run-dir", "here").run_dir == "here"


# -- files and precedence ------------------------------------------------------------------------


def test_flags_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        'steps = 7\nseed = 9\n[pacing]\ngroup_size = 4\nmax_steps_off_policy = "none"\n'
        "[fake]\nraise_problems = [1, 2]\n"
    )
    config = parse(str(path), "--seed", "11", "--pacing.groups-per-batch", "3")
    assert (config.steps, config.seed) == (7, 11)
    assert config.pacing == PacingConfig(
        groups_per_batch=3, group_size=4, max_steps_off_policy=None
    )
    assert config.fake.raise_problems == (1, 2)
    assert parse("--group-size", "2", str(path)).pacing.group_size == 2
    assert parse(str(path), "--max-steps-off-policy", "5").pacing.max_steps_off_policy == 5


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(config=structs(Config))
def test_a_configuration_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_bytes(encode_config(config))
    assert read_config(path) == config


def test_the_default_configuration_survives_its_file_and_names_every_key(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(encode_config(Config()))
    assert read_config(path) == Config()
    text = path.read_text()
    assert all(re.search(rf"^{key.path[-1]} = ", text, re.MULTILINE) for key in KEYS)
    assert parse(str(path), "--run-dir", "x") == msgspec.structs.replace(Config(), run_dir="x")


# -- errors of one line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--step", "3"], "--step: unknown flag; see --help (got 3)"),
        (["--steps"], "--steps: expected one argument (got nothing)"),
        (["--steps", "many"], "steps: expected `int`, got `str` (got many)"),
        (["--steps", "1.5"], "steps: expected `int`, got `str` (got 1.5)"),
        (["--steps", ""], "steps: expected `int`, got `str` (got )"),
        (["--steps", "none"], "steps: expected `int`, got `null` (got none)"),
        (["--learning-rate", "fast"], "learner.learning_rate: expected `float`"),
        (["--steps", "1\n2"], r"steps: expected `int`, got `str` (got 1\n2)"),
        (["--engine", "jax"], "engine: invalid enum value 'jax' (got jax)"),
        (["--streaming", "perhaps"], "pacing.streaming: expected `bool`"),
        (["--fake.raise-problems", "1,x"], "fake.raise_problems"),
        (["--max-steps-off-policy", "x"], "pacing.max_steps_off_policy: expected `int | null`"),
        (["a.toml", "b.toml"], "b.toml: unknown flag; see --help (got nothing)"),
        (["--nonsense=1"], "--nonsense=1: unknown flag"),
        (["nowhere.toml"], "config: must be a readable file: No such file or directory"),
        (["/"], "config: must be a readable file: Is a directory (got /)"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: list[str], error: str) -> None:
    assert refused(*arguments).startswith(error)


def test_a_flag_that_no_file_can_hold_is_one_line() -> None:
    assert refused("--task", "\udcff").startswith("task: must be UTF-8 text")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"steps = ", "config: must be valid TOML"),
        (b"\xff\xfe", "config: must be valid TOML"),
        (b"stepz = 3", "stepz: unknown key (got 3)"),
        (b"[pacing]\ndepth = 3", "pacing.depth: unknown key (got 3)"),
        (b"[pacing]\ngroup_size = 'x'", "pacing.group_size: expected `int`, got `str` (got x)"),
        (b"pacing = 3", "pacing: expected `object`, got `int` (got 3)"),
        (b"[steps]\nx = 1", "steps: expected `int`, got `object` (got {'x': 1})"),
        (b"steps = [1, 2]", "steps: expected `int`, got `array` (got [1, 2])"),
        (b"[fake]\nraise_problems = 3", "fake.raise_problems: expected `array`, got `int`"),
        (b"seed = 1979-05-27", "seed: "),
        (b"steps = '''\n1\n2'''", r"steps: expected `int`, got `str` (got 1\n2)"),
        (b"['a\nb']", "config: must be valid TOML"),
        (b"steps = " + b"9" * 5000, "config: must be valid TOML"),
        (b"x = " + b"[" * 100_000, "config: must be valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: bytes, error: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    assert refused(str(path)).startswith(error)


def test_a_flag_into_a_section_that_is_no_section_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("pacing = 3")
    assert refused(str(path), "--group-size", "3").startswith("pacing: must be a table")


toml_values = st.recursive(
    st.one_of(
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(),
        st.booleans(),
        st.text(st.characters(codec="utf-8"), max_size=10),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(
    values=st.dictionaries(
        st.sampled_from(["steps", "pacing", "fake", "engine", "samplers", "nonsense"]),
        toml_values,
        min_size=1,
        max_size=2,
    )
)
def test_no_file_can_do_more_than_be_refused(values: dict[str, Any]) -> None:
    read = build_or_error(values)
    assert isinstance(read, Config) or len(str(read).splitlines()) == 1
    assert tomli_w.dumps(values)


def build_or_error(values: dict[str, Any]) -> Config | ConfigError:
    try:
        return build_config(values)
    except ConfigError as error:
        return error
