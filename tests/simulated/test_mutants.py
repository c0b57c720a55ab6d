"""Tests of the mutants themselves, and the grid of them all (nightly).

Faults planted, each caught: a change made twice · a change to `check_invariants` · a control that is not tried.
"""

import ast
import os

import pytest

from tests.simulated import mutants

LEAST_SHARE = 0.9


@pytest.mark.parametrize("file", ["replica/downpour.py", "coordinator/work.py", "slices.py"])
def test_each_mutant_changes_the_code_and_no_two_in_the_same_way(file: str) -> None:
    codes = [ast.unparse(mutants.mutated(file, mutant.number)) for mutant in mutants.mutants_of(file)]
    assert len(set(codes)) == len(codes)


def test_the_operators_are_all_there() -> None:
    words = {mutant.what.split(" to ")[0] for file in mutants.FILES for mutant in mutants.mutants_of(file)}
    assert {"Lt", "Eq", "In", "Is", "And", "Or", "not removed", "0", "1", "True", "False"} <= words
    assert {"statement dropped", "element 0 not returned", "left side not returned"} <= words


def test_what_only_checks_is_left_alone() -> None:
    scopes = {mutant.scope.split(".")[-1] for file in mutants.FILES for mutant in mutants.mutants_of(file)}
    assert "check_invariants" not in scopes
    assert "_push" in scopes


def test_a_mutant_is_killed_and_code_that_is_not_changed_is_not() -> None:
    of_shard = mutants.mutants_of("shard/machine.py")
    settles = [
        m
        for m in of_shard
        if m.text == "book.take(push.block, push.minibatches)" and m.what == "statement dropped"
    ]

    verdicts = mutants.try_all([*settles, of_shard[0]], jobs=2, most=180)

    assert of_shard[0].number == mutants.CONTROL
    assert [bool(verdict) for verdict in verdicts.values()] == [True, False], verdicts


def test_each_listed_survivor_is_a_mutant_and_has_a_reason() -> None:
    keys = {mutant.key for file in mutants.FILES for mutant in mutants.mutants_of(file)}
    assert mutants.reasons().keys() <= keys
    assert all(len(reason) > 20 for reason in mutants.reasons().values())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_simulated_suite_kills_nine_mutants_of_ten_and_the_rest_have_reasons() -> None:
    grid = mutants.grid(jobs=os.cpu_count() or 1)
    assert grid.share >= LEAST_SHARE, "\n".join(map(str, grid.survivors))
    assert [str(mutant) for mutant in grid.unexplained] == []
