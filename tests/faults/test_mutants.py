"""The guards that `make mutants` removes exist in the scripts."""

from __future__ import annotations

import pytest
from faults.guards import MUTANTS, Mutant
from faults.mutants import ROOT, SCRIPTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_each_guard_occurs_once_in_its_script(mutant: Mutant) -> None:
    text = (ROOT / SCRIPTS / mutant.script).read_text()
    assert text.count(mutant.text) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_the_tests_of_a_guard_exist(mutant: Mutant) -> None:
    assert (ROOT / mutant.test_file).is_file()
