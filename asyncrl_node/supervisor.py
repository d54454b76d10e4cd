"""The launcher's work: start, watch and stop the processes of one run (see launch.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import assert_never

import msgspec
import psutil
import zmq

from asyncrl_node.cli import parse_command_line
from asyncrl_node.config import Config
from asyncrl_node.config_file import encode_config
from asyncrl_node.engines.vllm_start import vllm_environment
from asyncrl_node.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAULT,
    EXIT_USER_ERROR,
    ConfigError,
    RunFault,
)
from asyncrl_node.gpu_plan import GpuPlan, resolved, start_lines
from asyncrl_node.gpu_watch import THREAD_VARIABLES, GpuWatch, Role, usable_cores
from asyncrl_node.gpus import Nvml
from asyncrl_node.inspect.follow import RowFollower
from asyncrl_node.inspect.loggers import MetricLogger, check_loggers, make_loggers
from asyncrl_node.inspect.summary import print_summary
from asyncrl_node.inspect.view import View, make_view
from asyncrl_node.loss_rules import loss_notes
from asyncrl_node.messages import (
    Drain,
    LauncherHello,
    LauncherMessage,
    LauncherReport,
    Noted,
    RestartSampler,
    RunEnded,
    SamplerExited,
    Status,
    Warned,
)
from asyncrl_node.plan import (
    NVML,
    check_config,
    check_machine,
    check_run_dir,
    describe,
    engine_of,
    num_samplers,
    run_slot_bytes,
    settle,
    task_of,
)
from asyncrl_node.process import LAUNCHER_PID, read_fault
from asyncrl_node.run_directory import (
    RunDirectory,
    Runtime,
    new_runtime,
    sweep,
    sweep_dead_runs,
    write_atomically,
)
from asyncrl_node.transport.channel import Dealer, Peer, endpoint

_POLL_MS = 100
_MAX_RESTARTS = 3
_CRASH_LOOP_S = 600.0
_END_WITHIN_S = 15.0
_ASK_NVML_EVERY_S = 0.5


class Child:
    """One process of the run."""

    def __init__(
        self, name: str, command: list[str], directory: RunDirectory, more: dict[str, str]
    ) -> None:
        """Start it; `more` is added to its environment."""
        self.name = name
        with (directory.logs / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment() | more,
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
            )

    def exit_code(self) -> int | None:
        """Return how it ended, or None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        """End it now and reap it."""
        self.process.kill()
        self.process.wait()


class Sampler:
    """One sampler's place: its present process, and how often it was restarted."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = 0
        self.child: Child | None = None
        self.restarts_s: list[float] = []
        """When it was restarted, of late."""
        self.waits_since_s: float | None = None
        """Since when its cards should be free; None: it runs."""
        self.wait_is_told = False


def _environment() -> dict[str, str]:
    """One thread per process: two OpenMP threads each on two cores made a job ten times slower."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    own = {LAUNCHER_PID: str(os.getpid())}
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), **quiet, **own}


