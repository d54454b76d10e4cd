"""Which losses go with which settings, what is known of them on stale data, and the reference.

Imports no torch (a user's own file may) and starts nothing; plan.py calls it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl_node.config import Config, LearnerConfig
from asyncrl_node.errors import ConfigError
from asyncrl_node.learner.losses.registry import absolute, load_advantage, loss_facts, recipe_of
from asyncrl_node.learner.losses.settings import LossSettings, Recipe


def effective(learner: LearnerConfig) -> Recipe:
    """Say which function is trained by and how: the loss's own settings, where a run sets none."""
    own = recipe_of(learner.loss)
    names = ("clip_low", "clip_high", "aggregation", "advantage")
    chosen = {name: getattr(learner, name) for name in names}
    return replace(own, **{name: value for name, value in chosen.items() if value is not None})


def loss_settings(learner: LearnerConfig) -> LossSettings:
    """Collect the numbers that losses read."""
    numbers = {name: getattr(learner, name) for name in LossSettings.__dataclass_fields__}
    recipe = effective(learner)
    return LossSettings(
        **numbers | {"clip_low": recipe.clip_low, "clip_high": recipe.clip_high},
    )


def check_losses(config: Config) -> None:
    """Check loss, advantage and their settings. Raises: ConfigError."""
    learner = config.learner
    facts = loss_facts(learner.loss)
    load_advantage(effective(learner).advantage)
    if "log_ratio_limit" in facts.needs and learner.num_minibatches > 1:
        rule = (
            f"must be 1 with {learner.loss}: its clip range comes from the log-ratios of a whole "
            "update, which must be there before the first gradient; micro_batch_tokens bounds "
            "memory just as well"
        )
        raise ConfigError("learner.num_minibatches", rule, learner.num_minibatches)
    if "proximal_logprobs" in facts.needs and learner.num_substeps > 1 and config.pacing.streaming:
        rule = (
            f"must be off with {learner.loss} and num_substeps > 1: the whole batch is scored by "
            "the weights at the start of the step, and streaming takes most of it later"
        )
        raise ConfigError("pacing.streaming", rule, "true")
    _check_bounds(learner)


def _check_bounds(learner: LearnerConfig) -> None:
    """Check the numbers that depend on one another; plan.py has looked at each alone."""
    bound = 1 + effective(learner).clip_high
    if learner.dual_clip is not None and not learner.dual_clip > bound:
        rule = f"must be above 1 + clip_high, which is {bound:g}, or none"
        raise ConfigError("learner.dual_clip", rule, learner.dual_clip)
    for low, high in (("ratio_floor", "ratio_cap"), ("weight_low", "weight_high")):
        least, most = getattr(learner, low), getattr(learner, high)
        if least > most:
            raise ConfigError(f"learner.{low}", f"must be at most {high}, which is {most:g}", least)


def settled(config: Config, most_loss_tokens: int, model_dir: Path) -> Config:
    """Fill in what is unset and make paths absolute, for processes that start elsewhere.

    The reference by name in config.toml is what keeps it: a run that goes on from its checkpoint
    is held to the weights that it began with, not to those it goes on from.
    """
    learner, reference = config.learner, reference_folder(config.learner)
    recipe = effective(learner)
    if learner.kl_coefficient:
        reference = reference or model_dir
    learner = msgspec.structs.replace(
        learner,
        loss=absolute(learner.loss),
        advantage=absolute(recipe.advantage),
        aggregation=recipe.aggregation,
        clip_low=recipe.clip_low,
        clip_high=recipe.clip_high,
        horizon=learner.horizon or most_loss_tokens,
        reference_model="" if reference is None else str(reference.absolute()),
    )
    return msgspec.structs.replace(config, learner=learner)


# -- the reference model -------------------------------------------------------------------------


class _Kind(msgspec.Struct, frozen=True):
    """What of a config.json must be the same for two models to score each other's tokens."""

    model_type: str = ""
    vocab_size: int = 0


class _Vocabulary(msgspec.Struct, frozen=True):
    """Of a tokenizer.json."""

    vocab: msgspec.Raw = msgspec.Raw()


class _Tokenizer(msgspec.Struct, frozen=True):
    model: _Vocabulary = _Vocabulary()


def reference_folder(learner: LearnerConfig) -> Path | None:
    """Folder of the reference model that was asked for; None: no KL term, or the first weights."""
    wanted = learner.kl_coefficient and learner.reference_model
    return Path(learner.reference_model) if wanted else None


def other_kind(model_dir: Path, reference_dir: Path) -> str | None:
    """Say in which way two model folders do not fit together; None: they do.

    Their config.json files are readable. Tokenizers are compared where both have one.
    """
    ours, theirs = (
        msgspec.json.decode((folder / "config.json").read_bytes(), type=_Kind)
        for folder in (model_dir, reference_dir)
    )
    for field in _Kind.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"its {field} is {other}, and the model's {mine}"
    words, other_words = _vocabulary(model_dir), _vocabulary(reference_dir)
    if None not in (words, other_words) and words != other_words:
        return "its tokenizer has other tokens"
    return None


def _vocabulary(folder: Path) -> object:
    """Tokens of the folder's tokenizer.json; None where it has none that is of that form."""
    try:
        text = (folder / "tokenizer.json").read_bytes()
        vocabulary = msgspec.json.decode(text, type=_Tokenizer).model.vocab
        return msgspec.json.decode(vocabulary) if len(bytes(vocabulary)) else None
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def loss_notes(config: Config) -> list[str]:
    """Say what is known of the loss under these settings; printed at start, and by --dry-run."""
    learner, depth = config.learner, config.pacing.depth
    facts, notes = loss_facts(learner.loss), []
    if "proximal_logprobs" in facts.needs and learner.num_substeps == 1:
        notes.append(
            f"loss {learner.loss} with num_substeps 1: the ratio to the policy at the start of the "
            "step is 1, and nothing that looks at it alone ever clips"
        )
    recipe = effective(learner)
    if learner.loss == "gspo" and (recipe.clip_low, recipe.clip_high) == (0.2, 0.2):
        notes.append(
            "loss gspo clips the ratio of a rollout at 0.2 and 0.2, its paper at 3e-4 and 4e-4: "
            "see learner.clip_low, learner.clip_high"
        )
    if learner.loss == "dapo" and not config.pacing.filter_constant_rewards:
        notes.append(
            "loss dapo: its paper also filters groups of constant reward, which is "
            "--pacing.filter-constant-rewards"
        )
    if depth and facts.two_sided is None:
        notes.append(
            f"loss {learner.loss} does not say whether it has a two-sided trust region, and "
            f"pipeline_depth is {depth}: without one, collapse on stale data is known"
        )
    elif depth and not facts.two_sided:
        notes.append(
            f"loss {learner.loss} has no two-sided trust region around the sampler and "
            f"pipeline_depth is {depth}: known to collapse on stale data; prefer --loss ppo"
        )
    if learner.kl_coefficient and learner.kl_estimator == "k1" and not learner.kl_weighted:
        notes.append(
            "kl_estimator k1 without kl_weighted: its gradient is zero in the mean, only noise; "
            "prefer k2, or weigh it"
        )
    if depth and learner.kl_coefficient and learner.kl_weighted:
        notes.append(
            f"kl_weighted and pipeline_depth is {depth}: the ratio that weighs the KL is not "
            "clipped, whatever the loss clips; a few stale tokens may carry the whole term"
        )
    return notes
