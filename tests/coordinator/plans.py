"""What tests of the coordinator's parts plan: blocks of one minibatch, in one epoch."""

from squall.blocks import Block
from squall.coordinator.work import WorkPlan


def block(first: int) -> Block:
    return Block(0, 0, first, first + 1)


def plan_of(blocks: int, *, warm_start: int = 0) -> WorkPlan:
    return WorkPlan(
        stage=0,
        minibatches_per_epoch=blocks,
        block_length=1,
        epochs=1,
        steps=None,
        warm_start=warm_start,
    )