class Supervisor:
    """All processes of one run."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        runtime: Runtime,
        show: Callable[[LauncherReport | None], None],
        signals: Sequence[int],
        watch: GpuWatch | None = None,
    ) -> None:
        """Take `show`, which is called with every report, and with None several times a second.

        `signals` grows with every request to end: the first drains, the second kills. `watch` has
        the GPUs of the run; None: it runs on the CPU.
        """
        self._config = config
        self._directory = directory
        self._runtime = runtime
        self._show = show
        self._zmq = zmq.Context()
        address = endpoint(Path(runtime.sockets_dir), "scheduler")
        self._scheduler: Dealer[LauncherReport, LauncherMessage] = Dealer(
            self._zmq, address, Peer("launcher"), LauncherReport
        )
        self._children: list[Child] = []
        self._samplers = [Sampler(index) for index in range(num_samplers(config))]
        self._signals = signals
        self._watch = watch
        self._asked_nvml_s = 0.0
        self._looked_for_strays = False
        self._drained = False
        self.ended: RunEnded | None = None

    # -- life --------------------------------------------------------------------------------

    def run(self) -> None:
        """Start everything; return when the run has ended. Raises: RunFault."""
        try:
            self._start()
            while self.ended is None and len(self._signals) < 2:
                self._poll()
            self._wait_for_exits()
        finally:
            self._kill_all()
            self._scheduler.close()
            self._zmq.term()

    def _start(self) -> None:
        self._scheduler.send(LauncherHello())
        self._spawn("scheduler", "scheduler")
        self._spawn("learner", "learner")
        for sampler in self._samplers:
            self._spawn_sampler(sampler)

    def _spawn(self, name: str, role: Role, *more: str, index: int = 0) -> Child:
        command = [sys.executable, "-m", f"asyncrl_node.{role}"]
        command += ["--run-dir", str(self._directory.path), *more]
        child = Child(name, command, self._directory, self._environment(role, index))
        self._children.append(child)
        return child

    def _spawn_sampler(self, sampler: Sampler) -> None:
        sampler.waits_since_s, sampler.wait_is_told = None, False
        sampler.child = self._spawn(
            f"sampler-{sampler.index}",
            "sampler",
            *("--index", str(sampler.index), "--incarnation", str(sampler.incarnation)),
            index=sampler.index,
        )

    def _environment(self, role: Role, index: int) -> dict[str, str]:
        """Make what is added to the environment of a process."""
        more: dict[str, str] = {}
        if role == "sampler" and engine_of(self._config) == "vllm":
            on_cpu = self._watch is None
            more = vllm_environment(on_cpu, -1, self._runtime.sockets_dir)
        if self._watch is not None:
            more |= self._watch.environment_of(role, index, usable_cores(), os.environ)
        return more

    def _poll(self) -> None:
        self._scheduler.socket.poll(_POLL_MS)
        self._receive()
        self._show(None)
        if self.ended is None:
            self._watch_children()
            self._start_waiting()
        if self._signals and not self._drained:
            self._drained = True
            self._scheduler.send(Drain())

    def _receive(self) -> None:
        while (report := self._scheduler.receive()) is not None:
            self._digest(report)

    def _digest(self, report: LauncherReport) -> None:
        match report:
            case RunEnded():
                self.ended = report
            case RestartSampler():
                for sampler in self._samplers:
                    known = (sampler.index, sampler.incarnation)
                    if sampler.child and known == (report.sampler, report.incarnation):
                        self._restart(sampler, report)
            case Status():
                self._show(report)
                self._look_for_strays(report)
            case Warned() | Noted():
                self._show(report)
            case _:
                assert_never(report)

    # -- deaths ------------------------------------------------------------------------------

    def _watch_children(self) -> None:
        for sampler in self._samplers:
            child = sampler.child
            if child is not None and (code := child.exit_code()) is not None:
                if code == 0 and self._ends_now():
                    return
                fault = read_fault(self._directory, child.name)
                name = fault.name if fault else "sampler_died"
                story = fault.story if fault else f"it {_died(code)}"
                report = RestartSampler(sampler.index, sampler.incarnation, name, story)
                self._restart(sampler, report)
        samplers = [sampler.child for sampler in self._samplers]
        for child in self._children:
            if child not in samplers and (code := child.exit_code()) is not None:
                self._stop_for(child, code)

    def _ends_now(self) -> bool:
        """Wait for the last words of a run in which a process ended well; the clock ends this.

        It was told to end before they were sent, and they may still be on their way.
        """
        until_s = time.monotonic() + _END_WITHIN_S
        while self.ended is None and time.monotonic() < until_s:
            self._scheduler.socket.poll(_POLL_MS)
            self._receive()
        return self.ended is not None

    def _stop_for(self, child: Child, code: int) -> None:
        """The learner or the scheduler is gone: the run cannot go on, unless it has just ended."""
        if code == 0 and self._ends_now():
            return
        fault = read_fault(self._directory, child.name)
        if fault is not None:
            raise RunFault(fault.name, f"{child.name}: {fault.story}")
        log = self._directory.logs / f"{child.name}.log"
        raise RunFault(f"{child.name}_died", f"the {child.name} {_died(code)}; see {log}")

    def _restart(self, sampler: Sampler, why: RestartSampler) -> None:
        """Replace a sampler; its groups restart on their slots. Too often: stop by name."""
        assert sampler.child is not None
        self._show(why)
        sampler.child.kill()
        self._children.remove(sampler.child)
        now_s = time.monotonic()
        recent = [at_s for at_s in sampler.restarts_s if now_s - at_s < _CRASH_LOOP_S]
        sampler.restarts_s = [*recent, now_s]
        if len(sampler.restarts_s) > _MAX_RESTARTS:
            story = (
                f"sampler {sampler.index} ended {len(sampler.restarts_s)} times in "
                f"{_CRASH_LOOP_S / 60:.0f} minutes, the last time by {why.name}: {why.story}"
            )
            raise RunFault("crash_loop", story)
        self._scheduler.send(SamplerExited(sampler.index, sampler.incarnation))
        sampler.incarnation += 1
        fault = self._directory.logs / f"sampler-{sampler.index}.fault"
        fault.unlink(missing_ok=True)
        sampler.child = None
        sampler.waits_since_s = now_s
        self._start_waiting(ask_now=True)

    # -- GPUs --------------------------------------------------------------------------------

    def _start_waiting(self, ask_now: bool = False) -> None:
        """Start the samplers that wait for their cards, as soon as nobody is on these.

        The clock ends the wait. Raises: RunFault("gpu_not_free"), naming who is in the way.
        """
        now_s = time.monotonic()
        waiting = [sampler for sampler in self._samplers if sampler.waits_since_s is not None]
        if not waiting or (not ask_now and now_s - self._asked_nvml_s < _ASK_NVML_EVERY_S):
            return
        self._asked_nvml_s = now_s
        for sampler in waiting:
            reason = self._watch.why_not_free(sampler.index) if self._watch else ""
            if not reason:
                self._spawn_sampler(sampler)
                continue
            assert sampler.waits_since_s is not None
            waited_s = now_s - sampler.waits_since_s
            if waited_s > self._config.weights_overdue_s:
                story = (
                    f"sampler {sampler.index} cannot start again: {reason}, {waited_s:.0f} s after "
                    "it ended; end that process, or raise weights_overdue_s"
                )
                raise RunFault("gpu_not_free", story)
            if not sampler.wait_is_told:
                sampler.wait_is_told = True
                self._show(Warned(f"sampler {sampler.index} waits: {reason}"))

    def _look_for_strays(self, status: Status) -> None:
        """Warn of contexts on foreign cards, once, when every sampler has had an update."""
        first = self._config.start_version
        versions = [sampler.policy_version for sampler in status.samplers]
        updated = len(versions) == len(self._samplers) and min(versions) > first
        if self._watch is None or self._looked_for_strays or not updated:
            return
        self._looked_for_strays = True
        owned: dict[int, frozenset[str]] = {}
        learner = next(child for child in self._children if child.name == "learner")
        places: list[tuple[Role, int, Child]] = [("learner", 0, learner)]
        for sampler in self._samplers:
            if sampler.child is not None:
                places.append(("sampler", sampler.index, sampler.child))
        for role, index, child in places:
            uuids = frozenset(gpu.uuid for gpu in self._watch.gpus_of(role, index))
            owned.update(dict.fromkeys(_family(child.process.pid), uuids))
        for story in self._watch.strays(owned):
            self._show(Warned(f"{story}, which is not its own: its memory is missing there"))

    def _wait_for_exits(self) -> None:
        """Give the processes the time to end by themselves; the owner of this wait is the clock."""
        for sampler in self._samplers:
            if sampler.child is not None:
                sampler.child.process.terminate()  # it holds nothing; it may never have connected
        until_s = time.monotonic() + _END_WITHIN_S
        while time.monotonic() < until_s and len(self._signals) < 2:
            if all(child.exit_code() is not None for child in self._children):
                return
            self._show(None)
            self._scheduler.socket.poll(_POLL_MS)
            self._scheduler.receive()

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()


def _family(pid: int) -> list[int]:
    """List a process and all below it: an engine's workers are its children."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _died(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


