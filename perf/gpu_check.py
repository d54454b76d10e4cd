"""Does everything that only a GPU can show hold on this GPU? 17 lines in under four minutes.

    python perf/gpu_check.py [--all] [--only N ...] [--budget-s 210]

Each line is PASS, FAIL or SKIP, with the value, what was expected, the limit and the reason. A line
passes only by measuring; what this machine or this version cannot do is a SKIP that says why. The
last line is JSON: `copy_ratio` (IPC copy rate / local copy rate), `mfu` (learner step) and `exact`
(every byte that was compared was right); null for what did not run.

Exit code 0 if no line failed, also where none could run; 1 if one did; 2 for a wrong argument.

One GPU is enough, and torch, numpy, pyzmq, msgspec, transformers; for the few other packages of the
program that are missing, stand-ins do (gpu_checks/stand_ins.py). --all adds what needs several GPUs
or vLLM, 8 lines, in up to a quarter of an hour. Limits in absolute units are of an H200.

The checks are in gpu_checks/; they run the program's own code wherever there is some. **None of
them has run on a GPU.** What one GPU cannot show is what --all adds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perf.gpu_checks.measure import used_bytes  # noqa: E402
from perf.gpu_checks.outcome import MIB, Check, Outcome, Session, outcome_of  # noqa: E402
from perf.gpu_checks.table import CHECKS, EXTRA_CHECKS  # noqa: E402

BUDGET_S = 210.0
BUDGET_OF_ALL_S = 900.0
GRACE_S = 25.0


def run_check(check: Check, session: Session) -> Outcome:
    """Run one check; whatever it raises becomes its line."""
    import torch

    try:
        outcome = check.run(session)
    except Exception as error:  # noqa: BLE001 - one line fails, the others are still worth running
        return outcome_of(error)
    finally:
        torch.cuda.empty_cache()
    session.figures.update(outcome.figures)
    return outcome


def blocker(check: Check) -> str:
    """Say why a check cannot run here; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    if torch.cuda.device_count() < check.num_gpus:
        return f"needs {check.num_gpus} GPUs, {torch.cuda.device_count()} here"
    if check.needs_vllm and importlib.util.find_spec("vllm") is None:
        return "vllm cannot be imported here: pip install -e '.[vllm]'"
    return ""


def print_line(check: Check, outcome: Outcome, took_s: float) -> None:
    """Print one line of the report."""
    parts = [
        f"{check.number:>2} {outcome.status} {check.title}: {outcome.value}",
        f"expected {check.expected}",
        f"limit {check.limit}",
    ]
    if outcome.reason:
        parts.append(f"reason: {outcome.reason}")
    print("; ".join(parts) + f" [{took_s:.1f} s]", flush=True)


def print_result(session: Session, outcomes: dict[str, Outcome]) -> None:
    """Print the last line."""
    compared = [outcome.exact for outcome in outcomes.values() if outcome.exact is not None]
    statuses = [outcome.status for outcome in outcomes.values()]
    result = {
        "copy_ratio": session.figures.get("copy_ratio"),
        "mfu": session.figures.get("mfu"),
        "exact": all(compared) if compared else None,
        "num_passed": statuses.count("PASS"),
        "num_failed": statuses.count("FAIL"),
        "num_skipped": statuses.count("SKIP"),
        "checks": {number: outcome.status for number, outcome in outcomes.items()},
    }
    print(json.dumps(result), flush=True)


def describe_machine() -> str:
    """Say what this ran on."""
    import torch

    runtime = "gVisor" if "gvisor" in Path("/proc/version").read_text().lower() else "Linux"
    versions = f"torch {torch.__version__}, transformers " + metadata.version("transformers")
    text = f"{versions}, {runtime}"
    if not torch.cuda.is_available():
        return f"{text}, no GPU"
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        driver = "driver version not readable"
    return f"{text}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {driver}"


def print_memory(session: Session, when: str) -> None:
    """Print the memory in use on the first GPU."""
    import torch

    if torch.cuda.is_available():
        used = used_bytes(session) / MIB
        print(f"GPU memory in use at the {when}: {used:.0f} MiB", flush=True)


def give_up(running: list[Check], session: Session, outcomes: dict[str, Outcome]) -> None:
    """End the process when a check does not return: a hang is a failure with a line of its own."""
    outcomes[running[-1].number] = Outcome("FAIL", "-", "did not return within the budget")
    print_line(running[-1], outcomes[running[-1].number], 0.0)
    print_result(session, outcomes)
    os._exit(1)


def run_checks(checks: Sequence[Check], budget_s: float, session: Session) -> dict[str, Outcome]:
    """Run and print every check; those that the budget leaves no time for are skipped."""
    outcomes: dict[str, Outcome] = {}
    started_s = time.monotonic()
    running: list[Check] = []
    watchdog = threading.Timer(budget_s + GRACE_S, give_up, (running, session, outcomes))
    watchdog.daemon = True
    watchdog.start()
    for check in checks:
        check_started_s = time.monotonic()
        running.append(check)
        if reason := blocker(check):
            outcome = Outcome("SKIP", "-", reason)
        elif check_started_s - started_s > budget_s:
            outcome = Outcome("SKIP", "-", f"the budget of {budget_s:.0f} s is spent")
        else:
            outcome = run_check(check, session)
        outcomes[check.number] = outcome
        print_line(check, outcome, time.monotonic() - check_started_s)
    watchdog.cancel()
    print_memory(session, "end")
    print_result(session, outcomes)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    numbers = [check.number for check in (*CHECKS, *EXTRA_CHECKS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="also what needs several GPUs or vLLM")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=numbers, metavar="N", help="these, of all"
    )
    parser.add_argument("--budget-s", type=float, help=f"[{BUDGET_S:g}; {BUDGET_OF_ALL_S:g}]")
    options = parser.parse_args(arguments)
    checks: Sequence[Check] = CHECKS
    if options.all or options.only:
        checks = (*CHECKS, *EXTRA_CHECKS)
    if options.only:
        checks = [check for check in checks if check.number in options.only]
    budget_s = options.budget_s or (BUDGET_OF_ALL_S if options.all else BUDGET_S)
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder))
        print_memory(session, "start")
        outcomes = run_checks(checks, budget_s, session)
    return int(any(outcome.status == "FAIL" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
