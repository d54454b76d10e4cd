"""Every message between processes: its direction is the union it belongs to.

sampler -> scheduler   SamplerMessage        scheduler -> sampler   SamplerOrder
learner -> scheduler   LearnerMessage        scheduler -> learner   LearnerOrder
launcher -> scheduler  LauncherMessage       scheduler -> launcher  LauncherReport
sampler -> learner     WeightRequest         learner -> sampler     WeightNotice

All are msgspec tagged structs, decoded by decoders built once (transport/channel.py). Unknown
fields, wrong types and wrong tags are refused by the decoder; nothing is ever executed.
"""

from __future__ import annotations

import msgspec


class WeightEntry(msgspec.Struct, frozen=True):
    """Where one parameter lies in the flat weight buffer."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch dtype without the prefix, e.g. "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer's weight area; 256-byte aligned."""
    num_bytes: int
