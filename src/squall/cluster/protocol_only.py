"""Nothing is computed and no tensor exists: the protocol alone, for replicas by the ten thousand."""

from math import nan

from squall.cluster.accounts import Accounts
from squall.data.minibatches import Minibatches
from squall.replica.downpour import Compute, Computed
from squall.shard.events import Applied, Apply, Record, Store, Worker, WriteOut


class ProtocolOnly:
    """What a `World` asks for, answered without arithmetic.

    A minibatch takes its time and has its number of examples, every gradient is finite, and nobody knows a loss.
    """

    def __init__(self, minibatches: Minibatches, accounts: Accounts) -> None:
        self._minibatches = minibatches
        self._accounts = accounts

    def attach(self, worker: Worker) -> None:
        pass

    def compute(self, worker: Worker, wish: Compute) -> Computed:
        return Computed(loss=nan, examples=self._minibatches.size(wish.position))

    def swap(self, worker: Worker, buffer: int) -> None:
        pass

    def apply(self, shard: int, effect: Apply) -> Applied:
        self._accounts.applied(shard, effect)
        return Applied()

    def write_out(self, shard: int, effect: WriteOut) -> None:
        self._accounts.written_out(shard, effect)

    def record(self, shard: int, row: Record, now: float) -> None:
        self._accounts.record(shard, row)

    def store(self, shard: int, effect: Store) -> None:
        pass
