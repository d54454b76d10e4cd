"""What `--gpus` means for a run: which cards, who learns and who samples, and what it takes.

    Ask (configuration, model, lengths) + cards -> GpuPlan
        rule      the split that the planned build would run (core/placement.py)
        present   the split that runs today: one learner rank
        refusal   why it does not start today, with the ways out

A dry run plans also for cards that are not there: it takes what there is, or cards of 80 GB, and
says so. Nothing here has run on a GPU: every figure is the forecast of core/memory.py.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl_node.config import Config
from asyncrl_node.core.memory import (
    ITEM_BYTES,
    USABLE_SHARE,
    Build,
    LearnerBytes,
    ModelShape,
    SamplerBytes,
    fewer_tokens,
    kv_bytes_per_token,
    kv_tokens_of,
    learner_parts,
    sampler_parts,
)
from asyncrl_node.core.placement import (
    Counts,
    RecomputePrice,
    Speed,
    Split,
    Workload,
    choose_split,
    recompute_price,
    speed_of,
)
from asyncrl_node.dtype_rules import DType, dtype_of
from asyncrl_node.errors import ConfigError
from asyncrl_node.gpus import Gpu, Nvml, Placement, place, placement_table, select_gpus
from asyncrl_node.loss_rules import reference_folder
from asyncrl_node.sampling_rules import KVAfterUpdate, kv_after_update, kv_words

ASSUMED_BYTES = 80_000_000_000
ASSUMED_NAME = "H100"
CACHE_BLOCK_TOKENS = 128
"""At most this many tokens of a rollout's cache stand empty."""
LARGEST_CARD_BYTES = 192_000_000_000
"""A larger card is a way out up to here."""

PRESENT_BUILD: dict[DType, Build] = {"float32": "present_float32", "bfloat16": "present"}

_GPU_WORD = re.compile(r"[0-9]{1,4}|GPU-[0-9a-f-]+", re.IGNORECASE)
_INDENT = " " * 12
_WIDTH = 96
"""Of what stands beside a label."""


class Ask(NamedTuple):
    """What a plan is made for."""

    config: Config
    folder: Path
    """The model's."""
    context_tokens: int
    """Of the longest rollout, prompt included."""
    prompt_tokens: int

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, and its reference's. Raises: ConfigError."""
        shape, learner = _read_shape(self.folder), self.config.learner
        if not learner.kl_coefficient:
            return shape
        other = reference_folder(learner)
        return shape._replace(reference=(_read_shape(other) if other else shape).parameters)

    @property
    def workload(self) -> Workload:
        """What the planned build would be asked for."""
        pacing, learner = self.config.pacing, self.config.learner
        return Workload(
            context_tokens=self.context_tokens,
            prompt_tokens=self.prompt_tokens,
            micro_batch_tokens=learner.micro_batch_tokens,
            optimizer=learner.optimizer,
            max_concurrent_rollouts=self.config.sampling.max_concurrent_rollouts,
            outstanding_rollouts=pacing.groups_per_batch * pacing.group_size * (pacing.depth + 1),
        )


def _read_shape(folder: Path) -> ModelShape:
    try:
        fields = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        rule = f"must hold a config.json that is JSON: {error}"
        raise ConfigError("model", rule, folder) from error
    if not isinstance(fields, dict):
        raise ConfigError("model", "must hold a config.json that is an object", folder)
    return ModelShape.from_config(fields)


