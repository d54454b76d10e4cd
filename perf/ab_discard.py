"""What does discarding late groups do to the data and to the policy, compared with pacing?

    python perf/ab_discard.py [--seeds 0 1 2] [--steps 60] [--json]

The demo task with latency that grows with difficulty: every 8-digit problem and half of the 7-digit
ones (a quarter of all) are 60 to 300 times slower. The clock is virtual (perf/simulation.py); the
model, its samples, its rewards and its training are real, in one process: the shipped trainer and
the shipped torch engine. Groups are sampled by the weights of the version that started them. Pacing
is the shipped core; discarding lives here only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from asyncrl_node.config import LearnerConfig  # noqa: E402
from asyncrl_node.core.order import mix, problem_order, rollout_seed  # noqa: E402
from asyncrl_node.core.rollout import TrajectoryGroup  # noqa: E402
from asyncrl_node.engines.base import Completion, GenerateRequest  # noqa: E402
from asyncrl_node.engines.torch_engine import TorchEngine  # noqa: E402
from asyncrl_node.learner.trainer import Trainer  # noqa: E402
from asyncrl_node.messages import GroupKey  # noqa: E402
from asyncrl_node.plan import WARM_MODEL  # noqa: E402
from asyncrl_node.sampler.rollouts import Rollout, build_group  # noqa: E402
from asyncrl_node.tasks.base import Outcome, Split  # noqa: E402
from asyncrl_node.tasks.sort_digits import SortDigits  # noqa: E402
from perf.simulation import (  # noqa: E402
    DiscardPolicy,
    Policy,
    Settings,
    ShippedPolicy,
    mean_staleness,
    simulate,
)

GROUP_SIZE = 8
FAST_S, TRAIN_S = 1.0, 20.0
POLICIES: dict[str, type[ShippedPolicy] | type[DiscardPolicy]] = {
    "pacing": ShippedPolicy,
    "discard": DiscardPolicy,
}


class Figures(NamedTuple):
    """One policy, one seed."""

    policy: str
    seed: int
    trained: int
    sampled: int
    slow_coverage: float
    """Slow problems trained, of the slow problems that were due to be trained by then."""
    slow_share: float
    slow_share_offered: float
    max_staleness: int
    mean_staleness: float
    tokens_discarded: int
    reward_held_out: float
    reward_held_out_slow: float
    per_step_s: float
    """Virtual."""


class Latencies(list[float]):
    """Seconds per problem, worked out when asked."""

    def __init__(self, task: SortDigits) -> None:
        super().__init__()
        self._task = task

    def __len__(self) -> int:
        return self._task.num_train_problems

    def __getitem__(self, problem: int) -> float:  # type: ignore[override]
        if not is_slow(self._task, "train", problem):
            return FAST_S
        return FAST_S * (60 + mix(problem) % 241)


def is_slow(task: SortDigits, split: Split, problem: int) -> bool:
    """Say whether a problem is one of the slow quarter."""
    length = len(task.digits(split, problem))
    return length == 8 or (length == 7 and problem % 2 == 0)


class Lab:
    """The real model: samples groups, trains them, evaluates."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.task = SortDigits(seed)
        self.trainer = Trainer(LearnerConfig(), WARM_MODEL, 1.0, seed)
        self.engine = TorchEngine(WARM_MODEL, max_rows=512, max_context=19)
        self.entries, num_bytes = self.trainer.manifest()
        self.buffer = bytearray(num_bytes)
        self.version = -1
        self.groups: dict[int, TrajectoryGroup] = {}
        self.unsampled: list[tuple[int, int]] = []
        self.load()

    def load(self) -> None:
        """Give the engine the trainer's weights as the next version."""
        self.version += 1
        self.trainer.copy_weights_into(memoryview(self.buffer))
        self.engine.load_weights(self.version, self.entries, memoryview(self.buffer))

    def start(self, group: int, problem: int) -> None:
        """Note a start; it is sampled, with others, before the weights move."""
        self.unsampled.append((group, problem))

    def sample_started(self) -> None:
        """Sample what has started under the present weights."""
        wanted = [(problem, mix(self.seed, group)) for group, problem in self.unsampled]
        rollouts = self.sample("train", wanted, GROUP_SIZE)
        for place, (group, problem) in enumerate(self.unsampled):
            mine = rollouts[place * GROUP_SIZE : (place + 1) * GROUP_SIZE]
            self.groups[group] = build_group(GroupKey(group, 0), problem, 0, mine)
        self.unsampled.clear()

    def sample(self, split: Split, wanted: list[tuple[int, int]], count: int) -> list[Rollout]:
        """Sample `count` rollouts of each (problem, seed)."""
        rollouts: list[Rollout] = []
        for problem, seed in wanted:
            environment = self.task.environment(split, problem)
            prompt = asyncio.run(environment.reset())
            for number in range(count):
                rollout = Rollout()
                rollout.add_prompt(prompt)
                request = GenerateRequest(
                    request_id=len(rollouts),
                    prompt_tokens=prompt,
                    max_new_tokens=self.task.max_new_tokens,
                    temperature=1.0,
                    seed=rollout_seed(seed, number, 0),
                    stop_token_ids=self.task.stop_token_ids,
                )

                def finish(
                    completion: Completion, rollout: Rollout = rollout, problem: int = problem
                ) -> None:
                    rollout.add_completion(completion)
                    answered = self.task.environment(split, problem)
                    outcome = asyncio.run(answered.step(completion.tokens))
                    assert isinstance(outcome, Outcome)
                    rollout.reward = outcome.reward

                self.engine.submit(request, finish)
                rollouts.append(rollout)
        while self.engine.step():
            pass
        return rollouts

    def train(self, step: int, groups: list[int]) -> None:
        """Train a batch and load the next version."""
        self.sample_started()
        self.trainer.accumulate([self.groups.pop(group) for group in groups], step)
        self.trainer.update()
        self.trainer.finish_step()
        self.load()

    def evaluate(self) -> tuple[float, float]:
        """Return held-out reward on all problems, and on the slow ones alone."""
        problems = range(self.task.num_eval_problems)
        rollouts = self.sample("eval", [(p, mix(self.seed, -1, p)) for p in problems], 1)
        rewards = [rollout.reward for rollout in rollouts]
        slow = [r for p, r in zip(problems, rewards, strict=True) if is_slow(self.task, "eval", p)]
        return statistics.fmean(rewards), statistics.fmean(slow)


