"""The policy and its optimizer: trajectory groups in, gradients, weights and metrics out.

    groups -> advantages -> rollouts that carry a gradient | rollouts whose advantage is zero
                |                    forward, backward     |        forward only
                v                                          v
    pack by token budget -> base model, packed attention -> head log-probs -> loss, statistics
                |
    update():  gradients / loss tokens -> norm -> guard -> clip -> AdamW      (num_substeps times)
                |
    finish_step(): metrics      copy_weights_into(): the flat buffer that samplers read

Losses are summed while gradients accumulate and divided once, in update(), by the loss tokens of
everything that was accumulated. So an update's gradient does not depend on how its groups were cut
into minibatches or packs, and streaming trains exactly what a whole batch would.

What the gradient cannot see is not computed: a rollout's forward pass stops at its last sampled
token but one (nothing later predicts a sampled token), the head scores sampled tokens only, and a
rollout with advantage zero gets no backward pass. Every metric still covers all loss tokens.

Guard: every number that reaches the optimizer is finite, or the run stops by name before a weight
has moved.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl_node.config import LearnerConfig
from asyncrl_node.core.advantages import group_advantages
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.packing import pack_rollouts
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.attention import (
    PackedSequences,
    no_mask,
    packed_attention,
    plan_attention,
)
from asyncrl_node.learner.logprobs import head_logprobs
from asyncrl_node.learner.loss import TokenLoss, importance_sampling_loss, ppo_loss
from asyncrl_node.learner.parity import ParityGate
from asyncrl_node.learner.step_sums import StepSums
from asyncrl_node.messages import WeightEntry

Model = Any
"""A Hugging Face causal language model; transformers has no types."""
Int64s = npt.NDArray[np.int64]
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


class _Rollouts(NamedTuple):
    """R rollouts of several groups, T tokens in all; NumPy arrays."""

    tokens: Int64s
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]"""
    sampler_logprobs: npt.NDArray[np.float32]
    """[T]"""
    policy_versions: npt.NDArray[np.int32]
    """[T]"""
    on_older_kv: npt.NDArray[np.bool_]
    """[T]"""
    starts: Int64s
    """[R], first token of each rollout."""
    num_inputs: Int64s
    """[R], tokens up to the one that predicts the last loss token; at least 1."""
    advantages: npt.NDArray[np.float32]
    """[R]"""
    places: Int64s
    """[R], each rollout's group, by its place among the groups."""


class _Pack(NamedTuple):
    """One forward pass: T input tokens of several rollouts, N of them predict a loss token."""

    input_ids: Tensor
    """[1, T] int64"""
    position_ids: Tensor
    """[1, T] int64, from 0 in each rollout."""
    sequences: PackedSequences
    predictors: Tensor
    """[N] int64, inputs whose next token is a loss token."""
    targets: Tensor
    """[N] int64"""
    sampler_logprobs: Tensor
    """[N] float32"""
    advantages: Tensor
    """[N] float32"""
    policy_versions: Tensor
    """[N] int32"""
    on_older_kv: Tensor
    """[N] bool"""
    places: Int64s
    """[N] NumPy, each token's group, by its place among the groups."""


