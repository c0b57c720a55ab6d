"""Tests of squall.coordinator.gate: what may be begun while what is out.

Planted faults, each seen to fail: a late block begun beside what was granted without it · late blocks that wait for one
another · a late block that, once begun anew, holds nothing back.
"""

from squall.coordinator.gate import StalenessGate
from tests.coordinator.plans import block

A, B, C, D = map(block, range(4))


def test_what_was_granted_before_may_all_be_begun_again_at_once_and_nothing_beside_it() -> None:
    gate = StalenessGate(1)
    gate.taken_over(A)
    gate.taken_over(B)
    assert gate.may_start(A)
    assert gate.may_start(B)
    gate.granted(A)
    assert gate.may_start(B)
    assert not gate.may_start(C)


def test_what_is_heard_of_late_waits_for_what_was_granted_without_it() -> None:
    """Else the two would run beside each other, and one make the other stale (schedule 3224)."""
    gate = StalenessGate(0)
    gate.granted(A)
    gate.taken_over(B)
    assert not gate.may_start(B)
    assert gate.may_start(A)
    gate.settled(A, is_applied=True)
    assert gate.may_start(B)
    gate.granted(B)
    assert not gate.may_start(C)
    gate.settled(B, is_applied=True)
    assert gate.may_start(C)


def test_late_ones_do_not_wait_for_one_another_for_ever() -> None:
    gate = StalenessGate(0)
    gate.granted(A)
    gate.taken_over(B)
    gate.taken_over(C)
    gate.settled(A, is_applied=True)
    assert gate.may_start(B)
    assert gate.may_start(C)
    gate.granted(B)
    assert not gate.may_start(C)
    assert not gate.may_start(D)
    gate.settled(B, is_applied=False)
    assert gate.may_start(C)
