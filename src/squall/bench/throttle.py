"""A process that gets a share of its core only: stopped and continued from outside, many times a second."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from squall.errors import RunError

PERIOD_S = 0.1
LOOK_S = 0.01


class Throttle:
    """Lets a process run for a share of every tenth of a second; used as a ``with`` block, after which it runs freely.

    Args:
        send: sends it a signal; may raise OSError when it has ended.
        share: above 0, below 1.

    >>> sent = []
    >>> with Throttle(sent.append, share=0.25):
    ...     pass
    >>> sent[-1] == signal.SIGCONT
    True
    """

    def __init__(self, send: Callable[[signal.Signals], None], *, share: float) -> None:
        self._send = send
        self._share = share
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over.wait(PERIOD_S * self._share):
                self._send(signal.SIGSTOP)
                self._is_over.wait(PERIOD_S * (1 - self._share))
                self._send(signal.SIGCONT)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._send(signal.SIGCONT)


@contextlib.contextmanager
def throttle_replica(run: Path, name: str, *, share: float) -> Iterator[None]:
    """Throttle a role of a run that is about to begin, from the moment that its directory names it.

    Raises:
        RunError: at the end of the block, if the role never appeared, so that nothing was throttled.
    """
    is_over = threading.Event()
    found: list[int] = []

    def wait_and_throttle() -> None:
        while (pid := _pid_of(run, name)) is None:
            if is_over.wait(LOOK_S):
                return
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:
            return
        with Throttle(lambda number: signal.pidfd_send_signal(found[0], number), share=share):
            is_over.wait()

    thread = threading.Thread(target=wait_and_throttle, name="waits for a role", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for descriptor in found:
            os.close(descriptor)
    if not found:
        raise RunError(reason=f"{name} never appeared in {run}, so it was not slowed down")


def _pid_of(run: Path, name: str) -> int | None:
    """A role's process, from the run's ``processes.json``, which may not be there yet."""
    try:
        rows = json.loads((run / "processes.json").read_text())
    except (OSError, ValueError):
        return None
    return next((int(row["pid"]) for row in rows if row["name"] == name), None)
