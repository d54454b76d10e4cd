"""The configuration: frozen structs, filled from TOML and flags, checked before anything starts.

Every key is also a flag: `pacing.groups_per_batch` is `--pacing.groups-per-batch`, and the keys
of contract.md have a short form without the section (`--groups-per-batch`). See cli.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PacingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far sampling may run ahead of training; core/pacing.py has the rule and its proof.

    Two settings, on purpose. `pipeline_depth` D sets *typical* staleness: D steps' worth of
    groups are sampled ahead. `max_steps_off_policy` K is the *hard* bound: it only has to cover
    the slowest rollouts, and with room to spare it costs nothing.

    Choosing: start with D = 1, K = 8. If the end-of-run advice says that the learner mostly waits
    for fill, raise D (speed is bought with mean staleness); if it waits for stragglers, raise K.
    Use a two-sided trust-region loss whenever D >= 1: depth never buys stability.
    Several steps of staleness ask for a lower learning rate (docs/losses.md has the figures).
    """

    groups_per_batch: int = 32
    """B: groups trained in one step."""
    group_size: int = 8
    """Rollouts of one problem, scored together; at least 2."""
    pipeline_depth: int | None = None
    """D: how many steps sampling may run ahead; 0 is synchronous. Unset: min(1, K)."""
    max_steps_off_policy: int | None = 8
    """K: no token is trained more than K steps after its weights; `none` = no bound."""
    streaming: bool = False
    """Take the batch minibatch by minibatch, as groups complete, instead of whole."""
    fixed_staleness: bool = False
    """For experiments: the learner takes only when every slot holds a completed group, so each is
    exactly `pipeline_depth` steps stale, once the pipeline has filled, whatever the latencies.
    Slow: sampling and training take turns."""
    filter_constant_rewards: bool = False
    """Drop groups whose rewards are all equal before they are taken; their slot frees at once."""

    @property
    def depth(self) -> int:
        """D with its default filled in."""
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        return 1 if self.max_steps_off_policy is None else min(1, self.max_steps_off_policy)


class SamplingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rollouts are sampled."""

    temperature: float = 1.0
    max_new_tokens: int | None = None
    """Sampled tokens per turn; unset: the task's own budget."""
    rollout_timeout_s: float = 3600.0
    """A rollout past this is cut off, graded as it stands (reward at most 0) and trained."""
    max_retries: int = 2
    """How often one sample is redone after an error before it is dropped from its group."""
    weight_updates: Literal["in_flight", "between_groups"] = "in_flight"
    """in_flight: weights swap between decode steps. between_groups: a sampler drains first."""
    max_concurrent_rollouts: int = 256
    """Rollouts that one sampler runs at once."""
    kv_cache_bytes: int | None = None
    """Keys and values on each GPU of a vllm sampler; unset: what the forecast leaves for them."""
    kv_after_update: Literal["recompute", "keep"] | None = None
    """Cached keys and values of running rollouts when new weights come. recompute: exact, at the
    price of one prefill of all of them. keep: no price; tokens on older ones are counted apart.
    Unset: recompute on a CPU and where its forecast is at most 5 % of a step, else keep."""
    top_p: float = 1.0
    """Must stay 1: the learner cannot match probabilities that were renormalised."""
    top_k: int = 0
    """Must stay 0, the whole vocabulary: as top_p."""
    min_p: float = 0.0
    """Must stay 0: as top_p."""
    presence_penalty: float = 0.0
    """Must stay 0: the learner cannot match logits that depend on what was sampled before."""
    frequency_penalty: float = 0.0
    """Must stay 0: as presence_penalty."""
    repetition_penalty: float = 1.0
    """Must stay 1: as presence_penalty."""


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How groups are trained."""

    loss: str = "ppo"
    """ppo, gspo, a3po, decoupled_ppo, m2po, cispo, importance_sampling or path/to/file.py:name; or
    grpo, dapo, dr_grpo: ppo with that method's settings where they are unset."""
    advantage: str | None = None
    """mean_std, mean, leave_one_out, mean_normalised or path/to/file.py:name. Unset: mean_std, and
    mean with dr_grpo."""
    turn_credit: Literal["return_to_go", "as_given", "off"] = "return_to_go"
    """Where an environment rewards turns: compare what each rollout still earned from a turn on, or
    take a turn's reward as its advantage, or look at the rollout's reward only."""
    turn_discount: float = 1.0
    """return_to_go: what a later turn's reward is worth, per turn."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """Every token counts the same, every rollout does, or nothing depends on lengths. Unset:
    token_mean; sequence_mean with grpo, constant with dr_grpo."""
    horizon: int | None = None
    """Loss tokens that the constant aggregation divides by; unset: most that a rollout can have."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Trust region of the importance ratio: [1 - clip_low, 1 + clip_high]. Unset: the loss's own,
    0.2 and 0.2; 0.2 and 0.28 with dapo."""
    dual_clip: float | None = None
    """Largest ratio that counts where the advantage is negative; above 1 + clip_high."""
    ratio_floor: float = 0.0
    """cispo: no token weighs less."""
    ratio_cap: float = 2.0
    """cispo: no token weighs more."""
    weight_correction: Literal["off", "truncate", "mask"] = "truncate"
    """decoupled_ppo, a3po: what becomes of behaviour weights outside [weight_low, weight_high]."""
    weight_low: float = 0.0
    """Smallest behaviour weight: below it is raised to it, or masked."""
    weight_high: float = 5.0
    """Largest behaviour weight: above it is cut to it, or masked."""
    m2_budget: float = 0.04
    """m2po: largest mean squared log-ratio of the tokens that push against the trust region."""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus, per token."""
    kl_coefficient: float = 0.0
    """Weight of the KL to a reference model, per token; above 0 the learner keeps that model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """What each one optimises, weighted or not, is in learner/losses/regularizers.py."""
    kl_weighted: bool = True
    """Weigh the estimate by the importance ratio: with k1 and k3 the gradient is then that of
    KL(policy || reference), on stale data too."""
    reference_model: str = ""
    """A folder in Hugging Face form, of the policy's kind and vocabulary. Empty: the weights that
    the run starts from."""
    optimizer: Literal["adamw", "adamw_bf16_sr", "adamw_cpu"] = "adamw"
    """adamw keeps 16 bytes per parameter on the GPUs. The others (bf16 with stochastic rounding, 8;
    moments in host memory, 4) are forecast by --dry-run and not built yet."""
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    """Optimizer updates over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    num_substeps: int = 1
    """Optimizer updates per batch; one version is published after the last."""
    num_minibatches: int = 1
    """Forward/backward passes per optimizer update; the gradient does not depend on it."""
    parity_limit: float | Literal["auto"] | None = "auto"
    """Largest difference of sampler and learner log-probability, over max(1, |log-probability|),
    before the first update, of tokens that the weights in use have sampled. auto: 5e-5 in float32,
    1 in bfloat16; none: not checked."""
    parity_mean_limit: float | Literal["auto"] | None = "auto"
    """The same for their mean, before every update. auto: 5e-5 in float32, 0.03 in bfloat16; none:
    not checked."""
    probe_limit: float | Literal["auto"] | None = "auto"
    """Largest difference of sampler and learner log-probability of a few tokens, the same after
    every weight update; a sampler beyond it is restarted. auto: 5e-5 in float32, 0.15 in bfloat16;
    none: only the bytes are compared."""
    micro_batch_tokens: int = 8192
    """Most tokens in one forward pass; one longer rollout is passed alone."""


class FakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scripted engine: real processes, sockets, slots and weights; only the model is not."""

    latencies: str = ""
    """JSON file: seconds per problem, by index (modulo its length). Empty: 0.02 s each."""
    train_s: float = 0.1
    """Seconds that one training step takes."""
    num_problems: int = 100_000
    """Size of the fake task's train split."""
    tokens_per_rollout: int = 8
    """Sampled tokens of one rollout, spread evenly over its latency."""
    weight_bytes: int = 4096
    """Size of the fake weights; every byte of a version carries that version."""
    load_s: float = 0.0
    """Extra seconds that loading weights takes on a sampler."""
    stale_after_version: int | None = None
    """Later versions never reach a sampler's model, though their bytes do; its first load does."""
    decode_stale_after_version: int | None = None
    """Later versions never reach what a sampler decodes with, though it scores by them."""
    raise_rate: float = 0.0
    """Share of rollout attempts that raise, drawn by seed."""
    raise_problems: tuple[int, ...] = ()
    """Problems whose every rollout raises."""
    hang_problems: tuple[int, ...] = ()
    """Problems whose rollouts never end."""
    constant_share: float = 0.0
    """Share of problems, drawn by seed, whose rollouts all get the same reward."""


class LoggingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "asyncrl_node"
    num_logged_rollouts: int = 4
    """Rollouts written to rollouts/ in each step, for reading."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run."""

    run_dir: str = ""
    """Where everything of the run goes; must not exist or be empty. Empty: runs/TASK-DATE."""
    steps: int = 100
    """Training steps."""
    epochs: int | None = None
    """Passes over the train split; unset: as many as `steps` need."""
    seed: int = 0
    task: str = "sort_digits"
    model: str = ""
    """A folder in Hugging Face form. Empty: the small model that ships with the demo task."""
    engine: Literal["auto", "torch", "vllm", "fake"] = "auto"
    """auto: vllm where GPUs are asked for, else the embedded torch engine; fake: scripted."""
    gpus: str | None = None
    """GPUs of this box: a count ("8"), ids ("0,3", and "3," for one) or UUIDs; those that
    CUDA_VISIBLE_DEVICES hides stay hidden. Unset: run on the CPU."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """In which weights are published and sampled, and the learner's passes computed; its master
    weights, Adam, logits and checkpoints stay float32. Unset: bfloat16 with GPUs, else float32."""
    transport: Literal["auto", "host", "cuda_ipc"] = "auto"
    """How weights reach a sampler. auto: straight from the learner's GPU where there is one and a
    self-test of the pair passes, else host shared memory, with the reason; cuda_ipc: a pair that
    fails it stops the run; host: always host shared memory."""
    samplers: int | None = None
    """Sampler processes. Unset: one on the CPU; with GPUs, what the split rule chooses."""
    learners: int | None = None
    """GPUs that learn; one for now, more for --dry-run. Unset: what the split rule chooses."""
    tensor_parallel: int | None = None
    """GPUs of one sampler. Unset: as few as its weights and 150,000 cached tokens fit on."""
    save_every: int = 0
    """Checkpoint every so many steps; 0: only after the last."""
    eval_every: int = 0
    """Evaluate every so many steps; 0: only before the first and after the last."""
    eval_problems: int = 256
    """Held-out problems per evaluation, one rollout each at the sampling temperature."""
    start_version: int = 0
    """The policy version that training starts from."""
    warn_every_s: float = 120.0
    """A wait longer than this is named in a warning, and again each time it passes."""
    weights_overdue_s: float = 120.0
    """A sampler that began loading weights and has not acknowledged them by then is at fault."""
    pacing: PacingConfig = PacingConfig()
    sampling: SamplingConfig = SamplingConfig()
    learner: LearnerConfig = LearnerConfig()
    fake: FakeConfig = FakeConfig()
    logging: LoggingConfig = LoggingConfig()
