"""One process that loads minibatches ahead for a replica: a fork of it that never computes anything else.

    replica                              data worker
      (epoch, position)   ----------->   seeds the generators, loads
                          <-----------   the batch, and the generators as loading left them
                                         or: what the user's code raised, or that memory ran out
      its end closes      ----------->   exits

Orders are answered in turn. A batch lies in memory without a name, whose descriptor travels with the answer: nothing
is left behind however either of the two dies, and what is not opened costs nothing but the close of a descriptor.
"""

import gc
import os
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from squall.data.minibatches import Minibatches
from squall.data.order import seed_for
from squall.data.tree import map_leaves
from squall.errors import ConfigError, DataError, LostError, SquallError, UserCodeError, is_out_of_memory
from squall.model.randomness import random_state, seed_everything
from squall.wire.channel import Channel
from squall.wire.waiting import wait

Key = tuple[int, int]
"""A minibatch: (epoch, position)."""

_ORDER = struct.Struct("<qq")
_BATCH, _RAISED, _NO_MEMORY = b"B", b"R", b"M"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWorkers:
    """How many processes load for each replica, and what a user wants done in them first.

    Attributes:
        num: of them; 0 loads in the replica itself.
        init: called with 0 to `num` - 1, as a DataLoader's ``worker_init_fn``.
        dataset: what ``torch.utils.data.get_worker_info()`` shows as such.
    """

    num: int = 0
    init: Callable[[int], None] | None = None
    dataset: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How an object crosses from a data worker to its own replica.

    Attributes:
        pack: to some bytes and a descriptor, both to be sent; the descriptor is the caller's to close.
        unpack: the other way round; takes the descriptor over.
    """

    pack: Callable[[Any], tuple[bytes, int]]
    unpack: Callable[[bytes, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """What every data worker of a replica does.

    Attributes:
        role: the replica, as errors call it.
        seed: the run's.
    """

    role: str
    minibatches: Minibatches
    seed: int
    workers: DataWorkers
    packing: Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A minibatch as a data worker loaded it.

    Attributes:
        left: `random_state` after it; None if loading drew nothing.
    """

    batch: Any
    examples: int
    left: tuple[Any, ...] | None


class DataWorker:
    """A data worker as its replica holds it.

    Args:
        number: among those of the replica, from 0.
        inherited: descriptors that the process would get from the fork and must not hold, lest peers of this
            replica never learn of its death.

    Attributes:
        orders: minibatches that it has been told to load and that have not been taken, in order.
        pid: the process.
    """

    def __init__(self, number: int, duty: Duty, inherited: Iterable[int] = ()) -> None:
        self.orders: deque[Key] = deque()
        self._name = f"data worker {number} of {duty.role}"
        self._unpack = duty.packing.unpack
        self._channel, theirs = Channel.pair()
        not_theirs = [*inherited, self._channel.fileno()]
        self.pid = _forked(lambda: _serve(number, duty, theirs, not_theirs))
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._poll = select.poll()
        for fd in (self._channel.fileno(), self._pidfd):
            self._poll.register(fd, select.POLLIN)

    def fileno(self) -> int:
        """Of the connection to it."""
        return self._channel.fileno()

    def order(self, key: Key) -> None:
        """Have it load a minibatch.

        Raises:
            LostError: it is dead.
        """
        try:
            self._channel.send(_ORDER.pack(*key))
        except ConnectionError:
            raise self._lost() from None
        self.orders.append(key)

    def take(self, key: Key) -> Loaded:
        """Wait for a minibatch that was ordered; those ordered before it are dropped.

        Raises:
            UserCodeError, DataError: what loading it raised.
            MemoryError: there was not enough for it.
            LostError: the process died.
        """
        while self.orders[0] != key:
            for fd in self._receive()[1]:
                os.close(fd)
            self.orders.popleft()
        answer, fds = self._receive()
        self.orders.popleft()
        kind, rest = answer[:1], answer[1:]
        if kind == _NO_MEMORY:
            raise MemoryError(rest.decode())
        found = self._unpack(rest, fds[0])
        if kind == _RAISED:
            raise found
        assert isinstance(found, Loaded)
        return found

    def dismiss(self) -> None:
        """Let the process exit as soon as it has loaded what it is loading."""
        self._channel.close()

    def close(self, until: float) -> None:
        """Dismiss the process, and kill it if it is still there at that `time.monotonic`. Twice does nothing."""
        self.dismiss()
        if self._pidfd < 0:
            return
        if not wait([self._pidfd], max(0.0, until - time.monotonic())):
            os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def _receive(self) -> tuple[bytes, tuple[int, ...]]:
        # The process itself is watched as well: something that the user's code started may hold its connection open.
        ready = {fd for fd, _ in self._poll.poll()}
        received = self._channel.receive() if self._channel.fileno() in ready else None
        if received is None:
            raise self._lost()
        return received

    def _lost(self) -> LostError:
        loading = (
            f" while loading epoch {self.orders[0][0]}, position {self.orders[0][1]}" if self.orders else ""
        )
        os.kill(self.pid, signal.SIGKILL)  # which changes nothing if it is dead or dying
        code = self._reap()
        how = (
            f"exited with {code}"
            if code >= 0
            else f"was killed by signal {-code} ({signal.strsignal(-code)})"
        )
        hint = " That is what the system does when memory runs out." if code == -signal.SIGKILL else ""
        return LostError(reason=f"{self._name} {how}{loading}.{hint}")

    def _reap(self) -> int:
        """Wait for the end of the process; return its exit code."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._pidfd = -1
        return os.waitstatus_to_exitcode(status)


# The process -----------------------------------------------------------------------------------------------


def _forked(life: Callable[[], None]) -> int:
    """Fork; the child does only `life`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns where there are other threads. A role's only other one waits for the launcher's end.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        life()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _serve(number: int, duty: Duty, channel: Channel, not_mine: Iterable[int]) -> None:
    """The process's whole life: until the replica closes its end or is gone."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the replica decides when to leave
    _give_back(not_mine)
    Path("/proc/self/comm").write_text(f"{duty.role}-data{number}"[:15])
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to, and so copy, pages that are the replica's
    failure = _initialise(number, duty)
    while (received := channel.receive()) is not None:
        epoch, position = _ORDER.unpack(received[0])
        try:
            _answer(
                channel, duty, failure or _load(duty, epoch, position), f"epoch {epoch}, position {position}"
            )
        except ConnectionError:
            return


def _give_back(fds: Iterable[int]) -> None:
    """Let go of what they are, but keep the numbers: objects that are never looked at again still name them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _initialise(number: int, duty: Duty) -> BaseException | None:
    """Do what the user wants done first; an exception is the answer to every order."""
    import torch.utils.data._utils.worker as torch_worker  # here, because few replicas need it and it is large

    workers = duty.workers
    torch_worker._worker_info = torch_worker.WorkerInfo(  # what torch's own workers do for `get_worker_info`
        id=number, num_workers=workers.num, seed=duty.seed + number, dataset=workers.dataset
    )
    try:
        if workers.init is not None:
            workers.init(number)
    except Exception as error:
        return _told(error, duty, step="")
    return None


