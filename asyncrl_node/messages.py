"""Every message between processes: its direction is the union it belongs to.

sampler -> scheduler   SamplerMessage        scheduler -> sampler   SamplerOrder
learner -> scheduler   LearnerReport         scheduler -> learner   LearnerOrder
launcher -> scheduler  LauncherMessage       scheduler -> launcher  LauncherReport
sampler -> learner     WeightRequest         learner -> sampler     WeightNotice

All are msgspec tagged structs, decoded by decoders built once (transport/channel.py). Unknown
fields, wrong types and wrong tags are refused by the decoder; nothing is ever executed. Every
answer echoes the id of its order: a group with its attempt, a take with its number.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

FailureKind = Literal["environment", "engine"]
TransportKind = Literal["host", "cuda_ipc"]
"""Which way weights go: host shared memory, or the learner's GPU memory mapped by the sampler."""

CUDA_HANDLE_BYTES = 64
PATTERN_SEEDS = (1, 2, 3)
"""The self-test of a pair of GPUs: one pattern per seed, each written after the mapping."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The base of every message: immutable, tagged by its class name, nothing unknown in it."""


class WeightEntry(msgspec.Struct, frozen=True):
    """Where one parameter lies in the flat weight buffer."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch dtype without the prefix, e.g. "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer's weight area; 256-byte aligned."""
    num_bytes: int


