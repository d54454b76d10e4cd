"""Which GPUs learn and which sample: a forecast of the speed, and the split.

    ModelShape -> learner_bytes, sampler_bytes   what fits (memory.py)
               -> learner and sampler rates      how fast it would be
               -> choose_split -> Split          the fastest that fits

Everything here is arithmetic: it decides before anything starts, and a run may measure otherwise.
Constants are estimates for bf16 dense decoders with gated feed-forwards; GB is 1e9 bytes.

Words   N GPUs = L learners + S samplers * TP (+ idle ones, only where counts are set by hand).
        P parameters, d hidden, h heads, kv key-value heads, hd head_dim, V vocabulary.
        T tokens of one forward pass of the learner, C tokens of the longest rollout.

Rule    Of the splits that fit, take the one with the greatest min(learners' rate, samplers' rate);
        of equals, the one with more samplers: sampling is what a longer answer makes slower.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncrl_node.core.memory import (
    MAX_SEARCHED_GPUS,
    MIN_KV_TOKENS,
    STATE_BYTES,
    USABLE_SHARE,
    Build,
    ModelShape,
    Optimizer,
    fewer_tokens,
    host_bytes,
    kv_bytes_per_token,
    kv_tokens_of,
    learner_bytes,
    min_learner_ranks,
    sampler_bytes,
)
from asyncrl_node.errors import ConfigError

KV_FILL = 0.85
"""Share of the key-value cache that running rollouts fill on average."""


class Speed(NamedTuple):
    """What one card can do."""

    name: str
    flops: float
    """Dense bf16 FLOP/s."""
    bytes_per_s: float
    """Memory bandwidth."""


H100 = Speed("H100", 989e12, 3.35e12)
H200 = Speed("H200", 989e12, 4.8e12)
CARDS = (
    H200,
    H100,
    Speed("B200", 2250e12, 8.0e12),
    Speed("H20", 148e12, 4.0e12),
    Speed("A100", 312e12, 2.0e12),
    Speed("L40S", 362e12, 0.86e12),
    Speed("RTX 4090", 165e12, 1.0e12),
)
"""From the vendor's data sheets, the fastest variant of a name. H200 stands before H20."""


def speed_of(gpu_name: str) -> Speed:
    """Look a card up by NVML's name for it; one that is not known is taken for an H100.

    Only the ratio of compute to bandwidth decides the split; its words say what was assumed.
    """
    known = (speed for speed in CARDS if speed.name in gpu_name)
    return next(known, H100._replace(name=f"{gpu_name} taken for an H100"))


# -- the forecast of the speed -------------------------------------------------------------------


