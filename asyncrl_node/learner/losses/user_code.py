"""What a user's own loss or advantage may do wrong at run time, each a named fault.

    user_code       it raised: what, where in the user's file; the traceback is in the learner's log
    bad_loss        it returned something else than one finite number per token, with a gradient
    bad_advantage   it returned something else than one finite number per reward

No torch here but what a loss has brought: checking a name imports none.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from asyncrl_node.errors import RunFault

if TYPE_CHECKING:
    from asyncrl_node.learner.losses.base import LossInput

log = logging.getLogger(__name__)

USER_FAULTS = ("user_code", "bad_loss", "bad_advantage")
_MOST_CHARACTERS = 300


@contextmanager
def blaming(spec: str, what: str = "") -> Iterator[None]:
    """Turn whatever a user's code raises into a fault; sys.exit() is no way out of a run.

    spec  path/to/file.py:function
    what  of it was running: empty, or "the backward pass of "

    Raises: RunFault("user_code").
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        log.exception("%s%s raised", what, spec)
        message = " ".join(str(error).split())[:_MOST_CHARACTERS]
        place = _place(error, spec.rpartition(":")[0])
        story = f"{what}{spec} raised {type(error).__name__}: {message}{place}"
        raise RunFault("user_code", f"{story}; its traceback is in the learner's log") from error


def _place(error: BaseException, path: str) -> str:
    """Say where in the user's file it was, as deep as that goes; nothing, if it was elsewhere."""
    file = os.path.realpath(path)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == file
    ]
    return f" (line {frames[-1].lineno} of {path}, in {frames[-1].name})" if frames else ""


def check_loss(spec: str, result: Any, tokens: LossInput) -> None:  # noqa: ANN401 - a user's
    """Let only a loss per token through. A NaN is left to the guard, which names its group.

    Raises: RunFault("bad_loss").
    """
    count = len(tokens.logprobs)
    losses: Any = getattr(result, "losses", None)
    if not hasattr(losses, "requires_grad"):
        _refuse(spec, f"{type(result).__name__}", "it must be what token_loss() returns")
    if list(losses.shape) != [count]:
        shape = f"losses of shape {list(losses.shape)} for {count} tokens"
        _refuse(spec, shape, f"it must be [{count}], neither summed nor averaged")
    if not losses.dtype.is_floating_point or losses.device != tokens.logprobs.device:
        kind = f"losses of {losses.dtype} on {losses.device}"
        _refuse(spec, kind, f"they must be {tokens.logprobs.dtype} on {tokens.logprobs.device}")
    if tokens.logprobs.requires_grad and not losses.requires_grad:
        way_out = "they must depend on tokens.logprobs (a loss of nothing: 0 * tokens.logprobs)"
        _refuse(spec, "losses without a gradient", way_out)
    for name in ("num_clipped", "ratio_max"):
        value: Any = getattr(result, name, None)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = float("nan")
        if not isfinite(number) and not (name == "ratio_max" and _is_broken(losses)):
            _refuse(spec, f"a {name} of {value}", "it must be one finite number")


def _is_broken(losses: Any) -> bool:  # noqa: ANN401 - a tensor
    """Whether a loss is not finite, which the guard tells better."""
    return not isfinite(float(losses.detach().sum()))


def check_advantages(spec: str, result: Any, num_rewards: int) -> list[float]:  # noqa: ANN401
    """Return one finite number per reward. Raises: RunFault("bad_advantage")."""
    try:
        advantages: Sequence[float] = list(map(float, result))
    except (TypeError, ValueError, RuntimeError):
        advantages = ()
    if len(advantages) != num_rewards or not all(map(isfinite, advantages)):
        shown = " ".join(repr(result).split())[:_MOST_CHARACTERS]
        story = f"{spec} returned {shown} for {num_rewards} rewards: it must be one finite number"
        raise RunFault("bad_advantage", f"{story} for each")
    return list(advantages)


def _refuse(spec: str, found: str, rule: str) -> None:
    raise RunFault("bad_loss", f"{spec} returned {found}: {rule}")