class GroupKey(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at one group; an answer that names an older attempt is late and ignored."""

    group_id: int
    attempt: int


# -- sampler -> scheduler --------------------------------------------------------------------


class SamplerHello(Message, frozen=True):
    """This sampler can take work; `incarnation` grows with every restart of its process."""

    sampler: int
    incarnation: int
    pid: int
    max_rollouts: int


class GroupStarted(Message, frozen=True):
    """The first token of the group exists, sampled by `version`."""

    key: GroupKey
    version: int


class GroupCompleted(Message, frozen=True):
    """The group lies whole in its slot."""

    key: GroupKey
    num_bytes: int
    checksum: int
    """xxh3-64 of the slot's contents."""
    version_min: int
    version_max: int
    num_rollouts: int
    num_tokens: int
    """Sampled tokens, over all rollouts."""
    reward_sum: float
    reward_min: float
    reward_max: float
    """Of what the rollouts are told apart by (core/advantages.compared_range): rewards, or the
    returns of turns where these are rewarded. Equal: the group says nothing."""
    num_timeouts: int
    num_dropped_samples: int
    seconds: float
    """From the start of its first rollout to the end of its last."""


class GroupFailed(Message, frozen=True):
    """Fewer than two of the group's samples survived their retries."""

    key: GroupKey
    kind: FailureKind
    reason: str


class EvaluationCompleted(Message, frozen=True):
    """One held-out rollout."""

    evaluation: int
    problem: int
    attempt: int
    reward: float
    version_min: int
    version_max: int
    failed: bool


class Heartbeat(Message, frozen=True):
    """The sampler's loop is alive; what it is doing."""

    sampler: int
    incarnation: int
    policy_version: int
    num_rollouts: int
    num_queued_groups: int
    loading: bool
    num_tokens: int
    """Tokens sampled since the process started."""


SamplerMessage = (
    SamplerHello | GroupStarted | GroupCompleted | GroupFailed | EvaluationCompleted | Heartbeat
)

# -- scheduler -> sampler --------------------------------------------------------------------


class Admit(Message, frozen=True):
    """Sample this group into its slot, by weights at least `min_version`."""

    key: GroupKey
    problem: int
    epoch: int
    min_version: int
    seed: int


class Evaluate(Message, frozen=True):
    """Sample one rollout of a held-out problem; never ahead of a training group."""

    evaluation: int
    problem: int
    attempt: int
    min_version: int
    seed: int


class Cancel(Message, frozen=True):
    """Forget this attempt; nobody waits for it."""

    key: GroupKey


class Stop(Message, frozen=True):
    """End the process now, leaving nothing behind."""


SamplerOrder = Admit | Evaluate | Cancel | Stop

# -- learner -> scheduler --------------------------------------------------------------------


class LearnerHello(Message, frozen=True):
    """The learner is ready and will publish `version` first."""

    pid: int
    version: int


class Take(Message, frozen=True):
    """Hand over `num_groups` groups for step `step`, when the rule allows it."""

    order: int
    step: int
    num_groups: int


class Trained(Message, frozen=True):
    """The optimizer has run for step `step`; the weights are not public yet."""

    step: int


class Published(Message, frozen=True):
    """The weights of `version` are complete and announced to the samplers."""

    version: int


class StepFinished(Message, frozen=True):
    """Everything that belongs to step `step` is done; its metrics row may be written."""

    step: int
    metrics: dict[str, float | None]
    """None: a mean over nothing."""


class RequestEvaluation(Message, frozen=True):
    """Evaluate the policy as of `step`, by weights at least `min_version`."""

    evaluation: int
    step: int
    min_version: int


class SamplerFault(Message, frozen=True):
    """A sampler failed its weight transaction: it must be restarted."""

    sampler: int
    incarnation: int
    name: str
    story: str


class LearnerFinished(Message, frozen=True):
    """Everything is saved; the learner ends."""


LearnerMessage = (
    LearnerHello
    | Take
    | Trained
    | Published
    | StepFinished
    | RequestEvaluation
    | SamplerFault
    | LearnerFinished
)

# -- scheduler -> learner --------------------------------------------------------------------


class BatchGroup(msgspec.Struct, frozen=True):
    """One taken group: which slot to map, and what must be found there."""

    key: GroupKey
    problem: int
    epoch: int
    num_bytes: int
    checksum: int


class Batch(Message, frozen=True):
    """The groups of a take, stalest first."""

    order: int
    step: int
    groups: tuple[BatchGroup, ...]
    closes: bool
    """True when the batch of this step is complete."""
    waited_for_stragglers_s: float
    """How long enough completed groups were there and the rule alone held them back."""


class EndOfData(Message, frozen=True):
    """Nothing more will be trained: save and end."""

    reason: Literal["done", "interrupted"]


class EvaluationDone(Message, frozen=True):
    """Every rollout of the evaluation is in."""

    evaluation: int
    reward_mean: float


LearnerOrder = Batch | EndOfData | EvaluationDone | Stop

# -- launcher <-> scheduler ------------------------------------------------------------------


class LauncherHello(Message, frozen=True):
    """The launcher listens for reports."""


class Drain(Message, frozen=True):
    """End soon: finish a step already training, hand back one still collecting."""


class SamplerExited(Message, frozen=True):
    """The process of this sampler is gone; a new one with the next incarnation follows."""

    sampler: int
    incarnation: int


LauncherMessage = LauncherHello | Drain | SamplerExited


class SamplerStatus(msgspec.Struct, frozen=True):
    """One sampler, for the live view."""

    sampler: int
    ready: bool
    policy_version: int
    num_rollouts: int
    num_groups: int
    loading: bool


class Status(Message, frozen=True):
    """What is going on now, for the live view."""

    step: int
    published: int
    in_flight: int
    completed: int
    taken: int
    learner: str
    """What the learner does or waits for, in words."""
    samplers: tuple[SamplerStatus, ...]
    evaluating: int
    """Held-out rollouts still out."""


class Warned(Message, frozen=True):
    """Something that the user should know: a wait that has lasted long, weights that take another
    way than asked for. The text names who, why and the way out. Also from the learner."""

    text: str


class Noted(Message, frozen=True):
    """A line for the user's screen; nothing is wrong. From the learner."""

    text: str


class RestartSampler(Message, frozen=True):
    """Kill this sampler and start it anew."""

    sampler: int
    incarnation: int
    name: str
    story: str


class RunEnded(Message, frozen=True):
    """The scheduler has recorded everything; the counts of the ledger."""

    reason: Literal["done", "interrupted"]
    admitted: int
    trained: int
    filtered: int
    failed: int
    leftover: int


LearnerReport = LearnerMessage | Warned | Noted
LauncherReport = Status | Warned | Noted | RestartSampler | RunEnded

# -- sampler <-> learner: the weight transaction -----------------------------------------------


class CudaIpcHandle(Message, frozen=True):
    """How to open a buffer of another process. Raises: ValueError for a handle of another size."""

    handle: bytes
    """64 opaque bytes, good for any number of processes while the exporter lives."""
    num_bytes: int
    """The whole allocation, front and back included."""
    gpu_uuid: str
    """The GPU that the bytes lie on."""
    layout_hash: int

    def __post_init__(self) -> None:
        if len(self.handle) != CUDA_HANDLE_BYTES:
            size = len(self.handle)
            raise ValueError(f"a handle has {CUDA_HANDLE_BYTES} bytes, this one {size}")
        if self.num_bytes < 1:
            raise ValueError(f"a buffer of {self.num_bytes} bytes")


class WeightsHello(Message, frozen=True):
    """Tell me where the weights are."""

    sampler: int
    incarnation: int


class Lease(Message, frozen=True):
    """May I copy? Answered by LeaseGranted when nobody writes."""

    sampler: int
    incarnation: int


class LoadStarted(Message, frozen=True):
    """The lease is here and copying begins: from now on the clock of the update runs."""

    sampler: int
    incarnation: int
    version: int


class Release(Message, frozen=True):
    """The copy is made; the buffer may be overwritten."""

    sampler: int
    incarnation: int
    version: int


class WeightsLoaded(Message, frozen=True):
    """Every parameter of `version` is in use here; `weights_hash` is of this sampler's own copy."""

    sampler: int
    incarnation: int
    version: int
    weights_hash: int
    canary_logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=64)] = ()
    """What the weights in use make of the canary and of the tokens decoded after it, scored in one
    pass; see core/probe.py."""
    decoded_logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=64)] = ()
    """The same tokens after the canary, as they were decoded."""


