"""Check 17: scheduler, learner and sampler as in a run, on one GPU. Has not run on a GPU.

    here: a launcher that starts them, waits for the scheduler's last words, and kills what is left
    scheduler, learner (torch, cuda:0), sampler (torch engine, the same card)      child.py

The program itself gives each process a card of its own; this puts two on one, told by the UUID that
both are given. Waits: for the scheduler's report and for its end; ended by a child that exits, or
by the clock.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from asyncrl_node.config import Config, PacingConfig, SamplingConfig
from asyncrl_node.config_file import encode_config
from asyncrl_node.errors import RunFault
from asyncrl_node.gpu_watch import THREAD_VARIABLES
from asyncrl_node.inspect.verify import verify
from asyncrl_node.messages import LauncherHello, LauncherMessage, LauncherReport, RunEnded, Warned
from asyncrl_node.plan import run_slot_bytes, task_of
from asyncrl_node.process import LAUNCHER_PID, read_fault
from asyncrl_node.run_directory import RunDirectory, Runtime, new_runtime, sweep
from asyncrl_node.transport.channel import Dealer, Peer, endpoint
from perf.gpu_checks.models import write_random_model
from perf.gpu_checks.outcome import Outcome, Session, judge

ROOT = Path(__file__).resolve().parents[2]
TASK = f"{Path(__file__).with_name('even_tokens.py')}:EvenTokens"
_WITHIN_S = 150.0
_END_WITHIN_S = 15.0
_STOOD_STILL = re.compile(r"version (\d+): stood still for ([0-9.]+) s")


class RunFigures(NamedTuple):
    """What a run left behind."""

    breaches: list[str]
    """Of the verifier."""
    num_trained: int
    stalls_s: list[float]
    """How long the sampler stood still, by version, the first left out: it makes the model."""
    warnings: list[str]


def config_of(folder: Path, model_dir: Path, steps: int, on_gpu: bool) -> Config:
    """Configure the run."""
    return Config(
        run_dir=str(folder / "run"),
        steps=steps,
        task=TASK,
        model=str(model_dir),
        engine="torch",
        gpus="0," if on_gpu else None,
        learners=1 if on_gpu else None,
        samplers=1,
        eval_problems=0,
        pacing=PacingConfig(groups_per_batch=4, group_size=4),
        sampling=SamplingConfig(max_new_tokens=48, max_concurrent_rollouts=32),
    )


def run_whole(folder: Path, model_dir: Path, steps: int, uuid: str | None) -> RunFigures:
    """Run it to its end; `uuid` is the card of both, None a CPU. Raises: RunFault."""
    config = config_of(folder, model_dir, steps, uuid is not None)
    directory = RunDirectory(Path(config.run_dir))
    directory.create()
    directory.config.write_bytes(encode_config(config))
    runtime = new_runtime(run_slot_bytes(config, task_of(config)))
    if uuid is not None:
        runtime = msgspec.structs.replace(runtime, learner_gpus=(uuid,), sampler_gpus=((uuid,),))
    directory.write_runtime(runtime)
    try:
        warnings = _run_processes(directory, runtime, uuid)
    finally:
        sweep(runtime)
    log = (directory.logs / "sampler-0.log").read_text()
    stalls = {int(version): float(s) for version, s in _STOOD_STILL.findall(log)}
    verdict = verify(directory.path)
    later = [s for version, s in sorted(stalls.items()) if version > config.start_version]
    return RunFigures(verdict.breaches, verdict.trained, later, warnings)


def _run_processes(directory: RunDirectory, runtime: Runtime, uuid: str | None) -> list[str]:
    """Start the processes and wait for the run's end; return the warnings. Raises: RunFault."""
    context = zmq.Context()
    scheduler: Dealer[LauncherReport, LauncherMessage] = Dealer(
        context, endpoint(Path(runtime.sockets_dir), "scheduler"), Peer("launcher"), LauncherReport
    )
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        scheduler.send(LauncherHello())
        for name in ("scheduler", "learner", "sampler-0"):
            children[name] = _start(name, directory, uuid)
        warnings = _wait(scheduler, children, directory)
        for name in ("learner", "scheduler"):  # which write their last records as they end
            children[name].wait(_END_WITHIN_S)
        return warnings
    finally:
        for child in children.values():
            child.kill()
            child.wait()
        scheduler.close()
        context.term()


def _start(name: str, directory: RunDirectory, uuid: str | None) -> subprocess.Popen[bytes]:
    role = name.removesuffix("-0")
    environment = {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, "1"),
        LAUNCHER_PID: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if uuid is not None:
        seen = "" if role == "scheduler" else uuid
        environment |= {"CUDA_VISIBLE_DEVICES": seen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [sys.executable, "-m", "perf.gpu_checks.child", role]
    command += ["--run-dir", str(directory.path)]
    with (directory.logs / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )


def _wait(
    scheduler: Dealer[LauncherReport, LauncherMessage],
    children: dict[str, subprocess.Popen[bytes]],
    directory: RunDirectory,
) -> list[str]:
    warnings: list[str] = []
    until_s = time.monotonic() + _WITHIN_S
    gone: str | None = None
    while True:
        scheduler.socket.poll(100)
        while (report := scheduler.receive()) is not None:
            if isinstance(report, RunEnded):
                return warnings
            if isinstance(report, Warned):
                warnings.append(report.text)
        if gone is not None:
            fault = read_fault(directory, gone)
            if fault is not None:
                raise RunFault(fault.name, f"{gone}: {fault.story}")
            code = children[gone].returncode
            words = (directory.logs / f"{gone}.log").read_text().splitlines()[-3:]
            raise RunFault(f"{gone}_died", f"exit code {code}: {' | '.join(words)}")
        # One that ends well has told the scheduler, whose last words may still be on their way.
        failed = (name for name, child in children.items() if child.poll() not in (None, 0))
        gone = next(failed, None)
        if time.monotonic() > until_s:
            raise RunFault("did_not_end", f"the run has not ended within {_WITHIN_S:.0f} s")


def check_whole_run(session: Session) -> Outcome:
    """Train for some steps with updates in flight, and have the run verified.

    A sampler may skip a version, and the run may end before the last one has arrived.
    """
    size, steps = session.scale.run_model, session.scale.run_steps
    model_dir = write_random_model(size, session.folder, session.on)
    uuid = session.device.uuid if session.on == "cuda" else None
    found = run_whole(session.folder, model_dir, steps, uuid)
    stall_s = statistics.median(found.stalls_s) if found.stalls_s else float("inf")
    value = (
        f"{found.num_trained} groups trained, {len(found.breaches)} breaches, "
        f"{len(found.stalls_s)} updates of {1e3 * stall_s:.0f} ms"
    )
    passed = not found.breaches and len(found.stalls_s) >= steps // 2 and stall_s <= 0.1
    return judge(passed, value, "; ".join([*found.breaches[:2], *found.warnings[:2]]))
