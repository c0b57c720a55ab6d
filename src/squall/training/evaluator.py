"""The process that measures the test set while training goes on: one fetch, one version of each slice."""

from typing import Any

import torch
from torch import Tensor

from squall.errors import SquallError, UserCodeError
from squall.model.buffers import BufferSpace
from squall.replica.exchange import connect_shards, wait_for_reply
from squall.training.best import BestKeeper
from squall.training.evaluation import Evaluation
from squall.wire.connection import Connection
from squall.wire.control import EvaluateNow, Finish, Measured, Ready
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch


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
    evaluator = Evaluator(settings, load, fds)
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
            case Finish():
                return


class Evaluator:
    """Fetches like a worker that never pushes, and measures."""

    def __init__(self, settings: dict[str, Any], load: dict[str, Any], fds: list[int]) -> None:
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

    def fetch(self) -> tuple[int, ...]:
        """Fetch every slice once; return their versions, in order of slices.

        Raises:
            LostError: a shard is gone.
        """
        self._requests += 1
        versions: dict[int, int] = {}
        for shard in self._shards.values():
            shard.send(Fetch(request=self._requests, into=0))
        for shard in self._shards.values():
            versions |= {state.slice: state.version for state in wait_for_reply(shard).states}
        return tuple(versions[number] for number in sorted(versions))

    def measure(self, minibatches: int) -> dict[str, float]:
        """Measure what was fetched when so many minibatches were done, and keep it if it is the best."""
        vectors = [self._vectors[number] for number in sorted(self._vectors)]
        sets = [self._space.read(memory) for memory in self._left]
        buffers = self._space.merge([values for values in sets if values is not None])
        try:
            values = self._evaluation.of_slices(self._model, vectors, buffers)
        except SquallError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, role="evaluator", step="") from error
        if self._best is not None:
            self._best.offer(values, self._model, minibatches)
        return values
