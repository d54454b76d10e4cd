"""How long does a sampler stand still for new weights, and when do all samplers have them?

    python perf/weights.py [--json] [--engines torch,vllm] [--samplers 1,4] [--kv recompute,keep]
                           [--repeats N] [--no-sampling] [--gpus N]

100M random parameters in float32. The learner's side is this process (the real PublishingCore,
Courier and buffer, without a trainer), the samplers are real processes of one thread each
(sampler_rig.py). Everything is compared with one memcpy of the same bytes, made before each
publication of the same run: from the shared buffer into private memory whose pages are there
("warm"), nothing else running. Version 0 is not counted: it also builds the model. A ratio is the
median over the publications by the median memcpy; `best_` ratios are of the least of each, which
is what is left of them on a machine that others use too.

stall_over_memcpy           No request is running. How long no decode step was possible, by the
                            sampler's own clock: the embedded engine from the grant of the lease
                            until its loop is free; vLLM from asking for the pause until resumed.
                            The slowest sampler counts. The canary is apart, see canary_s.
publish_to_ack_over_memcpy  No request is running. From telling the courier that the version is
                            complete in the buffer (written, hashed) until the learner has read
                            the last sampler's acknowledgement and compared its hash: so the
                            announcement, the lease, the copy, vLLM's own load, the hash of the
                            copy, and five messages a sampler. Without the canary.
with_canary_over_memcpy     The same with it, as in a run by default: before it acknowledges, every
                            sampler scores 8 tokens; at two loads and then at every eighth it
                            decodes two more before (canary_s). The embedded
                            engine decodes nothing else meanwhile; to vLLM it is one more request.
..._over_parallel_memcpy    The same against as many processes as samplers, each copying the
                            buffer at once, until the last is done: what this memory allows.
busy                        16 requests are running on every sampler, and two updates come one after
                            the other, with the canary. cpu_s: CPU seconds that one update adds to a
                            fixed amount of sampling, on one sampler: copy, hash, canary, and with
                            `recompute` the key-value cache of the 16 computed anew. stall_s and
                            publish_to_ack_s as above, while that goes on.
recompute_cpu_s             The part of it that recomputing is: recompute less keep (--kv of vLLM).

The two keys are of the embedded engine, the worse of the numbers of samplers. Bars: 1.5 and 6.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl_node.config import Config, PacingConfig, SamplingConfig  # noqa: E402
from asyncrl_node.engines.torch_model import ModelConfig  # noqa: E402
from asyncrl_node.engines.vllm_start import CPU_INSTALL  # noqa: E402
from perf.sampler_rig import (  # noqa: E402
    HUNDRED_MILLION,
    RANDOM_PROMPTS,
    TINY,
    SamplerRig,
    Update,
    make_model,
    read_flat,
)

STALL_BAR, ACK_BAR = 1.5, 6.0
GROUP_SIZE = 4
GROUPS_PER_SAMPLER = 4
UPDATES_WHILE_SAMPLING = 2

EngineName = Literal["torch", "vllm"]
KVKind = Literal["recompute", "keep"]


class Options(NamedTuple):
    """How much to measure, and where."""

    repeats: int
    """Publications."""
    sampling: bool
    """Also updates while requests are running."""
    num_new: int = 80
    """Tokens of an answer, then."""
    gpus: str = ""


class Busy(NamedTuple):
    """One update while requests are running; medians, in seconds."""

    cpu_s: float
    """Added to the sampling, on each sampler."""
    stall_s: float
    """The slowest sampler's."""
    publish_to_ack_s: float
    """The last sampler's."""