class GpuPlan(NamedTuple):
    """Cards and splits of one run."""

    gpus: tuple[Gpu, ...]
    assumed: str
    """In words, why these cards are not this machine's; empty: they are."""
    shape: ModelShape
    speed: Speed
    """Of the slowest card."""
    gpu_bytes: int
    """Of the smallest card."""
    dtype: DType
    """Of what runs today."""
    work: Workload
    rule: Split
    present: Split | None
    """None: see `refusal`."""
    refusal: ConfigError | None
    price: RecomputePrice
    kv_kind: KVAfterUpdate
    """Of recomputing keys and values after an update, with the split that would run."""

    @property
    def split(self) -> Split:
        """The split that runs today, or the rule's where none does."""
        return self.rule if self.present is None else self.present

    @property
    def placement(self) -> Placement:
        """Which process gets which card."""
        return place(self.gpus, self.split)

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values on each GPU of a sampler, as it runs today."""
        work = self.work._replace(build=PRESENT_BUILD[self.dtype])
        return int(_sampler_parts(self, self.split, work).cache)


# -- the text of --gpus --------------------------------------------------------------------------


def check_gpus_form(text: str | None) -> None:
    """Check that `gpus` can be read; whether this machine has them is `own_gpus`' question.

    Raises: ConfigError
    """
    if text is None:
        return
    words = _gpu_words(text)
    rule = 'must be a count ("8"), ids ("0,3", "3,") or UUIDs ("GPU-8932f937,GPU-1b")'
    _require(bool(words) and all(map(_GPU_WORD.fullmatch, words)), rule, text)
    if _is_count(text):
        _require(int(text) >= 1, "must be at least 1; leave it out to run on the CPU", text)
    _require(len({*words}) == len(words), "must name each GPU once", text)


def _require(condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError("gpus", rule, value)


def _is_count(gpus: str) -> bool:
    return "," not in gpus and gpus.strip().isdigit()


def _gpu_words(gpus: str) -> list[str]:
    """Split into a count or names; a comma at the end makes one id a name ("3,")."""
    words = [word.strip().lower() for word in gpus.split(",")]
    return words[:-1] if len(words) > 1 and not words[-1] else words


# -- which cards ---------------------------------------------------------------------------------


def own_gpus(text: str, nvml: Nvml, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Find the cards of this machine that `--gpus` means. Raises: ConfigError."""
    gpus, problem = nvml.list_gpus()
    return select_gpus(
        text,
        environ.get("CUDA_VISIBLE_DEVICES"),
        gpus,
        problem=problem,
        device_order=environ.get("CUDA_DEVICE_ORDER"),
    )


def assumed_gpus(text: str, nvml: Nvml) -> tuple[tuple[Gpu, ...], str]:
    """Make up the cards that `--gpus` means, for a dry run; returns them and says why, in words.

    They are like the first card of this machine, or of 80 GB where there is none.
    """
    gpus, problem = nvml.list_gpus()
    words = _gpu_words(text)
    if _is_count(text):
        words = [str(number) for number in range(int(text))]
    if gpus:
        name, total_bytes = gpus[0].name, gpus[0].total_bytes
        why = f"{len(words)} like GPU {gpus[0].index} are assumed: those asked for cannot be had"
    else:
        name, total_bytes = ASSUMED_NAME, ASSUMED_BYTES
        why = (
            f"{len(words)} of {ASSUMED_BYTES / 1e9:.0f} GB at the speed of an {ASSUMED_NAME} are "
            f"assumed: none is here ({problem})"
        )
    return tuple(
        Gpu(
            index=int(word) if word.isdigit() else -1,
            uuid="(assumed)" if word.isdigit() else word,
            name=name,
            total_bytes=total_bytes,
            used_bytes=0,
        )
        for word in words
    ), why


# -- the plan ------------------------------------------------------------------------------------


def make_plan(ask: Ask, gpus: tuple[Gpu, ...], assumed: str = "") -> GpuPlan:
    """Plan a run on these cards.

    Raises: ConfigError for what could not fit even where everything planned is built; what only
    cannot start today is in `refusal`.
    """
    config, shape, work = ask.config, ask.shape, ask.workload
    gpu_bytes = min(gpu.total_bytes for gpu in gpus)
    speed = min((speed_of(gpu.name) for gpu in gpus), key=lambda each: each.flops)
    counts = Counts(config.learners, config.samplers, _tensor_parallel(config))
    rule = choose_split(shape, len(gpus), gpu_bytes, work, speed, counts)
    dtype, present, refusal = dtype_of(config), None, None
    try:
        _refuse_unbuilt(config)
        present = _present_split(config, shape, len(gpus), gpu_bytes, work, speed)
    except ConfigError as error:
        refusal = error
    rollouts = config.pacing.groups_per_batch * config.pacing.group_size
    runs = work._replace(build=PRESENT_BUILD[dtype]) if present else work
    price = recompute_price(shape, present or rule, runs, rollouts, speed)
    engine = "vllm" if config.engine == "auto" else config.engine
    kind = kv_after_update(config.sampling, engine, True, price)
    return GpuPlan(
        gpus, assumed, shape, speed, gpu_bytes, dtype, work, rule, present, refusal, price, kind
    )