class Workload(NamedTuple):
    """What the run asks of the cards."""

    context_tokens: int
    """C: tokens of the longest rollout, prompt included."""
    prompt_tokens: int = 0
    micro_batch_tokens: int = 16_384
    """Most tokens in one forward pass; a longer rollout is passed alone."""
    optimizer: Optimizer = "adamw"
    max_concurrent_rollouts: int = 256
    """That one sampler runs at once."""
    outstanding_rollouts: int | None = None
    """That all samplers together may have: B * (D + 1) * group_size. None: always enough."""
    build: Build = "planned"
    """Whose bytes count; the speed is always the planned build's."""

    @property
    def pass_tokens(self) -> int:
        """T: the longest forward pass."""
        return max(self.micro_batch_tokens, self.context_tokens)

    @property
    def resident_tokens(self) -> float:
        """Mean tokens of a rollout while it is sampled: the prompt and half of the answer."""
        return (self.context_tokens + self.prompt_tokens) / 2

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the sampler adds to a prompt."""
        return self.context_tokens - self.prompt_tokens


def model_flops_utilization(shape: ModelShape) -> float:
    """Share of the peak that a learner is forecast to use: 40 %, and 22 % below 1e9 parameters."""
    return 0.40 if shape.parameters >= 1e9 else 0.22


def learner_rate(shape: ModelShape, work: Workload, speed: Speed) -> float:
    """Forecast t, the sampled tokens that one learner GPU trains a second.

    t = MFU * peak / (6 P + 6 layers h hd C), causal attention, recomputation not counted; times
    the share of the rollout that was sampled, since prompts are passed too.
    """
    attention = shape.layers * shape.heads * shape.head_dim * work.context_tokens
    flops = 6 * (shape.parameters + attention)
    passed = model_flops_utilization(shape) * speed.flops / flops
    return passed * work.sampled_tokens / work.context_tokens


def sampler_rate(
    shape: ModelShape,
    work: Workload,
    speed: Speed,
    gpu_bytes: int,
    tensor_parallel: int = 1,
    samplers: int = 1,
) -> float:
    """Forecast s, the tokens that one GPU of a sampler samples a second.

    s TP = n / (max((2 P + n c KV) / (0.65 bandwidth TP),
                    n (2 P + 4 layers h hd c) / (0.45 peak TP)) + 2.5 ms)
    n = min(concurrent rollouts allowed, share of those outstanding, 0.85 KV tokens / c)

    with c the mean resident tokens of a rollout and KV the bytes of a token. What the ranks of
    one sampler say to each other is not counted.
    """
    resident = work.resident_tokens
    running = _running_rollouts(
        kv_tokens_of(shape, tensor_parallel, gpu_bytes, work.build), work, resident, samplers
    )
    kv = running * resident * kv_bytes_per_token(shape)
    read_s = (2 * shape.parameters + kv) / (0.65 * speed.bytes_per_s * tensor_parallel)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * resident
    flops = running * (2 * shape.parameters + attention)
    compute_s = flops / (0.45 * speed.flops * tensor_parallel)
    return running / (max(read_s, compute_s) + 0.0025) / tensor_parallel


def _running_rollouts(kv_tokens: int, work: Workload, resident: float, samplers: int) -> float:
    limits = [work.max_concurrent_rollouts, KV_FILL * kv_tokens / resident]
    if work.outstanding_rollouts is not None:
        limits.append(work.outstanding_rollouts / samplers)
    return min(limits)


# -- the split -----------------------------------------------------------------------------------


class Split(NamedTuple):
    """How many GPUs learn and sample, and why."""

    learners: int
    """L, GPUs of the one learner."""
    samplers: int
    """S, processes; each has `tensor_parallel` GPUs."""
    tensor_parallel: int
    idle: int
    """GPUs without a task; 0 unless counts were set by hand."""
    learner_bytes: float
    """Forecast on each learner GPU."""
    kv_tokens: int
    """Room for keys and values in each sampler, in tokens."""
    learner_tokens_per_s: float
    """Forecast of all learners together, in sampled tokens."""
    sampler_tokens_per_s: float
    """Forecast of all samplers together."""
    reason: tuple[str, ...]
    """Lines for a person."""

    @property
    def sampler_gpus(self) -> int:
        """GPUs that sample."""
        return self.samplers * self.tensor_parallel

    @property
    def tokens_per_s(self) -> float:
        """Forecast of the run: the slower side's."""
        return min(self.learner_tokens_per_s, self.sampler_tokens_per_s)


class Counts(NamedTuple):
    """What the user set by hand; None: to be chosen."""

    learners: int | None = None
    samplers: int | None = None
    tensor_parallel: int | None = None


def choose_split(
    shape: ModelShape,
    num_gpus: int,
    gpu_bytes: int,
    work: Workload,
    speed: Speed = H100,
    counts: Counts = Counts(),  # noqa: B008  an immutable tuple
) -> Split:
    """Split `num_gpus` cards of `gpu_bytes` each so that the slower side is as fast as can be.

    Example: Qwen3-8B, 8 cards of 80 GB, rollouts of 16k tokens: 3 learners, 5 samplers.

    Raises: ConfigError for what cannot fit, by name and with the ways out.
    """
    _check_asked(shape, num_gpus, work, counts)
    tensor_parallel = _tensor_parallel(shape, num_gpus, gpu_bytes, work, counts)
    pairs = _pairs(num_gpus, tensor_parallel, counts)
    limit = USABLE_SHARE * gpu_bytes
    fitting = [
        (learners, samplers)
        for learners, samplers in pairs
        if _learner_bytes(shape, learners, work) <= limit
    ]
    if not fitting:
        most = max(learners for learners, _ in pairs)
        _refuse_learner(shape, num_gpus, gpu_bytes, work, most, counts)
    splits = [
        _split(shape, num_gpus, gpu_bytes, work, speed, learners, samplers, tensor_parallel)
        for learners, samplers in fitting
    ]
    best = max(splits, key=lambda split: (split.tokens_per_s, split.samplers))
    return best._replace(reason=_reason(shape, gpu_bytes, work, speed, best, counts))


