"""Bugs that somebody could write into the core, each of which the tests must find.

    python -m tests.core.mutants          the table: mutant, killed by, seconds
    python -m tests.core.mutants --all    every killer of each: so many unit tests, which graphs

A mutant is a change of the source text that applies exactly once. It is compiled into a module in
memory; no file is touched. The kill suite are the unit tests (functions of `core`) and, for the
pacing core, small graphs of the model checker.
"""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest

import asyncrl_node
from tests.core.enumeration import Setting, explore

PACKAGE = Path(asyncrl_node.__file__).parent
PACING = "core/pacing.py"
SCHEDULING = "core/scheduling.py"
LIMIT_S = 20.0
"""CPU seconds that a suite may take; a mutant that loops for ever is killed by it."""

TOO_SLOW = {"test_cost_is_flat_in_the_number_outstanding"}
GRAPHS = (
    Setting(1, 1, 1, exact=True),
    Setting(2, 0, 2, exact=True),
    Setting(2, 1, 1, num_steps=2),
    Setting(2, 1, 1, group_bytes=(1, 2), max_bytes=4),
    Setting(1, 2, None),
    Setting(2, 1, 2),
    Setting(1, 2, 3),
    Setting(1, 2, 2, exact=True),
)


class Mutant(NamedTuple):
    """One bug: `old` occurs exactly once in `file` and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


class Kill(NamedTuple):
    """What found a mutant."""

    by: str
    """A unit test or a graph; empty if it survived."""
    error: str
    seconds: float


def load(mutant: Mutant) -> ModuleType:
    """Compile the changed source into a module of its own."""
    path = PACKAGE / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise LookupError(f"{mutant.name}: its text occurs {count} times in {mutant.file}")
    if mutant.new == mutant.old:
        raise LookupError(f"{mutant.name}: nothing is changed")
    module = ModuleType(f"mutant_{path.stem}")
    exec(compile(text.replace(mutant.old, mutant.new), f"<{mutant.name}>", "exec"), vars(module))
    return module


# -- the kill suite -------------------------------------------------------------------------------


def suite_of(file: str) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield (name, check) for a file of the core; a check takes the module under test."""
    from tests.core import test_pacing, test_scheduling

    tests = test_pacing if file == PACING else test_scheduling
    for name, function in inspect.getmembers(tests, inspect.isfunction):
        is_test = name.startswith("test_") and name not in TOO_SLOW
        takes_core = list(inspect.signature(function).parameters) == ["core"]
        if is_test and takes_core and not hasattr(function, "pytestmark"):
            yield name, function
    if file == PACING:
        for setting in GRAPHS:
            yield str(setting), _graph(setting)


def _graph(setting: Setting) -> Callable[[Any], object]:
    return lambda core: explore(setting, core, max_states=20_000, refusals=True)


class TooLong(Exception):
    """The CPU limit of a suite has passed."""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TooLong


def kills(mutant: Mutant) -> Iterator[Kill]:
    """Run the suite on a mutant; yield each check that fails."""
    core = load(mutant)
    before = signal.signal(signal.SIGVTALRM, _too_long)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        for name, check in suite_of(mutant.file):
            try:
                check(core)
            # Whatever a broken core raises, it was found out.
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
                line = (str(error).splitlines() or [""])[0]
                yield Kill(name, f"{type(error).__name__}: {line}", time.process_time() - begin)
                if isinstance(error, TooLong):
                    return
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def first_kill(mutant: Mutant) -> Kill:
    """Run the suite until something fails; `by` is empty if nothing does."""
    begin = time.process_time()
    found = kills(mutant)
    kill = next(found, None)
    found.close()
    return kill or Kill("", "", time.process_time() - begin)


# -- the mutants ----------------------------------------------------------------------------------

