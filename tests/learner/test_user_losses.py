"""A user's loss or advantage from a file: what works, and every mistake on one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from asyncrl_node.core.advantages import group_advantages
from asyncrl_node.errors import ConfigError, RunFault
from asyncrl_node.learner.base import GroupFault
from asyncrl_node.learner.losses.base import needs_of
from asyncrl_node.learner.losses.registry import LOSSES, load_advantage, load_loss
from asyncrl_node.learner.losses.settings import LossSettings
from asyncrl_node.learner.trainer import Trainer
from tests.learner.oracles import random_case
from tests.learner.test_trainer import VERSION, make_groups, model_dir, model_dirs
from tests.learner.test_trainer_losses import config_of

__all__ = ["model_dir", "model_dirs"]

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


def says_nothing(rewards):
    return None


def says_words(rewards):
    return ["good" for _ in rewards]


def is_nested(rewards):
    return [[reward] for reward in rewards]


def one_by_one(rewards):
    for reward in rewards:
        yield reward / sum(rewards)


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


def test_an_advantage_may_come_one_by_one(mine):
    advantage = load_advantage(f"{mine}:one_by_one")
    assert advantage([1.0, 3.0]) == [0.25, 0.75]
    with pytest.raises(RunFault, match=r"ZeroDivisionError: .* \(line \d+ of .*in one_by_one\)"):
        advantage([0.0, 0.0])


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out", "mean_normalised"])
def test_an_advantage_by_name(kind):
    rewards = [1.0, 0.0, 0.0, 3.0]
    assert load_advantage(kind)(rewards) == group_advantages(rewards, kind)


@pytest.mark.parametrize(
    "name", ["forgets_one", "divides_by_zero", "says_nothing", "says_words", "is_nested"]
)
def test_an_advantage_must_be_one_finite_number_per_reward(mine, name):
    advantage = load_advantage(f"{mine}:{name}")
    with pytest.raises(RunFault, match=f"bad_advantage: .*{name} returned .* for 2 rewards"):
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


# -- what goes wrong at run time ------------------------------------------------------------------

BROKEN = """
import sys

import torch

from asyncrl_node.learner.losses.base import needs, token_loss


def helper(table):
    return table["nobody"]


def raises(tokens, settings):
    return helper({})


def leaves(tokens, settings):
    sys.exit(0)


def two_lines(tokens, settings):
    raise ValueError("first\\nsecond")


def parts(tokens):
    ratios = torch.exp(tokens.logprobs - tokens.sampler_logprobs)
    return -ratios * tokens.advantages, ratios > 2, ratios


def bare(tokens, settings):
    return parts(tokens)[0]


def empty(tokens, settings):
    return None


def one_short(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses[1:], clipped, ratios)


def column(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses[:, None], clipped, ratios)


def whole_numbers(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses.long(), clipped, ratios)


def detached(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses.detach(), clipped, ratios)


def counts_each(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses, clipped, ratios)._replace(num_clipped=clipped)


def endless(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(losses, clipped, ratios)._replace(ratio_max=float("inf"))


class Stubborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no way back")


def one_way(tokens, settings):
    losses, clipped, ratios = parts(tokens)
    return token_loss(Stubborn.apply(losses), clipped, ratios)


def raising_advantage(rewards):
    return 1 / 0
"""


@pytest.fixture
def broken(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return path


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("raises", r"KeyError: 'nobody' \(line 10 of .*broken.py, in helper\)"),
        ("leaves", r"SystemExit: 0 \(line 18 of .*broken.py, in leaves\)"),
        ("two_lines", r"ValueError: first second \(line 22 of .*broken.py, in two_lines\)"),
    ],
)
def test_what_a_users_loss_raises_is_named_with_its_line(broken, name, story, caplog):
    loss = load_loss(f"{broken}:{name}")
    with pytest.raises(RunFault, match=f"{name} raised {story}") as caught:
        loss(random_case([3, 2], 0).tensors(), LossSettings())
    assert caught.value.name == "user_code"
    assert "\n" not in caught.value.story
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("bare", r"returned Tensor: it must be what token_loss\(\) returns"),
        ("empty", "returned NoneType: it must be what token_loss"),
        ("one_short", r"losses of shape \[4\] for 5 tokens: it must be \[5\]"),
        ("column", r"losses of shape \[5, 1\] for 5 tokens"),
        ("whole_numbers", "losses of torch.int64 on cpu: they must be torch.float64 on cpu"),
        ("detached", "losses without a gradient: they must depend on tokens.logprobs"),
        ("counts_each", "a num_clipped of tensor.*: it must be one finite number"),
        ("endless", "a ratio_max of inf: it must be one finite number"),
    ],
)
def test_what_a_users_loss_may_not_return(broken, name, story):
    loss = load_loss(f"{broken}:{name}")
    with pytest.raises(RunFault, match=story) as caught:
        loss(random_case([3, 2], 0).tensors(), LossSettings())
    assert caught.value.name == "bad_loss"
    assert f"{broken}:{name} returned" in caught.value.story


def test_without_gradients_none_is_asked_for(broken):
    tokens = random_case([3, 2], 0).tensors()
    with torch.no_grad():
        detached = replace(tokens, logprobs=tokens.logprobs.detach())
        assert len(load_loss(f"{broken}:detached")(detached, LossSettings()).losses) == 5


def test_a_backward_pass_that_fails_is_the_users(broken, model_dir):
    trainer = Trainer(config_of(loss=f"{broken}:one_way"), model_dir, 1.0, seed=0)
    story = "the backward pass of .*one_way raised RuntimeError: no way back .*in backward"
    with pytest.raises(RunFault, match=story) as caught:
        trainer.accumulate(make_groups(2), VERSION)
    assert caught.value.name == "user_code"


def test_an_advantage_that_raises_names_its_group(broken, model_dir):
    config = config_of(advantage=f"{broken}:raising_advantage")
    trainer = Trainer(config, model_dir, 1.0, seed=0)
    groups = make_groups(2)
    story = r"group 0 \(problem 100\): .*raising_advantage raised ZeroDivisionError: "
    with pytest.raises(GroupFault, match=story) as caught:
        trainer.accumulate(groups, VERSION)
    assert (caught.value.name, caught.value.group) == ("user_code", groups[0])
