"""Does the scheduler's cost per event depend on how many groups are outstanding?

    python perf/scheduler.py [--json]

Drives the shipped SchedulerCore in virtual time: fake samplers answer every admission with a start
and a completion in a shuffled order, a fake learner takes, trains and publishes. Counted are the
messages handled and the CPU time inside the core. A small batch has more messages of the cheap kind
(four per step, whatever its size), so flatness is judged by whole groups per second: the ratio is
the slowest size to the fastest.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.core.instructions import Instruction, ToLearner, ToSampler  # noqa: E402
from asyncrl_node.core.pacing import PacingRule  # noqa: E402
from asyncrl_node.core.scheduler_state import SchedulerSettings  # noqa: E402
from asyncrl_node.core.scheduling import Event, SchedulerCore  # noqa: E402
from asyncrl_node.messages import (  # noqa: E402
    Admit,
    Batch,
    GroupCompleted,
    GroupStarted,
    Published,
    SamplerHello,
    StepFinished,
    Take,
    Trained,
)

DEPTH, BOUND = 4, 8


class World:
    """Fake samplers and a fake learner around the core, in virtual time."""

    def __init__(self, outstanding: int, num_samplers: int) -> None:
        self.batch = max(1, outstanding // (DEPTH + 1))
        rule = PacingRule(self.batch, DEPTH, BOUND)
        problems = iter((0, i) for i in range(1 << 62))
        self.core = SchedulerCore(SchedulerSettings(rule=rule, group_size=8), problems)
        self.random = random.Random(0)
        self.admitted: list[Admit] = []
        self.handed: Batch | None = None
        self.now_s = 0.0
        self.num_events = 0
        self.spent_s = 0.0
        self.version = 0
        for sampler in range(num_samplers):
            self.handle(SamplerHello(sampler, 0, 1, 8 * (self.batch * (DEPTH + 1))))

    def handle(self, event: Event) -> None:
        """Time one event in the core; note what it orders."""
        self.now_s += 1e-6
        began_s = time.process_time()
        instructions = self.core.handle(event, self.now_s)
        self.spent_s += time.process_time() - began_s
        self.num_events += 1
        for instruction in instructions:
            self.note(instruction)

    def note(self, instruction: Instruction) -> None:
        """Keep admissions and batches."""
        if isinstance(instruction, ToSampler) and isinstance(instruction.message, Admit):
            self.admitted.append(instruction.message)
        elif isinstance(instruction, ToLearner) and isinstance(instruction.message, Batch):
            self.handed = instruction.message

    def step(self) -> None:
        """Finish groups in random order until a batch is handed over; train and publish it."""
        self.handle(Take(self.version, self.version, self.batch))
        while self.handed is None:
            self.finish_one()
        self.handed = None
        self.handle(Trained(self.version))
        self.version += 1
        self.handle(Published(self.version))
        self.handle(StepFinished(self.version - 1, {}))

    def finish_one(self) -> None:
        """Start and complete one in-flight group."""
        place = self.random.randrange(len(self.admitted))
        self.admitted[place], self.admitted[-1] = self.admitted[-1], self.admitted[place]
        admit = self.admitted.pop()
        self.handle(GroupStarted(admit.key, admit.min_version))
        self.handle(completed(admit))


def completed(admit: Admit) -> GroupCompleted:
    """Make the message of a whole group."""
    return GroupCompleted(
        key=admit.key,
        num_bytes=1,
        checksum=0,
        version_min=admit.min_version,
        version_max=admit.min_version,
        num_rollouts=8,
        num_tokens=8,
        reward_sum=4.0,
        reward_min=0.0,
        reward_max=1.0,
        num_timeouts=0,
        num_dropped_samples=0,
        seconds=1.0,
    )


def measure(outstanding: int, num_samplers: int, min_events: int) -> tuple[float, float]:
    """Return events and groups per CPU-second with so many groups outstanding."""
    gc.collect()
    gc.disable()  # as the scheduler process does: the core makes no reference cycles
    world = World(outstanding, num_samplers)
    world.step()  # fill the pipeline
    world.num_events, world.spent_s = 0, 0.0
    num_steps = 0
    while world.num_events < min_events:
        world.step()
        num_steps += 1
    world.core.validate()
    gc.enable()
    return world.num_events / world.spent_s, num_steps * world.batch / world.spent_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--min-events", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [(10, 1), (1_000, 4), (100_000, 8), (100_000, 256)]
    rates = {size: measure(*size, options.min_events) for size in sizes}
    groups_per_s = [groups for _, groups in rates.values()]
    ratio = min(groups_per_s) / max(groups_per_s)
    if options.json:
        events = {f"{size}_groups_{n}_samplers": e for (size, n), (e, _) in rates.items()}
        groups = {f"{size}_groups_{n}_samplers": g for (size, n), (_, g) in rates.items()}
        result = {"events_per_s": events, "groups_per_s": groups, "slowest_over_fastest": ratio}
        print(json.dumps(result))
        return
    for (size, samplers), (event_rate, group_rate) in rates.items():
        print(
            f"{size:>7} outstanding, {samplers:>3} samplers: {event_rate:>9,.0f} events/s, "
            f"{group_rate:>8,.0f} groups/s"
        )
    print(f"slowest over fastest, by groups: {ratio:.2f}")


if __name__ == "__main__":
    main()