PACING_MUTANTS = (
    Mutant(
        "slots freed at take",
        PACING,
        "if self.exhausted or len(self._groups) >= self.rule.num_slots:",
        "if self.exhausted or len(self._groups) - self._num_taken >= self.rule.num_slots:",
    ),
    Mutant(
        "slots freed when the batch is closed",
        PACING,
        "if self.exhausted or len(self._groups) >= self.rule.num_slots:",
        "held = len(self._groups) - (0 if self.left else self._num_taken)\n"
        "        if self.exhausted or held >= self.rule.num_slots:",
    ),
    Mutant(
        "admission one slot too many",
        PACING,
        "len(self._groups) >= self.rule.num_slots:",
        "len(self._groups) > self.rule.num_slots:",
    ),
    Mutant(
        "admission one slot too few",
        PACING,
        "return self.groups_per_batch * (self.pipeline_depth + 1)",
        "return self.groups_per_batch * (self.pipeline_depth + 1) - 1",
    ),
    Mutant(
        "an admission does not carry the newest version",
        PACING,
        "self._add(Group(group_id, self.published, wanted))",
        "self._add(Group(group_id, self.published - 1, wanted))",
    ),
    Mutant(
        "horizon off by one, too lax",
        PACING,
        "horizon = source + bound - self.step",
        "horizon = source + bound - self.step + 1",
    ),
    Mutant(
        "horizon off by one, too strict",
        PACING,
        "horizon = source + bound - self.step",
        "horizon = source + bound - self.step - 1",
    ),
    Mutant(
        "only what is due now is waited for",
        PACING,
        "if due > self.rule.groups_per_batch * horizon + places:",
        "if horizon <= 0 and due > places:",
    ),
    Mutant(
        "one group too many is let through at each horizon",
        PACING,
        "if due > self.rule.groups_per_batch * horizon + places:",
        "if due > self.rule.groups_per_batch * horizon + places + 1:",
    ),
    Mutant(
        "the places that the take uses up are not counted",
        PACING,
        "places = self.left - sum(removed.values())",
        "places = self.left",
    ),
    Mutant(
        "groups in flight are not counted",
        PACING,
        "due += self._untaken[source] - removed.get(source, 0)",
        "due += len(self._completed.get(source, ())) - removed.get(source, 0)",
    ),
    Mutant(
        "the chosen are counted as untaken",
        PACING,
        "due += self._untaken[source] - removed.get(source, 0)",
        "due += self._untaken[source]",
    ),
    Mutant(
        "each horizon counts only what is due exactly then",
        PACING,
        "due += self._untaken[source] - removed.get(source, 0)",
        "due = self._untaken[source] - removed.get(source, 0)",
    ),
    Mutant(
        "K and D swapped in the test",
        PACING,
        "        bound = self.rule.max_steps_off_policy\n"
        "        if bound is None:\n            return True\n",
        "        bound = self.rule.pipeline_depth\n"
        "        if self.rule.max_steps_off_policy is None:\n            return True\n",
    ),
    Mutant(
        "K and D swapped in the slots",
        PACING,
        "return self.groups_per_batch * (self.pipeline_depth + 1)",
        "return self.groups_per_batch * ((self.max_steps_off_policy or 0) + 1)",
    ),
    Mutant(
        "K none waits anyway",
        PACING,
        "        if bound is None:\n            return True\n        removed",
        "        bound = self.rule.pipeline_depth if bound is None else bound\n        removed",
    ),
    Mutant(
        "prefetch tested against the step published",
        PACING,
        "horizon = source + bound - self.step",
        "horizon = source + bound - self.published",
    ),
    Mutant(
        "newest first",
        PACING,
        "for source in sorted(self._completed):",
        "for source in sorted(self._completed, reverse=True):",
    ),
    Mutant(
        "last completed first among equals",
        PACING,
        "list(islice(self._completed[source], count))",
        "list(islice(reversed(self._completed[source]), count))",
    ),
    Mutant(
        "a filtered untaken group keeps its slot",
        PACING,
        "        self._count(group.source, -1)\n        self._free(group)\n        return True",
        "        self._count(group.source, -1)\n        return True",
    ),
    Mutant(
        "a taken group that is dropped frees its slot",
        PACING,
        "            group.dropped = True\n            return False",
        "            self._taken[group.step].remove(group_id)\n"
        "            self._num_taken -= 1\n"
        "            self._free(group)\n"
        "            return True",
    ),
    Mutant(
        "a taken group that is dropped frees its place",
        PACING,
        "            group.dropped = True\n            return False",
        "            group.dropped = True\n            self.left += 1\n            return False",
    ),
    Mutant(
        "a taken group that is dropped is trained",
        PACING,
        "ids if not self._groups[group_id].dropped)",
        "ids)",
    ),
    Mutant(
        "due step moved down",
        PACING,
        "if version > group.source:",
        "if version != group.source:",
    ),
    Mutant(
        "due step not moved up by the first token",
        PACING,
        '        self._raise_source(group, version)\n        self._tell("start", group_id)',
        '        self._tell("start", group_id)',
    ),
    Mutant(
        "due step not moved up by the oldest token",
        PACING,
        "        self._raise_source(group, version_min)\n",
        "",
    ),
    Mutant(
        "min_version ignored on start",
        PACING,
        "self._require(version >= group.min_version,",
        "self._require(version >= 0,",
    ),
    Mutant(
        "data older than the first token accepted",
        PACING,
        "self._require(version_min >= group.source,",
        "self._require(version_min >= group.min_version,",
    ),
    Mutant(
        "restart keeps the old min_version",
        PACING,
        "        group.min_version = group.source\n",
        "",
    ),
    Mutant(
        "restart does not move the due step",
        PACING,
        "        self._raise_source(group, self.published)\n"
        "        group.min_version = group.source\n",
        "        group.min_version = self.published\n",
    ),
    Mutant(
        "restart lowers the source",
        PACING,
        "        self._raise_source(group, self.published)\n",
        "        self._count(group.source, -1)\n"
        "        group.source = self.published\n"
        "        self._count(group.source, +1)\n",
    ),
    Mutant(
        "bytes charged again at completion",
        PACING,
        "        self._raise_source(group, version_min)\n",
        "        self._raise_source(group, version_min)\n"
        "        self._reserved_bytes += group.num_bytes\n",
    ),
    Mutant(
        "bytes not charged at admission",
        PACING,
        "self._reserved_bytes += group.num_bytes",
        "self._reserved_bytes += 0",
    ),
    Mutant(
        "bytes never released",
        PACING,
        "self._reserved_bytes -= group.num_bytes",
        "self._reserved_bytes -= 0",
    ),
    Mutant(
        "bytes limit ignored",
        PACING,
        "if limit is not None and self._reserved_bytes + wanted > limit:",
        "if limit is not None and self._reserved_bytes > limit:",
    ),
    Mutant(
        "publish does not reopen the places",
        PACING,
        "            self.step = version\n            self.left = self.rule.groups_per_batch\n",
        "            self.step = version\n",
    ),
    Mutant(
        "publish opens the prefetched batch again",
        PACING,
        "            self.step = version\n            self.left = self.rule.groups_per_batch\n",
        "            self.step = version\n        self.left = self.rule.groups_per_batch\n",
    ),
    Mutant(
        "publish frees the batch that is collected",
        PACING,
        "freed = tuple(self._taken.pop(self.published, ()))",
        "freed = tuple(self._taken.pop(self.step, ()))",
    ),
    Mutant(
        "publish before the batch is whole",
        PACING,
        "collected = self.step > self.published or self.left == 0",
        "collected = True",
    ),
    Mutant(
        "two batches ahead",
        PACING,
        'self._require(self.step == self.published, "collect_next"',
        'self._require(self.step >= self.published, "collect_next"',
    ),
    Mutant(
        "left not decreased",
        PACING,
        "self.left = 0 if closes else self.left - len(group_ids)",
        "self.left = 0 if closes else self.left",
    ),
    Mutant(
        "short step not closed",
        PACING,
        "return self._take(self._stalest(self._num_completed), closes=True)",
        "return self._take(self._stalest(self._num_completed), closes=False)",
    ),
    Mutant(
        "a streamed batch is left open at the end of the data",
        PACING,
        "        if self._taken.get(self.step):\n            return self._take([], closes=True)\n",
        "",
    ),
    Mutant(
        "end of data ignores groups in flight",
        PACING,
        "if not self.exhausted or self.num_in_flight > 0:",
        "if not self.exhausted:",
    ),
    Mutant(
        "end of data ignores completed groups",
        PACING,
        "        if self._num_completed > 0:\n"
        "            return self._take(self._stalest(self._num_completed), closes=True)\n",
        "",
    ),
    Mutant(
        "admission after the end of the data",
        PACING,
        "if self.exhausted or len(self._groups)",
        "if len(self._groups)",
    ),
    Mutant(
        "step limit ignored by take",
        PACING,
        "        if self.places_left() == 0:\n            return EndOfTraining()\n",
        "",
    ),
    Mutant(
        "step limit ignored by admission",
        PACING,
        "return places is None or untaken < places",
        "return True",
    ),
    Mutant(
        "one rollout too many under a step limit",
        PACING,
        "return places is None or untaken < places",
        "return places is None or untaken <= places",
    ),
    Mutant(
        "taken groups use up places under a step limit",
        PACING,
        "untaken = len(self._groups) - self._num_taken",
        "untaken = len(self._groups)",
    ),
    Mutant(
        "resume tests only j = 0",
        PACING,
        '        if not self._fits([]):\n            raise RunFault("impossible_resume", self._imp',
        "        due = (n for s, n in self._untaken.items() if self.step >= s + (\n"
        "            rule.max_steps_off_policy if rule.max_steps_off_policy is not None else s))\n"
        "        if sum(due) > self.left:\n"
        '            raise RunFault("impossible_resume", self._imp',
    ),
    Mutant(
        "resume into more groups than slots",
        PACING,
        "if len(self._groups) > rule.num_slots:",
        "if len(self._groups) > 2 * rule.num_slots:",
    ),
    Mutant(
        "resume into too few bytes",
        PACING,
        "if largest > rule.slot_bytes or too_many_bytes:",
        "if largest > rule.slot_bytes:",
    ),
    Mutant(
        "resume of a group larger than a slot",
        PACING,
        "if largest > rule.slot_bytes or too_many_bytes:",
        "if too_many_bytes:",
    ),
    Mutant(
        "stuck waits for ever instead of stopping",
        PACING,
        "            if self.num_in_flight == 0:\n",
        "            if self.num_in_flight < 0:\n",
    ),
    Mutant(
        "past due is not noticed",
        PACING,
        "if oldest + bound < self.step:",
        "if oldest + bound < self.step - 1:",
    ),
    Mutant(
        "due now is past due",
        PACING,
        "if oldest + bound < self.step:",
        "if oldest + bound <= self.step:",
    ),
    Mutant(
        "hand back forgets the places",
        PACING,
        "            group.step = -1\n        self.left = self.rule.groups_per_batch\n",
        "            group.step = -1\n",
    ),
    Mutant(
        "hand back forgets the deadlines",
        PACING,
        "            self._count(group.source, +1)\n            self._put_completed(group)\n",
        "            self._put_completed(group)\n",
    ),
    Mutant(
        "hand back brings a dropped group back",
        PACING,
        "            if group.dropped:\n                self._free(group)\n"
        "                continue\n",
        "",
    ),
    Mutant(
        "a short batch leaves whole groups behind",
        PACING,
        "return self._take(self._stalest(min(self.left, self._num_completed)), closes=True)",
        "return self._take([], closes=True)",
    ),
    Mutant(
        "a short batch is overfilled",
        PACING,
        "self._stalest(min(self.left, self._num_completed))",
        "self._stalest(self._num_completed)",
    ),
    Mutant(
        "a take of what does not divide the batch",
        PACING,
        "0 < num_groups <= self.left and self.rule.groups_per_batch % num_groups == 0,",
        "0 < num_groups <= self.left,",
    ),
)