def _check_asked(shape: ModelShape, num_gpus: int, work: Workload, counts: Counts) -> None:
    asked = {"learners": counts.learners, "samplers": counts.samplers}
    for key, count in {**asked, "tensor_parallel": counts.tensor_parallel}.items():
        if count is not None and count < 1:
            raise ConfigError(key, "must be at least 1", count)
    if work.context_tokens <= work.prompt_tokens:
        rule = f"must leave room in {work.context_tokens} tokens for the prompt and an answer"
        raise ConfigError("sampling.max_new_tokens", rule, work.sampled_tokens)
    if num_gpus < 2:
        raise ConfigError("gpus", "must be at least 2: one learns, one samples", num_gpus)
    width = counts.tensor_parallel
    if width is not None and not _divides_heads(shape, width):
        rule = f"must divide the model's {shape.heads} heads and go with its {shape.kv_heads}"
        raise ConfigError("tensor_parallel", f"{rule} key-value heads", width)


def _divides_heads(shape: ModelShape, width: int) -> bool:
    pair = sorted((width, shape.kv_heads))
    return shape.heads % width == 0 and pair[1] % pair[0] == 0


def _learner_bytes(shape: ModelShape, ranks: int, work: Workload) -> float:
    return learner_bytes(shape, ranks, work.pass_tokens, work.optimizer, work.build)


def _least_kv_tokens(work: Workload) -> int:
    """One rollout at its longest; and enough to be worth a sampler, or all it may ever run."""
    all_of_them = work.max_concurrent_rollouts * work.context_tokens
    return max(work.context_tokens, min(MIN_KV_TOKENS, all_of_them))


def _tensor_parallel(
    shape: ModelShape, num_gpus: int, gpu_bytes: int, work: Workload, counts: Counts
) -> int:
    """The fewest GPUs that one sampler fits on, powers of two, beside at least one learner."""
    if counts.tensor_parallel is not None:
        widths = [counts.tensor_parallel]
    else:
        powers = (1 << power for power in range(num_gpus.bit_length()))
        widths = [width for width in powers if _divides_heads(shape, width)]
    widths = [width for width in widths if width < num_gpus]
    if not widths:
        rule = f"must leave a GPU of the {num_gpus} for the learner"
        raise ConfigError("tensor_parallel", rule, counts.tensor_parallel)
    for width in widths:
        if kv_tokens_of(shape, width, gpu_bytes, work.build) >= _least_kv_tokens(work):
            return width
    width = widths[-1]
    need = sampler_bytes(shape, width, _least_kv_tokens(work), work.build)
    raise ConfigError(
        "gpus",
        f"the sampler does not fit: on each of its {width} GPU(s) it needs {_gb(need)} for "
        f"weights and {_least_kv_tokens(work):,} tokens of keys and values, and may use "
        f"{_gb(USABLE_SHARE * gpu_bytes)} of {_gb(gpu_bytes)}; ways out: "
        f"{_wider(shape, gpu_bytes, work, width)}a smaller model, a larger card",
        num_gpus,
    )


def _wider(shape: ModelShape, gpu_bytes: int, work: Workload, width: int) -> str:
    """Name the next width that would do, as the beginning of a list of ways out."""
    while (width := 2 * width) <= MAX_SEARCHED_GPUS:
        fits = kv_tokens_of(shape, width, gpu_bytes, work.build) >= _least_kv_tokens(work)
        if fits and _divides_heads(shape, width):
            return f"tensor_parallel {width} on at least {width + 1} GPUs, "
    return ""