@contextlib.contextmanager
def _caught_signals() -> Iterator[Sequence[int]]:
    """Collect requests to end, from before anything is made until all is swept."""
    caught: list[int] = []
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in wanted}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Screen:
    """What each poll feeds: view, loggers."""

    def __init__(self, view: View, rows: RowFollower, loggers: list[MetricLogger]) -> None:
        self._view = view
        self._rows = rows
        self._loggers = loggers

    def __call__(self, report: LauncherReport | None) -> None:
        if isinstance(report, Status):
            self._view.show_status(report)
        elif isinstance(report, Warned):
            self._view.warn(report.text)
        elif isinstance(report, Noted):
            self._view.note(report.text)
        elif isinstance(report, RestartSampler):
            self._view.warn(f"sampler {report.sampler} restarts, {report.name}: {report.story}")
        for row in self._rows.new_rows():
            self._view.show_row(row)
            for logger in self._loggers:
                logger.log(row)


def main(arguments: list[str], nvml: Nvml = NVML) -> int:
    """Run launch.py; return its exit code. `nvml` shows the machine's GPUs."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    try:
        command = parse_command_line(arguments)
        if command.resume:
            raise ConfigError("resume", "is not built yet", command.resume)
        config = command.config
        check_config(config)
        check_loggers(config)
        if command.dry_run:
            sys.stdout.write(describe(config, nvml) + "\n")
            return 0
        path = check_run_dir(config)
        plan = check_machine(config, nvml)
        config = settle(config)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    watch = None
    if plan is not None:
        config = resolved(config, plan)
        watch = GpuWatch(plan.placement, nvml)
        _say(start_lines(plan))
    with _caught_signals() as signals:
        directory = RunDirectory(path.absolute())
        try:
            runtime = _prepare(config, directory, plan)
        except OSError as error:
            sys.stderr.write(f"error: run_dir: must be writable: {error} (got {path})\n")
            return EXIT_USER_ERROR
        return _run(config, directory, runtime, signals, watch)


def _say(lines: Iterable[str]) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: the view finds out too
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def _prepare(config: Config, directory: RunDirectory, plan: GpuPlan | None) -> Runtime:
    """Make the run directory and what the processes need to find each other.

    What launchers that were killed have left in memory is swept first.
    """
    sweep_dead_runs()
    directory.create()
    write_atomically(directory.config, encode_config(config))
    runtime = new_runtime(run_slot_bytes(config, task_of(config)))
    if plan is not None:
        placement = plan.placement
        runtime = msgspec.structs.replace(
            runtime,
            learner_gpus=tuple(gpu.uuid for gpu in placement.learners),
            sampler_gpus=tuple(tuple(gpu.uuid for gpu in gpus) for gpus in placement.samplers),
        )
    directory.write_runtime(runtime)
    return runtime


def _run(
    config: Config,
    directory: RunDirectory,
    runtime: Runtime,
    signals: Sequence[int],
    watch: GpuWatch | None,
) -> int:
    began_s = time.monotonic()
    fault: RunFault | None = None
    loggers = make_loggers(config, directory)
    view = make_view(config, directory)
    screen = _Screen(view, RowFollower(directory.metrics), loggers)
    supervisor = Supervisor(config, directory, runtime, screen, signals, watch)
    try:
        with view:
            for note in loss_notes(config):
                view.warn(note)
            supervisor.run()
            screen(None)
    except RunFault as error:
        fault = error
    finally:
        sweep(runtime)
        directory.runtime.unlink(missing_ok=True)
        for logger in loggers:
            logger.close()
    wall_s = time.monotonic() - began_s
    with contextlib.suppress(SystemExit, OSError):  # nobody reads it: the run is recorded
        print_summary(config, directory, supervisor.ended, fault, wall_s)
    if fault is not None:
        sys.stderr.write(f"stopped: {fault}\n")
        return EXIT_RUN_FAULT
    return EXIT_INTERRUPTED if signals else 0