class WritePattern(Message, frozen=True):
    """The test buffer of this rank is mapped here: write this pattern now."""

    sampler: int
    incarnation: int
    rank: int
    seed: int


class TransportVerdict(Message, frozen=True):
    """Which way this sampler takes its weights, and why, in words; it has opened them."""

    sampler: int
    incarnation: int
    kind: TransportKind
    reason: str


WeightRequest = (
    WeightsHello | Lease | LoadStarted | Release | WeightsLoaded | WritePattern | TransportVerdict
)


class WeightsManifest(Message, frozen=True):
    """What lies in the buffer; sent once, in answer to the hello. TransportOffer follows."""

    num_bytes: int
    entries: tuple[WeightEntry, ...]
    layout_hash: int


class WeightsAvailable(Message, frozen=True):
    """Version `version` is public."""

    version: int


class LeaseGranted(Message, frozen=True):
    """Copy now, then release. The buffer holds `version` and will not change under you."""

    version: int
    weights_hash: int
    canary: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    """Tokens to score once the weights are in use; none: the probe is off."""
    num_decoded: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Tokens to decode after the canary, and to score with it."""


class TransportOffer(Message, frozen=True):
    """Which ways lead to the weights. One of host memory alone is not answered; one with
    cuda_ipc is, by a TransportVerdict after the self-test: no version is announced before it."""

    kinds: tuple[TransportKind, ...]
    """Without `host`, a self-test that fails stops the run."""
    reason: str = ""
    """Why cuda_ipc is not among them, in words."""
    weights: tuple[CudaIpcHandle, ...] = ()
    """The buffer of each learner rank."""
    tests: tuple[CudaIpcHandle, ...] = ()
    """The test buffer of each learner rank, for this sampler alone."""


class PatternWritten(Message, frozen=True):
    """The pattern is there."""

    rank: int
    seed: int


class WeightsAccepted(Message, frozen=True):
    """Hash and canary of your copy of `version` are right: what it sampled may leave you."""

    version: int


WeightNotice = (
    WeightsManifest
    | TransportOffer
    | PatternWritten
    | WeightsAvailable
    | LeaseGranted
    | WeightsAccepted
)
