"""Where a replica's minibatches come from: loaded when they are needed, or ahead, by processes of its own.

Either way a minibatch is the same to the last bit, and so are the random numbers that the model draws after it: the
generators are seeded by (epoch, position), the minibatch is loaded, and they go on from where loading left them.
"""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from squall.blocks import Block
from squall.data.minibatches import Minibatches
from squall.data.order import seed_for
from squall.model.randomness import seed_everything, set_random_state
from squall.replica.data_worker import DataWorker, Duty, Key

_GRACE_S = 0.5


class Loader(Protocol):
    """Loads minibatches for one replica."""

    def expect(self, block: Block) -> None:
        """This block's minibatches will be asked for, after all that were expected before."""

    def load(self, epoch: int, position: int) -> tuple[Any, int]:
        """The minibatch, and how many examples it holds; sets the random generators to where loading left them.

        Raises:
            Exception: whatever the data raises.
        """

    def close(self) -> None:
        """End what was started for it."""


class LoadsHere:
    """Loads each minibatch where and when it is asked for."""

    def __init__(self, minibatches: Minibatches, seed: int) -> None:
        self._minibatches, self._seed = minibatches, seed

    def expect(self, block: Block) -> None:
        pass

    def load(self, epoch: int, position: int) -> tuple[Any, int]:
        seed_everything(seed_for(self._seed, epoch, position))
        return self._minibatches.load(epoch, position)

    def close(self) -> None:
        pass


class LoadsAhead:
    """Has data workers load what is expected, at most `IN_HAND` minibatches each.

    Make it before this process has computed anything: a fork of one whose math library has threads may hang.
    What is expected and never asked for is dropped as soon as a later minibatch is.

    Args:
        inherited: descriptors of this process that its workers must not hold.
    """

    IN_HAND = 2
    """One being loaded and one ready, so that a worker does not wait for the replica."""

    def __init__(self, duty: Duty, inherited: Iterable[int] = ()) -> None:
        self._seed = duty.seed
        self._expected: dict[Key, DataWorker | None] = {}  # in order, with who loads it
        self.workers: list[DataWorker] = []
        for number in range(duty.workers.num):
            others = [worker.fileno() for worker in self.workers]
            self.workers.append(DataWorker(number, duty, [*inherited, *others]))

    def expect(self, block: Block) -> None:
        for position in range(block.first, block.stop):
            self._expected.setdefault((block.epoch, position), None)
        self._hand_out()

    def load(self, epoch: int, position: int) -> tuple[Any, int]:
        """As of `Loader`.

        Raises:
            LostError: the worker that had it is dead.
            UserCodeError, DataError, MemoryError: what loading it raised there.
        """
        key = epoch, position
        worker = self._forget_up_to(key)
        if worker is None or key not in worker.orders:
            worker = self._least_busy()
            worker.order(key)
        loaded = worker.take(key)
        self._hand_out()
        if loaded.left is None:
            seed_everything(seed_for(self._seed, epoch, position))
        else:
            set_random_state(loaded.left)
        return loaded.batch, loaded.examples

    def close(self) -> None:
        """End the workers: within half a second by themselves, else killed."""
        for worker in self.workers:
            worker.dismiss()
        until = time.monotonic() + _GRACE_S
        for worker in self.workers:
            worker.close(until)

    def _forget_up_to(self, key: Key) -> DataWorker | None:
        """Expect neither this one nor any before it any more; return who loads it."""
        if key not in self._expected:
            return None
        while (first := next(iter(self._expected))) != key:
            del self._expected[first]
        return self._expected.pop(key)

    def _hand_out(self) -> None:
        for key, worker in self._expected.items():
            # An unexpected one may have jumped the queue, and what lay before it there is to be loaded anew.
            if worker is None or key not in worker.orders:
                free = self._least_busy()
                if self._busy(free) >= self.IN_HAND:
                    return
                free.order(key)
                self._expected[key] = free

    def _least_busy(self) -> DataWorker:
        return min(self.workers, key=self._busy)

    def _busy(self, worker: DataWorker) -> int:
        """How many minibatches it has in hand that are still expected."""
        return sum(self._expected.get(key) is worker for key in worker.orders)