class Trainer:
    """One learner's model and AdamW, in float32.

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
    ) -> None:
        """Load the model of `model_dir`; log-probabilities are taken at the sampling `temperature`.

        Dropout is off: the learner's log-probabilities must be the sampler's. `seed` only matters
        to models that draw random numbers elsewhere.

        Raises: RunFault if the folder holds no whole model, or one that packed attention or a
        plain head do not serve.
        """
        torch.manual_seed(seed)
        self._config = config
        self._model_dir = model_dir
        self._temperature = temperature
        self._device = torch.device(device)
        self._model = _load_model(model_dir).to(self._device)
        self._head: Tensor = self._model.get_output_embeddings().weight
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
        self._pending_tokens = 0
        self._sums = StepSums()
        self._layout = layout_weights([_spec(*named) for named in self._parameters.items()])
        self._views: tuple[tuple[int, int], list[Tensor]] = ((0, 0), [])
        self._parity = ParityGate(config.parity_limit)
        self._prove_packing()

    def accumulate(self, groups: Sequence[TrajectoryGroup], policy_version: int) -> None:
        """Add the gradient of the summed loss of `groups`; the weights in use are `policy_version`.

        The groups' arrays must stay readable until `update`.

        Raises: RunFault naming the group with a reward, log-probability or loss that is not finite.
        """
        for group in groups:
            self._sums.add_rewards(group.rewards.tolist())
        for pack, has_signal in self._packs(groups):
            loss, logprobs, entropies = self._run(pack, groups, has_signal)
            same = (pack.policy_versions == policy_version) & ~pack.on_older_kv
            if self._sums.num_updates:
                same.zero_()
            log_ratios = (logprobs.detach() - pack.sampler_logprobs).double()
            self._sums.add_tokens(loss, log_ratios, entropies, same, pack.on_older_kv)
            self._compare(pack, logprobs, same, groups)
            self._pending_tokens += len(pack.targets)
        self._pending += groups

    def update(self) -> None:
        """Step the optimizer by the mean gradient over the accumulated loss tokens, clipped.

        Constant groups count in the mean, with zero. Without any loss token nothing happens.

        Raises: RunFault naming the group with a gradient that is not finite, or "parity" before
        the first update; no weight has moved.
        """
        if self._pending_tokens:
            self._parity.check()
            norm = self._grad_norm() / self._pending_tokens
            if not isfinite(norm):
                raise RunFault("non_finite", self._gradient_story())
            clip = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            torch._foreach_mul_(self._grads, clip / self._pending_tokens)
            learning_rate = self._config.learning_rate * self._warmup()
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
            self._num_updates += 1
            self._sums.add_update(norm, learning_rate)
        self._optimizer.zero_grad(set_to_none=False)
        self._pending, self._pending_tokens = [], 0

    def finish_step(self) -> dict[str, float]:
        """Return the metrics of the step and start the next one.

        reward/trained_mean, _std        over all rollouts handed in, population std
        reward/num_constant_groups       groups without a signal: all rewards equal
        loss/mean, entropy/mean          per loss token; entropy at the sampling temperature
        grad_norm                        before clipping, of the mean gradient; mean over updates
        learning_rate                    of the last update
        ratio/max                        largest learner / sampler probability ratio of a token
        ratio/clip_fraction              loss tokens whose gradient the ppo clip removed
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

        All cover every loss token, also those of constant groups. log r = learner - sampler
        log-probability, by the weights in use when the token was accumulated.
        """
        assert not self._pending, "update() must follow accumulate() before the step ends"
        metrics = self._sums.metrics()
        self._sums = StepSums()
        return metrics

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
        pack = _bare_pack(sequence[:-1], sequence[1:], [len(tokens) - 1])
        scores: list[float] = self._score_at(pack, 1.0)[0].tolist()
        return scores

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return the parameters in module order by Hugging Face name, a tied head once; views."""
        return [(name, parameter.detach()) for name, parameter in self._parameters.items()]

    def manifest(self) -> tuple[tuple[WeightEntry, ...], int]:
        """Return where copy_weights_into puts each parameter, and the num_bytes it needs."""
        return self._layout

    def copy_weights_into(self, buffer: memoryview) -> None:
        """Write every parameter into `buffer`, laid out by the manifest.

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

    def _packs(self, groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[_Pack, bool]]:
        """Cut groups into forward passes; True for those whose rollouts carry a gradient."""
        if not groups:
            return
        rollouts = _collect(groups, [self._advantages(group) for group in groups])
        signal = rollouts.advantages != 0
        for has_signal in (True, False):
            members = np.flatnonzero(signal == has_signal)
            lengths = rollouts.num_inputs[members].tolist()
            for places in pack_rollouts(lengths, self._config.micro_batch_tokens):
                yield _make_pack(rollouts, members[list(places)], self._device), has_signal

    def _advantages(self, group: TrajectoryGroup) -> list[float]:
        """Return the group's advantages. Raises: RunFault for a reward that is not finite."""
        try:
            return group_advantages(group.rewards.tolist(), self._config.advantage)
        except ValueError as error:
            raise RunFault("non_finite", f"{_name(group)}: {error}") from error

    def _run(
        self, pack: _Pack, groups: Sequence[TrajectoryGroup], has_signal: bool
    ) -> tuple[TokenLoss, Tensor, Tensor]:
        """Pass a pack forward and, if it carries a gradient, backward."""
        with torch.set_grad_enabled(has_signal):
            logprobs, entropies = self._score(pack)
            loss = self._loss(logprobs, pack)
        _guard(pack, groups, logprobs.detach(), loss)
        if has_signal:
            torch.autograd.backward(loss.total)
        return loss, logprobs, entropies

    def _compare(
        self, pack: _Pack, logprobs: Tensor, same: Tensor, groups: Sequence[TrajectoryGroup]
    ) -> None:
        """Show the parity gate the tokens that the weights in use have sampled."""
        if self._num_updates == 0:
            places = pack.places[same.cpu().numpy()].tolist()
            named = [groups[place].group_id for place in places]
            self._parity.add(pack.targets[same], pack.sampler_logprobs[same], logprobs[same], named)

    def _score(self, pack: _Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a pack's N targets, as they were sampled."""
        return self._score_at(pack, self._temperature)

    def _score_at(self, pack: _Pack, temperature: float) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self._model.base_model(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            pack=pack.sequences,
        ).last_hidden_state[0]
        chosen = hidden.index_select(0, pack.predictors)
        return head_logprobs(chosen, self._head, pack.targets, temperature)

    def _loss(self, logprobs: Tensor, pack: _Pack) -> TokenLoss:
        """The configured loss, summed over the pack's tokens."""
        if self._config.loss == "importance_sampling":
            return importance_sampling_loss(logprobs, pack.sampler_logprobs, pack.advantages)
        return ppo_loss(
            logprobs,
            pack.sampler_logprobs,
            pack.advantages,
            self._config.clip_low,
            self._config.clip_high,
        )

    def _warmup(self) -> float:
        """Share of the learning rate for the next update: 1/w, 2/w, ... 1."""
        return min(1.0, (self._num_updates + 1) / max(1, self._config.warmup_steps))

    def _grad_norm(self) -> float:
        """Return the norm of the accumulated gradients, over all parameters."""
        return float(torch.nn.utils.get_total_norm(self._grads))

    def _gradient_story(self) -> str:
        """Find the group with the non-finite gradient: pass each one backward alone."""
        for group in self._pending:
            self._optimizer.zero_grad(set_to_none=False)
            for pack, has_signal in self._packs([group]):
                self._run(pack, [group], has_signal)
            if not isfinite(self._grad_norm()):
                return f"{_name(group)}: its gradient is not finite; no weight was changed"
        return (
            f"the gradients of {len(self._pending)} groups overflow in sum; no weight was changed"
        )

    def _prove_packing(self) -> None:
        """Compare two packed sequences with the model's own eager attention and head.

        Raises: RunFault for a model whose attention or head is not what this learner computes.
        """
        first, second = 5, 3
        members = torch.arange(first + second, device=self._device)
        tokens = (members % self._head.shape[0])[None]
        targets = tokens[0].roll(-1)
        pack = _bare_pack(tokens[0], targets, [first, second])
        with torch.no_grad(), _quiet():
            packed, _ = self._score(pack)
            self._model.set_attn_implementation("eager")
            logits = [
                self._model(sequence, use_cache=False).logits[0]
                for sequence in (tokens[:, :first], tokens[:, first:])
            ]
            self._model.set_attn_implementation("packed")
        plain = (torch.cat(logits) / self._temperature).log_softmax(1)
        plain = plain.gather(1, targets[:, None])[:, 0]
        if not torch.allclose(packed, plain, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise RunFault(
                "unsupported_model",
                f"{self._model_dir}: packed log-probabilities differ from the model's own by "
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


def _spec(name: str, parameter: Tensor) -> tuple[str, str, tuple[int, ...], int]:
    """Describe a parameter for core/layout.py."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return name, dtype, tuple(parameter.shape), parameter.nbytes


def _view(flat: Tensor, entry: WeightEntry) -> Tensor:
    """Return the entry's place in the flat byte buffer as a tensor."""
    area = flat[entry.offset : entry.offset + entry.num_bytes]
    return area.view(getattr(torch, entry.dtype)).view(entry.shape)


def _collect(groups: Sequence[TrajectoryGroup], advantages: Sequence[list[float]]) -> _Rollouts:
    """Put groups back to back; rollouts without a loss token are left out, they train nothing.

    Raises: RunFault for a rollout whose first token is a loss token: nothing predicts it.
    """
    loss_mask = np.concatenate([group.loss_mask for group in groups])
    offsets = np.cumsum([0] + [len(group.tokens) for group in groups[:-1]])
    sizes = [len(group.rewards) for group in groups]
    starts = np.concatenate([group.rollout_starts[:-1] for group in groups])
    starts = starts + np.repeat(offsets, sizes)
    places = np.repeat(np.arange(len(groups)), sizes)
    trained = np.flatnonzero(loss_mask)
    owner = np.searchsorted(starts, trained, side="right") - 1
    distance = trained - starts[owner]
    if not distance.all():
        culprit = groups[places[owner[np.argmin(distance)]]]
        raise RunFault("bad_group", f"{_name(culprit)}: a rollout without a prompt token")
    num_inputs = np.zeros(len(starts), np.int64)
    num_inputs[owner] = distance
    kept = np.flatnonzero(num_inputs)
    return _Rollouts(
        tokens=np.concatenate([group.tokens for group in groups]).astype(np.int64),
        loss_mask=loss_mask,
        sampler_logprobs=np.concatenate([group.sampler_logprobs for group in groups]),
        policy_versions=np.concatenate([group.policy_versions for group in groups]),
        on_older_kv=np.concatenate([group.on_older_kv for group in groups]),
        starts=starts[kept],
        num_inputs=num_inputs[kept],
        advantages=np.concatenate(advantages)[kept].astype(np.float32),
        places=places[kept],
    )


def _make_pack(rollouts: _Rollouts, members: Int64s, device: torch.device) -> _Pack:
    """Gather the rollouts `members` [R] int64, longest first, into one forward pass."""
    num_inputs = rollouts.num_inputs[members]
    positions = np.arange(num_inputs.sum()) - np.repeat(
        num_inputs.cumsum() - num_inputs, num_inputs
    )
    sources = np.repeat(rollouts.starts[members], num_inputs) + positions
    predictors = np.flatnonzero(rollouts.loss_mask[sources + 1])
    scored = sources[predictors] + 1
    owner = np.repeat(members, num_inputs)[predictors]

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return _Pack(
        input_ids=tensor(rollouts.tokens[sources])[None],
        position_ids=tensor(positions)[None],
        sequences=plan_attention(num_inputs.tolist(), device),
        predictors=tensor(predictors),
        targets=tensor(rollouts.tokens[scored]),
        sampler_logprobs=tensor(rollouts.sampler_logprobs[scored]),
        advantages=tensor(rollouts.advantages[owner]),
        policy_versions=tensor(rollouts.policy_versions[scored]),
        on_older_kv=tensor(rollouts.on_older_kv[scored]),
        places=rollouts.places[owner],
    )


def _bare_pack(tokens: Tensor, targets: Tensor, lengths: list[int]) -> _Pack:
    """Pack whole sequences, back to back in `tokens` [T], to score `targets` [T] after each."""
    members = torch.arange(len(tokens), device=tokens.device)
    nothing = torch.zeros_like(members)
    return _Pack(
        input_ids=tokens[None],
        position_ids=torch.cat([members[:length] for length in lengths])[None],
        sequences=plan_attention(lengths, tokens.device),
        predictors=members,
        targets=targets,
        sampler_logprobs=nothing,
        advantages=nothing,
        policy_versions=nothing,
        on_older_kv=nothing.bool(),
        places=np.zeros(0, np.int64),
    )


def _guard(
    pack: _Pack, groups: Sequence[TrajectoryGroup], logprobs: Tensor, loss: TokenLoss
) -> None:
    """Let only finite numbers through to the backward pass.

    Raises: RunFault naming the group of the first token that is not.
    """
    if isfinite(float(loss.total.detach() + logprobs.sum() + loss.ratio_max)):
        return
    ratios = torch.exp(logprobs - pack.sampler_logprobs)
    for problem, values in (
        ("sampler log-probability", pack.sampler_logprobs),
        ("learner log-probability", logprobs),
        ("importance ratio", ratios),
        ("loss", ratios * pack.advantages),
    ):
        broken = torch.nonzero(~torch.isfinite(values))
        if len(broken):
            token = int(broken[0])
            name = _name(groups[pack.places[token]])
            story = f"{name}: the {problem} of a token is {float(values[token])}"
            raise RunFault("non_finite", f"{story}; no weight was changed")
    raise RunFault("non_finite", f"the losses of {len(groups)} groups overflow in sum")


def _name(group: TrajectoryGroup) -> str:
    """Name a group in a story."""
    return f"group {group.group_id} (problem {group.problem})"
