"""perf/gpu_check.py as far as a CPU goes: every check but one runs, small, and sees what is broken.

Device memory is a fake between real processes (fake_gpu.py), kernels run on the CPU. Speeds mean
nothing here, so a check may well FAIL; what is looked at are its numbers. Check 6 needs streams:
its two controls are tested by hand.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from asyncrl_node import config_file
from asyncrl_node.config import Config
from asyncrl_node.core.layout import layout_weights
from asyncrl_node.core.shards import assemble
from asyncrl_node.errors import RunFault
from asyncrl_node.gpus import Gpu
from asyncrl_node.learner.attention import packed_attention, plan_attention
from asyncrl_node.plan import WARM_MODEL
from asyncrl_node.transport.cuda_driver import CudaDevice, CudaError
from asyncrl_node.transport.cuda_ipc import CudaIpcExport, CudaIpcImport
from asyncrl_node.transport.weights import DeviceArea
from perf import gpu_check
from perf.gpu_checks import (
    fsdp,
    host,
    ipc,
    kernels,
    learner,
    measure,
    models,
    several,
    stand_ins,
    whole_run,
)
from perf.gpu_checks import peer as peers
from perf.gpu_checks.outcome import MIB, Check, Outcome, Scale, Session, Unavailable
from tests.perf import fake_gpu
from tests.test_gpus import FakeNvml
from tests.transport.fake_cuda import INVALID_HANDLE, Faults
from tests.transport.shared_cuda import FOLDER
from tests.transport.test_cuda_ipc import make_machine, make_manifest, nothing, start

SMALL = Scale(
    buffer_bytes=MIB,
    self_test_bytes=MIB,
    version_bytes=64 << 10,
    num_publications=10,
    killed_bytes=MIB,
    host_bytes=MIB,
    sharded=(("toy", 1, 0.0), ("toy", 3, 0.0)),
    pulled_model="toy",
    matmul_side=64,
    packed_tokens=512,
    longest_document=128,
    head=(300, 32, 500),
    cast_model="toy",
    learner_models=(("toy", 0.1),),
    rollout_tokens=16,
    micro_batch_tokens=512,
    parity=("toy", 4, 16),
    run_model="toy",
    run_steps=3,
)

Fill = Callable[[DeviceArea, int], None]
Late = list[Callable[[], object]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, "cpu", SMALL)


@pytest.fixture
def fake(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose device memory is the fake, here and in the processes that it starts."""
    (tmp_path / "gpu").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "gpu"))
    library = fake_gpu.use("learner", monkeypatch.setattr)
    monkeypatch.setattr(peers, "TARGET", fake_gpu.serve)
    yield session
    if session.opened is not None:
        session.opened.close()  # nothing is left in it
    library._calls.close()