class Run(NamedTuple):
    """One engine with one number of samplers; each list has one entry per publication, seconds."""

    engine: EngineName
    num_samplers: int
    kv: KVKind
    num_bytes: int
    memcpy_s: list[float]
    """One copy into warm private memory."""
    cold_memcpy_s: list[float]
    """One copy into private memory that has no pages yet."""
    parallel_memcpy_s: list[float]
    """As many processes as samplers, at once, each into warm private memory; the last is done."""
    stall_s: list[float]
    publish_to_ack_s: list[float]
    lease_s: list[float]
    """From the announcement until the last sampler begins to copy."""
    canary_s: list[float]
    """The slowest sampler's; of publications of their own, as the next."""
    with_canary_s: list[float]
    """Publish to ack."""
    copy_s: list[float]
    """The slowest sampler's copy, from LoadStarted to Release as the learner reads them."""
    busy: Busy | None
    """None: not measured."""

    def ratios(self) -> dict[str, float]:
        """Compare; see the top of this file."""
        found = {}
        for key, times in (("stall", self.stall_s), ("publish_to_ack", self.publish_to_ack_s)):
            middle = statistics.median(times)
            found[f"{key}_over_memcpy"] = middle / statistics.median(self.memcpy_s)
            found[f"best_{key}_over_memcpy"] = min(times) / min(self.memcpy_s)
            at_once = statistics.median(self.parallel_memcpy_s)
            found[f"{key}_over_parallel_memcpy"] = middle / at_once
        with_canary = statistics.median(self.with_canary_s)
        return found | {"with_canary_over_memcpy": with_canary / statistics.median(self.memcpy_s)}

    def meets_bars(self) -> bool:
        """Say whether both bars are met."""
        ratios = self.ratios()
        stall, ack = ratios["stall_over_memcpy"], ratios["publish_to_ack_over_memcpy"]
        return stall <= STALL_BAR and ack <= ACK_BAR


