"""Work that a shard leaves to a thread, one piece after another, so that it can go on serving."""

import os
import queue
import threading
from collections.abc import Callable, Iterator


class Background:
    """One thread and what it is to do; readable when something is done.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reader, self._bell = os.pipe()
        self._orders: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue()
        self._done: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._reader

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Have `work` called there, after all that was started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._orders.put((what, work))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            what, work = order
            try:
                work()
                self._done.put((what, None))
            except Exception as error:
                self._done.put((what, error))
            del order, work  # or what it holds would stay until the next
            os.write(self._bell, b".")
            self._orders.task_done()

    def finished(self) -> Iterator[tuple[str, Exception | None]]:
        """What has been done since the last time, each with what it raised. Call it when readable."""
        os.read(self._reader, 4096)
        while not self._done.empty():
            yield self._done.get()

    def wait(self) -> None:
        """Wait until all that was started is done."""
        self._orders.join()

    def close(self) -> None:
        """Wait for what is under way."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
