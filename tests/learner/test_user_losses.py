"""A user's loss or advantage from a file: what works, and every mistake on one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from asyncrl_node.core.advantages import group_advantages
from asyncrl_node.errors import ConfigError
from asyncrl_node.learner.losses.base import needs_of
from asyncrl_node.learner.losses.registry import LOSSES, load_advantage, load_loss
from asyncrl_node.learner.losses.settings import LossSettings
from tests.learner.oracles import random_case

MINE = '''
"""What a user writes: one loss, one advantage."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl_node.learner.losses.base import needs, token_loss


def reinforce(tokens, settings):
    """Policy gradient that ignores who sampled."""
    ratios = torch.exp(tokens.logprobs - tokens.sampler_logprobs).detach()
    return token_loss(-tokens.advantages * tokens.logprobs, ratios > 10, ratios)


@needs("proximal_logprobs")
def anchored(tokens, settings, strength=2.0):
    gap = tokens.logprobs - tokens.proximal_logprobs
    return token_loss(strength * gap ** 2, gap > 1, gap.exp())


def against_the_best(rewards):
    return [reward - max(rewards) for reward in rewards]


def forgets_one(rewards):
    return rewards[1:]


def divides_by_zero(rewards):
    return [float("nan") for _ in rewards]


def takes_one(tokens):
    return tokens


@dataclass
class Strength:
    value: float = 2.0


NUMBER = 3
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_users_loss_trains(mine):
    tokens = random_case([3, 2], 0).tensors()
    result = load_loss(f"{mine}:reinforce")(tokens, LossSettings())
    (grad,) = torch.autograd.grad(result.losses.sum(), tokens.logprobs)
    torch.testing.assert_close(grad, -tokens.advantages)


def test_a_users_loss_says_what_it_needs(mine):
    assert needs_of(load_loss(f"{mine}:anchored")) == {"proximal_logprobs"}
    assert needs_of(load_loss(f"{mine}:reinforce")) == frozenset()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_name_is_looked_up(name):
    assert load_loss(name).__name__ == name


def test_finding_an_advantage_or_a_mistake_imports_no_torch():
    """The command line and the scripted run check both settings without it."""
    code = (
        "import sys\n"
        "from asyncrl_node.errors import ConfigError\n"
        "from asyncrl_node.learner.losses.settings import RECIPES\n"
        "from asyncrl_node.learner.losses.registry import load_advantage, load_loss\n"
        "assert load_advantage(RECIPES['dr_grpo'].advantage)([1, 0]) == [0.5, -0.5]\n"
        "try:\n"
        "    load_loss('pppo')\n"
        "except ConfigError as error:\n"
        "    print(error.key, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "learner.loss False\n", done.stderr


def test_a_users_advantage_compares(mine):
    assert load_advantage(f"{mine}:against_the_best")([1.0, 0.0, 3.0]) == [-2.0, -3.0, 0.0]


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out", "mean_normalised"])
def test_an_advantage_by_name(kind):
    rewards = [1.0, 0.0, 0.0, 3.0]
    assert load_advantage(kind)(rewards) == group_advantages(rewards, kind)


@pytest.mark.parametrize("name", ["forgets_one", "divides_by_zero"])
def test_an_advantage_must_be_one_finite_number_per_reward(mine, name):
    advantage = load_advantage(f"{mine}:{name}")
    with pytest.raises(ValueError, match=f"{name} returned .* for 2 rewards"):
        advantage([1.0, 0.0])


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("pppo", "must be one of a3po, cispo, .*, or path/to/file.py:function"),
        ("{mine}", "must be one of"),
        ("losses.txt:f", "must be one of"),
        ("no/such/file.py:f", "must name a file that exists"),
        ("{mine}:missing", r"which has no missing\(\)"),
        ("{mine}:", r"which has no \(\)"),
        ("{mine}:NUMBER", r"which has no NUMBER\(\)"),
        ("{mine}:takes_one", r"takes \(tokens, settings\)"),
        ("{mine}:against_the_best", r"takes \(tokens, settings\)"),
    ],
)
def test_mistakes_are_one_line(mine, spec, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        load_loss(spec.format(mine=mine))
    assert str(caught.value).startswith("learner.loss: ")
    assert "\n" not in str(caught.value)


def test_an_advantage_must_take_rewards_alone(mine):
    with pytest.raises(ConfigError, match=r"learner.advantage: .* takes \(rewards\)"):
        load_advantage(f"{mine}:reinforce")
    with pytest.raises(ConfigError, match="must be one of mean_std, mean, leave_one_out"):
        load_advantage("median")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError"),
        ("raise RuntimeError('two\\nlines')\n", r"RuntimeError: two\\nlines"),
    ],
)
def test_a_file_that_does_not_import_is_one_line(tmp_path, text, what):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as caught:
        load_loss(f"{path}:f")
    assert "\n" not in str(caught.value)
