"""The order of problems and the seeds of rollouts: pure integer arithmetic, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 64 well-mixed bits (the finalizer of splitmix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def shuffled(num_problems: int, seed: int, epoch: int) -> list[int]:
    """Return the problems 0 .. num_problems - 1 in the order of one epoch."""
    return sorted(range(num_problems), key=lambda problem: (mix(seed, epoch, problem), problem))


def problem_order(
    num_problems: int, seed: int, num_epochs: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (epoch, problem), each problem once an epoch; endless if `num_epochs` is None."""
    epoch = 0
    while num_epochs is None or epoch < num_epochs:
        for problem in shuffled(num_problems, seed, epoch):
            yield epoch, problem
        epoch += 1


def rollout_seed(group_seed: int, rollout: int, retry: int) -> int:
    """Seed of one sample: a retry is a new sample, not the same one again."""
    return mix(group_seed, rollout, retry) >> 1
