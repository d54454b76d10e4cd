"""What a configuration means: derived sizes, rules between keys, the forecast in words.

Imports no torch and starts nothing; `--dry-run` is this module printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

from asyncrl_node.config import Config
from asyncrl_node.core.pacing import PacingRule
from asyncrl_node.engines.fake_engine import read_latencies
from asyncrl_node.engines.vllm_engine import CPU_INSTALL
from asyncrl_node.errors import ConfigError
from asyncrl_node.run_directory import SHM_FOLDER
from asyncrl_node.tasks.base import Task
from asyncrl_node.tasks.fake import FakeTask
from asyncrl_node.tasks.registry import load_task
from asyncrl_node.transport.slots import slot_bytes
from asyncrl_node.transport.weights import buffer_bytes

WARM_MODEL = Path(__file__).parent / "tasks" / "sort_digits_warm"
VLLM_INSTALL = "pip install -e '.[vllm]'"
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def task_of(config: Config) -> Task:
    """Load the task; the fake engine brings its own. Raises: ConfigError."""
    if engine_of(config) == "fake":
        return FakeTask(config.fake, config.seed)
    return load_task(config.task, config.seed)


def engine_of(config: Config) -> str:
    """Resolve `engine = auto`: vllm where GPUs are asked for, the embedded engine otherwise."""
    if config.engine == "auto":
        return "vllm" if config.gpus else "torch"
    return config.engine


def model_folder(config: Config) -> Path:
    """Folder of the model; the demo task has its own."""
    return Path(config.model) if config.model else WARM_MODEL


def num_samplers(config: Config) -> int:
    """Sampler processes."""
    return 1 if config.samplers is None else config.samplers


def max_new_tokens(config: Config, task: Task) -> int:
    """Sampled tokens per turn."""
    return config.sampling.max_new_tokens or task.max_new_tokens


def max_rollout_tokens(config: Config, task: Task) -> int:
    """Tokens of the longest rollout, prompt included; rollouts are cut off there."""
    return task.max_prompt_tokens + task.max_turns * max_new_tokens(config, task)


def run_slot_bytes(config: Config, task: Task) -> int:
    """Bytes of one slot."""
    return slot_bytes(config.pacing.group_size, max_rollout_tokens(config, task))


def pacing_rule(config: Config) -> PacingRule:
    """The pacing settings of the run."""
    return PacingRule(
        groups_per_batch=config.pacing.groups_per_batch,
        pipeline_depth=config.pacing.depth,
        max_steps_off_policy=config.pacing.max_steps_off_policy,
        last_version=config.start_version + config.steps,
    )


def weight_bytes(config: Config) -> int:
    """Bytes of the published weights, from the headers of the model's files."""
    if engine_of(config) == "fake":
        return config.fake.weight_bytes
    total = 0
    for path in sorted(model_folder(config).glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            total += (end - begin) // _DTYPE_BYTES.get(tensor["dtype"], 4) * 4
    return total


# -- rules between keys ------------------------------------------------------------------------


def check_config(config: Config) -> None:
    """Check every rule that can be known before anything starts. Raises: ConfigError."""
    _check_ranges(config)
    _check_pacing(config)
    _check_learner(config)
    if engine_of(config) == "fake":
        read_latencies(config.fake.latencies)
    else:
        task_of(config)
        _check_model(config)
    task = task_of(config)
    if config.eval_problems > task.num_eval_problems:
        rule = f"must be at most {task.num_eval_problems}, the task's held-out problems"
        raise ConfigError("eval_problems", rule, config.eval_problems)


def _require(condition: bool, key: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(key, rule, value)


def _check_ranges(config: Config) -> None:
    at_least = {
        "steps": (config.steps, 1),
        "save_every": (config.save_every, 0),
        "eval_every": (config.eval_every, 0),
        "eval_problems": (config.eval_problems, 0),
        "start_version": (config.start_version, 0),
        "samplers": (num_samplers(config), 1),
        "seed": (config.seed, 0),
        "sampling.max_retries": (config.sampling.max_retries, 0),
        "sampling.max_concurrent_rollouts": (config.sampling.max_concurrent_rollouts, 1),
        "sampling.max_new_tokens": (config.sampling.max_new_tokens or 1, 1),
        "learner.num_substeps": (config.learner.num_substeps, 1),
        "learner.num_minibatches": (config.learner.num_minibatches, 1),
        "learner.micro_batch_tokens": (config.learner.micro_batch_tokens, 1),
        "fake.num_problems": (config.fake.num_problems, 1),
        "fake.tokens_per_rollout": (config.fake.tokens_per_rollout, 1),
        "fake.weight_bytes": (config.fake.weight_bytes, 1),
    }
    for key, (value, least) in at_least.items():
        _require(value >= least, key, f"must be at least {least}", value)
    if config.epochs is not None:
        _require(config.epochs >= 1, "epochs", "must be at least 1", config.epochs)
    positive = {
        "sampling.temperature": config.sampling.temperature,
        "sampling.rollout_timeout_s": config.sampling.rollout_timeout_s,
        "learner.learning_rate": config.learner.learning_rate,
        "learner.max_grad_norm": config.learner.max_grad_norm,
        "warn_every_s": config.warn_every_s,
        "weights_overdue_s": config.weights_overdue_s,
    }
    for key, number in positive.items():
        _require(0 < number < float("inf"), key, "must be a number above 0", number)
    _require(config.learners in (None, 1), "learners", "must be 1 for now", config.learners)


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


def _check_learner(config: Config) -> None:
    pieces = config.learner.num_substeps * config.learner.num_minibatches
    _require(
        config.pacing.groups_per_batch % pieces == 0,
        "pacing.groups_per_batch",
        f"must be a multiple of num_substeps * num_minibatches, which is {pieces}",
        config.pacing.groups_per_batch,
    )


def _check_model(config: Config) -> None:
    folder = model_folder(config)
    if not config.model and config.task != "sort_digits":
        raise ConfigError("model", f"must name a model folder for task {config.task}", "nothing")
    _require(folder.is_dir(), "model", "must be a folder that exists", folder)
    _require((folder / "config.json").is_file(), "model", "must hold a config.json", folder)
    has_weights = any(folder.glob("*.safetensors"))
    _require(has_weights, "model", "must hold *.safetensors weights", folder)


def check_machine(config: Config) -> None:
    """Check what this machine must have. Raises: ConfigError."""
    if config.gpus or engine_of(config) == "vllm":
        _check_gpus(config)
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


def _check_gpus(config: Config) -> None:
    if engine_of(config) == "vllm" and importlib.util.find_spec("vllm") is None:
        install = VLLM_INSTALL if config.gpus else CPU_INSTALL
        raise ConfigError("engine", f"vllm is not installed: {install}", config.engine)
    if not config.gpus:
        return
    have = count_gpus()
    rule = f"must be at most the GPUs of this machine, {have}"
    wanted = int(config.gpus) if config.gpus.isdigit() else 1
    _require(wanted <= have, "gpus", rule, config.gpus)
    raise ConfigError("gpus", "GPU placement is not built yet; leave it out", config.gpus)


def count_gpus() -> int:
    """Count the NVIDIA devices that this machine shows."""
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sum(1 for _ in devices)


def check_run_dir(config: Config) -> Path:
    """Check that the run directory is new or empty and can be written; make nothing."""
    path = Path(config.run_dir)
    if path.exists():
        _require(path.is_dir(), "run_dir", "must be a directory", path)
        _require(os.access(path, os.W_OK | os.X_OK), "run_dir", "must be writable", path)
        rule = "must be new or empty; another run is in it"
        _require(not any(path.iterdir()), "run_dir", rule, path)
        return path
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    _require(writable, "run_dir", f"{parent} must be a writable directory", path)
    return path


def shared_memory_bytes(config: Config) -> int:
    """Bytes of /dev/shm that the run may need at most: every slot, and the weights."""
    slots = pacing_rule(config).num_slots * run_slot_bytes(config, task_of(config))
    return slots + buffer_bytes(weight_bytes(config))


# -- the forecast in words -----------------------------------------------------------------------


def describe(config: Config) -> str:
    """Say what the settings mean: placement, memory, semantics."""
    lines = [
        *_placement(config),
        *_memory(config),
        *_semantics(config),
    ]
    return "\n".join(lines)


def _placement(config: Config) -> list[str]:
    engine = engine_of(config)
    model = "scripted" if engine == "fake" else str(model_folder(config))
    where = f"{config.gpus} GPUs" if config.gpus else "CPU, one thread each"
    return [
        f"placement   1 scheduler, {num_samplers(config)} sampler(s) with the {engine} engine, "
        f"1 learner; {where}",
        f"model       {model}",
        f"task        {task_of(config).name}",
    ]


def _memory(config: Config) -> list[str]:
    task = task_of(config)
    rule = pacing_rule(config)
    slot = run_slot_bytes(config, task)
    weights = weight_bytes(config)
    # fp32 weights, gradient and two Adam moments on the learner; one flat copy and a fused one on
    # each sampler; one published copy in shared memory.
    learner, sampler = 4 * weights, 2 * weights
    return [
        f"/dev/shm    {rule.num_slots} slots x {_size(slot)} + weights {_size(weights)} = "
        f"{_size(shared_memory_bytes(config))} "
        f"({_size(shutil.disk_usage(SHM_FOLDER).free)} free)",
        f"memory      learner {_size(learner)} of weights, gradients and optimizer; each sampler "
        f"{_size(sampler)} of weights; activations and key-value cache on top",
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
    lines.append(f"staleness   {worst}; {typical}")
    lines.extend(f"note        {note}" for note in loss_notes(config))
    data = "every problem once an epoch; nothing sampled is discarded"
    if pacing.filter_constant_rewards:
        data = "every problem once an epoch; groups of constant reward are filtered, on record"
    lines.append(f"data        {data}")
    lines.append(
        f"budgets     a rollout is cut off after {config.sampling.rollout_timeout_s:g} s, graded as"
        f" it stands and trained; a failing sample is retried {config.sampling.max_retries} times"
    )
    return lines


def loss_notes(config: Config) -> list[str]:
    """Warn of a loss that is known to collapse on stale data."""
    if config.learner.loss == "ppo" or config.pacing.depth == 0:
        return []
    return [
        f"loss {config.learner.loss} has no two-sided trust region and pipeline_depth is "
        f"{config.pacing.depth}: known to collapse on stale data; prefer --loss ppo"
    ]


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes * 3 // 2 >> 20) + 16
