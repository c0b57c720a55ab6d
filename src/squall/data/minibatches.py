"""Minibatches by name: (epoch, position) says which examples, whoever asks and in whatever order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from squall.data.order import order
from squall.data.source import Source
from squall.errors import ConfigError

# Around the end of an epoch two are in use: blocks flow on without a barrier.
_ORDERS_KEPT = 2


class Minibatches:
    """Cuts each epoch's order of a source into minibatches.

    Nothing is remembered between calls but the order of the last epochs asked for; so replicas in threads
    may share one object if their source allows it.

    Attributes:
        num_minibatches: minibatches of one epoch; a short last one counts, unless `drop_last`.

    Args:
        source: where the examples come from.
        batch_size: examples of a minibatch, above 0.
        seed: the run's seed; the order is ``squall.data.order(source.num_examples, seed, epoch)``.
        shuffle: False takes the examples as they lie in the source, every epoch.
        drop_last: leave a short last minibatch out.
    Raises:
        ConfigError: `batch_size` is below 1, the seed is negative, or `drop_last` leaves nothing.

    >>> from squall.data import TensorSource
    >>> minibatches = Minibatches(TensorSource(np.arange(5)), batch_size=2, seed=0, shuffle=False)
    >>> minibatches.num_minibatches, minibatches.load(epoch=0, position=2)
    (3, (tensor([4]), 1))
    """

    def __init__(
        self, source: Source, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self._source, self._batch_size, self._seed, self._shuffle = source, batch_size, seed, shuffle
        if batch_size < 1 or seed < 0:
            raise ConfigError(
                subject="Minibatches",
                expected="batch_size >= 1 and seed >= 0",
                got=f"batch_size={batch_size}, seed={seed}",
            )
        full, rest = divmod(source.num_examples, batch_size)
        self.num_minibatches = full + (rest > 0 and not drop_last)
        if self.num_minibatches < 1:
            raise ConfigError(
                subject="Minibatches with drop_last",
                expected=f"at least batch_size={batch_size} examples",
                got=str(source.num_examples),
                remedy="Lower batch_size, or keep the short last minibatch.",
            )
        self._orders: dict[int, NDArray[np.int64]] = {}

    def resized(self, batch_size: int) -> "Minibatches":
        """The same examples as they lie in the source, in minibatches of another size."""
        return Minibatches(self._source, batch_size, self._seed, shuffle=False)

    def indices(self, epoch: int, position: int) -> NDArray[np.int64]:
        """Which examples the minibatch holds, shape (examples,), int64; not to be written to."""
        if not 0 <= position < self.num_minibatches:
            raise ConfigError(
                subject=f"minibatch {position} of epoch {epoch}",
                expected=f"a position in [0, {self.num_minibatches})",
                got=str(position),
            )
        first = position * self._batch_size
        return self._order(epoch)[first : first + self._batch_size]

    def size(self, position: int) -> int:
        """How many examples the minibatch at `position` holds, in whatever epoch."""
        return min(self._batch_size, self._source.num_examples - position * self._batch_size)

    def load(self, epoch: int, position: int) -> tuple[Any, int]:
        """The minibatch at `position` of that epoch, and how many examples it holds."""
        indices = self.indices(epoch, position)
        return self._source.batch(indices), len(indices)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            epoch = 0
        found = self._orders.get(epoch)
        if found is None:
            num = self._source.num_examples
            found = order(num, self._seed, epoch) if self._shuffle else np.arange(num, dtype=np.int64)
            kept = list(self._orders.items())[1 - _ORDERS_KEPT :]
            # Replaced in one assignment, never changed, so that threads need no lock.
            self._orders = dict([*kept, (epoch, found)])
        return found
