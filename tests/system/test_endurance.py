"""Long runs: what a process holds does not grow with the number of updates, and patience lasts.

Memory, descriptors and shared memory are read from /proc while the run goes on, by its own
progress (rows of metrics.jsonl), early and late.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl_node.core.order import problem_order
from tests.system.judge import judge
from tests.system.runs import LAUNCH, ROOT, fake_run, logs, processes_of
from tests.vllm_gate import need_vllm

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

GROWTH_BYTES = 6 << 20
"""Of a process's memory between the two windows: allocators breathe. A leak of 10 KB per update
would show in the long variants."""
VLLM_GROWTH_BYTES = 12 << 20
"""vLLM's engine breathes by 4 MB. One copy of the weights per update would be 53 MB in the short
variant."""
FAKE = ("--engine", "fake", "--fake.train-s", "0.01", "--fake.weight-bytes", "1000000")


def watch(run_dir: Path, steps: int, *flags: str) -> Iterator[tuple[int, str]]:
    """Run; yield (rows so far, id of the run) again and again. Asserts a good end."""
    output = run_dir.with_suffix(".out")
    command = [*LAUNCH, "--run-dir", str(run_dir), "--steps", str(steps), *flags]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)
    try:
        while process.poll() is None:
            try:
                run_id = json.loads((run_dir / "runtime.json").read_text())["run_id"]
                rows = (run_dir / "metrics.jsonl").read_text().count("\n")
            except (OSError, ValueError):  # not there yet
                rows, run_id = 0, ""
            yield rows, run_id
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output.read_text() + logs(run_dir)


class Held:
    """The most that each process held within a window, by pid: a name is lost before its process
    is, and the last of a window may find a run that ends."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.memory: defaultdict[int, int] = defaultdict(int)
        self.descriptors: defaultdict[int, int] = defaultdict(int)
        self.shm_bytes = 0
        self.samples = 0

    def read(self, run_id: str) -> None:
        """Read the processes of a run, and theirs."""
        for pid in processes_of(run_id):
            try:
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    name, rss, descriptors = each.name(), each.memory_info().rss, each.num_fds()
                    self.names.setdefault(each.pid, name)
                    self.memory[each.pid] = max(self.memory[each.pid], rss)
                    self.descriptors[each.pid] = max(self.descriptors[each.pid], descriptors)
            except psutil.NoSuchProcess:
                continue
        files = Path("/dev/shm").glob(f"arl-{run_id}*/**/*")
        self.shm_bytes = max(self.shm_bytes, sum(f.stat().st_size for f in files if f.is_file()))
        self.samples += 1


def check_flat(run_dir: Path, steps: int, *flags: str, growth_bytes: int = GROWTH_BYTES) -> None:
    """Compare the second fifth of a run with the last."""
    early, late = Held(), Held()
    for rows, run_id in watch(run_dir, steps, *flags):
        if run_id and steps // 5 <= rows < 2 * steps // 5:
            early.read(run_id)
        elif run_id and 4 * steps // 5 <= rows < steps - 1:
            late.read(run_id)
    assert early.samples
    assert late.samples
    assert len(early.memory) >= 3
    assert late.memory.keys() <= early.memory.keys(), "a process was restarted"
    growth = {pid: late.memory[pid] - early.memory[pid] for pid in late.memory}
    for pid, grown in growth.items():
        held = f"{early.memory[pid] >> 10} KiB, {late.descriptors[pid]} descriptors"
        print(f"{early.names[pid]}: {held}, grown by {grown >> 10} KiB")  # noqa: T201 - with -s
    assert max(growth.values()) <= growth_bytes, growth
    assert all(late.descriptors[pid] <= early.descriptors[pid] + 2 for pid in late.descriptors)
    assert late.shm_bytes <= early.shm_bytes
    judged = judge(run_dir)
    assert judged.events["restarted"] == 0
    assert len(judged.rows) == steps


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_updates_leave_no_more_than_a_few(tmp_path: Path, steps: int) -> None:
    flags = ("--samplers", "2", "--eval-problems", "0", "--groups-per-batch", "4")
    check_flat(tmp_path / "run", steps, *FAKE, *flags)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_updates_of_the_embedded_engine(tmp_path: Path) -> None:
    flags = ("--samplers", "2", "--eval-problems", "0", "--groups-per-batch", "4")
    check_flat(tmp_path / "run", 1000, "--learning-rate", "1e-5", *flags)


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_updates_of_vllm(tmp_path: Path, steps: int) -> None:
    """With few rows, so that every block of the key-value cache was in use before the first window.

    oneDNN's cache is kept short by `vllm_environment`: full, it would look like a leak of 0.4 GB.
    """
    need_vllm()
    flags = ("--engine", "vllm", "--eval-problems", "0", "--groups-per-batch", "4")
    few = ("--learning-rate", "1e-5", "--sampling.max-concurrent-rollouts", "32")
    check_flat(tmp_path / "run", steps, *flags, *few, growth_bytes=VLLM_GROWTH_BYTES)


def test_a_rollout_as_long_as_300_steps_never_restarts_its_sampler(tmp_path: Path) -> None:
    """It starts in the first step and is trained once, when the bound has the learner wait for it.

    Sixteen seconds are more than 305 such steps take on any machine that this is run on.
    """
    run_dir = tmp_path / "run"
    latencies = tmp_path / "latencies.json"
    _, straggler = next(problem_order(5000, 0, None))
    seconds = [0.001] * 5000
    seconds[straggler] = 16.0
    latencies.write_text(json.dumps(seconds))
    done = fake_run(
        run_dir,
        *("--steps", "310", "--fake.train-s", "0.001", "--fake.latencies", str(latencies)),
        *("--groups-per-batch", "2", "--group-size", "2", "--pipeline-depth", "4"),
        *("--max-steps-off-policy", "305", "--weights-overdue-s", "1"),
        *("--fake.num-problems", "5000"),
    )
    assert "restarts" not in done.stdout, "a warning names whoever is restarted, and why"
    judged = judge(run_dir)
    assert judged.events["restarted"] == 0
    (slow,) = [row for row in judged.trained if row["problem"] == straggler]
    assert slow["step"] - slow["version_min"] == 305