class Copiers:
    """Processes that copy a file in shared memory into warm private memory when they are told."""

    def __init__(self, path: Path, count: int) -> None:
        command = [sys.executable, str(Path(__file__)), "--copier", str(path)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        for process in self._processes:
            _read(process)  # warm, and waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def copy_s(self) -> float:
        """Have all copy at once; seconds until the last is done."""
        began_s = time.monotonic()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in self._processes:
            _read(process)
        return time.monotonic() - began_s


def _read(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"done\n", f"a copier ended: {line!r}"


def run_copier(path: Path) -> None:
    """Be one of `Copiers`: copy once, and again for every line that comes."""
    source = map_file(path)
    target = np.zeros_like(source)
    np.copyto(target, source)
    print("done", flush=True)
    for _ in sys.stdin:
        np.copyto(target, source)
        print("done", flush=True)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file, read-only."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)


def seconds(job: Callable[[], object]) -> float:
    """Wall-clock time that `job` takes."""
    began_s = time.monotonic()
    job()
    return time.monotonic() - began_s


def config_of(
    folder: Path,
    engine: EngineName,
    num_samplers: int,
    options: Options,
    kv: KVKind = "recompute",
) -> Config:
    """Configure the samplers."""
    return Config(
        run_dir=str(folder / f"run-{engine}-{num_samplers}-{kv}"),
        task=RANDOM_PROMPTS,
        model=str(folder / "model"),
        engine=engine,
        gpus=options.gpus,
        samplers=num_samplers,
        eval_problems=0,
        pacing=PacingConfig(groups_per_batch=GROUPS_PER_SAMPLER, group_size=GROUP_SIZE),
        sampling=SamplingConfig(
            max_new_tokens=options.num_new,
            max_concurrent_rollouts=GROUP_SIZE * GROUPS_PER_SAMPLER,
            kv_after_update=kv,
        ),
    )


def sampling_cpu_s(
    rig: SamplerRig, num_samplers: int, first: int, num_updates: int
) -> tuple[float, dict[int, list[Update]]]:
    """CPU seconds of a fixed amount of sampling, with so many updates one after another in it.

    Also the updates, by version. Raises: RuntimeError if the sampling was over before they were.
    """
    began_s = rig.cpu_s()
    keys = rig.admit(range(first, first + GROUPS_PER_SAMPLER * num_samplers))
    updates = {}
    for _ in range(num_updates):
        seen = rig.publish()
        updates[rig.version] = seen
    if rig.is_answered():
        raise RuntimeError("the sampling ended before the updates did; sample more tokens")
    rig.collect(keys)
    return rig.cpu_s() - began_s, updates


def measure_busy(rig: SamplerRig, num_samplers: int, repeats: int) -> Busy:
    """Compare sampling with and without updates, in turns."""
    sampling_cpu_s(rig, num_samplers, 0, 0)  # the first of all warms up
    added: list[float] = []
    updates: dict[int, list[Update]] = {}
    for turn in range(1, repeats + 1):
        first = turn * GROUPS_PER_SAMPLER * num_samplers
        plain_s, _ = sampling_cpu_s(rig, num_samplers, first, 0)
        with_s, seen = sampling_cpu_s(rig, num_samplers, first, UPDATES_WHILE_SAMPLING)
        added.append((with_s - plain_s) / UPDATES_WHILE_SAMPLING / num_samplers)
        updates |= seen
    stalls = rig.stalls_s()
    return Busy(
        cpu_s=statistics.median(added),
        stall_s=statistics.median(max(stalls[version]) for version in updates),
        publish_to_ack_s=statistics.median(
            max(u.acknowledged_s - u.announced_s for u in each) for each in updates.values()
        ),
    )


def measure(
    folder: Path,
    model: ModelConfig,
    engine: EngineName,
    num_samplers: int,
    options: Options,
    kv: KVKind = "recompute",
) -> Run:
    """Publish version after version to `num_samplers` samplers; `folder`/model holds the model."""
    manifest, flat = read_flat(folder / "model", model)
    config = config_of(folder, engine, num_samplers, options, kv)
    updates: list[list[Update]] = []
    memcpy_s: list[float] = []
    cold_s: list[float] = []
    parallel_s: list[float] = []
    busy: Busy | None = None
    with SamplerRig(config, manifest, flat) as rig:
        rig.start()
        source = map_file(rig.buffer_path)
        target = np.zeros_like(source)
        with Copiers(rig.buffer_path, num_samplers) as copiers:
            for _ in range(options.repeats):
                memcpy_s.append(seconds(lambda: np.copyto(target, source)))
                parallel_s.append(copiers.copy_s())
                cold_s.append(seconds(source.copy))
                updates.append(rig.publish(canary=False))
        counted = range(rig.version - options.repeats + 1, rig.version + 1)
        probed = [rig.publish(canary=True) for _ in range(options.repeats // 3 + 1)]
        stalls, canaries = rig.stalls_s(), rig.canaries_s()
        if options.sampling:
            busy = measure_busy(rig, num_samplers, 3)
    return Run(
        engine=engine,
        num_samplers=num_samplers,
        kv=kv,
        num_bytes=manifest.num_bytes,
        memcpy_s=memcpy_s,
        cold_memcpy_s=cold_s,
        parallel_memcpy_s=parallel_s,
        stall_s=[max(stalls[version]) for version in counted],
        publish_to_ack_s=[max(u.acknowledged_s - u.announced_s for u in each) for each in updates],
        canary_s=[max(times) for version, times in canaries.items() if version > counted[-1]],
        with_canary_s=[max(u.acknowledged_s - u.announced_s for u in each) for each in probed],
        lease_s=[max(u.started_s - u.announced_s for u in each) for each in updates],
        copy_s=[max(u.released_s - u.started_s for u in each) for each in updates],
        busy=busy,
    )


def summary(runs: list[Run]) -> dict[str, Any]:
    """Make the object of --json; see the top of this file."""
    rows = [
        {
            key: statistics.median(v) if isinstance(v, list) else v
            for key, v in run._asdict().items()
        }
        | {"busy": None if run.busy is None else run.busy._asdict()}
        | run.ratios()
        for run in runs
    ]
    embedded = [run.ratios() for run in runs if run.engine == "torch"]
    keys = [
        f"{best}{key}_over_memcpy" for best in ("", "best_") for key in ("stall", "publish_to_ack")
    ]
    worst = {key: max(ratios[key] for ratios in embedded) for key in keys} if embedded else {}
    return worst | {"recompute_cpu_s": recompute_cpu_s(runs), "runs": rows}


def recompute_cpu_s(runs: list[Run]) -> dict[str, float]:
    """What recomputing the cache is of an update while vLLM samples, by number of samplers."""
    busy = {(run.num_samplers, run.kv): run.busy for run in runs if run.engine == "vllm"}
    found = {}
    for count in sorted({count for count, _ in busy}):
        recomputed, kept = busy.get((count, "recompute")), busy.get((count, "keep"))
        if recomputed is not None and kept is not None:
            found[str(count)] = recomputed.cpu_s - kept.cpu_s
    return found


def print_table(runs: list[Run]) -> None:
    """Print one row per engine and number of samplers."""
    table = Table(
        "engine", "samplers", "cache", "memcpy (cold)", "at once", "stall", "publish to ack"
    )
    for column in (
        "of it lease, copy",
        "canary, ack with it",
        "best: stall, ack",
        "bars",
        "busy: CPU, stall, ack",
    ):
        table.add_column(column)
    for run in runs:
        ratios = run.ratios()
        bars = "met" if run.meets_bars() else "MISSED"
        table.add_row(
            run.engine,
            str(run.num_samplers),
            run.kv,
            f"{_ms(run.memcpy_s)} ({_ms(run.cold_memcpy_s)})",
            _ms(run.parallel_memcpy_s),
            f"{_ms(run.stall_s)} = {ratios['stall_over_memcpy']:.2f}x",
            f"{_ms(run.publish_to_ack_s)} = {ratios['publish_to_ack_over_memcpy']:.2f}x",
            f"{_ms(run.lease_s)}, {_ms(run.copy_s)}",
            f"{_ms(run.canary_s)}, {ratios['with_canary_over_memcpy']:.1f}x",
            f"{ratios['best_stall_over_memcpy']:.2f}x, "
            f"{ratios['best_publish_to_ack_over_memcpy']:.2f}x",
            bars if run.engine == "torch" else "-",
            "-" if run.busy is None else ", ".join(_ms([each]) for each in run.busy),
        )
    console = Console(width=180)
    console.print(table)
    console.print(
        f"{runs[0].num_bytes / 1e6:.0f} MB of weights; x: of one memcpy into warm memory. Bars of "
        f"the embedded engine: stall {STALL_BAR:g}x, publish to ack {ACK_BAR:g}x"
    )
    for count, spent_s in recompute_cpu_s(runs).items():
        console.print(
            f"vllm, {count} samplers: recomputing is {spent_s:.2f} CPU-s of a busy update"
        )


def _ms(times_s: list[float]) -> str:
    return f"{1e3 * statistics.median(times_s):.1f} ms"


def main() -> None:
    """Measure and print; the last line is JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", default="torch,vllm")
    parser.add_argument("--samplers", default="1,4", help="numbers of samplers, one run each")
    parser.add_argument("--gpus", default="", help="as launch.py; a sampler on each. Has not run")
    parser.add_argument("--repeats", type=int, default=20, help="publications")
    parser.add_argument(
        "--kv", default="recompute,keep", help="what becomes of the cache; keep is vLLM's alone"
    )
    parser.add_argument(
        "--sampling", action=argparse.BooleanOptionalAction, default=True, help="updates in it too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--tiny", action="store_true", help="the demo's shape: to see that it works"
    )
    parser.add_argument("--copier", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.copier:
        run_copier(arguments.copier)
        return
    model = TINY if arguments.tiny else HUNDRED_MILLION
    num_new = 1200 if arguments.tiny else 80  # the sampling must outlast the updates
    options = Options(arguments.repeats, arguments.sampling, num_new, arguments.gpus)
    samplers = arguments.gpus or arguments.samplers
    runs: list[Run] = []
    for engine in arguments.engines.split(","):
        if engine == "vllm" and importlib.util.find_spec("vllm") is None:
            print(f"SKIP vllm: it is not installed: {CPU_INSTALL}")
            continue
        kinds = arguments.kv.split(",") if engine == "vllm" else ["recompute"]
        for count, kv in product(map(int, samplers.split(",")), kinds):
            with tempfile.TemporaryDirectory() as folder:
                make_model(Path(folder) / "model", model)
                runs.append(measure(Path(folder), model, engine, count, options, kv))
    if runs:
        print_table(runs)
    if arguments.json:
        print(json.dumps(summary(runs)))


if __name__ == "__main__":
    main()
