"""Losses and advantages by name, and a user's own function from a file.

A name is looked up; anything with a colon is `path/to/file.py:function`. The file is Python that
the user wrote and asked for, run in the learner's process:

    def my_loss(tokens, settings):                       # LossInput, LossSettings
        ratios = torch.exp(tokens.logprobs - tokens.sampler_logprobs)
        return token_loss(-ratios * tokens.advantages, ratios > 9, ratios)

    def my_advantage(rewards):                           # R rewards of a group -> R advantages
        return [reward - max(rewards) for reward in rewards]

A loss's module, and torch with it, is imported only when that loss is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from asyncrl_node.core.advantages import AdvantageKind, GroupAdvantage, group_advantages
from asyncrl_node.errors import ConfigError
from asyncrl_node.learner.losses.settings import RECIPES, Recipe
from asyncrl_node.learner.losses.user_code import blaming, check_advantages, check_loss

if TYPE_CHECKING:
    from asyncrl_node.learner.losses.base import Loss, LossInput, Need, TokenLoss
    from asyncrl_node.learner.losses.settings import LossSettings


class LossFacts(NamedTuple):
    """What is known of a loss without importing it."""

    module: str = ""
    """Of this package; empty for a user's own."""
    two_sided: bool | None = None
    """Whether a token stops pushing once its ratio to the sampler has left the trust region, up or
    down; None: nobody said."""
    needs: frozenset[Need] = frozenset()
    """As @needs has it."""
    clip: tuple[float, float] = (0.2, 0.2)
    """clip_low and clip_high where a run sets none. gspo's are not its paper's 3e-4 and 4e-4:
    policy.py says why."""


LOSSES = {
    "importance_sampling": LossFacts("policy", two_sided=False),
    "ppo": LossFacts("policy", two_sided=True),
    "cispo": LossFacts("policy", two_sided=False),
    "gspo": LossFacts("policy", two_sided=True),
    "decoupled_ppo": LossFacts(
        "off_policy", two_sided=False, needs=frozenset({"proximal_logprobs"})
    ),
    "a3po": LossFacts("off_policy", two_sided=True),
    "m2po": LossFacts("off_policy", two_sided=True, needs=frozenset({"log_ratio_limit"})),
}
"""decoupled_ppo's trust region is around the proximal policy, not around the sampler."""


def recipe_of(spec: str) -> Recipe:
    """Say which function a name stands for, and with which settings where a run sets none."""
    if spec in RECIPES:
        return RECIPES[spec]
    low, high = LOSSES[spec].clip if spec in LOSSES else LossFacts().clip
    return Recipe(spec, clip_low=low, clip_high=high)


def loss_facts(spec: str, key: str = "learner.loss") -> LossFacts:
    """Check a loss and say what is known of it; imports no torch unless the user's file does.

    A user's loss may say what it knows itself: `my_loss.two_sided = True`.

    Raises: ConfigError for an unknown name, or a file or function that cannot be used.
    """
    if recipe_of(spec).loss in LOSSES:
        return LOSSES[recipe_of(spec).loss]
    loss = load_loss(spec, key)
    return LossFacts("", getattr(loss, "two_sided", None), getattr(loss, "needs", frozenset()))


def absolute(spec: str) -> str:
    """Make the path of `path/to/file.py:function` absolute; a name stays as it is."""
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon else spec


def load_loss(spec: str, key: str = "learner.loss") -> Loss:
    """Find a loss by name or as `path/to/file.py:function`.

    A user's function comes with its guard: it raises RunFault and nothing else (user_code.py).

    Raises: ConfigError for an unknown name, or a file or function that cannot be used.
    """
    name = recipe_of(spec).loss
    if name in LOSSES:
        module = importlib.import_module(f"{__package__}.{LOSSES[name].module}")
        return cast("Loss", getattr(module, name))
    function = _load_function(spec, key, sorted({*LOSSES, *RECIPES}), ("tokens", "settings"))

    @wraps(function)  # with what it says of itself
    def guarded(tokens: LossInput, settings: LossSettings) -> TokenLoss:
        with blaming(spec):
            result = function(tokens, settings)
        check_loss(spec, result, tokens)
        return cast("TokenLoss", result)

    return guarded


def load_advantage(spec: str, key: str = "learner.advantage") -> GroupAdvantage:
    """Find an advantage by name or as `path/to/file.py:function`.

    A user's function comes with its guard: it raises RunFault and nothing else (user_code.py).

    Raises: ConfigError for an unknown name, or a file or function that cannot be used.
    """
    kinds = get_args(AdvantageKind)
    if spec in kinds:
        return partial(group_advantages, kind=cast(AdvantageKind, spec))
    function = _load_function(spec, key, kinds, ("rewards",))

    def guarded(rewards: Sequence[float]) -> list[float]:
        with blaming(spec):
            result = function(rewards)
            if isinstance(result, Iterator):  # a generator has not run yet
                result = list(result)
        return check_advantages(spec, result, len(rewards))

    return guarded


def _load_function(
    spec: str, key: str, names: Sequence[str], parameters: tuple[str, ...]
) -> Callable[..., Any]:
    """Import a file and return its function that takes `parameters`.

    Raises: ConfigError, on one line, for whatever is wrong with it.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        rule = f"must be one of {', '.join(names)}, or path/to/file.py:function"
        raise ConfigError(key, rule, spec)
    if not Path(path).is_file():
        raise ConfigError(key, "must name a file that exists", spec)
    module_name = f"asyncrl_user_{Path(path).stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        rule = f"must name a file that imports without {type(error).__name__}: {error}"
        raise ConfigError(key, rule, spec) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(key, f"must name a function of that file, which has no {name}()", spec)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        rule = f"must name a function that takes ({', '.join(parameters)})"
        raise ConfigError(key, rule, spec) from error
    return cast(Callable[..., Any], function)