SCHEDULING_MUTANTS = (
    Mutant(
        "late message not recognised",
        SCHEDULING,
        "if group is None or group.key != key or group.sampler < 0",
        "if group is None or group.sampler < 0",
    ),
    Mutant(
        "message of a group without a sampler not recognised",
        SCHEDULING,
        "group.key != key or group.sampler < 0 or group.completed is not None:",
        "group.key != key or group.completed is not None:",
    ),
    Mutant(
        "second completion not recognised",
        SCHEDULING,
        "group.key != key or group.sampler < 0 or group.completed is not None:",
        "group.key != key or group.sampler < 0:",
    ),
    Mutant(
        "late messages not counted",
        SCHEDULING,
        "            self.totals.late_messages += 1\n",
        "",
    ),
    Mutant(
        "a filtered group's slot is not released",
        SCHEDULING,
        "        self._record(event, group, reason=reason)\n"
        "        self._out.append(ReleaseSlot(group.key))\n",
        "        self._record(event, group, reason=reason)\n",
    ),
    Mutant(
        "a filtered group is not dropped",
        SCHEDULING,
        "        self.pacing.drop(group.key.group_id)\n",
        "",
    ),
    Mutant(
        "a published group's slot is not released",
        SCHEDULING,
        "self._out.append(ReleaseSlot(self._groups.pop(group_id).key))",
        "self._groups.pop(group_id)",
    ),
    Mutant(
        "a restarted group keeps its attempt number",
        SCHEDULING,
        "group.key = GroupKey(group_id, group.key.attempt + 1)",
        "group.key = GroupKey(group_id, group.key.attempt)",
    ),
    Mutant(
        "a lost attempt's slot is not released",
        SCHEDULING,
        "            self._out.append(ReleaseSlot(group.key))\n            group.key = ",
        "            group.key = ",
    ),
    Mutant(
        "a lost group keeps its due step",
        SCHEDULING,
        "version = self.pacing.restart(group_id)",
        "version = self.pacing.published",
    ),
    Mutant(
        "a lost group is not placed again",
        SCHEDULING,
        "            self._unplaced.append(group_id)\n",
        "",
    ),
    Mutant(
        "new groups before lost ones",
        SCHEDULING,
        "while self._unplaced and (link := self._least_loaded()) is not None:",
        "while not self.pacing.can_admit() and self._unplaced and (\n"
        "            link := self._least_loaded()) is not None:",
    ),
    Mutant(
        "a restarted group is ordered by its old version",
        SCHEDULING,
        "order = Admit(group.key, group.problem, group.epoch, paced.min_version, seed)",
        "order = Admit(group.key, group.problem, group.epoch, 0, seed)",
    ),
    Mutant(
        "a restart samples the same again",
        SCHEDULING,
        "seed = mix(self.settings.seed, group.key.group_id, group.key.attempt) >> 1",
        "seed = mix(self.settings.seed, group.key.group_id) >> 1",
    ),
    Mutant(
        "take answered while draining",
        SCHEDULING,
        "        if self._draining:\n            self._answer_draining(pending)\n"
        "            return\n",
        "",
    ),
    Mutant(
        "admission while draining",
        SCHEDULING,
        "while not self._draining and self.pacing.can_admit():",
        "while self.pacing.can_admit():",
    ),
    Mutant(
        "drain interrupts an open batch at once",
        SCHEDULING,
        "if not self.pacing.taken_in(self.pacing.step) or self.pacing.left == 0:",
        "if True:",
    ),
    Mutant(
        "drain waits for a batch that is closed",
        SCHEDULING,
        "if not self.pacing.taken_in(self.pacing.step) or self.pacing.left == 0:",
        "if not self.pacing.taken_in(self.pacing.step):",
    ),
    Mutant(
        "drain trains a batch before its first update",
        SCHEDULING,
        "taken >= rule.groups_per_batch // self.settings.num_substeps:",
        "taken >= 1:",
    ),
    Mutant(
        "drain hands back a batch after its first update",
        SCHEDULING,
        "taken >= rule.groups_per_batch // self.settings.num_substeps:",
        "taken > rule.groups_per_batch // self.settings.num_substeps:",
    ),
    Mutant(
        "handed back groups are not recorded",
        SCHEDULING,
        '                self._record("handed_back", self._groups[group_id], '
        "step=self.pacing.step)\n",
        "                pass\n",
    ),
    Mutant(
        "warning never sent",
        SCHEDULING,
        "if pending is None or now_s - pending.warned_s < self.settings.warn_every_s:",
        "if True:",
    ),
    Mutant(
        "warning sent at every event",
        SCHEDULING,
        "        pending.warned_s = now_s\n        waited",
        "        waited",
    ),
    Mutant(
        "warning names the groups due last",
        SCHEDULING,
        "ids.sort(key=lambda g: (self.pacing.due_step(g) or 0, g))",
        "ids.sort(key=lambda g: (-(self.pacing.due_step(g) or 0), -g))",
    ),
    Mutant(
        "waiting for fill counted as stragglers",
        SCHEDULING,
        'pending.account(answer.reason == "stragglers", now_s)',
        "pending.account(True, now_s)",
    ),
    Mutant(
        "waiting for stragglers counted as fill",
        SCHEDULING,
        'pending.account(answer.reason == "stragglers", now_s)',
        "pending.account(False, now_s)",
    ),
    Mutant(
        "only the last stretch of a wait is counted",
        SCHEDULING,
        "self.held_s += now_s - self.held_since_s",
        "self.held_s = now_s - self.held_since_s",
    ),
    Mutant(
        "gauges read when the row is written",
        SCHEDULING,
        "totals, gauges = self.totals, self._gauges",
        "totals, gauges = self.totals, self.pacing.gauges()",
    ),
    Mutant(
        "gauges read before the slots are freed",
        SCHEDULING,
        "        for group_id in self.pacing.publish(published.version):\n"
        "            self._out.append(ReleaseSlot(self._groups.pop(group_id).key))\n"
        "        self._gauges = self.pacing.gauges()\n",
        "        self._gauges = self.pacing.gauges()\n"
        "        for group_id in self.pacing.publish(published.version):\n"
        "            self._out.append(ReleaseSlot(self._groups.pop(group_id).key))\n",
    ),
    Mutant(
        "figures of a batch are not reset",
        SCHEDULING,
        "        totals.start_batch()\n",
        "",
    ),
    Mutant(
        "reward over what the filter left",
        SCHEDULING,
        "        totals.count_sampled(done)\n        totals.num_filtered_tokens",
        "        totals.num_filtered_tokens",
    ),
    Mutant(
        "nothing is said of a stretch without signal",
        SCHEDULING,
        "if totals.filtered_in_a_row % (10 * self.settings.rule.groups_per_batch) == 0:",
        "if totals.filtered_in_a_row < 0:",
    ),
    Mutant(
        "constant rewards are filtered unasked",
        SCHEDULING,
        "if self.settings.filter_constant_rewards and done.reward_min == done.reward_max:",
        "if done.reward_min == done.reward_max:",
    ),
    Mutant(
        "a failure is not counted",
        SCHEDULING,
        "        self.totals.failed += 1\n",
        "",
    ),
    Mutant(
        "a failed group stays with its sampler",
        SCHEDULING,
        "        self._unassign(group)\n        self.totals.failed += 1\n",
        "        self.totals.failed += 1\n",
    ),
    Mutant(
        "data of any version is trained",
        SCHEDULING,
        "if not paced.source <= done.version_min <= done.version_max:",
        "if not paced.source <= done.version_min:",
    ),
    Mutant(
        "a second hello restarts the sampler's groups",
        SCHEDULING,
        "if known is not None and known.incarnation >= hello.incarnation:",
        "if known is not None and known.incarnation > hello.incarnation:",
    ),
    Mutant(
        "the exit of an old incarnation takes the new one",
        SCHEDULING,
        "if link is None or link.incarnation != incarnation:",
        "if link is None:",
    ),
    Mutant(
        "a new incarnation forgets the groups of the old one",
        SCHEDULING,
        "            self._on_sampler_gone(hello.sampler, known.incarnation)\n",
        "            pass\n",
    ),
    Mutant(
        "a faulty sampler keeps its groups",
        SCHEDULING,
        "        self._on_sampler_gone(fault.sampler, fault.incarnation)\n",
        "",
    ),
    Mutant(
        "a faulty sampler is not replaced",
        SCHEDULING,
        "        self._out.append(ToLauncher(report))\n",
        "",
    ),
    Mutant(
        "the most loaded sampler gets the next group",
        SCHEDULING,
        "load, sampler, incarnation = self._idle[0]",
        "self._idle.sort(reverse=True)\n            load, sampler, incarnation = self._idle[0]",
    ),
    Mutant(
        "a sampler takes more groups than it has room for",
        SCHEDULING,
        "if len(link.groups) < link.max_groups:",
        "if True:",
    ),
    Mutant(
        "outdated entries of idle samplers pile up",
        SCHEDULING,
        "if len(self._idle) > 4 * len(self._links) + 16:",
        "if len(self._idle) < 0:",
    ),
    Mutant(
        "an idle sampler is forgotten when the heap is swept",
        SCHEDULING,
        "links = (k for k in self._links.values() if len(k.groups) < k.max_groups)",
        "links = (k for k in self._links.values() if k is link)",
    ),
    Mutant(
        "an evaluation that lasts is not named",
        SCHEDULING,
        'elif phase == "evaluating" and self.evaluations.num_open:',
        'elif phase == "evaluating" and not self.evaluations.num_open:',
    ),
    Mutant(
        "a phase is warned of at every event",
        SCHEDULING,
        "        self._phase_watch = (phase, since_s, now_s)\n",
        "",
    ),
    Mutant(
        "silence is found by the message that ends it",
        SCHEDULING,
        "                self._on_heartbeat(event, now_s)\n",
        "                self._find_silent(now_s)\n"
        "                self._on_heartbeat(event, now_s)\n",
    ),
    Mutant(
        "silence is never found",
        SCHEDULING,
        "                self._find_silent(now_s)\n",
        "                pass\n",
    ),
    Mutant(
        "heartbeats do not end a silence",
        SCHEDULING,
        "            link.heard_s = now_s\n",
        "",
    ),
    Mutant(
        "a run in which everything fails goes on",
        SCHEDULING,
        "if self.totals.failed_in_a_row >= limit:",
        "if self.totals.failed_in_a_row < 0:",
    ),
    Mutant(
        "failures far apart stop the run",
        SCHEDULING,
        "        self.totals.failed_in_a_row = 0\n",
        "",
    ),
    Mutant(
        "the learner's figures replace the reward of everything sampled",
        SCHEDULING,
        "        row.update(finished.metrics)\n"
        '        row["reward/mean"] = totals.reward_sum / max(1, totals.num_rollouts)\n',
        '        row["reward/mean"] = totals.reward_sum / max(1, totals.num_rollouts)\n'
        "        row.update(finished.metrics)\n",
    ),
    Mutant(
        "a restarted group is ordered by the newest version",
        SCHEDULING,
        "order = Admit(group.key, group.problem, group.epoch, paced.min_version, seed)",
        "order = Admit(group.key, group.problem, group.epoch, self.pacing.published, seed)",
    ),
    Mutant(
        "a good group does not end a stretch without signal",
        SCHEDULING,
        "        self.totals.filtered_in_a_row = 0\n",
        "",
    ),
    Mutant(
        "the user's seed does not matter",
        SCHEDULING,
        "seed = mix(self.settings.seed, group.key.group_id, group.key.attempt) >> 1",
        "seed = mix(0, group.key.group_id, group.key.attempt) >> 1",
    ),
    Mutant(
        "a report names another incarnation",
        SCHEDULING,
        "RestartSampler(fault.sampler, fault.incarnation, fault.name, fault.story)",
        "RestartSampler(fault.sampler, fault.incarnation + 1, fault.name, fault.story)",
    ),
    Mutant(
        "a report always names the first incarnation",
        SCHEDULING,
        "RestartSampler(fault.sampler, fault.incarnation, fault.name, fault.story)",
        "RestartSampler(fault.sampler, 0, fault.name, fault.story)",
    ),
    Mutant(
        "restarted groups are not counted",
        SCHEDULING,
        "            self.totals.restarted += 1\n",
        "",
    ),
    Mutant(
        "lost groups are placed last first",
        SCHEDULING,
        "self._place(self._groups[self._unplaced.popleft()], link)",
        "self._place(self._groups[self._unplaced.pop()], link)",
    ),
    Mutant(
        "lost groups are queued last first",
        SCHEDULING,
        "for group_id in sorted(link.groups):",
        "for group_id in sorted(link.groups, reverse=True):",
    ),
    Mutant(
        "the row says that nothing is taken",
        SCHEDULING,
        'row["async/taken_groups"] = gauges.taken',
        'row["async/taken_groups"] = 0',
    ),
    Mutant(
        "the row does not say what was restarted",
        SCHEDULING,
        'row["async/restarted_groups"] = totals.restarted',
        'row["async/restarted_groups"] = 0',
    ),
    Mutant(
        "an evaluation is ordered at any version",
        SCHEDULING,
        "self.evaluations.begin(event.evaluation, event.step, event.min_version)",
        "self.evaluations.begin(event.evaluation, event.step, 0)",
    ),
    Mutant(
        "a hopeless run goes on for twice as long",
        SCHEDULING,
        "limit = 4 * self.settings.rule.num_slots",
        "limit = 8 * self.settings.rule.num_slots",
    ),
    Mutant(
        "a hopeless run is counted in batches",
        SCHEDULING,
        "limit = 4 * self.settings.rule.num_slots",
        "limit = 4 * self.settings.rule.groups_per_batch",
    ),
    Mutant(
        "a silent sampler is called by another name",
        SCHEDULING,
        'SamplerFault(link.sampler, link.incarnation, "sampler_silent", story)',
        'SamplerFault(link.sampler, link.incarnation, "overdue", story)',
    ),
    Mutant(
        "a silent sampler is reported as its first incarnation",
        SCHEDULING,
        'SamplerFault(link.sampler, link.incarnation, "sampler_silent", story)',
        'SamplerFault(link.sampler, 0, "sampler_silent", story)',
    ),
    Mutant(
        "evaluation of a lost sampler is forgotten",
        SCHEDULING,
        "        self.evaluations.lose_sampler(sampler)\n",
        "",
    ),
    Mutant(
        "leftovers are not counted",
        SCHEDULING,
        "            totals.leftover += 1\n",
        "",
    ),
    Mutant(
        "fixed staleness ignores what is in flight",
        SCHEDULING,
        "self.pacing.num_in_flight > 0 or self.pacing.can_admit()",
        "self.pacing.can_admit()",
    ),
    Mutant(
        "fixed staleness ignores free slots",
        SCHEDULING,
        "self.pacing.num_in_flight > 0 or self.pacing.can_admit()",
        "self.pacing.num_in_flight > 0",
    ),
    Mutant(
        "leftovers are not cancelled",
        SCHEDULING,
        "self._out.append(ToSampler(group.sampler, Cancel(group.key)))",
        "pass",
    ),
    Mutant(
        "samplers are not stopped",
        SCHEDULING,
        "        self._out.extend(ToSampler(sampler, Stop()) for sampler in self._links)\n",
        "",
    ),
    Mutant(
        "trained groups are not counted",
        SCHEDULING,
        "            self.totals.trained += 1\n",
        "",
    ),
    Mutant(
        "the first weights are taken for a step",
        SCHEDULING,
        "if published.version == self.settings.start_version:",
        "if published.version == 0:",
    ),
    Mutant(
        "a batch does not say that it closes",
        SCHEDULING,
        "closes=taken.closes_batch,",
        "closes=False,",
    ),
    Mutant(
        "a group is handed over without its record",
        SCHEDULING,
        '            self._record("taken", group, step=self.pacing.step)\n',
        "",
    ),
)

MUTANTS = PACING_MUTANTS + SCHEDULING_MUTANTS


# -- the table ------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Print the table; return the number of survivors."""
    survivors = 0
    total_s = 0.0
    for mutant in MUTANTS:
        if "--all" in arguments:
            found = list(kills(mutant))
            tests = [kill.by for kill in found if kill.by.startswith("test_")]
            graphs = [kill.by for kill in found if not kill.by.startswith("test_")]
            words = f"{len(tests)} tests; graphs: {', '.join(graphs) or '-'}"
            seconds = found[-1].seconds if found else 0.0
        else:
            kill = first_kill(mutant)
            found = [kill] if kill.by else []
            words, seconds = kill.by, kill.seconds
        survivors += not found
        total_s += seconds
        file = mutant.file.removeprefix("core/").removesuffix(".py")
        sys.stdout.write(
            f"{file:10s} {mutant.name:55s} {words or 'SURVIVED':70s} {seconds:5.2f} s\n"
        )
        sys.stdout.flush()
    killed = len(MUTANTS) - survivors
    sys.stdout.write(f"{killed} of {len(MUTANTS)} killed in {total_s:.1f} s of CPU time\n")
    return survivors


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
