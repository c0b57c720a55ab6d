"""Arithmetic without tensors: bookkeeping of what would be applied, for protocol schedules by the thousand.

It also watches what only a simulation can see: that no parameter buffer is written while its replica may be
reading it, and that no gradient is applied other than the one its replica last finished.
"""

from collections.abc import Callable, Mapping

from squall.blocks import Block
from squall.replica.downpour import Compute, Computed
from squall.shard.events import Applied, Apply, NotFinite, Record, Store, Worker, WriteOut


def loss_of(epoch: int, position: int) -> float:
    """The made-up mean loss of a minibatch: a sum of some names them, and is exact."""
    return 2.0 ** (position % 16) + epoch


def examples_of(position: int) -> int:
    """The made-up number of examples in a minibatch."""
    return 4 + position % 3


def absent_of(position: int) -> tuple[int, ...]:
    """The made-up tensors without a gradient in a block that ends at this position."""
    return (position % 5,) if position % 2 else ()


def scale_of(position: int) -> float:
    """The made-up clipping of a block that ends at this position."""
    return 0.5 if position % 3 == 0 else 1.0


class ModelledArithmetic:
    """Keeps, per slice, the blocks applied in order, and every ledger row.

    Args:
        not_finite: says which tensor, if any, is not finite when this worker computes this minibatch.
        ruins: says which tensor, if any, this update leaves not finite on this shard.
    """

    def __init__(
        self,
        not_finite: Callable[[Worker, Compute], str] = lambda worker, wish: "",
        ruins: Callable[[int, Apply], int | None] = lambda shard, effect: None,
    ) -> None:
        self.applied: dict[int, list[Block]] = {}
        self.rows: list[tuple[float, int, Record]] = []
        self.stored: list[tuple[int, Store]] = []
        self._not_finite = not_finite
        self._ruins = ruins
        self._in_use: dict[Worker, int] = {}
        self._gradient: dict[
            tuple[Worker, int], list[tuple[int, int]]
        ] = {}  # by buffer: what is summed so far
        self._found: dict[Worker, str] = {}

    def attach(self, worker: Worker) -> None:
        self._in_use[worker] = 1

    def compute(self, worker: Worker, wish: Compute) -> Computed:
        if wish.is_first:
            self._gradient[worker, wish.buffer] = []
            self._found[worker] = ""
        self._gradient[worker, wish.buffer].append((wish.epoch, wish.position))
        self._found[worker] = self._found[worker] or self._not_finite(worker, wish)
        if not wish.is_last:
            return Computed(loss=loss_of(wish.epoch, wish.position), examples=examples_of(wish.position))
        return Computed(
            loss=loss_of(wish.epoch, wish.position),
            examples=examples_of(wish.position),
            not_finite=self._found[worker],
            absent=absent_of(wish.position),
            scale=scale_of(wish.position),
        )

    def swap(self, worker: Worker, buffer: int) -> None:
        self._in_use[worker] = buffer

    def apply(self, shard: int, effect: Apply) -> Applied | NotFinite:
        block = effect.push.block
        expected = [(block.epoch, position) for position in range(block.first, block.stop)]
        assert self._gradient[effect.sender.beside(0), effect.push.buffer] == expected, (
            "the gradient buffer holds another block"
        )
        if (tensor := self._ruins(shard, effect)) is not None:
            return NotFinite(tensor=tensor)
        for number in effect.slices:
            self.applied.setdefault(number, []).append(block)
        if effect.push.into is not None:
            self._written(effect.sender, effect.push.into)
        return Applied()

    def write_out(self, shard: int, effect: WriteOut) -> None:
        self._written(effect.to, effect.into)

    def _written(self, worker: Worker, buffer: int) -> None:
        assert self._in_use[worker.beside(0)] != buffer, (
            "a shard writes into the buffer that its replica reads"
        )

    def record(self, shard: int, row: Record, now: float) -> None:
        self.rows.append((now, shard, row))

    def store(self, shard: int, effect: Store) -> None:
        self.stored.append((shard, effect))

    def counts(self) -> Mapping[int, dict[Block, int]]:
        """Per slice, how often each block was applied."""
        counts: dict[int, dict[Block, int]] = {}
        for number, blocks in self.applied.items():
            for block in blocks:
                counts.setdefault(number, {}).setdefault(block, 0)
                counts[number][block] += 1
        return counts