def _load(duty: Duty, epoch: int, position: int) -> Loaded | BaseException:
    try:
        seed_everything(seed_for(duty.seed, epoch, position))
        before = random_state()
        batch, examples = duty.minibatches.load(epoch, position)
        after = random_state()
        return Loaded(
            batch=map_leaves(_alone, batch), examples=examples, left=None if after == before else after
        )
    except Exception as error:
        return _told(error, duty, step=f"epoch {epoch}, position {position}")


def _told(error: Exception, duty: Duty, step: str) -> BaseException:
    """The exception as the replica would have raised it."""
    if isinstance(error, SquallError):
        return error
    if is_out_of_memory(error):
        return MemoryError(str(error))
    return UserCodeError.of(error, role=duty.role, step=step)


def _alone(leaf: Any) -> Any:
    """A tensor whose storage holds little else: sending a view sends all that it is a view of."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.numel() == 0:
        return leaf
    span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    if leaf.untyped_storage().nbytes() == span * leaf.itemsize:
        return leaf
    whole = leaf.detach().as_strided((span,), (1,), leaf.storage_offset()).clone()
    return whole.as_strided(leaf.shape, leaf.stride())


def _answer(channel: Channel, duty: Duty, found: Loaded | BaseException, step: str) -> None:
    try:
        answer, fd = _packed(duty, found, step)
    except MemoryError as error:
        channel.send(_NO_MEMORY + str(error).encode())
        return
    try:
        channel.send(answer, [fd])
    finally:
        os.close(fd)


def _packed(duty: Duty, found: Loaded | BaseException, step: str) -> tuple[bytes, int]:
    if isinstance(found, MemoryError):
        raise found
    try:
        header, fd = duty.packing.pack(found)
    except ConfigError as error:
        if error.subject == "shared memory":
            raise MemoryError(str(error)) from None
        return _packed(duty, _cannot_be_sent(error, step), step)
    return (_BATCH if isinstance(found, Loaded) else _RAISED) + header, fd


def _cannot_be_sent(error: ConfigError, step: str) -> DataError:
    return DataError(
        subject=f"the minibatch at {step}",
        expected="something that a data worker can send to its replica",
        got=error.got,
        remedy="Return tensors, arrays and plain values, or load in the replica itself: data_workers=0.",
    )