def measure(name: str, seed: int, steps: int) -> Figures:
    """Run one policy with one seed."""
    torch.manual_seed(seed)
    lab = Lab(seed)
    settings = Settings(32, 3, 3, TRAIN_S, steps)
    policy: Policy = POLICIES[name](settings)
    order = problem_order(lab.task.num_train_problems, seed, None)
    problems: Iterator[int] = (problem for _, problem in order)
    outcome = simulate(policy, settings, Latencies(lab.task), problems, lab.start, lab.train)
    slow = {p for p in set(outcome.sampled) if is_slow(lab.task, "train", p)}
    trained = [g.problem for g in outcome.trained]
    # What a run without any loss would have trained by now: the first of the order.
    due = list(dict.fromkeys(outcome.sampled))[: len(trained)]
    slow_due = [p for p in due if p in slow]
    lost = len(outcome.discarded)
    lab.sample_started()  # what was discarded before it was wanted has been sampled all the same
    rewards = lab.evaluate()
    return Figures(
        policy=name,
        seed=seed,
        trained=len(trained),
        sampled=len(trained) + lost,
        slow_coverage=len(set(trained) & set(slow_due)) / len(slow_due),
        slow_share=sum(p in slow for p in trained) / len(trained),
        slow_share_offered=len(slow_due) / len(due),
        max_staleness=max(g.step - g.version for g in outcome.trained),
        mean_staleness=mean_staleness(outcome.trained),
        tokens_discarded=sum(int(lab.groups[g].loss_mask.sum()) for g in outcome.discarded),
        reward_held_out=rewards[0],
        reward_held_out_slow=rewards[1],
        per_step_s=outcome.step_ends_s[-1] / steps,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = [(name, seed) for seed in options.seeds for name in POLICIES]
    shown = track(cells, "training", disable=options.json)
    figures = [measure(name, seed, options.steps) for name, seed in shown]
    if options.json:
        print(json.dumps({"runs": [f._asdict() for f in figures]}))
        return
    table = Table("policy", "seed", "trained/sampled", "slow coverage", "slow share (offered)")
    for column in ("staleness", "tokens discarded", "held-out", "held-out, slow", "s/step"):
        table.add_column(column)
    for f in figures:
        table.add_row(
            f.policy,
            str(f.seed),
            f"{f.trained}/{f.sampled}",
            f"{f.slow_coverage:.0%}",
            f"{f.slow_share:.3f} ({f.slow_share_offered:.3f})",
            f"{f.mean_staleness:.2f} / {f.max_staleness}",
            str(f.tokens_discarded),
            f"{f.reward_held_out:.3f}",
            f"{f.reward_held_out_slow:.3f}",
            f"{f.per_step_s:.1f}",
        )
    console = Console(width=150)
    console.print(table)
    for name in POLICIES:
        rewards = [f.reward_held_out for f in figures if f.policy == name]
        spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        console.print(f"{name}: held-out {statistics.fmean(rewards):.3f} +- {spread:.3f}")


if __name__ == "__main__":
    main()
