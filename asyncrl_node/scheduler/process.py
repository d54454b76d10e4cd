"""The scheduler process: receive -> core -> obey. It decides nothing.

    samplers, learner, launcher --ROUTER--> SchedulerCore --instructions--> sockets, slots, ledger

Its one wait is the poll on its socket, ended by any message or after 50 ms (for the clock).
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any, assert_never

import msgspec
import zmq

from asyncrl_node.config import Config
from asyncrl_node.core.instructions import (
    Finish,
    Instruction,
    Record,
    ReleaseSlot,
    ReserveSlot,
    ToLauncher,
    ToLearner,
    ToSampler,
    WriteRow,
)
from asyncrl_node.core.order import problem_order
from asyncrl_node.core.scheduler_state import SchedulerSettings
from asyncrl_node.core.scheduling import SchedulerCore, Tick
from asyncrl_node.messages import (
    LauncherMessage,
    LauncherReport,
    LearnerReport,
    Noted,
    SamplerExited,
    SamplerHello,
    SamplerMessage,
    SamplerOrder,
    Warned,
)
from asyncrl_node.plan import pacing_rule, task_of
from asyncrl_node.process import ProcessContext
from asyncrl_node.run_directory import slot_folder
from asyncrl_node.scheduler.ledger import Ledger
from asyncrl_node.transport.channel import Peer, Router, endpoint
from asyncrl_node.transport.rows import RowFile

log = logging.getLogger(__name__)

_TICK_S = 0.05
_STATUS_EVERY_S = 0.2
_FLUSH_EVERY_S = 0.05
_LAUNCHER_WITHIN_S = 3.0
_OBEY_AT_ONCE = 16

LEARNER = Peer("learner")
LAUNCHER = Peer("launcher")


def scheduler_settings(config: Config) -> SchedulerSettings:
    """Pick what the core needs."""
    return SchedulerSettings(
        rule=pacing_rule(config),
        group_size=config.pacing.group_size,
        num_substeps=config.learner.num_substeps,
        seed=config.seed,
        start_version=config.start_version,
        filter_constant_rewards=config.pacing.filter_constant_rewards,
        fixed_staleness=config.pacing.fixed_staleness,
        eval_problems=config.eval_problems,
        warn_every_s=config.warn_every_s,
        rollout_timeout_s=config.sampling.rollout_timeout_s,
    )


class SchedulerProcess:
    """The shell around the core."""

    def __init__(self, context: ProcessContext) -> None:
        config, directory, runtime = context.config, context.directory, context.runtime
        task = task_of(config)
        problems = problem_order(task.num_train_problems, config.seed, config.epochs)
        self.core = SchedulerCore(scheduler_settings(config), problems)
        self._slots = slot_folder(runtime)
        self._ledger = Ledger(directory.ledger, runtime.run_attempt)
        self._rows = RowFile(directory.metrics)
        self._zmq = zmq.Context()
        self._router: Router[Any, Any] = Router(
            self._zmq,
            endpoint(Path(runtime.sockets_dir), "scheduler"),
            {
                "sampler": SamplerMessage,
                "learner": LearnerReport,
                "launcher": LauncherMessage,
            },
        )
        self._incarnations: dict[int, int] = {}
        self._last_flush_s = 0.0
        self._last_status_s = 0.0
        self._todo: deque[Instruction] = deque()
        self._finished = False

    def run(self) -> None:
        """Serve until the core says that everything is recorded."""
        try:
            while not self._finished:
                self._router.socket.poll(0 if self._todo else _TICK_S * 1000)
                self._drain_socket()
                self._queue(self.core.handle(Tick(), time.monotonic()))
                self._obey_some()
                self._housekeeping()
            self._wait_for_launcher()
        finally:
            self._ledger.close()
            self._rows.close()
            self._router.close()
            self._zmq.term()

    def _wait_for_launcher(self) -> None:
        """Keep the last words for a launcher that has not connected yet; the clock ends this."""
        until_s = time.monotonic() + _LAUNCHER_WITHIN_S
        while self._router.has_waiting(LAUNCHER) and time.monotonic() < until_s:
            self._router.socket.poll(_TICK_S * 1000)
            self._router.receive()

    def _drain_socket(self) -> None:
        while not self._finished and (received := self._router.receive()) is not None:
            peer, message = received
            if isinstance(message, Warned | Noted):
                self._report(message)
                continue
            if isinstance(message, SamplerHello):
                self._incarnations[message.sampler] = message.incarnation
                log.info("%s, pid %d", peer, message.pid)
            elif isinstance(message, SamplerExited):
                log.warning("sampler %d, start %d, is gone", message.sampler, message.incarnation)
            self._queue(self.core.handle(message, time.monotonic()))

    def _queue(self, instructions: list[Instruction]) -> None:
        """Answer the learner at once; queue the rest, in order.

        A publication brings dozens of admissions, each with a slot to make; the learner's next take
        must not wait for them. Nothing it is told depends on what is still queued.
        """
        for instruction in instructions:
            if isinstance(instruction, ToLearner):
                self._router.send(LEARNER, instruction.message)
            else:
                self._todo.append(instruction)

    def _obey_some(self) -> None:
        """Obey a few instructions, then look at the socket again."""
        for _ in range(min(_OBEY_AT_ONCE, len(self._todo))):
            self._obey(self._todo.popleft())

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case ToSampler():
                self._send_sampler(instruction.sampler, instruction.message)
            case ToLearner():
                self._router.send(LEARNER, instruction.message)
            case ToLauncher():
                self._report(instruction.message)
            case ReserveSlot():
                self._slots.reserve(instruction.key)
            case ReleaseSlot():
                self._slots.release(instruction.key)
            case Record():
                self._ledger.add(instruction, time.time())
            case WriteRow():
                self._rows.write(instruction.row)
            case Finish():
                self._ledger.add_end(instruction.reason, time.time())
                self._finished = True
            case _:
                assert_never(instruction)

    def _send_sampler(self, sampler: int, order: SamplerOrder) -> None:
        self._router.send(Peer("sampler", sampler, self._incarnations[sampler]), order)

    def _report(self, report: LauncherReport) -> None:
        log.info("%s", msgspec.json.encode(report).decode())
        self._router.send(LAUNCHER, report)

    def _housekeeping(self) -> None:
        now = time.monotonic()
        if now - self._last_flush_s >= _FLUSH_EVERY_S:
            self._last_flush_s = now
            self._ledger.flush()
        if now - self._last_status_s >= _STATUS_EVERY_S:
            self._last_status_s = now
            if self._router.knows(LAUNCHER):
                self._router.send(LAUNCHER, self.core.status())


def main(context: ProcessContext) -> None:
    """Run the scheduler.

    The core makes no reference cycles (tests/core/test_scheduling.py), so the cycle collector would
    only scan every outstanding group again and again, at a cost that grows with their number.
    """
    gc.disable()
    SchedulerProcess(context).run()
