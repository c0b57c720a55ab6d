"""Processes of this machine: a value that names where a run goes, kept warm by a ``with`` block.

This file imports no torch, so that the command line can start the process that imports it for all roles before
it does so itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from squall.cluster.zygote import Zygote
from squall.errors import ConfigError

if TYPE_CHECKING:
    from squall.training.execution import Ending, Execution


@dataclass(eq=False)
class Local:
    """Every role as a process of its own on this machine, over shared memory.

    ``with squall.Local() as cluster:`` keeps the process warm from which roles are forked, so that further runs
    start in a tenth of a second; without it, each run starts and ends its own.

    Args:
        transport: "auto" or "shared"; "tcp" is not built yet.

    >>> Local(transport="auto").transport
    'auto'
    """

    is_modelled: ClassVar[bool] = False

    transport: str = "auto"
    _zygote: Zygote | None = field(default=None, init=False, repr=False)
    _is_busy: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _is_kept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "shared"):
            raise ConfigError(
                subject="Local(transport=)",
                expected="'auto' or 'shared'",
                got=repr(self.transport),
                remedy="This version connects the processes of one machine by shared memory only.",
            )

    def warm_up(self) -> None:
        """Begin to start the process that roles are forked from; returns at once."""
        if self._zygote is not None and self._zygote.is_lost:
            self.close()
        if self._zygote is None:
            self._zygote = Zygote.start(modules=["squall.cluster.role"])

    def run(self, execution: Execution) -> Ending:
        """Carry out a run; see `squall.training.execution.Cluster`."""
        from squall.cluster.launch import Launch

        if not self._is_busy.acquire(blocking=False):
            raise ConfigError(
                subject="this Local cluster",
                expected="one run at a time",
                got="a second run while the first goes on",
                remedy="Give each its own squall.Local().",
            )
        try:
            self.warm_up()
            assert self._zygote is not None
            return Launch(execution, self._zygote).run()
        finally:
            self._is_busy.release()
            if not self._is_kept:
                self.close()

    def abandon(self) -> None:
        """Kill the warm process at once, before it has started anything; for a program that is about to exit."""
        if self._zygote is not None:
            self._zygote.kill()

    def close(self) -> None:
        """End the warm process and whatever it has started. Twice does nothing."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def __enter__(self) -> Self:
        self._is_kept = True
        self.warm_up()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_kept = False
        self.close()
