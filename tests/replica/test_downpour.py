"""Tests of squall.replica.downpour: the loop alone, its wishes answered by hand.

Faults planted, each caught: a fetch after each push whatever `n_fetch` is · a short block counted short · `based_on`
taken after a fetch within the block · a local step before a fetch · the loss of the last minibatch alone reported ·
one slice's refusal drowned by the others · `refresh` ignored · no fetch after a gradient that is not finite ·
another lease asked for with each report, so that they pile up · time per minibatch taken for time per block.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from squall.blocks import Block, Outcome
from squall.replica.downpour import (
    Await,
    Compute,
    Computed,
    DownpourLoop,
    Exchange,
    Exchanged,
    NextBlock,
    Wish,
    downpour,
)
from squall.wire.messages import Finished, Lease, Leave, SliceState


@dataclass
class Hand:
    """Answers the wishes of one loop; every exchange finds the slice one version further."""

    loop: DownpourLoop
    blocks: list[Block]
    outcomes: dict[int, Outcome] = field(default_factory=lambda: {0: Outcome.APPLIED})
    bad: tuple[int, ...] = ()
    """Positions whose gradient is not finite."""
    refresh: tuple[int, ...] = ()
    """Which leases, counted from 0, ask for a fresh fetch."""
    wishes: list[Wish] = field(default_factory=list)
    version: int = 0
    seconds: float = 0.0

    def run(self) -> list[Wish]:
        loop, tickets, leases = downpour(self.loop), 0, 0
        answer: Any = None
        while True:
            try:
                wish = loop.send(answer)
            except StopIteration:
                return self.wishes
            self.wishes.append(wish)
            match wish:
                case NextBlock():
                    tickets += 1
                    answer = tickets
                case Await(ticket=ticket) if leases < len(self.blocks):
                    answer = Lease(
                        request=ticket, block=self.blocks[leases], attempt=1, refresh=leases in self.refresh
                    )
                    leases += 1
                case Await(ticket=ticket):
                    answer = Leave(request=ticket, why="done")
                case Compute(position=position):
                    bad = "weight" if position in self.bad and wish.is_last else ""
                    answer = Computed(loss=float(position), examples=2, not_finite=bad, seconds=self.seconds)
                case Exchange(gradient=gradient):
                    self.version += 1
                    states = {
                        n: SliceState(slice=n, version=self.version, minibatches=self.version)
                        for n in self.outcomes
                    }
                    answer = Exchanged(states=states, outcomes={} if gradient is None else self.outcomes)


def blocks(*lengths: int) -> list[Block]:
    """Blocks of these lengths, one after the other."""
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return [Block(0, 0, start, start + length) for start, length in zip(starts, lengths, strict=True)]


def loop(n_fetch: int = 1, n_push: int = 1, *, local: bool = False, ahead: int = 0) -> DownpourLoop:
    return DownpourLoop(n_fetch=n_fetch, n_push=n_push, has_local_steps=local, ahead=ahead)


def story(wishes: Iterable[Wish]) -> str:
    """c: a minibatch, C: one with a local step; P: push and fetch, p: push alone, f: fetch alone."""
    letters = []
    for wish in wishes:
        match wish:
            case Compute(local_step=local_step):
                letters.append("C" if local_step else "c")
            case Exchange(gradient=None):
                letters.append("f")
            case Exchange(fetch=fetch):
                letters.append("P" if fetch else "p")
    return "".join(letters)


def reports(wishes: Iterable[Wish]) -> list[Finished]:
    return [wish.finished for wish in wishes if isinstance(wish, NextBlock) and wish.finished is not None]


@pytest.mark.parametrize(
    ("n_fetch", "n_push", "lengths", "expected"),
    [
        (1, 1, (1, 1, 1), "f cP cP cP"),
        (2, 1, (1, 1, 1, 1), "f Cp cP Cp cP"),
        (2, 2, (2, 2), "f CcP CcP"),
        (4, 2, (2, 2, 2), "f CCp CcP CCp"),
        (5, 2, (2, 2, 2, 2, 2), "f CCp CCp CcP CCp CcP"),
        (1, 2, (2, 2), "f cfcP cfcP"),
        (2, 3, (3, 3), "f CcfCp cfCcP"),
        (2, 2, (1, 2, 2), "f cP CcP CcP"),
        (4, 2, (1, 2, 2), "f Cp CcP CCp"),
    ],
    ids=lambda value: str(value),
)
def test_fetches_fall_where_n_fetch_and_n_push_say(
    n_fetch: int, n_push: int, lengths: tuple[int, ...], expected: str
) -> None:
    """A local step is taken except where a fetch follows; a short block counts in full where fetches ride on pushes."""
    hand = Hand(loop(n_fetch, n_push, local=True), blocks(*lengths))
    assert story(hand.run()) == expected.replace(" ", "")


def test_without_local_steps_none_is_taken() -> None:
    assert story(Hand(loop(4, 2), blocks(2, 2)).run()) == "fccpccP"


def test_a_push_is_based_on_what_the_block_began_with() -> None:
    wishes = Hand(loop(1, 3), blocks(3)).run()

    (pushed,) = [wish.gradient for wish in wishes if isinstance(wish, Exchange) and wish.gradient]

    assert pushed.based_on == {0: 1}, "not what was fetched within it"


def test_a_schedule_counts_from_the_fetched_point_on() -> None:
    wishes = Hand(loop(4, 2), blocks(2, 2, 2)).run()
    counted = [wish.minibatches for wish in wishes if isinstance(wish, Compute)]
    assert counted == [1, 2, 3, 4, 3, 4], "the first fetch said 1, the one with the second push 3"


def test_a_report_sums_the_block() -> None:
    (report,) = reports(Hand(loop(3, 3), [Block(0, 1, 4, 7)]).run())

    assert (report.block, report.attempt) == (Block(0, 1, 4, 7), 1)
    assert (report.loss_sum, report.examples, report.outcome) == (4.0 + 5.0 + 6.0, 6, Outcome.APPLIED)


@pytest.mark.parametrize(
    ("outcomes", "overall"),
    [
        ((Outcome.APPLIED, Outcome.REPEATED), Outcome.APPLIED),
        ((Outcome.REPEATED, Outcome.REPEATED), Outcome.APPLIED),
        ((Outcome.APPLIED, Outcome.NOT_FINITE), Outcome.NOT_FINITE),
        ((Outcome.NOT_FINITE, Outcome.REFUSED), Outcome.REFUSED),
        ((Outcome.APPLIED, Outcome.REFUSED), Outcome.REFUSED),
    ],
)
def test_a_block_is_done_only_if_every_slice_has_it(outcomes: tuple[Outcome, ...], overall: Outcome) -> None:
    (report,) = reports(Hand(loop(), blocks(1), outcomes=dict(enumerate(outcomes))).run())
    assert report.outcome is overall


def test_staleness_is_the_mean_over_the_slices_that_applied_it() -> None:
    hand = Hand(loop(2, 1), blocks(1, 1), outcomes={0: Outcome.APPLIED, 1: Outcome.REPEATED})
    assert [report.staleness for report in reports(hand.run())] == [0.0, 1.0]


def test_after_a_gradient_that_is_not_finite_the_replica_fetches() -> None:
    assert story(Hand(loop(4, 1, local=True), blocks(1, 1, 1, 1), bad=(0,)).run()) == "fCPCpCpCp"


def test_a_lease_after_a_wait_begins_with_a_fetch_and_counts_anew() -> None:
    assert story(Hand(loop(2, 1), blocks(1, 1, 1), refresh=(1,)).run()) == "fcp fcp cP".replace(" ", "")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_leases_are_asked_for_ahead_of_the_work(ahead: int) -> None:
    wishes = Hand(loop(ahead=ahead), blocks(1, 1)).run()

    first = next(at for at, wish in enumerate(wishes) if isinstance(wish, Await))

    assert sum(isinstance(wish, NextBlock) for wish in wishes[:first]) == 1 + ahead
    assert [wish.ticket for wish in wishes if isinstance(wish, Await)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("seconds", "length", "ahead", "held"),
    [
        (1.0, 1, 1, 2),
        (0.004, 1, 1, 5),
        (0.004, 5, 1, 2),
        (0.0001, 1, 1, 16),
        (0.0001, 1, 0, 1),
        (0.03, 1, 3, 4),
    ],
)
def test_a_replica_of_short_blocks_holds_more_leases(
    seconds: float, length: int, ahead: int, held: int
) -> None:
    wishes = Hand(loop(length, length, ahead=ahead), blocks(*[length] * 40), seconds=seconds).run()

    in_hand, most = 0, 0
    for wish in wishes:
        in_hand += isinstance(wish, NextBlock) - (isinstance(wish, NextBlock) and wish.finished is not None)
        most = max(most, in_hand)
    assert most == held
    assert [report.block for report in reports(wishes)] == blocks(*[length] * 40)


def test_the_first_and_the_last_minibatch_of_a_block_are_marked() -> None:
    marks = [(w.is_first, w.is_last) for w in Hand(loop(3, 3), blocks(3, 1)).run() if isinstance(w, Compute)]
    assert marks == [(True, False), (False, False), (False, True), (True, True)]
