"""Held-out evaluation: which rollouts are out, on whom, and when one evaluation is whole.

Evaluation takes no training slot. Its results say which versions sampled it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from asyncrl_node.core.order import mix
from asyncrl_node.messages import Evaluate, EvaluationCompleted, EvaluationDone


class EvaluationOrder(NamedTuple):
    """Send `message` to `sampler`."""

    sampler: int
    message: Evaluate


class EvaluationResult(NamedTuple):
    """A whole evaluation: its row for metrics.jsonl and the answer to the learner."""

    row: dict[str, object]
    message: EvaluationDone


class _Evaluation:
    def __init__(self, step: int, min_version: int, num_problems: int) -> None:
        self.step = step
        self.min_version = min_version
        self.attempts = [0] * num_problems
        self.open = set(range(num_problems))
        self.reward_sum = 0.0
        self.num_failed = 0
        self.versions: set[int] = set()


class Evaluations:
    """All evaluations that are not whole yet."""

    def __init__(self, num_problems: int, seed: int) -> None:
        self._num_problems = num_problems
        self._seed = seed
        self._running: dict[int, _Evaluation] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._holder: dict[tuple[int, int], int] = {}

    @property
    def num_open(self) -> int:
        """Rollouts that are not in yet."""
        return sum(len(e.open) for e in self._running.values())

    def holders(self) -> str:
        """Name the samplers that hold open rollouts."""
        samplers = sorted(set(self._holder.values()))
        return ", ".join(f"sampler {sampler}" for sampler in samplers)

    def begin(self, evaluation: int, step: int, min_version: int) -> None:
        """Queue one rollout of every held-out problem."""
        assert evaluation not in self._running
        self._running[evaluation] = _Evaluation(step, min_version, self._num_problems)
        self._queue.extend((evaluation, problem) for problem in range(self._num_problems))

    def assign(self, samplers: list[int]) -> list[EvaluationOrder]:
        """Spread what is queued over the samplers, evenly."""
        orders = []
        while self._queue:
            evaluation, problem = self._queue.popleft()
            running = self._running[evaluation]
            sampler = samplers[problem % len(samplers)]
            self._holder[evaluation, problem] = sampler
            attempt = running.attempts[problem]
            # The step is not in the seed: evaluations of one run are paired by problem.
            seed = mix(self._seed, -1, problem, attempt) >> 1
            message = Evaluate(evaluation, problem, attempt, running.min_version, seed)
            orders.append(EvaluationOrder(sampler, message))
        return orders

    def lose_sampler(self, sampler: int) -> None:
        """Queue again what this sampler held."""
        for (evaluation, problem), holder in list(self._holder.items()):
            if holder == sampler:
                del self._holder[evaluation, problem]
                self._running[evaluation].attempts[problem] += 1
                self._queue.append((evaluation, problem))

    def complete(self, done: EvaluationCompleted) -> EvaluationResult | None:
        """Count one rollout; return the result when the evaluation is whole."""
        running = self._running.get(done.evaluation)
        if running is None or done.problem not in running.open:
            return None
        if running.attempts[done.problem] != done.attempt:
            return None
        running.open.discard(done.problem)
        del self._holder[done.evaluation, done.problem]
        if done.failed:
            running.num_failed += 1
        else:
            running.reward_sum += done.reward
            running.versions.update((done.version_min, done.version_max))
        if running.open:
            return None
        del self._running[done.evaluation]
        return _result(done.evaluation, running)


def _result(evaluation: int, running: _Evaluation) -> EvaluationResult:
    """Score every problem; one that could not be sampled has earned nothing, and is counted."""
    num_problems = len(running.attempts)
    mean = running.reward_sum / num_problems
    row: dict[str, object] = {
        "kind": "eval",
        "step": running.step,
        "eval/reward_mean": mean,
        "eval/num_problems": num_problems,
        "eval/num_failed": running.num_failed,
        "eval/version_min": min(running.versions, default=-1),
        "eval/version_max": max(running.versions, default=-1),
    }
    return EvaluationResult(row, EvaluationDone(evaluation, mean))
