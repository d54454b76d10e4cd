"""Every mutant of the core is found by the tests, and the shipped core is not."""

from __future__ import annotations

import sys

import pytest

from tests.core.mutants import MUTANTS, PACING, SCHEDULING, Mutant, first_kill, load, suite_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file[5:-3]}: {m.name}")
def test_the_tests_kill(mutant):
    kill = first_kill(mutant)
    sys.stdout.write(f"\n{mutant.name}: {kill.by} {kill.error} {kill.seconds:.2f} s")
    assert kill.by, "it survived"


@pytest.mark.parametrize("file", [PACING, SCHEDULING])
def test_a_harmless_change_survives_the_whole_suite(file):
    """The suite finds mutants for what they do, not for being compiled apart."""
    harmless = Mutant("harmless", file, "from __future__", "# a comment\nfrom __future__")
    assert first_kill(harmless).by == ""
    assert len(list(suite_of(file))) > 30


def test_there_are_enough_mutants_and_no_two_alike():
    assert len(MUTANTS) >= 24
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_a_mutant_that_does_not_apply_is_an_error():
    for old, new in (("no such text", "x"), ("self", "x"), ("class Pacing:", "class Pacing:")):
        with pytest.raises(LookupError):
            load(Mutant("bad", PACING, old, new))
