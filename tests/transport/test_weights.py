"""The weight buffer: both ends see the same bytes, and never two versions at once."""

from __future__ import annotations

import itertools
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_node.core.layout import layout_weights
from asyncrl_node.errors import RunFault
from asyncrl_node.messages import WeightsManifest
from asyncrl_node.transport.weights import (
    SharedMemoryExport,
    SharedMemoryImport,
    WeightExport,
    WeightImport,
    buffer_bytes,
    layout_hash,
    weights_hash,
)

SHM = Path("/dev/shm")

_numbers = itertools.count()


def make_manifest(*sizes: int) -> WeightsManifest:
    specs = [(f"p{i}", "float32", (size,), 4 * size) for i, size in enumerate(sizes)]
    entries, num_bytes = layout_weights(specs)
    return WeightsManifest(num_bytes, entries, layout_hash(entries))


def publish(export: WeightExport, version: int, content: bytes) -> int:
    with export.begin_write() as area:
        area[:] = content
    return export.end_write(version)


def read(imported: WeightImport, version: int) -> bytes:
    with imported.view(version) as view:
        return bytes(view)


def fault_of(imported: WeightImport, version: int) -> str:
    with pytest.raises(RunFault) as caught:
        imported.view(version)
    return caught.value.name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the examples of a property; each takes a file name of its own."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture
def manifest() -> WeightsManifest:
    return make_manifest(3, 100, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="test-weights-") as folder:
        yield Path(folder)


# -- round trip ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    seeds=st.lists(st.integers(0, 1 << 32), min_size=1, max_size=4),
)
def test_round_trip_and_the_same_hash_on_both_ends(
    shared: Path, sizes: list[int], seeds: list[int]
) -> None:
    manifest = make_manifest(*sizes)
    path = shared / f"weights-{next(_numbers)}"
    export = SharedMemoryExport(path, manifest)
    imported = SharedMemoryImport(path, manifest)
    for version, seed in enumerate(seeds):
        content = np.random.default_rng(seed).bytes(manifest.num_bytes)
        published = publish(export, version, content)
        assert read(imported, version) == content
        with imported.view(version) as view:
            assert weights_hash(view) == published
        assert weights_hash(memoryview(bytearray(content))) == published
    imported.close()
    export.close()
    assert not path.exists()


def test_the_hash_tells_every_flipped_byte(path: Path, manifest: WeightsManifest) -> None:
    content = bytearray(manifest.num_bytes)
    hashes = {weights_hash(memoryview(content))}
    for position in range(0, len(content), 7):
        content[position] ^= 1
        hashes.add(weights_hash(memoryview(content)))
    assert len(hashes) == 1 + len(range(0, len(content), 7))


def test_a_reader_cannot_write_and_reads_on_after_removal(
    path: Path, manifest: WeightsManifest
) -> None:
    export = SharedMemoryExport(path, manifest)
    publish(export, 4, b"\x07" * manifest.num_bytes)
    imported = SharedMemoryImport(path, manifest)
    export.close()
    export.close()
    with imported.view(4) as view:
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        assert bytes(view) == b"\x07" * manifest.num_bytes
    imported.close()


# -- torn reads ----------------------------------------------------------------------------------


def test_nothing_can_be_read_before_the_first_version(
    path: Path, manifest: WeightsManifest
) -> None:
    SharedMemoryExport(path, manifest)
    assert fault_of(SharedMemoryImport(path, manifest), 0) == "torn_weights"


