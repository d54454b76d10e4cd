"""The learner process.

    publish the first weights -> evaluate
    each step t:  take (the whole batch, or piece by piece) -> forward/backward -> update
                  -> record what was trained -> publish t + 1 -> evaluate? -> save? -> row
    end of data:  evaluate -> save

Waits: for the scheduler's answer to a take or an evaluation (the scheduler names who it waits for),
and for leases to come back before the buffer is written (the courier's overdue rule ends it).
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from asyncrl_node.config import Config
from asyncrl_node.core.probe import Probe, make_probe
from asyncrl_node.core.publishing import PublishingCore
from asyncrl_node.core.rollout import TrajectoryGroup
from asyncrl_node.dtype_rules import dtype_of, limits_of
from asyncrl_node.errors import RunFault
from asyncrl_node.learner.base import GroupFault, Trainer
from asyncrl_node.learner.clock import CauseClock
from asyncrl_node.learner.courier import Courier
from asyncrl_node.learner.losses.user_code import USER_FAULTS
from asyncrl_node.learner.records import TrainedRecords, write_fault, write_samples
from asyncrl_node.learner.watch import CollapseWatch
from asyncrl_node.learner.weights import LearnerWeights
from asyncrl_node.messages import (
    Batch,
    EndOfData,
    EvaluationDone,
    LearnerFinished,
    LearnerHello,
    Noted,
    Published,
    RequestEvaluation,
    StepFinished,
    Stop,
    Take,
    Trained,
    Warned,
    WeightsManifest,
)
from asyncrl_node.plan import engine_of, max_rollout_tokens, model_folder, task_of
from asyncrl_node.process import ProcessContext
from asyncrl_node.run_directory import slot_folder, weights_path
from asyncrl_node.transport.weights import layout_hash

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """The scheduler wants the run to end: the open batch went back."""


def make_trainer(config: Config) -> Trainer:
    """Make the trainer that goes with the engine; the heavy imports happen here.

    With `gpus` it sits on the one GPU that this process sees; float32 is without TF32's shorter
    mantissas, so that its log-probabilities stay the sampler's. That has not run on a GPU.
    """
    if engine_of(config) == "fake":
        from asyncrl_node.learner.fake_trainer import FakeTrainer

        return FakeTrainer(config)
    import torch

    from asyncrl_node.learner.trainer import Trainer as TorchTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = "cuda" if config.gpus else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return TorchTrainer(
        config.learner,
        model_folder(config),
        config.sampling.temperature,
        config.seed,
        device,
        dtype_of(config),
    )


def copies_at_once(config: Config) -> int | None:
    """Say how many samplers may copy the weights at the same time; None: all of them.

    On a CPU, half as many as there are cores: two at once on two cores took twice as long.
    """
    return None if config.gpus else max(1, len(os.sched_getaffinity(0)) // 2)


class LearnerProcess:
    """The shell around the trainer and the publishing core."""

    def __init__(self, context: ProcessContext) -> None:
        config, directory, runtime = context.config, context.directory, context.runtime
        self._config = config
        self._directory = directory
        self._trainer = make_trainer(config)
        entries, num_bytes = self._trainer.manifest()
        manifest = WeightsManifest(num_bytes, entries, layout_hash(entries))
        self._weights = LearnerWeights(config, manifest, weights_path(runtime))
        self._task = task_of(config)
        self._probe = self._make_probe()
        overdue_s, terms = config.weights_overdue_s, self._weights.terms
        core = PublishingCore(
            manifest, overdue_s, self._probe, terms=terms, copies_at_once=copies_at_once(config)
        )
        self._courier = Courier(core, Path(runtime.sockets_dir), self._weights)
        self._slots = slot_folder(runtime)
        self._records = TrainedRecords(
            directory.trained, config.pacing.max_steps_off_policy, runtime.run_attempt
        )
        self._watch = CollapseWatch()
        self._version = config.start_version
        self._saved_version = -1
        self._num_orders = 0
        self._num_evaluations = 0
        self._has_reported = False
        """True once the parity gate's figures are on the screen."""
        self._open_evaluations: set[int] = set()
        """Asked for and not answered yet."""
        self._last_version = config.start_version + config.steps
        self._clock = CauseClock()

    def run(self) -> None:
        """Train to the end of the data, the step limit or an interruption."""
        try:
            if self._config.transport != "host" and (reason := self._weights.terms.reason):
                self._courier.send(Warned(f"weights go through host shared memory: {reason}"))
            self._publish(self._version)
            self._courier.send(LearnerHello(os.getpid(), self._version))
            self._train()
            self._courier.send(LearnerFinished())
        finally:
            self._records.close()
            self._courier.close()
            self._weights.close()

    def _train(self) -> None:
        try:
            self._evaluate(wait=True)
            while self._step():
                pass
            if self._version < self._last_version:
                self._evaluate(wait=True)  # the data ended first
        except Interrupted:
            log.info("interrupted at version %d", self._version)
        self._save()

    # -- one step ----------------------------------------------------------------------------

    def _step(self) -> bool:
        """Train one step and publish; False when nothing is left to train."""
        step = self._version
        if step == self._last_version or not self._train_batch(step):
            return False
        self._report_parity()
        metrics: dict[str, float | None] = dict(self._trainer.finish_step())
        for population in ("same_version", "older_kv", "stale"):
            if not metrics.get(f"mismatch/num_tokens_{population}"):
                metrics[f"mismatch/kl_{population}"] = None  # a mean over nothing
        if "ratio/max" in metrics:  # the scripted trainer has no ratios
            for alarm in self._watch.observe(step, metrics):
                self._courier.send(Warned(alarm.story))
        metrics.update(self._records.finish_step())
        self._courier.send(Trained(step))
        with self._clock.cause("publish"):
            self._publish(step + 1)
        try:
            self._after_publication()
        finally:  # an interruption here still leaves the step's row
            metrics.update(self._clock.row())
            self._courier.send(StepFinished(step, metrics))
        return True

    def _report_parity(self) -> None:
        report = self._trainer.parity_report
        if report is not None and not self._has_reported:
            self._has_reported = True
            self._courier.send(Noted(report))

    def _train_batch(self, step: int) -> bool:
        """Take and train the batch of a step; False when there is nothing more to train."""
        learner = self._config.learner
        trained: list[TrajectoryGroup] = []
        pieces = self._pieces(step)
        closed = False
        for _ in range(learner.num_substeps):
            num_before = len(trained)
            for _ in range(learner.num_minibatches):
                piece, closed = ([], True) if closed else next(pieces)
                if piece:
                    with self._clock.cause("train"), self._set_aside(step):
                        self._trainer.accumulate(piece, step)
                    trained += piece
            if len(trained) > num_before:
                with self._clock.cause("train"), self._set_aside(step):
                    self._trainer.update()
        if trained:
            self._records.add(step, trained)
            path = self._directory.rollouts / f"step-{step:06d}.jsonl"
            count = self._config.logging.num_logged_rollouts
            write_samples(path, step, trained, self._task, count)
        return bool(trained)

    @contextmanager
    def _set_aside(self, step: int) -> Iterator[None]:
        """Write down the group that is to blame for a fault, while its slot is still there.

        The fault of a user's own function says in which step.
        """
        try:
            yield
        except RunFault as fault:
            if isinstance(fault, GroupFault):
                path = self._directory.rollouts / f"fault-step-{step:06d}.jsonl"
                write_fault(path, step, fault.group, self._task, fault.story)
            if fault.name in USER_FAULTS:
                raise RunFault(fault.name, f"step {step}: {fault.story}") from fault
            raise

    def _pieces(self, step: int) -> Iterator[tuple[list[TrajectoryGroup], bool]]:
        """Yield the batch in num_substeps * num_minibatches pieces, and whether each is the last.

        Streaming takes each piece when it is wanted; otherwise the whole batch is taken at once
        and cut. A short batch has fewer or smaller pieces. At the end of the data: nothing, last.
        """
        batch = self._config.pacing.groups_per_batch
        size = batch // (self._config.learner.num_substeps * self._config.learner.num_minibatches)
        if self._config.pacing.streaming:
            closed = False
            while not closed:
                groups, closed = self._take(step, size)
                yield groups, closed
        groups, _ = self._take(step, batch)
        with self._clock.cause("train"), self._set_aside(step):
            self._trainer.keep_proximal(groups[size * self._config.learner.num_minibatches :])
        for start in range(0, len(groups), size):
            yield groups[start : start + size], start + size >= len(groups)
        yield [], True

    def _take(self, step: int, num_groups: int) -> tuple[list[TrajectoryGroup], bool]:
        """Take groups; returns them and whether they close the batch. Raises: Interrupted."""
        self._num_orders += 1
        with self._clock.cause("waiting_for_fill"):
            self._courier.send(Take(self._num_orders, step, num_groups))
            batch = self._wait_for_batch()
        if batch is None:
            return [], True
        if batch.order != self._num_orders or batch.step != step:
            raise RunFault("wrong_answer", f"asked {self._num_orders} for {step}, got {batch}")
        self._clock.move(
            "waiting_for_fill", "waiting_for_stragglers", batch.waited_for_stragglers_s
        )
        groups = [self._slots.read_group(g.key, g.num_bytes, g.checksum) for g in batch.groups]
        for group, told in zip(groups, batch.groups, strict=True):
            if (group.problem, group.epoch) != (told.problem, told.epoch):
                raise RunFault("wrong_slot", f"{told} holds problem {group.problem}")
        self._records.check(step, groups)
        return groups, batch.closes

    def _wait_for_batch(self) -> Batch | None:
        while True:
            order = self._courier.next_order()
            match order:
                case Batch():
                    return order
                case EndOfData(reason="done"):
                    return None
                case EndOfData() | Stop():
                    raise Interrupted
                case EvaluationDone():  # one that nobody waits for
                    self._open_evaluations.discard(order.evaluation)

    # -- after a step ------------------------------------------------------------------------

    def _publish(self, version: int) -> None:
        """Make the weights public: complete in the buffer, announced; then slots are freed."""
        canary = self._score_canary(version)
        self._courier.wait_until_free()
        self._courier.announce(version, self._weights.publish(version, self._trainer), canary)
        self._courier.send(Published(version))
        self._version = version

    def _make_probe(self) -> Probe | None:
        """The canary that every sampler can take as a prompt; None where the probe is off."""
        limit = limits_of(self._config.learner, dtype_of(self._config)).probe
        most = max_rollout_tokens(self._config, self._task) - 1
        if limit is None:
            return None
        return make_probe(self._trainer.vocab_size, most, limit, self._trainer.next_logprobs)

    def _score_canary(self, version: int) -> tuple[float, ...]:
        """Score the canary. Raises: RunFault("non_finite") for weights that are broken."""
        if self._probe is None:
            return ()
        scores = tuple(self._trainer.score(self._probe.tokens))
        if not all(map(isfinite, scores)):
            story = f"the weights of version {version} give logprobs that are not finite: {scores}"
            raise RunFault("non_finite", story)
        return scores

    def _after_publication(self) -> None:
        done = self._version - self._config.start_version
        if self._version == self._last_version:
            self._evaluate(wait=True)
        elif self._config.eval_every and done % self._config.eval_every == 0:
            self._evaluate(wait=False)
        if self._config.save_every and done % self._config.save_every == 0:
            with self._clock.cause("checkpoint"):
                self._save()

    def _evaluate(self, wait: bool) -> None:
        """Ask for an evaluation of the present version.

        Waiting is for every evaluation that is still open, so that none is lost at the end.
        Raises: Interrupted.
        """
        if self._config.eval_problems == 0:
            return
        self._num_evaluations += 1
        request = RequestEvaluation(self._num_evaluations, self._version, self._version)
        self._courier.send(request)
        self._open_evaluations.add(request.evaluation)
        if not wait:
            return
        with self._clock.cause("eval"):
            while self._open_evaluations:
                order = self._courier.next_order()
                if isinstance(order, EndOfData | Stop):
                    raise Interrupted
                if isinstance(order, EvaluationDone):
                    self._open_evaluations.discard(order.evaluation)

    def _save(self) -> None:
        """Write a checkpoint: a draft folder, renamed when it is whole."""
        if self._saved_version == self._version:
            return
        folder = self._directory.checkpoint(self._version)
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        self._trainer.save(draft)
        draft.rename(folder)
        self._saved_version = self._version


def main(context: ProcessContext) -> None:
    """Run the learner."""
    process = LearnerProcess(context)
    gc.freeze()
    process.run()