def check_present(plan: GpuPlan) -> None:
    """Refuse to start what is planned and not built. Raises: ConfigError."""
    if plan.refusal is not None:
        raise plan.refusal


def check_torch(version: str) -> None:
    """Refuse a torch that was built for the CPU. Raises: ConfigError."""
    if version.endswith("+cpu"):
        rule = f"torch {version} is built for the CPU: install a CUDA build of it"
        raise ConfigError("gpus", rule, version)


def resolved(config: Config, plan: GpuPlan) -> Config:
    """Write the plan's counts into the configuration, where every process reads them."""
    split = plan.split
    cache = config.sampling.kv_cache_bytes or plan.kv_cache_bytes
    sampling = msgspec.structs.replace(
        config.sampling, kv_cache_bytes=cache, kv_after_update=plan.kv_kind
    )
    return msgspec.structs.replace(
        config,
        learners=split.learners,
        samplers=split.samplers,
        tensor_parallel=split.tensor_parallel,
        sampling=sampling,
    )


def _refuse_unbuilt(config: Config) -> None:
    if config.learners not in (None, 1):
        rule = (
            "must be 1 to start: several learner ranks are not built yet (--dry-run plans for "
            "them); pass --learners 1"
        )
        raise ConfigError("learners", rule, config.learners)
    if config.learner.optimizer != "adamw":
        rule = f"{config.learner.optimizer} is not built yet (--dry-run forecasts it); pass adamw"
        raise ConfigError("learner.optimizer", rule, config.learner.optimizer)


def _present_split(
    config: Config, shape: ModelShape, num_gpus: int, gpu_bytes: int, work: Workload, speed: Speed
) -> Split:
    """One learner, as it is built today, and samplers on all other cards. Raises: ConfigError."""
    dtype = dtype_of(config)
    work = work._replace(build=PRESENT_BUILD[dtype])
    need = learner_parts(shape, 1, work.pass_tokens, build=work.build).total
    limit = USABLE_SHARE * gpu_bytes
    if need > limit:
        raise ConfigError(
            "gpus",
            f"the learner does not fit on one GPU, and several learner ranks are not built yet: "
            f"adamw for {_billions(shape)} parameters and passes of {work.pass_tokens} tokens in "
            f"{dtype} needs {_gb(need)} GB, and may use {_gb(limit)} of "
            f"{_gb(gpu_bytes)} GB; ways out: {_ways_out(shape, gpu_bytes, work, need)}",
            config.gpus,
        )
    counts = Counts(1, config.samplers, _tensor_parallel(config))
    split = choose_split(shape, num_gpus, gpu_bytes, work, speed, counts)
    if config.engine == "torch":
        _check_embedded(shape, gpu_bytes, work)
    return split


def _tensor_parallel(config: Config) -> int | None:
    """GPUs of one sampler; the embedded engine knows one. Raises: ConfigError."""
    if config.engine != "torch":
        return config.tensor_parallel
    if config.tensor_parallel not in (None, 1):
        rule = "must be 1 with the torch engine"
        raise ConfigError("tensor_parallel", rule, config.tensor_parallel)
    return 1


def _check_embedded(shape: ModelShape, gpu_bytes: int, work: Workload) -> None:
    """Check the embedded engine: it holds its weights twice and a place for every rollout.

    Raises: ConfigError
    """
    copy = ITEM_BYTES[work.build] * shape.parameters
    twice = copy // kv_bytes_per_token(shape, work.build)
    tokens = kv_tokens_of(shape, 1, gpu_bytes, work.build) - twice
    most = max(0, tokens) // work.context_tokens
    if most < work.max_concurrent_rollouts:
        rule = (
            f"must be at most {most} with the torch engine, which keeps {work.context_tokens} "
            "tokens of keys and values for each of them"
        )
        key = "sampling.max_concurrent_rollouts"
        raise ConfigError(key, rule, work.max_concurrent_rollouts)