def test_a_write_that_has_begun_is_a_torn_read(path: Path, manifest: WeightsManifest) -> None:
    export = SharedMemoryExport(path, manifest)
    imported = SharedMemoryImport(path, manifest)
    publish(export, 1, bytes(manifest.num_bytes))
    assert read(imported, 1) == bytes(manifest.num_bytes)
    with export.begin_write() as area:
        assert fault_of(imported, 1) == "torn_weights"
        area[: len(area) // 2] = b"\x01" * (len(area) // 2)
        assert fault_of(imported, 1) == "torn_weights"
        assert fault_of(imported, 2) == "torn_weights"
    export.end_write(2)
    assert fault_of(imported, 1) == "torn_weights"
    assert len(read(imported, 2)) == manifest.num_bytes


@pytest.mark.parametrize("version", [0, 2, 1 << 40])
def test_a_version_other_than_the_leased_one_is_refused(
    path: Path, manifest: WeightsManifest, version: int
) -> None:
    export = SharedMemoryExport(path, manifest)
    publish(export, 1, bytes(manifest.num_bytes))
    assert fault_of(SharedMemoryImport(path, manifest), version) == "torn_weights"


@pytest.mark.parametrize("end", ["front", "back"])
def test_a_version_that_differs_between_front_and_back_is_torn(
    path: Path, manifest: WeightsManifest, end: str
) -> None:
    export = SharedMemoryExport(path, manifest)
    publish(export, 1, bytes(manifest.num_bytes))
    imported = SharedMemoryImport(path, manifest)
    offset = 16 if end == "front" else buffer_bytes(manifest.num_bytes) - 8
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<q", 2))
    assert fault_of(imported, 1) == "torn_weights"
    assert fault_of(imported, 2) == "torn_weights"


# -- layouts -------------------------------------------------------------------------------------


def test_a_manifest_that_does_not_hash_to_its_own_hash_is_refused(
    path: Path, manifest: WeightsManifest
) -> None:
    SharedMemoryExport(path, manifest)
    swapped = msgspec.structs.replace(manifest, entries=manifest.entries[::-1])
    with pytest.raises(RunFault) as caught:
        SharedMemoryImport(path, swapped)
    assert caught.value.name == "weights_mismatch"


def test_a_buffer_laid_out_otherwise_is_refused(path: Path) -> None:
    export = SharedMemoryExport(path, make_manifest(64, 128))
    other = make_manifest(128, 64)
    assert other.num_bytes == make_manifest(64, 128).num_bytes
    publish(export, 0, bytes(other.num_bytes))
    assert fault_of(SharedMemoryImport(path, other), 0) == "weights_mismatch"


@pytest.mark.parametrize("offset", [0, 8, 24])
def test_a_front_of_something_else_is_refused(
    path: Path, manifest: WeightsManifest, offset: int
) -> None:
    export = SharedMemoryExport(path, manifest)
    publish(export, 0, bytes(manifest.num_bytes))
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x55" * 8)
    assert fault_of(SharedMemoryImport(path, manifest), 0) == "weights_mismatch"


@pytest.mark.parametrize(
    "field", [{"name": "q"}, {"dtype": "int32"}, {"shape": (3, 1)}, {"offset": 256}]
)
def test_the_layout_hash_tells_every_field(field: dict[str, object]) -> None:
    entries = make_manifest(3, 100).entries
    changed = (msgspec.structs.replace(entries[0], **field), *entries[1:])
    assert layout_hash(changed) != layout_hash(entries)


# -- the file ------------------------------------------------------------------------------------


def test_the_buffer_is_private_whole_and_made_once(path: Path, manifest: WeightsManifest) -> None:
    umask = os.umask(0)
    try:
        SharedMemoryExport(path, manifest)
    finally:
        os.umask(umask)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == buffer_bytes(manifest.num_bytes) <= status.st_blocks * 512
    with pytest.raises(FileExistsError):
        SharedMemoryExport(path, manifest)


def test_full_shared_memory_is_a_named_fault_that_leaves_nothing(shm: Path) -> None:
    filesystem = os.statvfs(shm)
    too_much = make_manifest(filesystem.f_blocks * filesystem.f_frsize // 4 + 1)
    with pytest.raises(RunFault, match=r"are free\); .* --shm-size") as caught:
        SharedMemoryExport(shm / "weights", too_much)
    assert caught.value.name == "shm_full"
    assert list(shm.iterdir()) == []


def test_a_thousand_publications_leave_nothing_behind(shm: Path) -> None:
    manifest = make_manifest(1000)
    path = shm / "weights"

    def footprint() -> tuple[int, int, list[str]]:
        """Mappings and descriptors of the buffer in this process, files in its folder."""
        maps = Path("/proc/self/maps").read_text().count(str(path))
        links = (entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
        descriptors = sum(os.path.realpath(link).startswith(str(path)) for link in links)
        return maps, descriptors, sorted(entry.name for entry in shm.iterdir())

    assert footprint() == (0, 0, [])
    export = SharedMemoryExport(path, manifest)
    imports = [SharedMemoryImport(path, manifest) for _ in range(2)]
    during = footprint()
    assert during == (3, 3, ["weights"])
    for version in range(1000):
        digest = publish(export, version, bytes([version % 256]) * manifest.num_bytes)
        for imported in imports:
            with imported.view(version) as view:
                assert weights_hash(view) == digest
    assert footprint() == during
    for imported in imports:
        imported.close()
    export.close()
    del export
    assert footprint() == (0, 0, [])
