"""What a run in one thread writes down on behalf of its roles: ledgers, traffic, and the sizes of messages."""

from collections.abc import Mapping

from squall.observe.ledger import LedgerWriter, read_ledger, rows_to_take_back
from squall.shard.events import Apply, Record, Worker, WriteOut
from squall.shard.records import first_incarnation, ledger_file, ledger_row
from squall.training.execution import Execution, TrafficCount
from squall.wire.connection import CODEC
from squall.wire.messages import Fetched, Message, Push, Pushed


class Accounts:
    """One ledger a shard, and the bytes that go from whom to whom, whether or not there are tensors behind them.

    Attributes:
        lives: of each shard, its incarnation.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._layout = layout = execution.prepared.layout
        self._traffic = TrafficCount()
        self._slice_bytes = [spec.num_bytes for spec in layout.slices]
        shards = range(layout.num_shards)
        self._line_bytes: dict[tuple[int, int], int] = {}  # by shard and partition
        for spec in layout.slices:
            line = spec.shard, spec.partition
            self._line_bytes[line] = self._line_bytes.get(line, 0) + spec.num_bytes
        self._folder = execution.directory.ledger
        self.lives = [first_incarnation(self._folder, shard) for shard in shards]
        self._ledgers = [self._ledger(shard) for shard in shards]
        self._fetching: set[tuple[str, str, int]] = set()  # pushes that ask for a fetch as well

    def _ledger(self, shard: int) -> LedgerWriter:
        return LedgerWriter(self._folder / ledger_file(shard, self.lives[shard]))

    def close(self) -> None:
        for ledger in self._ledgers:
            ledger.close()

    def flush(self, shard: int) -> None:
        self._ledgers[shard].flush()

    def total_traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        return self._traffic.total()

    def record(self, shard: int, row: Record) -> None:
        self._ledgers[shard].append(ledger_row(shard, self.lives[shard], row, self._execution.now()))

    def came_back(self, shard: int, incarnation: int, versions: Mapping[int, int]) -> None:
        """A shard goes on, in another life: what it had applied beyond these versions of its slices is taken back."""
        self._ledgers[shard].close()
        rows = read_ledger(self._folder, f"shard{shard}-*", "rolled-back-*")
        lost = list(rows_to_take_back(rows[rows["shard"] == shard], versions, self._execution.now()))
        self.lives[shard] = incarnation
        self._ledgers[shard] = self._ledger(shard)
        for row in lost:
            self._ledgers[shard].append(row)

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
