"""What every process of a run does first and last: name, parent, threads, log, named faults."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import setproctitle

from asyncrl_node.config import Config
from asyncrl_node.config_file import read_config
from asyncrl_node.errors import EXIT_RUN_FAULT, EXIT_USER_ERROR, ConfigError, RunFault
from asyncrl_node.plan import engine_of
from asyncrl_node.run_directory import RunDirectory, Runtime, write_atomically

LAUNCHER_PID = "ASYNCRL_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class FaultFile(msgspec.Struct, frozen=True):
    """RUN_DIR/logs/PROCESS.fault: the last words of a process that stopped on a fault."""

    process: str
    name: str
    story: str


class ProcessContext(msgspec.Struct, frozen=True):
    """What a process is given."""

    name: str
    config: Config
    directory: RunDirectory
    runtime: Runtime
    index: int
    incarnation: int


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher dies, however it dies.

    A process started by hand (no launcher named in its environment) is left alone. The parent is
    compared after the call, for a launcher that died before it.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(launcher):
        os._exit(EXIT_RUN_FAULT)


def run_process(role: str, main: Callable[[ProcessContext], None]) -> None:
    """Run one process of a run by its command line; exits with 0 or 3, never with a traceback."""
    parser = argparse.ArgumentParser(prog=f"python -m asyncrl_node.{role}")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--index", type=int, default=0, help="which one of its kind")
    parser.add_argument("--incarnation", type=int, default=0, help="+1 with every restart")
    args = parser.parse_args()
    die_with_parent()
    name = role if role in ("scheduler", "learner") else f"{role}-{args.index}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    directory = RunDirectory(args.run_dir)
    try:
        runtime, config = directory.read_runtime(), read_config(directory.config)
    except (OSError, msgspec.MsgspecError, ConfigError) as error:
        sys.stderr.write(f"error: run_dir: must hold a run that is going on: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    setproctitle.setproctitle(f"asyncrl-{name} run={runtime.run_id}")
    context = ProcessContext(
        name=name,
        config=config,
        directory=directory,
        runtime=runtime,
        index=args.index,
        incarnation=args.incarnation,
    )
    try:
        _check_gpus(role, context)
        main(context)
    except RunFault as fault:
        leave_fault(directory, name, fault.name, fault.story)
        log.error("fault %s", fault)
        sys.exit(EXIT_RUN_FAULT)
    except Exception as error:
        log.exception("unexpected")
        story = traceback.format_exception_only(error)[-1].strip()
        leave_fault(directory, name, "crash", f"{story}; see {directory.logs / name}.log")
        sys.exit(EXIT_RUN_FAULT)


def _check_gpus(role: str, context: ProcessContext) -> None:
    """Compare the cards that this process sees with its own; the scripted engine touches none.

    Raises: RunFault
    """
    own = given_gpus(role, context.index, context.runtime)
    if own and engine_of(context.config) != "fake":
        from asyncrl_node.own_gpus import check_own_gpus

        check_own_gpus(own)


def given_gpus(role: str, index: int, runtime: Runtime) -> tuple[str, ...]:
    """UUIDs of the cards that the launcher gave to a process; none on a CPU."""
    if role == "learner":
        return runtime.learner_gpus
    if role == "sampler" and index < len(runtime.sampler_gpus):
        return runtime.sampler_gpus[index]
    return ()


def leave_fault(directory: RunDirectory, process: str, name: str, story: str) -> None:
    """Write the last words where the launcher looks for them."""
    words = FaultFile(process, name, story)
    write_atomically(directory.logs / f"{process}.fault", msgspec.json.encode(words))


def read_fault(directory: RunDirectory, process: str) -> FaultFile | None:
    """Read the last words of a process, if it left any."""
    path = directory.logs / f"{process}.fault"
    return msgspec.json.decode(path.read_bytes(), type=FaultFile) if path.exists() else None