def _pairs(num_gpus: int, tensor_parallel: int, counts: Counts) -> list[tuple[int, int]]:
    """Learner GPUs and samplers that make up `num_gpus`, as far as the counts leave a choice."""
    if counts.learners is not None and counts.samplers is not None:
        pairs = [(counts.learners, counts.samplers)]
    elif counts.learners is not None:
        pairs = [(counts.learners, (num_gpus - counts.learners) // tensor_parallel)]
    else:
        most = (num_gpus - 1) // tensor_parallel
        choice = range(1, most + 1) if counts.samplers is None else (counts.samplers,)
        pairs = [(num_gpus - samplers * tensor_parallel, samplers) for samplers in choice]
    learners, samplers = pairs[0]
    if learners < 1 or samplers < 1 or learners + samplers * tensor_parallel > num_gpus:
        key = "learners" if counts.learners is not None else "samplers"
        rule = f"must leave GPUs for the other side: there are {num_gpus}, and each sampler takes"
        raise ConfigError(key, f"{rule} {tensor_parallel}", getattr(counts, key))
    return pairs


def _split(
    shape: ModelShape,
    num_gpus: int,
    gpu_bytes: int,
    work: Workload,
    speed: Speed,
    learners: int,
    samplers: int,
    tensor_parallel: int,
) -> Split:
    sampling = samplers * tensor_parallel
    rate = sampler_rate(shape, work, speed, gpu_bytes, tensor_parallel, samplers)
    return Split(
        learners=learners,
        samplers=samplers,
        tensor_parallel=tensor_parallel,
        idle=num_gpus - learners - sampling,
        learner_bytes=_learner_bytes(shape, learners, work),
        kv_tokens=kv_tokens_of(shape, tensor_parallel, gpu_bytes, work.build),
        learner_tokens_per_s=learners * learner_rate(shape, work, speed),
        sampler_tokens_per_s=sampling * rate,
        reason=(),
    )


# -- words ---------------------------------------------------------------------------------------


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _refuse_learner(
    shape: ModelShape,
    num_gpus: int,
    gpu_bytes: int,
    work: Workload,
    most: int,
    counts: Counts,
) -> None:
    """Say what the learner needs, and which single changes would make it fit."""
    need = _learner_bytes(shape, most, work)
    ways, short = _ways_out(shape, num_gpus, gpu_bytes, work, most)
    out = "ways out: " + ("; ".join(ways) if ways else "none alone, combine them")
    if short:
        out += f" (not enough alone: {', '.join(short)})"
    by_hand = counts.learners is not None
    raise ConfigError(
        "learners" if by_hand else "gpus",
        f"the learner does not fit: {work.optimizer} for {shape.parameters / 1e9:.1f}B parameters "
        f"and passes of {work.pass_tokens} tokens needs {_gb(need)} on each of {most} learner "
        f"GPU(s), which may use {_gb(USABLE_SHARE * gpu_bytes)} of {_gb(gpu_bytes)}; {out}",
        counts.learners if by_hand else num_gpus,
    )


def _ways_out(
    shape: ModelShape, num_gpus: int, gpu_bytes: int, work: Workload, most: int
) -> tuple[list[str], list[str]]:
    """Changes that suffice alone, and those that do not."""
    ways, short = [], []
    tokens = fewer_tokens(shape, gpu_bytes, work.pass_tokens, most, work.optimizer, work.build)
    if tokens is None:
        short.append("fewer tokens")
    else:
        also = "" if tokens >= work.context_tokens else " and rollouts as short"
        ways.append(f"fewer tokens: learner.micro_batch_tokens {tokens}{also}")
    for optimizer, state in STATE_BYTES.items():
        if state >= STATE_BYTES[work.optimizer]:
            continue
        ranks = min_learner_ranks(shape, gpu_bytes, work.pass_tokens, optimizer, most)
        if ranks is None:
            short.append(optimizer)
        else:
            ways.append(f"learner.optimizer {optimizer}, from {ranks} learner GPU(s)")
    ranks = min_learner_ranks(shape, gpu_bytes, work.pass_tokens, work.optimizer)
    if ranks is None:
        short.append("more GPUs")
    else:
        ways.append(f"more GPUs: {ranks} for the learner, {num_gpus - most + ranks} in all")
    return ways, short


def _reason(
    shape: ModelShape,
    gpu_bytes: int,
    work: Workload,
    speed: Speed,
    split: Split,
    counts: Counts,
) -> tuple[str, ...]:
    by_hand = [key for key, count in counts._asdict().items() if count is not None]
    ratio = learner_rate(shape, work, speed) / (split.sampler_tokens_per_s / split.sampler_gpus)
    least = min_learner_ranks(shape, gpu_bytes, work.pass_tokens, work.optimizer)
    learns_more = split.learner_tokens_per_s >= split.sampler_tokens_per_s
    lines = [
        f"{split.learners} GPU(s) learn, {split.sampler_gpus} sample"
        + (f" in {split.samplers} engines of {split.tensor_parallel}" if _wide(split) else "")
        + (f", {split.idle} idle" if split.idle else "")
        + (f"; fixed: {', '.join(by_hand)}" if by_hand else ""),
        f"a learner GPU trains {ratio:.1f} x what a sampler GPU samples ({speed.name}); the "
        f"learner needs at least {least} GPU(s)"
        + (", so it would run unsharded too" if least == 1 and split.learners > 1 else ""),
        f"learners {split.learner_tokens_per_s:,.0f} tok/s, samplers "
        f"{split.sampler_tokens_per_s:,.0f} tok/s: "
        + ("learners" if learns_more else "samplers")
        + " will wait",
        f"learner {_gb(split.learner_bytes)} of {_gb(USABLE_SHARE * gpu_bytes)} usable on each "
        f"GPU; sampler holds {split.kv_tokens:,} tokens of keys and values",
    ]
    if host_bytes(shape, work.optimizer):
        lines.append(f"optimizer in host memory: {_gb(host_bytes(shape, work.optimizer))}")
    return tuple(lines)


def _wide(split: Split) -> bool:
    return split.tensor_parallel > 1


# -- recompute the keys and values after an update, or keep them ---------------------------------


class RecomputePrice(NamedTuple):
    """What it costs to recompute the keys and values of running rollouts at each update."""

    seconds: float
    """Per update, on all samplers at once."""
    share: float
    """Of a training step."""

    @property
    def worth_it(self) -> bool:
        """At most 5 % of a step: then sampling at one version throughout is cheap to have."""
        return self.share <= 0.05

    @property
    def words(self) -> str:
        """Example: `recompute: about 10 s per update, 16 % of a step`."""
        seconds = f"about {self.seconds:.0f} s" if self.seconds >= 1 else "under 1 s"
        return f"recompute: {seconds} per update, {100 * self.share:.0f} % of a step"


def recompute_price(
    shape: ModelShape, split: Split, work: Workload, rollouts_per_step: int, speed: Speed = H100
) -> RecomputePrice:
    """Forecast the price of recomputing rather than keeping.

    seconds = resident tokens of one sampler / prefill rate, with a full cache as the usual case:
    resident = min(concurrent rollouts * c, 0.85 KV tokens), prefill rate = half of the peak /
    (2 (P - embedding) + 4 layers h hd C / 2). The step is rollouts_per_step answers of full
    length at the forecast rate of the slower side.
    """
    resident = work.resident_tokens
    tokens = resident * _running_rollouts(split.kv_tokens, work, resident, split.samplers)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * work.context_tokens / 2
    flops = 2 * (shape.parameters - shape.embedding) + attention
    seconds = tokens * flops / (0.5 * speed.flops * split.tensor_parallel)
    step_s = rollouts_per_step * work.sampled_tokens / split.tokens_per_s
    return RecomputePrice(seconds, seconds / step_s)
