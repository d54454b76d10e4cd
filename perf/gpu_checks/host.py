"""Check 9: weights through host shared memory, pinned at both ends. Has not run on a GPU."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from asyncrl_node.run_directory import SHM_FOLDER
from asyncrl_node.transport.pinned import PinnedMemory
from asyncrl_node.transport.weights import SharedMemoryExport
from perf.gpu_checks.measure import fill_words, rate, seconds, synchronize
from perf.gpu_checks.models import flat_manifest
from perf.gpu_checks.outcome import Outcome, Session, judge_bytes
from perf.gpu_checks.peer import peer

if TYPE_CHECKING:
    from torch import Tensor


def _copy_down_s(area: memoryview, source: Tensor) -> float:
    """Copy from the GPU into pinned memory; seconds of one copy. All is there on return."""
    import torch

    target = torch.frombuffer(area, dtype=torch.uint8)
    copy_s = seconds(lambda: target.copy_(source, non_blocking=True))
    synchronize()
    return copy_s


def check_pinned_host(session: Session) -> Outcome:
    """Publish a version from the GPU into the program's own buffer, and read it in another
    process; both have its pages pinned, by the driver."""
    import torch

    num_bytes, seed = session.scale.host_bytes, 7
    manifest = flat_manifest(num_bytes)
    path = SHM_FOLDER / f"arl-check-{secrets.token_hex(4)}"
    export = SharedMemoryExport(path, manifest)
    try:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=session.on)
        fill_words(source, seed)
        synchronize()
        began_s = time.perf_counter()
        with export.memory() as memory:
            pinned = PinnedMemory(session.device, memory)
        pinned_s = (time.perf_counter() - began_s) * 1e9 / num_bytes
        try:
            with export.begin_write() as area:
                down = num_bytes / _copy_down_s(area, source)
            export.end_write(0)
            with peer() as other:
                wrong, up, refusal = other.call("read_host", str(path), manifest, seed)
        finally:
            pinned.close()
    finally:
        export.close()
    value = (
        f"{wrong} wrong words, down {rate(down)}, up {rate(up)}, pinned in {pinned_s:.2f} s per GB"
    )
    return judge_bytes(not wrong, min(down, up) >= 20e9 and not refusal, value, refusal)