def _ways_out(shape: ModelShape, gpu_bytes: int, work: Workload, need: float) -> str:
    """Name what makes one learner fit today."""
    ways = []
    half = learner_parts(shape, 1, work.pass_tokens, build="present").total
    if work.build == "present_float32" and half <= USABLE_SHARE * gpu_bytes:
        ways.append("dtype bfloat16")
    tokens = fewer_tokens(shape, gpu_bytes, work.pass_tokens, 1, build=work.build)
    if tokens is not None:
        shorter = " and rollouts as short" if tokens < work.context_tokens else ""
        ways.append(f"learner.micro_batch_tokens {tokens}{shorter}")
    if need <= USABLE_SHARE * LARGEST_CARD_BYTES:
        ways.append(f"a card of {_gb(need / USABLE_SHARE)} GB")
    return "; ".join([*ways, "a smaller model"])


def _cached_tokens(plan: GpuPlan, split: Split, work: Workload) -> int:
    """Tokens that a sampler caches: every rollout at its longest if there is room, and no more."""
    rows = work.max_concurrent_rollouts * (work.context_tokens + CACHE_BLOCK_TOKENS)
    room = kv_tokens_of(plan.shape, split.tensor_parallel, plan.gpu_bytes, work.build)
    return min(rows, room)


def _sampler_parts(plan: GpuPlan, split: Split, work: Workload) -> SamplerBytes:
    """Bytes on each GPU of a sampler."""
    tokens = _cached_tokens(plan, split, work)
    return sampler_parts(plan.shape, split.tensor_parallel, tokens, work.build)


# -- in words ------------------------------------------------------------------------------------


def describe_plan(plan: GpuPlan) -> list[str]:
    """Say which cards, who gets which, and what it takes, for a person."""
    return [
        *_labelled("cards", [_cards(plan)]),
        *_labelled("split", list(plan.rule.reason)),
        *_labelled("runs now", _present_words(plan)),
        "",
        *(f"  {line}" for line in placement_table(plan.placement)),
        "",
        *_memory_table(plan),
        "",
        *_updates(plan),
    ]


def start_lines(plan: GpuPlan) -> list[str]:
    """Say at start what is about to run."""
    return [
        *_labelled("runs now", _present_words(plan)),
        *(f"  {line}" for line in placement_table(plan.placement)),
        *_updates(plan),
    ]


def _updates(plan: GpuPlan) -> list[str]:
    return _labelled("kv cache", [kv_words(plan.kv_kind, plan.price)])


def model_words(plan: GpuPlan) -> str:
    """Say what is trained: its size."""
    shape = plan.shape
    return (
        f"{_billions(shape)} parameters, {shape.layers} layers, {shape.heads} heads, "
        f"{shape.kv_heads} for keys and values"
    )


def _cards(plan: GpuPlan) -> str:
    if plan.assumed:
        return plan.assumed
    names = {gpu.name for gpu in plan.gpus}
    size = f"{_gb(plan.gpu_bytes)} GB each"
    if len(names) > 1:
        size = f"the smallest has {_gb(plan.gpu_bytes)} GB: all are planned like it"
    return f"{len(plan.gpus)} x {', '.join(sorted(names))}; {size}"


