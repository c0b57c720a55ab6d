"""The process that measures the test set while training goes on: one fetch, one version of each slice."""

from typing import Any

import torch
from torch import Tensor

from squall.model.buffers import BufferSpace
from squall.replica.exchange import Exchange, Reply, SharedExchange, connect_shards
from squall.training.best import BestKeeper
from squall.training.evaluation import Evaluation
from squall.wire.connection import Connection
from squall.wire.control import EvaluateNow, Finish, Measured, Ready, ShardBack
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch
from squall.wire.waiting import wait


def serve(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Evaluate whenever the launcher asks, until it says to finish.

    Args:
        settings: "shards", those that hold slices; "num_replicas"; "replica", what stands for one in shards' books;
            "tcp", if it is to connect that way.
        load: "model", which is written, its "buffers", "evaluation" and "best".
        launcher: the connection to it.
        fds: each replica's memory for its model's buffers; then, unless "tcp" is there, for each of "shards" its
            connection and the memory shared with it.
    """
    torch.set_num_threads(1)
    evaluator = Evaluator(settings, load, launcher, fds)
    launcher.send(Ready())
    while (received := launcher.receive()) is not None:
        match received[0]:
            case EvaluateNow(epoch=epoch, minibatches=minibatches):
                versions = evaluator.fetch()
                values = evaluator.measure(minibatches)
                measured = Measured(
                    epoch=epoch,
                    minibatches=minibatches,
                    names=tuple(values),
                    values=tuple(values.values()),
                    versions=versions,
                )
                launcher.send(measured)
            case ShardBack(shard=shard):
                evaluator.come_back(shard, received[1][0])
            case Finish():
                return


class Evaluator:
    """Fetches like a worker that never pushes, and measures."""

    def __init__(
        self, settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]
    ) -> None:
        self._launcher = launcher
        self._model = load["model"]
        self._evaluation: Evaluation = load["evaluation"]
        self._space: BufferSpace = load["buffers"]
        self._best: BestKeeper | None = load["best"]
        arena_bytes, num_replicas = self._space.arena_bytes, settings["num_replicas"]
        self._left = [
            self._space.memory(SharedArena.attach(fd, arena_bytes, writable=False))
            for fd in fds[:num_replicas]
        ]
        self._shards = connect_shards(
            settings, self._evaluation.layout, fds[num_replicas:], num_gradients=0, is_reader=True
        )
        self._vectors: dict[int, Tensor] = {}
        for exchange in self._shards.values():
            self._vectors |= exchange.views.buffers[0]
        self._requests = 0
        self._open: dict[int, Fetch] = {}  # by shard

    def fetch(self) -> tuple[int, ...]:
        """Fetch every slice once; return their versions, in order of slices.

        Raises:
            LostError: a shard is gone.
        """
        self._requests += 1
        versions: dict[int, int] = {}
        request = Fetch(request=self._requests, into=0)
        for exchange in self._shards.values():
            exchange.send(request)
        self._open = dict.fromkeys(self._shards, request)
        for shard, exchange in self._shards.items():
            reply = self._reply(shard, exchange)
            versions |= {state.slice: state.version for state in reply.states}
        return tuple(versions[number] for number in sorted(versions))

    def _reply(self, shard: int, exchange: Exchange) -> Reply:
        """Wait until a shard has answered; one that is killed may come back, and is asked again."""
        while not (replies := exchange.replies()):
            if isinstance(exchange, SharedExchange) and exchange.is_gone:
                self._wait_for(shard)
            else:
                wait([exchange], None)
        del self._open[shard]
        return replies[0]

    def _wait_for(self, shard: int) -> None:
        """Until the launcher says that this shard is back; the run may end before."""
        while (received := self._launcher.receive()) is not None:
            match received[0]:
                case ShardBack(shard=back):
                    self.come_back(back, received[1][0])
                    if back == shard:
                        return
                case Finish():
                    break
        raise SystemExit(0)

    def come_back(self, shard: int, fd: int) -> None:
        """A shard was killed and started anew; this is the connection to it."""
        exchange = self._shards[shard]
        assert isinstance(exchange, SharedExchange)
        exchange.come_back(fd)
        if shard in self._open:
            exchange.send(self._open[shard])

    def measure(self, minibatches: int) -> dict[str, float]:
        """Measure what was fetched when so many minibatches were done, and keep it if it is the best."""
        vectors = [self._vectors[number] for number in sorted(self._vectors)]
        sets = [self._space.read(memory) for memory in self._left]
        buffers = self._space.merge([values for values in sets if values is not None])
        values = self._evaluation.of_slices(self._model, vectors, buffers)
        if self._best is not None:
            self._best.offer(values, self._model, minibatches)
        return values