def break_driver(session: Session, **faults: object) -> None:
    """Break the driver of the processes that are started from now on."""
    (session.folder / "gpu" / "faults.json").write_text(json.dumps({"sampler": faults}))


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "num_lines"), [([], 17), (["--all"], 25), (["--only", "2", "A5"], 2)]
)
def test_without_a_gpu_every_line_is_skipped_and_says_why(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    num_lines: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(arguments) == 0
    _, *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == num_lines
    assert all(line[2:7] == " SKIP" and "no CUDA GPU here" in line for line in lines)
    result = msgspec.json.decode(last)
    assert [result[key] for key in ("exact", "copy_ratio", "mfu")] == [None] * 3
    assert result["num_passed"] == result["num_failed"] == 0
    assert result["num_skipped"] == num_lines


def test_the_lines_are_those_of_the_design() -> None:
    numbers = [check.number for check in gpu_check.CHECKS]
    assert sorted(map(int, numbers)) == list(range(1, 18))
    assert [check.number for check in gpu_check.EXTRA_CHECKS] == [f"A{n}" for n in range(1, 9)]
    assert {check.num_gpus for check in gpu_check.CHECKS} == {1}
    assert not any(check.needs_vllm for check in gpu_check.CHECKS)


def test_what_a_box_lacks_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    reasons = {c.number: gpu_check.blocker(c) for c in (*gpu_check.CHECKS, *gpu_check.EXTRA_CHECKS)}
    assert not any(reasons[check.number] for check in gpu_check.CHECKS)
    for number in ("A1", "A2", "A3", "A4", "A7"):
        assert reasons[number] == "needs 2 GPUs, 1 here"
    for number in ("A5", "A6", "A8"):
        assert "vllm cannot be imported" in reasons[number]


def test_an_unknown_line_is_a_wrong_argument() -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--only", "18"])
    assert caught.value.code == 2


def test_it_runs_where_only_torch_and_its_friends_are(tmp_path: Path) -> None:
    """The other packages of the program are hidden; even a whole run does without them."""
    hide = "import sys\nfor name in ('xxhash', 'psutil', 'rich', 'tomli_w', 'setproctitle'):\n"
    hide += "    sys.modules[name] = None\n"
    (tmp_path / "usercustomize.py").write_text(hide)
    (tmp_path / "sitecustomize.py").write_text(hide)
    code = (
        "import sys, pathlib\n"
        "assert sys.modules['rich'] is None\n"
        f"sys.path.insert(0, {str(gpu_check.ROOT)!r})\n"
        "from perf import gpu_check\n"
        "from perf.gpu_checks import whole_run, outcome\n"
        f"gpu_check.main(['--only', '14'])\n"
        f"scale = outcome.Scale(run_model='toy', run_steps=2)\n"
        f"session = outcome.Session(pathlib.Path({str(tmp_path)!r}), 'cpu', scale)\n"
        "print(whole_run.check_whole_run(session))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "14 SKIP" in done.stdout
    assert "8 groups trained, 0 breaches" in done.stdout, done.stdout


def test_a_failure_is_never_a_skip_once_ipc_has_worked() -> None:
    def raised(error: Exception) -> str:
        def run(_: Session) -> Outcome:
            raise error

        return gpu_check.run_check(Check("0", "", "", "", run), Session(Path())).status

    assert raised(CudaError("cuIpcOpenMemHandle_v2", INVALID_HANDLE, "x")) == "FAIL"
    assert raised(peers.PeerFault("cuIpcOpenMemHandle_v2")) == "FAIL"
    assert raised(RunFault("torn_weights", "x")) == "FAIL"
    assert raised(RunFault("unsupported_device", "no packed attention for cuda:0")) == "SKIP"
    assert raised(Unavailable("no CUDA IPC on this machine")) == "SKIP"


def test_stand_ins_do_what_the_real_packages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(gpus="0,", model='a "b"', seed=7)
    monkeypatch.setattr(config_file.tomli_w, "dumps", stand_ins.dumps)
    text = config_file.encode_config(config).decode()
    assert config_file.build_config(tomllib.loads(text)) == config
    began_s = stand_ins.Process().create_time()
    assert began_s == pytest.approx(psutil.Process().create_time(), abs=0.9), "or we are swept"
    with pytest.raises(ProcessLookupError):
        stand_ins.Process(2**22 + 1).create_time()
    piecewise = stand_ins.Crc()
    piecewise.update(memoryview(b"weights, "))
    piecewise.update(memoryview(b"more"))
    assert piecewise.intdigest() == stand_ins.STAND_INS["xxhash"]["xxh3_64_intdigest"](
        b"weights, more"
    )


# -- 2 to 9, between processes -------------------------------------------------------------------


def test_pulled_bytes_are_compared(fake: Session) -> None:
    outcome = ipc.check_ipc_bytes(fake)
    assert outcome.status == "PASS", outcome
    assert outcome.value.startswith("0 wrong words in 3 x")
    assert ipc.check_ipc_rate(fake).figures["copy_ratio"] > 0


def test_a_driver_that_copies_wrongly_fails_the_check(fake: Session) -> None:
    break_driver(fake, peer_copy="flipped")
    outcome = ipc.check_ipc_bytes(fake)
    assert outcome.status == "FAIL"
    assert outcome.exact is False
    assert "1 of 1048576 bytes arrived wrong" in outcome.reason


def test_no_ipc_at_all_is_a_skip_for_every_check_that_needs_it(fake: Session) -> None:
    break_driver(fake, fail=["cuIpcOpenMemHandle_v2"])
    with pytest.raises(Unavailable, match="CUDA_ERROR_MAP_FAILED"):
        ipc.check_ipc_bytes(fake)
    break_driver(fake)
    with pytest.raises(Unavailable, match="CUDA_ERROR_MAP_FAILED"):  # not tried again
        ipc.check_kills(fake)
    shards = ipc.check_virtual_shards(fake)
    assert shards.status == "PASS", shards
    assert "CudaImport not tried" in shards.value


def test_shards_are_pulled_by_the_importer_of_vllm(fake: Session) -> None:
    outcome = ipc.check_virtual_shards(fake)
    assert outcome.status == "PASS", outcome
    assert "toy/4 by CudaImport equal" in outcome.value
    break_driver(fake, fail=["cuMemAlloc_v2"])  # the importer allocates nothing through the driver
    assert ipc.fetched_like_the_source(fake, 2)


def test_publications_leak_nothing(fake: Session) -> None:
    outcome = ipc.check_publishing(fake)
    assert outcome.status == "PASS", outcome
    assert outcome.value == "0 torn of 15; grown: nothing"
    break_driver(fake, peer_copy="flipped")
    assert "15 torn of 15" in ipc.check_publishing(fake).value


def test_kills_are_survived(fake: Session) -> None:
    outcome = ipc.check_kills(fake)
    assert outcome.status == "PASS", outcome
    assert outcome.value.startswith("3 of 3 restarts served")


def test_memory_of_torch_is_refused(fake: Session) -> None:
    outcome = ipc.check_expandable_segments(fake)
    assert outcome.status == "PASS", outcome
    assert outcome.value.endswith("torch's own memory: not_exportable")


def test_host_memory_is_pinned_at_both_ends(fake: Session) -> None:
    outcome = host.check_pinned_host(fake)
    assert outcome.exact is None or outcome.exact
    assert outcome.value.startswith("0 wrong words")
    assert outcome.reason == ""
    calls = [path.read_text() for path in (fake.folder / "gpu").glob("calls-*")]
    assert sum("cuMemHostRegister_v2" in each for each in calls) == 2
    break_driver(fake, fail=["cuMemHostRegister_v2"])
    refused = host.check_pinned_host(fake)
    assert refused.status == "FAIL"
    assert "not pinned by the reader" in refused.reason


def test_another_process_without_a_driver_says_so_and_can_be_killed() -> None:
    other = peers.Peer()
    with pytest.raises(peers.PeerFault, match="no_cuda_driver"):
        other.call("export", 1, 1)
    other.kill()
    with pytest.raises((EOFError, ConnectionError)):
        other.call("export", 1, 1)
    other.stop()


def test_publications_are_counted_right_and_both_controls_see_what_is_broken() -> None:
    for peer_copy, torn in (("right", 0), ("flipped", 4)):
        machine = make_machine(faults=Faults(peer_copy=peer_copy))  # type: ignore[arg-type]
        exporter, importer, manifest = start(machine, 0), start(machine, 1), make_manifest(500)
        export = CudaIpcExport(exporter.device, manifest, nothing)
        imported = CudaIpcImport(importer.device, export.handle, manifest)
        late: list[Callable[[], object]] = []

        def fill(area: DeviceArea, version: int, device: CudaDevice = exporter.device) -> None:
            device.fill(area.address, version, area.num_bytes)
            device.synchronize()

        def fill_late(area: DeviceArea, version: int, fill: Fill = fill, late: Late = late) -> None:
            late.append(lambda: fill(area, version))

        def pull(version: int, device: CudaDevice = importer.device, end: Any = imported) -> int:
            return peers.pull(device, end, version)

        def pull_late(version: int, pull: Callable[[int], int] = pull, late: Late = late) -> int:
            late.pop()()
            return pull(version)

        assert ipc.publish_many(export, fill, pull, range(4)) == torn
        if not torn:
            broken = lambda between, d=importer.device, i=imported: peers.pull(d, i, 1, between)  # noqa: E731
            assert ipc.detects_ignored_lease(export, fill, broken)
            assert not ipc.detects_ignored_lease(export, fill, lambda between, p=pull: p(1))
            assert ipc.detects_skipped_wait(export, fill_late, pull_late)
            assert not ipc.detects_skipped_wait(export, fill, pull)
        for end in (imported, export, exporter.device, importer.device):
            end.close()
        machine.assert_clean()


def test_virtual_shards_are_exact_and_a_wrong_plan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(9, 5), (3,), (2, 4), (70, 3)]
    entries, _ = layout_weights(
        [(f"p{i}", "bfloat16", shape, 2 * math.prod(shape)) for i, shape in enumerate(shapes)]
    )

    def found(num_ranks: int) -> ipc.ShardFigures:
        return ipc.pull_virtual_shards(entries, num_ranks, "cpu", lambda job: 1.0)

    assert all(found(num_ranks).exact for num_ranks in range(1, 8))
    monkeypatch.setattr(ipc, "assemble", lambda *_, sampler: assemble(entries, 4)[::-1])
    assert not found(4).exact


def test_word_patterns_find_one_wrong_byte() -> None:
    target = torch.zeros(8000, dtype=torch.uint8)
    measure.fill_words(target, 3)
    assert measure.num_wrong_words(target, 3) == 0
    assert measure.num_wrong_words(target, 4) > 900
    target[4321] += 1
    assert measure.num_wrong_words(target, 3) == 1


def test_memory_in_use_is_nvmls_word(fake: Session) -> None:
    fake.on = "cuda"
    nvml = FakeNvml(2)
    nvml.gpus[1] = msgspec.structs.replace(nvml.gpus[1], uuid=fake.device.uuid, used_bytes=77)
    fake.nvml = nvml
    assert isinstance(nvml.gpus[1], Gpu)
    assert measure.used_bytes(fake) == 77
    assert measure.wait_for_memory(fake, 80, patience_s=0.0) == 77


def test_a_footprint_names_what_has_grown() -> None:
    before = measure.Footprint(10, 2, 100 * MIB)
    assert measure.Footprint(10, 2, 105 * MIB).leaks_since(before) == []
    grown = measure.Footprint(11, 2, 111 * MIB).leaks_since(before)
    assert grown == ["num_files +1", f"rss_bytes +{11 * MIB}"]


# -- several GPUs --------------------------------------------------------------------------------


def test_every_ordered_pair_is_tested(fake: Session) -> None:
    assert several.try_all_pairs([{}, {}], MIB) == []
    break_driver(fake, peer_copy="flipped")
    failed = several.try_all_pairs([{}, {}], MIB)
    assert [each.split(":")[0] for each in failed] == ["0 -> 1", "1 -> 0"]


def test_samplers_pull_from_all_learners_at_once(fake: Session) -> None:
    wrong, alone_s, together_s = several.fan_out([{}, {}], [{}, {}], MIB)
    assert wrong == 0
    assert alone_s > 0
    assert together_s > 0
    manifest = several.fan_out_model(MIB)
    assert len(manifest.entries) == several.NUM_PARAMETERS
    assert MIB <= manifest.num_bytes <= 2 * MIB


# -- kernels and the learner ---------------------------------------------------------------------


def test_the_publish_cast_gives_the_bits_of_a_plain_cast(session: Session) -> None:
    assert kernels.check_ceilings(session).status == "SKIP"
    assert session.figures["matmul_flops"] > 0
    outcome = kernels.check_cast(session)
    assert outcome.reason == ""
    assert "of the copy rate" in outcome.value


def test_attention_checks_see_a_leak(session: Session) -> None:
    found = kernels.check_attention(session).value
    assert ", 0 leaks, " in found
    lengths = models.document_lengths(200, 4)
    assert sum(lengths) == 200
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[-1] == 1
    plan = plan_attention(lengths)
    inputs = [torch.randn(1, heads, 200, 8, requires_grad=True) for heads in (4, 2, 2)]

    def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return packed_attention(torch.nn.Module(), query, key, value, None, pack=plan)[0]

    def leaking(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2)

    output = packed(*inputs)
    upstream = torch.randn_like(output)
    expected, expected_grads = kernels.attend_by_document(lengths, inputs, upstream)
    assert torch.allclose(output, expected, atol=1e-5)
    for grad, wanted in zip(
        torch.autograd.grad(output, inputs, upstream), expected_grads, strict=True
    ):
        assert torch.allclose(grad, wanted, atol=1e-4)
    plain = [tensor.detach() for tensor in inputs]
    assert kernels.leaking_documents(packed, lengths, plain) == 0
    assert kernels.leaking_documents(leaking, lengths, plain) > 0


def test_the_head_is_compared_with_float32(session: Session) -> None:
    value = kernels.check_head(session).value
    assert "peak nan of naive" in value
    assert float(value.split("error ")[1].split(",")[0]) < 5e-3


def test_the_learner_checks_measure_the_program(session: Session) -> None:
    groups = models.make_groups(2, 16, 40, -3.7)
    assert sum(len(group.tokens) for group in groups) == 2 * 8 * 16
    session.scale = SMALL._replace(learner_models=(("toy", 1e-9),))
    step = learner.check_learner_step(session)
    assert step.status == "PASS"
    assert step.figures["mfu"] > 1e-9
    session.scale = SMALL._replace(learner_models=(("toy", 0.9),))
    assert learner.check_learner_step(session).status == "FAIL"
    assert learner.check_parity(session).status == "PASS"
    found = learner.parity(WARM_MODEL, "cpu", "float32", 8, 16)
    assert 8 <= found.num_tokens <= 8 * 16
    assert found.max_difference < 5e-5
    assert found.rms_difference < 5e-5


def test_the_forecast_is_held_against_what_was_allocated(session: Session) -> None:
    session.scale = SMALL._replace(learner_models=(("a", 0.0), ("b", 0.0)))
    for share, status in ((1.14, "PASS"), (0.96, "PASS"), (1.16, "FAIL"), (0.94, "FAIL")):
        session.learner_bytes = {"a": (100.0, 100.0), "b": (100.0, 100.0 * share)}
        assert learner.check_forecast(session).status == status


def test_shards_of_real_ranks_are_what_is_published(session: Session) -> None:
    """FSDP2 itself, on three processes: 200 and 96 rows are not cut evenly."""
    outcome = fsdp.compare_ranks(session, [{}, {}, {}])
    assert outcome.status == "PASS", outcome
    assert outcome.value.startswith("3 ranks: 0 wrong bytes")


def test_a_whole_run_is_verified(session: Session) -> None:
    found = whole_run.run_whole(
        session.folder, models.write_random_model("toy", session.folder, "cpu"), 3, None
    )
    assert found.breaches == []
    assert found.num_trained == 3 * 4
    assert 1 <= len(found.stalls_s) <= 3  # the run may end before the last version has arrived
    assert all(stall_s > 0 for stall_s in found.stalls_s)


def test_a_process_of_the_run_that_dies_is_named(session: Session) -> None:
    model_dir = models.write_random_model("toy", session.folder, "cpu")
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(RunFault, match="learner: "):
        whole_run.run_whole(session.folder, model_dir, 3, None)
