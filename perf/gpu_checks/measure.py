"""Times, patterns and footprints, on the GPU if there is one and else on the CPU."""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perf.gpu_checks.outcome import MIB, Session

if TYPE_CHECKING:
    from torch import Tensor

PEAK_FLOPS = 989e12
"""bf16, dense, of an H100 or H200 by datasheet."""
PIECE_WORDS = 32 * MIB

Job = Callable[[], object]


def seconds(job: Job, repeats: int = 5) -> float:
    """Seconds of a job on its device: the median, after one round that does not count."""
    import torch

    job()
    times = []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            began_s = time.perf_counter()
            job()
            times.append(time.perf_counter() - began_s)
            continue
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        start.record()
        job()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return max(1e-9, statistics.median(times))


def synchronize() -> None:
    """Wait for all streams."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rate(num_bytes: float) -> str:
    """Write bytes per second."""
    return f"{num_bytes / 1e12:.2f} TB/s" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.1f} GB/s"


# -- patterns ------------------------------------------------------------------------------------


def words_of(seed: int, start: int, num_words: int, device: str) -> Tensor:
    """Return int64 words that depend on position and seed; sums and products wrap around."""
    import torch

    words = torch.arange(start, start + num_words, dtype=torch.int64, device=device)
    words += seed << 40
    words *= 0x9E3779B97F4A7C15 - (1 << 64)
    words ^= words >> 29
    words *= 0xBF58476D1CE4E5B9 - (1 << 64)
    return words ^ (words >> 32)


def fill_words(target: Tensor, seed: int) -> None:
    """Write the pattern into uint8 [num_bytes], a multiple of 8, on the current stream."""
    import torch

    words = target.view(torch.int64)
    for start in range(0, len(words), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        piece.copy_(words_of(seed, start, len(piece), str(target.device)))


def num_wrong_words(source: Tensor, seed: int) -> int:
    """Count the words of uint8 [num_bytes] that are not the pattern's, pulled piece by piece."""
    import torch

    words = source.view(torch.int64)
    wrong = 0
    for start in range(0, len(words), PIECE_WORDS):
        local = words[start : start + PIECE_WORDS].clone()
        expected = words_of(seed, start, len(local), str(source.device))
        wrong += int((local != expected).sum())
    return wrong


# -- memory ----------------------------------------------------------------------------------


def used_bytes(session: Session) -> int:
    """Memory in use on the session's GPU, by all processes: NVML's word, else CUDA's own."""
    import torch

    if session.on == "cpu":
        return 0
    for gpu in session.nvml.list_gpus().gpus:
        if gpu.uuid == session.device.uuid:
            return gpu.used_bytes
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def wait_for_memory(session: Session, limit: int, patience_s: float = 5.0) -> int:
    """Wait until memory in use is back at the limit, or patience ends; returns what is in use."""
    end_s = time.perf_counter() + patience_s
    while (used := used_bytes(session)) > limit and time.perf_counter() < end_s:
        time.sleep(0.05)
    return used


def peak_bytes(session: Session, job: Job) -> float:
    """Most bytes that torch had allocated during a job, beyond those at its start; NaN on a CPU."""
    import torch

    if session.on == "cpu":
        job()
        return math.nan
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


class Footprint(NamedTuple):
    """What a leak of this process would show in."""

    num_files: int
    num_shm: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        """Look."""
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        num_files, num_shm = (len(os.listdir(f)) for f in ("/proc/self/fd", "/dev/shm"))
        return cls(num_files, num_shm, rss)

    def leaks_since(self, before: Footprint) -> list[str]:
        """Name what has grown."""
        allowed = (0, 0, 10 * MIB)
        grown = zip(self._fields, before, self, allowed, strict=True)
        return [f"{name} +{b - a}" for name, a, b, limit in grown if b - a > limit]