def _labelled(label: str, lines: list[str]) -> list[str]:
    """Put a label before lines that are wrapped."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, _WIDTH)]
    return _beside(label, wrapped)


def _beside(label: str, lines: list[str]) -> list[str]:
    labels = [label, *[""] * (len(lines) - 1)]
    return [f"{name:<12}{line}" for name, line in zip(labels, lines, strict=True)]


def _present_words(plan: GpuPlan) -> list[str]:
    if plan.present is None:
        assert plan.refusal is not None
        key = "" if plan.refusal.key == "gpus" else f"{plan.refusal.key}: "
        return [f"nothing: {key}{plan.refusal.rule}", "what follows is the planned placement"]
    lines = [f"{_ratio(plan.present)}: {engine_words(plan)}, in {plan.dtype}"]
    if _ratio(plan.present) != _ratio(plan.rule):
        rule = f"the split rule alone would choose {_ratio(plan.rule)}"
        lines.append(f"one learner rank for now; {rule}")
    return lines


def _ratio(split: Split) -> str:
    """Learner GPUs to sampler GPUs."""
    return f"{split.learners}:{split.sampler_gpus}"


def engine_words(plan: GpuPlan) -> str:
    """Say how many processes of each kind there are."""
    split = plan.split
    width = f" of {split.tensor_parallel} GPUs each" if split.tensor_parallel > 1 else ""
    idle = f", {_count(split.idle, 'GPU')} idle" if split.idle else ""
    return f"{_count(split.learners, 'learner')}, {_count(split.samplers, 'sampler')}{width}{idle}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _memory_table(plan: GpuPlan) -> list[str]:
    """Two columns of GB on each GPU: the planned build by the rule, and what runs now."""
    now = plan.work._replace(build=PRESENT_BUILD[plan.dtype], optimizer="adamw")
    one = plan.present or plan.rule._replace(learners=1)
    columns = [(plan.rule, plan.work), (one, now)]
    titles = [f"planned {_ratio(plan.rule)}", f"now {_ratio(one)}" if plan.present else "now"]
    limit = USABLE_SHARE * plan.gpu_bytes
    usable = f"{_gb(limit)} of {_gb(plan.gpu_bytes)} usable"
    learner = [
        learner_parts(plan.shape, split.learners, work.pass_tokens, work.optimizer, work.build)
        for split, work in columns
    ]
    sampler = [_sampler_parts(plan, *column) for column in columns]
    cached = [f"{_cached_tokens(plan, *column):,}" for column in columns]
    return [
        f"memory      {_row('forecast, GB on each GPU', titles)}     {usable}",
        *_rows("learner", _LEARNER_ROWS, learner, limit),
        *_rows("sampler", _SAMPLER_ROWS, sampler, limit),
        f"{_INDENT}{_row('tokens in its cache', cached)}",
        f"  host      {_host_words(plan)}",
    ]


def _host_words(plan: GpuPlan) -> str:
    """Say what today's weight path takes of the host's memory, beside /dev/shm."""
    item = ITEM_BYTES[PRESENT_BUILD[plan.dtype]]
    gpus, copy = plan.split.sampler_gpus, item * plan.shape.parameters
    total = f"{gpus} x {_gb(copy)} = {_gb(gpus * copy)} GB"
    return f"now a copy of the weights for each sampler GPU: {total}; weights in /dev/shm"


_LEARNER_ROWS = {
    "state": "weights, gradients, Adam",
    "published": "published copy",
    "reference": "reference model",
    "gathered": "rounded for a pass",
    "activations": "activations",
    "logits": "logits, by chunks",
    "fixed": "context, workspaces",
}
_SAMPLER_ROWS = {
    "weights": "weights",
    "reserve": "reserve for an update",
    "cache": "keys and values",
    "fixed": "context, graphs",
}


def _rows(
    role: str,
    names: Mapping[str, str],
    columns: Sequence[LearnerBytes] | Sequence[SamplerBytes],
    limit: float,
) -> list[str]:
    """One line for each part that is not nothing everywhere, and their sum."""
    lines = []
    for part, name in names.items():
        values = [getattr(column, part) for column in columns]
        if any(values):
            lines.append(_row(name, [_gb(value) if value else "-" for value in values]))
    too_much = "     does not fit" if columns[-1].total > limit else ""
    lines.append(_row("in all", [_gb(column.total) for column in columns]) + too_much)
    return _beside(f"  {role}", lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<26}" + "".join(f"{cell:>14}" for cell in cells)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def _billions(shape: ModelShape) -> str:
    large = shape.parameters >= 100_000_000
    return f"{shape.parameters / 1e9:.1f}B" if large else f"{shape.parameters:,}"
