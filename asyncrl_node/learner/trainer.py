"""The policy and its optimizer: trajectory groups in, gradients, weights and metrics out.

    groups -> advantages -> rollouts that carry a gradient | rollouts whose advantage is zero
                |                    forward, backward     |        forward only
                v                                          v
    pack by token budget -> base model, packed attention -> head log-probs -> loss, statistics
                |
    update():  gradients / loss tokens -> norm -> guard -> clip -> AdamW      (num_substeps times)
                |
    finish_step(): metrics      copy_weights_into(): the flat buffer that samplers read

Parameters, gradients and moments are float32. Where `dtype` is bfloat16 every pass begins by
rounding the parameters to it, to nearest even as publishing does: the pass computes with the very
bits that samplers have, and its gradients are added up in float32 again.

Losses are weighted and summed while gradients accumulate, and divided once, in update(), by totals
of everything that was accumulated (losses/aggregation.py). So an update's gradient does not depend
on how its groups were cut into minibatches or packs, and streaming trains exactly what a whole
batch would.

What the gradient cannot see is not computed: a rollout's forward pass stops at its last sampled
token but one (nothing later predicts a sampled token), the head scores sampled tokens only, and a
rollout with advantage zero gets no backward pass, unless an entropy bonus or a user's own loss may
have a gradient there. Every metric still covers all loss tokens.

Guard: every number that reaches the optimizer is finite, or the run stops by name before the update
moves a weight. Earlier updates of the step stand; a run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.packing import pack_rollouts
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.dtype_rules import DType, limits_of
from asyncrl_node.errors import RunFault
from asyncrl_node.head_logits import head_logits
from asyncrl_node.learner.attention import no_mask, packed_attention
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.batch import (
    Float32s,
    Pack,
    bare_pack,
    collect,
    guard,
    make_pack,
)
from asyncrl_node.learner.credit import advantages_of, is_constant
from asyncrl_node.learner.losses.aggregation import divisor
from asyncrl_node.learner.losses.base import (
    LARGEST_LOG_RATIO,
    LossInput,
    TokenLoss,
    needs_of,
)
from asyncrl_node.learner.losses.off_policy import m2po_limit
from asyncrl_node.learner.losses.registry import (
    LOSSES,
    load_advantage,
    load_loss,
)
from asyncrl_node.learner.losses.regularizers import reference_kl, regularise
from asyncrl_node.learner.losses.user_code import blaming
from asyncrl_node.learner.parity import ParityGate
from asyncrl_node.learner.reference import Model, Reference, last_hidden, score_pack
from asyncrl_node.learner.step_sums import StepSums
from asyncrl_node.loss_rules import effective, loss_settings
from asyncrl_node.messages import WeightEntry

OPTIMIZER_FORMAT = 1
OPTIMIZER_TENSORS = "optimizer.safetensors"
OPTIMIZER_JSON = "optimizer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", no_mask)


class Trainer:
    """One learner's model and AdamW.

    A step is `accumulate` as often as groups arrive, `update` once per optimizer update, and
    `finish_step` at its end. `config` tells loss, advantage, optimizer and token budget; the
    caller decides how often to update (`num_substeps`, `num_minibatches`).
    """

    def __init__(
        self,
        config: LearnerConfig,
        model_dir: Path,
        temperature: float,
        seed: int,
        device: str = "cpu",
        dtype: DType = "float32",
    ) -> None:
        """Load the model of `model_dir`; log-probabilities are taken at the sampling `temperature`.

        `dtype` is that of passes and of published weights.

        Dropout is off: the learner's log-probabilities must be the sampler's. `seed` only matters
        to models that draw random numbers elsewhere.

        Raises: RunFault if the folder holds no whole model, or one that packed attention or a
        plain head do not serve.
        """
        torch.manual_seed(seed)
        self._config = config
        self._recipe = effective(config)
        self._model_dir = model_dir
        self._temperature = temperature
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._model = _load_model(model_dir).to(self._device)
        self._head: Tensor = self._model.get_output_embeddings().weight
        self._base: dict[str, Tensor] = dict(self._model.base_model.named_parameters())
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._grads = [torch.zeros_like(parameter) for parameter in self._parameters.values()]
        for parameter, grad in zip(self._parameters.values(), self._grads, strict=True):
            parameter.grad = grad
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._num_updates = 0
        self._pending: list[TrajectoryGroup] = []
        self._pending_tokens = self._pending_rollouts = 0
        self._version = 0
        self._token_loss = load_loss(config.loss)
        self._needs = needs_of(self._token_loss)
        self._group_advantages = load_advantage(self._recipe.advantage)
        self._settings = loss_settings(config)
        regularised = config.entropy_coefficient != 0 or config.kl_coefficient != 0
        self._is_users_loss = self._recipe.loss not in LOSSES
        self._always_backward = self._is_users_loss or regularised
        self._proximal: dict[int, Float32s] = {}
        self._limit: float | None = None
        self._sums = StepSums()
        specs = [_spec(name, p, self._dtype) for name, p in self._parameters.items()]
        self._layout = layout_weights(specs)
        self._views: tuple[tuple[int, int], list[Tensor]] = ((0, 0), [])
        limits = limits_of(config, dtype)
        self._parity = ParityGate(limits.parity, limits.parity_mean)
        self._prove_packing(self._model, model_dir)
        self._reference = self._load_reference() if config.kl_coefficient else None

    def keep_proximal(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Score groups of the step's later updates by the weights at its start, if the loss asks.

        Call it before the step's first update. Groups of that update need it not: the weights in
        use are those of the start. Kept until `finish_step`.
        """
        if "proximal_logprobs" not in self._needs or not groups:
            return
        assert not self._sums.num_updates, "the weights have moved since the step began"
        sizes = [len(group.tokens) for group in groups]
        scores = np.full(sum(sizes), np.nan, np.float32)
        for pack, logprobs in self._score_all(groups):
            scores[pack.scored] = logprobs.cpu().numpy()
        cut = np.split(scores, np.cumsum(sizes)[:-1])
        self._proximal.update((g.group_id, part) for g, part in zip(groups, cut, strict=True))

    def accumulate(self, groups: Sequence[TrajectoryGroup], policy_version: int) -> None:
        """Add the gradient of the summed loss of `groups`; the weights in use are `policy_version`.

        The groups' arrays must stay readable until `update`.

        Raises: GroupFault for a reward, advantage, log-probability or loss that is not finite, and
        RunFault for a user's function that fails.
        """
        self._version = policy_version
        for group in groups:
            constant = is_constant(group, self._config.turn_credit, self._config.turn_discount)
            self._sums.add_rewards(group.rewards.tolist(), constant)
        if "log_ratio_limit" in self._needs:
            self._limit = self._find_limit(groups)
        for pack, has_signal in self._packs(groups):
            reference = self._score_by_reference(pack)
            loss, logprobs, entropies = self._run(pack, reference, groups, has_signal)
            same = (pack.policy_versions == policy_version) & ~pack.on_older_kv
            if self._sums.num_updates:
                same.zero_()
            log_ratios = (logprobs - pack.sampler_logprobs).double()
            log_ratios = log_ratios.clamp(max=LARGEST_LOG_RATIO)
            self._sums.add_tokens(loss, log_ratios, entropies, same, pack.on_older_kv)
            if reference is not None:
                kl = reference_kl(logprobs, reference, self._config.kl_estimator)
                self._sums.add_reference_kl(float(kl.sum()))
            self._compare(pack, logprobs, same, groups)
            self._pending_tokens += len(pack.targets)
        self._pending += groups
        self._pending_rollouts += sum(len(group.rewards) for group in groups)

    def update(self) -> None:
        """Step the optimizer by the aggregated gradient of what was accumulated, clipped.

        Constant groups count in the mean, with zero. Without any loss token nothing happens.

        Raises: GroupFault for a gradient that is not finite, RunFault for gradients that overflow
        in sum, or "parity" before the first update; this update has moved no weight.
        """
        if self._pending_tokens:
            self._parity.check()
            total = self._divisor()
            norm = self._grad_norm() / total
            if not isfinite(norm):
                raise self._gradient_fault()
            clip = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            torch._foreach_mul_(self._grads, clip / total)
            learning_rate = self._config.learning_rate * self._warmup()
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
            self._num_updates += 1
            self._sums.add_update(norm, learning_rate)
        self._optimizer.zero_grad(set_to_none=False)
        self._pending, self._pending_tokens, self._pending_rollouts = [], 0, 0

    def finish_step(self) -> dict[str, float]:
        """Return the metrics of the step and start the next one.

        reward/trained_mean, _std        over all rollouts handed in, population std
        reward/num_constant_groups       groups without a signal: all rewards equal, or those of
                                         the turns that are compared
        loss/mean, entropy/mean          per loss token, whatever the aggregation; entropy at the
                                         sampling temperature
        grad_norm                        before clipping, of the mean gradient; mean over updates
        learning_rate                    of the last update
        ratio/max                        largest learner / sampler probability ratio of a token
        ratio/clip_fraction              loss tokens whose gradient the loss removed, or cut the
                                         weight of
        tokens/trained                   loss tokens
        mismatch/kl_same_version         KL(sampler || learner) per token, k3 estimate (Schulman
                                         2020, Approximating KL Divergence): r - 1 - log r; over
                                         tokens sampled by the very weights they are trained by,
                                         so only in the step's first update: engine mismatch
        mismatch/kl_older_kv             the same over tokens that may depend on keys and values
                                         of weights older than their own (kv_after_update = keep)
        mismatch/kl_stale                the same over all other loss tokens: staleness, and
                                         later substeps
        mismatch/num_tokens_*            the tokens behind the three; a mean over none is 0
        kl/reference_mean                KL(policy || reference) per loss token by kl_estimator,
                                         not weighted; only with a reference

        All cover every loss token, also those of constant groups. log r = learner - sampler
        log-probability, by the weights in use when the token was accumulated, at most 20.
        """
        assert not self._pending, "update() must follow accumulate() before the step ends"
        metrics = self._sums.metrics()
        self._sums = StepSums()
        self._proximal = {}
        return metrics

    @property
    def parity_report(self) -> str | None:
        """See `Trainer.parity_report`."""
        return self._parity.report

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        return self._head.shape[0]

    @torch.no_grad()
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:] under the present weights, at temperature 1.

        The same forward pass and head that train.
        """
        sequence = torch.tensor(tokens, device=self._device)
        pack = bare_pack(sequence[:-1], sequence[1:], [len(tokens) - 1])
        scores: list[float] = self._score_at(pack, 1.0)[0].tolist()
        return scores

    @torch.no_grad()
    def next_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """See `Trainer.next_logprobs`."""
        sequence = torch.tensor(tokens, device=self._device)
        pack = bare_pack(sequence, sequence, [len(tokens)])
        base, head = self._weights_in(self._dtype)
        hidden = last_hidden(self._model, pack, base)[-1:]
        logprobs: list[float] = head_logits(hidden, head).log_softmax(1)[0].tolist()
        return logprobs

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return the parameters in module order by Hugging Face name, a tied head once.

        They are views of the float32 masters; publishing rounds them to the manifest's type.
        """
        return [(name, parameter.detach()) for name, parameter in self._parameters.items()]

    def manifest(self) -> tuple[tuple[WeightEntry, ...], int]:
        """Return where copy_weights_into puts each parameter, and the num_bytes it needs."""
        return self._layout

    def copy_weights_into(self, buffer: memoryview) -> None:
        """Write every parameter into `buffer`, laid out by the manifest, in its type.

        Views into the buffer are kept, by its address; they are used during a call only. From a
        GPU (where this has not run) all is copied on return too: the buffer is not pinned.

        Raises: ValueError for a read-only buffer, or one that is too small.
        """
        if buffer.readonly or buffer.nbytes < self._layout[1]:
            raise ValueError(f"a writable buffer of {self._layout[1]} bytes is needed")
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        address = (flat.data_ptr(), flat.numel())
        if self._views[0] != address:
            self._views = (address, [_view(flat, entry) for entry in self._layout[0]])
        with torch.no_grad():
            torch._foreach_copy_(self._views[1], list(self._parameters.values()))

    def save(self, folder: Path) -> None:
        """Write model, tokenizer and optimizer state into `folder`: Hugging Face form, no pickle.

        The weights are the float32 masters; loaded as bfloat16 they are the published bits.

        The caller makes it atomic, by renaming the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with _quiet():
            self._model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            source = self._model_dir / name
            if source.is_file() and not (folder / name).exists():
                shutil.copyfile(source, folder / name)
        moments = {
            f"{name}.{moment}": self._optimizer.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._optimizer.state
            for moment in MOMENTS
        }
        save_file(moments, folder / OPTIMIZER_TENSORS)
        state = {"format": OPTIMIZER_FORMAT, "num_updates": self._num_updates}
        (folder / OPTIMIZER_JSON).write_text(json.dumps(state) + "\n")

    def load_optimizer(self, folder: Path) -> None:
        """Go on with the optimizer state that `save` wrote; the model is loaded by __init__.

        Raises: RunFault for a folder without the state, or with that of another model.
        """
        num_updates, moments = _read_optimizer(folder)
        expected = {
            f"{name}.{moment}": parameter.shape
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
            if num_updates
        }
        if {name: tensor.shape for name, tensor in moments.items()} != expected:
            raise RunFault("bad_checkpoint", f"{folder} holds another model's optimizer state")
        self._num_updates = num_updates
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if num_updates:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(num_updates), device=self._device),
                    **{m: moments[f"{name}.{m}"].to(self._device).clone() for m in MOMENTS},
                }

    def _packs(self, groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[Pack, bool]]:
        """Cut groups into forward passes; True for those whose rollouts carry a gradient."""
        if not groups:
            return
        rollouts = collect(groups, [self._advantages(group) for group in groups], self._proximal)
        signal = rollouts.has_advantage | self._always_backward
        for has_signal in (True, False):
            members = np.flatnonzero(signal == has_signal)
            lengths = rollouts.num_inputs[members].tolist()
            for places in pack_rollouts(lengths, self._config.micro_batch_tokens):
                chosen, aggregation = members[list(places)], self._recipe.aggregation
                yield make_pack(rollouts, chosen, self._device, aggregation), has_signal

    def _advantages(self, group: TrajectoryGroup) -> Float32s:
        """Advantages of the group's tokens. Raises: GroupFault where one is not finite."""
        compare, config = self._group_advantages, self._config
        return advantages_of(group, compare, config.turn_credit, config.turn_discount)

    def _run(
        self,
        pack: Pack,
        reference: Tensor | None,
        groups: Sequence[TrajectoryGroup],
        has_signal: bool,
    ) -> tuple[TokenLoss, Tensor, Tensor]:
        """Pass a pack forward and, if it carries a gradient, backward.

        reference: log-probabilities [N] by the reference model, if there is one.

        Returns the loss, and log-probabilities and entropies [N] without gradient.
        """
        with torch.set_grad_enabled(has_signal):
            logprobs, entropies = self._score(pack)
            loss = self._loss(logprobs, entropies, reference, pack)
        guard(pack, groups, logprobs.detach(), loss.losses.detach())
        if has_signal:
            with self._backward_blame():
                torch.autograd.backward((loss.losses * pack.weights).sum())
        return loss, logprobs.detach(), entropies.detach()

    def _backward_blame(self) -> AbstractContextManager[None]:
        """Name a user's loss where its gradient cannot be taken."""
        what = "the backward pass of "
        return blaming(self._config.loss, what) if self._is_users_loss else nullcontext()

    def _compare(
        self, pack: Pack, logprobs: Tensor, same: Tensor, groups: Sequence[TrajectoryGroup]
    ) -> None:
        """Show the parity gate the tokens that the weights in use have sampled."""
        places = pack.places[same.cpu().numpy()].tolist()
        named = [groups[place].group_id for place in places]
        self._parity.add(pack.targets[same], pack.sampler_logprobs[same], logprobs[same], named)

    def _score(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a pack's N targets, as they were sampled."""
        return self._score_at(pack, self._temperature)

    def _score_at(
        self, pack: Pack, temperature: float, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pass forward in `dtype`, or else the trainer's own."""
        weights = self._weights_in(dtype or self._dtype)
        has_bonus = self._config.entropy_coefficient != 0
        return score_pack(self._model, pack, temperature, has_bonus, weights)

    def _weights_in(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
        """Round the parameters of the base model and the head to `dtype`; gradients flow back.

        Each is rounded once: a tied head is the embedding's copy. They live as long as the pass.
        """
        rounded = {id(p): p.to(dtype) for p in self._parameters.values()}
        base = {name: rounded[id(parameter)] for name, parameter in self._base.items()}
        return base, rounded[id(self._head)]

    def _score_by_reference(self, pack: Pack) -> Tensor | None:
        """Log-probabilities [N] by the frozen reference model, if there is one."""
        return None if self._reference is None else self._reference.score(pack)

    def _loss(
        self, logprobs: Tensor, entropies: Tensor, reference: Tensor | None, pack: Pack
    ) -> TokenLoss:
        """The configured loss of each of the pack's tokens."""
        proximal = None
        if "proximal_logprobs" in self._needs:
            moved = self._sums.num_updates > 0
            proximal = pack.proximal_logprobs if moved else logprobs.detach()
        tokens = LossInput(
            logprobs=logprobs,
            sampler_logprobs=pack.sampler_logprobs,
            advantages=pack.advantages,
            rollout_index=pack.rollout_index,
            num_rollouts=pack.num_rollouts,
            staleness=self._version - pack.policy_versions,
            entropies=entropies,
            proximal_logprobs=proximal,
            reference_logprobs=reference,
            log_ratio_limit=self._limit,
        )
        loss = self._token_loss(tokens, self._settings)
        return regularise(
            loss,
            tokens,
            kl_coefficient=self._config.kl_coefficient,
            kl_kind=self._config.kl_estimator,
            kl_weighted=self._config.kl_weighted,
            entropy_coefficient=self._config.entropy_coefficient,
        )

    def _find_limit(self, groups: Sequence[TrajectoryGroup]) -> float:
        """Score an update's groups in advance, all of them, for the one limit of m2po."""
        assert not self._pending, "the limit is that of a whole update: accumulate it at once"
        log_ratios = [torch.zeros(0, device=self._device)]
        advantages = [torch.zeros(0, device=self._device)]
        for pack, logprobs in self._score_all(groups):
            log_ratios.append(logprobs - pack.sampler_logprobs)
            advantages.append(pack.advantages)
        return m2po_limit(torch.cat(log_ratios), torch.cat(advantages), self._config.m2_budget)

    def _score_all(self, groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[Pack, Tensor]]:
        """Pass groups forward only; log-probabilities [N] of each pack. Raises: GroupFault."""
        for pack, _ in self._packs(groups):
            with torch.no_grad():
                logprobs, _ = self._score(pack)
            guard(pack, groups, logprobs)
            yield pack, logprobs

    def _divisor(self) -> float:
        """What the accumulated gradient is divided by."""
        return divisor(
            self._recipe.aggregation,
            self._pending_tokens,
            self._pending_rollouts,
            self._config.horizon,
        )

    def _warmup(self) -> float:
        """Share of the learning rate for the next update: 1/w, 2/w, ... 1."""
        return min(1.0, (self._num_updates + 1) / max(1, self._config.warmup_steps))

    def _grad_norm(self) -> float:
        """Return the norm of the accumulated gradients, over all parameters."""
        return float(torch.nn.utils.get_total_norm(self._grads))

    def _gradient_fault(self) -> RunFault:
        """Find the group with the non-finite gradient: pass each one backward alone."""
        for group in self._pending:
            self._optimizer.zero_grad(set_to_none=False)
            for pack, has_signal in self._packs([group]):
                self._run(pack, self._score_by_reference(pack), [group], has_signal)
            if not isfinite(self._grad_norm()):
                story = "its gradient is not finite; this update changed nothing"
                return GroupFault("non_finite", group, story)
        count = len(self._pending)
        story = f"the gradients of {count} groups overflow in sum; this update changed nothing"
        return RunFault("non_finite", story)

    def _load_reference(self) -> Reference:
        """Load the frozen model that the KL term pulls back to, in the type of the passes.

        An empty `reference_model` is the folder that this trainer began with: a run that goes on
        from a checkpoint must name the first one (loss_rules.settled writes it down).

        Raises: RunFault as __init__, and for a model with another vocabulary.
        """
        folder = Path(self._config.reference_model or self._model_dir)
        model = _load_model(folder).to(self._device)
        self._prove_packing(model, folder)
        return Reference(model.to(self._dtype), folder, self.vocab_size, self._temperature)

    def _prove_packing(self, model: Model, model_dir: Path) -> None:
        """Compare two packed sequences with the float32 model's own eager attention and head.

        Raises: RunFault for a model whose attention or head is not what this learner computes.
        """
        first, second = 5, 3
        members = torch.arange(first + second, device=self._device)
        tokens = (members % self._head.shape[0])[None]
        targets = tokens[0].roll(-1)
        pack = bare_pack(tokens[0], targets, [first, second])
        with torch.no_grad(), _quiet():
            packed, _ = score_pack(model, pack, self._temperature)
            model.set_attn_implementation("eager")
            logits = [
                model(sequence, use_cache=False).logits[0]
                for sequence in (tokens[:, :first], tokens[:, first:])
            ]
            model.set_attn_implementation("packed")
        plain = (torch.cat(logits) / self._temperature).log_softmax(1)
        plain = plain.gather(1, targets[:, None])[:, 0]
        if not torch.allclose(packed, plain, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise RunFault(
                "unsupported_model",
                f"{model_dir}: packed log-probabilities differ from the model's own by "
                f"{float((packed - plain).abs().max()):.3g}; its attention or head is special",
            )


def _load_model(model_dir: Path) -> Model:
    """Load a causal language model in float32 with packed attention, from local files only.

    Its parameters are copied: safetensors maps the file, and a checkpoint written over a mapped
    file would change, or fault, the weights in use.

    Raises: RunFault if weights are missing.
    """
    with _quiet():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                model_dir,
                local_files_only=True,
                dtype=torch.float32,
                attn_implementation="packed",
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise RunFault("bad_model", f"{model_dir}: {error}") from error
    broken = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if broken:
        raise RunFault("bad_model", f"{model_dir}: weights missing or misshapen: {broken[:3]}")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal: it belongs to the live view."""
    bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    if bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _read_optimizer(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """Read num_updates and the moments. Raises: RunFault if they are not there or not ours."""
    try:
        state = json.loads((folder / OPTIMIZER_JSON).read_text())
        moments = load_file(folder / OPTIMIZER_TENSORS)
    except (OSError, ValueError) as error:
        raise RunFault("bad_checkpoint", f"{folder} holds no optimizer state: {error}") from error
    if state["format"] != OPTIMIZER_FORMAT:
        raise RunFault("bad_checkpoint", f"{folder}: optimizer format {state['format']}")
    return state["num_updates"], moments


def _spec(
    name: str, parameter: Tensor, dtype: torch.dtype
) -> tuple[str, str, tuple[int, ...], int]:
    """Describe a parameter for core/layout.py, as it is published."""
    num_bytes = parameter.numel() * dtype.itemsize
    return name, str(dtype).removeprefix("torch."), tuple(parameter.shape), num_bytes


def _view(flat: Tensor, entry: WeightEntry) -> Tensor:
    """Return the entry's place in the flat byte buffer as a tensor."""
    area = flat[entry.offset : entry.offset + entry.num_bytes]
    return area.view(getattr(torch, entry.dtype)).view(entry.shape)
