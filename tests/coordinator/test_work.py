"""Tests of squall.coordinator.work: which blocks, in which order.

Faults planted, each caught: a block across the end of an epoch · `steps` not cutting a block short · done positions
handed out again · gaps shorter than a block dropped · the larger bound taken · settled minibatches not counted.
"""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.blocks import BlockSet
from squall.coordinator.work import WorkPlan


def plan(
    *, epochs: int | None = 2, steps: int | None = None, length: int = 2, per_epoch: int = 5
) -> WorkPlan:
    return WorkPlan(
        stage=0,
        minibatches_per_epoch=per_epoch,
        block_length=length,
        epochs=epochs,
        steps=steps,
        warm_start=0,
    )


def places(plan: WorkPlan, *settled: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    return [(block.epoch, block.first, block.stop) for block in plan.blocks(BlockSet(settled))]


def test_blocks_follow_the_order_and_are_short_at_the_end_of_an_epoch() -> None:
    assert places(plan()) == [(0, 0, 2), (0, 2, 4), (0, 4, 5), (1, 0, 2), (1, 2, 4), (1, 4, 5)]


@pytest.mark.parametrize(
    ("epochs", "steps", "total"), [(2, None, 10), (2, 7, 7), (2, 12, 10), (None, 7, 7), (None, None, None)]
)
def test_the_stage_ends_at_whichever_bound_comes_first(
    epochs: int | None, steps: int | None, total: int | None
) -> None:
    bounded = plan(epochs=epochs, steps=steps)

    assert bounded.total == total
    if total is not None:
        assert sum(stop - first for _, first, stop in places(bounded)) == total


def test_without_a_bound_blocks_go_on_from_epoch_to_epoch() -> None:
    endless = islice(plan(epochs=None).blocks(BlockSet()), 3000)
    assert [block.epoch for block in endless][-1] == 999


def test_a_resumed_run_fills_the_gaps_first_and_counts_what_is_done() -> None:
    done = ((0, 0, 1, 2), (0, 0, 4, 5), (0, 1, 0, 1))
    assert places(plan(), *done) == [(0, 0, 1), (0, 2, 4), (1, 1, 3), (1, 3, 5)]
    assert places(plan(steps=6), *done) == [(0, 0, 1), (0, 2, 4)]


def test_a_stage_that_is_done_has_no_blocks() -> None:
    assert places(plan(epochs=1), (0, 0, 0, 5)) == []
    assert places(plan(steps=3), (0, 0, 0, 4)) == []


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.none() | st.integers(1, 20),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=6),
)
def test_every_position_comes_once_or_was_there(
    per_epoch: int, length: int, epochs: int, steps: int | None, done: set[tuple[int, int]]
) -> None:
    done = {(epoch, at) for epoch, at in done if epoch < epochs and at < per_epoch}
    settled = tuple((0, epoch, at, at + 1) for epoch, at in sorted(done))
    bounded = plan(epochs=epochs, steps=steps, length=length, per_epoch=per_epoch)

    blocks = places(bounded, *settled)

    positions = [(epoch, at) for epoch, first, stop in blocks for at in range(first, stop)]
    assert positions == sorted(set(positions))
    assert done.isdisjoint(positions)
    total = min(epochs * per_epoch, 10**9 if steps is None else steps)
    assert len(positions) == max(0, total - len(done))
    assert all(stop - first <= length for _, first, stop in blocks)
