"""What a run in one thread writes down on behalf of its roles: ledgers, traffic, and the sizes of messages."""

from squall.observe.ledger import LedgerWriter
from squall.shard.events import Apply, Record, Worker, WriteOut
from squall.shard.records import ledger_row
from squall.training.execution import Execution, TrafficCount
from squall.wire.connection import CODEC
from squall.wire.messages import Fetched, Message, Push, Pushed


class Accounts:
    """One ledger a shard, and the bytes that go from whom to whom, whether or not there are tensors behind them."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._starts = execution.prepared.starts
        self._layout = layout = execution.prepared.layout
        self._traffic = TrafficCount()
        self._slice_bytes = [spec.num_bytes for spec in layout.slices]
        shards = range(layout.num_shards)
        self._line_bytes: dict[tuple[int, int], int] = {}  # by shard and partition
        for spec in layout.slices:
            line = spec.shard, spec.partition
            self._line_bytes[line] = self._line_bytes.get(line, 0) + spec.num_bytes
        folder = execution.directory.ledger
        self._ledgers = [LedgerWriter(folder / f"shard{shard}-{self._starts}.ledger") for shard in shards]
        self._fetching: set[tuple[str, str, int]] = set()  # pushes that ask for a fetch as well

    def close(self) -> None:
        for ledger in self._ledgers:
            ledger.close()

    def flush(self, shard: int) -> None:
        self._ledgers[shard].flush()

    def total_traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        return self._traffic.total()

    def record(self, shard: int, row: Record) -> None:
        self._ledgers[shard].append(ledger_row(shard, self._starts, row, self._execution.now()))

    def applied(self, shard: int, effect: Apply) -> None:
        num_bytes = self._bytes_of(effect.slices)
        self._traffic.add(_name(effect.sender), f"shard{shard}", num_bytes)
        self._traffic.add(f"shard{shard}", _name(effect.sender), 0 if effect.push.into is None else num_bytes)

    def written_out(self, shard: int, effect: WriteOut) -> None:
        self._traffic.add(f"shard{shard}", _name(effect.to), self._bytes_of(effect.slices))

    def size_of(self, sender: str, receiver: str, message: Message) -> int:
        """Bytes that a message stands for: its own and those of the tensors that go with it."""
        num_bytes = len(CODEC.encode(message))
        if isinstance(message, Push):
            if message.into is not None:
                self._fetching.add((sender, receiver, message.request))
            return num_bytes + self._bytes_of_line(receiver, sender)
        if isinstance(message, Fetched):
            return num_bytes + self._bytes_of_line(sender, receiver)
        if isinstance(message, Pushed) and (receiver, sender, message.request) in self._fetching:
            return num_bytes + self._bytes_of_line(sender, receiver)
        return num_bytes

    def _bytes_of_line(self, shard: str, worker: str) -> int:
        partition = int(worker.partition(".")[2] or 0)
        return self._line_bytes.get((int(shard.removeprefix("shard")), partition), 0)

    def moved(self, sender: Worker, receiver: Worker, num_bytes: int) -> None:
        """Activations or gradients went from one worker of a replica to another."""
        self._traffic.add(_name(sender), _name(receiver), num_bytes)

    def _bytes_of(self, slices: tuple[int, ...]) -> int:
        return sum(self._slice_bytes[number] for number in slices)


def _name(worker: Worker) -> str:
    return f"replica{worker.replica}.{worker.partition}"
