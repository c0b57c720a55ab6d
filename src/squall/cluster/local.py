"""Processes of this machine: a value that names where a run goes, kept warm by a ``with`` block.

This file imports no torch, so that the command line can start the process that imports it for all roles before
it does so itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from squall.cluster.restarts import NEVER, Restarts
from squall.cluster.tcp import TcpPlan
from squall.cluster.zygote import Zygote
from squall.errors import ConfigError
from squall.keywords import named
from squall.wire.address import Address

if TYPE_CHECKING:
    from squall.training.execution import Ending, Execution
    from squall.training.job import Job


@named
@dataclass(eq=False)
class Local:
    """Every role as a process of its own on this machine, over shared memory or TCP.

    ``with squall.Local() as cluster:`` keeps the process warm from which roles are forked, so that further runs
    start in a tenth of a second; without it, each run starts and ends its own.

    Args:
        transport: "shared": tensors lie in memory that both sides map. "tcp": everything between roles goes over
            authenticated TCP connections, as between machines. "auto": shared, where the system has it.
        bind: where shards and the coordinator listen over TCP: "host:port" of a loopback address; port 0 for any
            that is free, since each has its own.
        advertise: what the others are told instead of `bind`; None: the same.
        relay: called with the names of caller and callee and the callee's address, as in ``("replica0.0", "shard1",
            "127.0.0.1:40001")``; returns the address to call instead, so that something may stand in between.
        restarts: how often, and how soon, a replica or coordinator is started again that was killed, ran out of memory
            or lost its peers; None: never. One that raises in the user's code ends the run.

    Raises:
        ConfigError: an address that others could reach too, or no such transport.

    >>> Local(transport="tcp", bind="[::1]:0").bind
    '[::1]:0'
    """

    is_modelled: ClassVar[bool] = False

    transport: str = "auto"
    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    relay: Callable[[str, str, str], str] | None = None
    restarts: Restarts | None = field(default_factory=Restarts)
    _zygote: Zygote | None = field(default=None, init=False, repr=False)
    _is_busy: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _is_kept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "shared", "tcp"):
            raise ConfigError(
                subject="Local(transport=)", expected="'auto', 'shared' or 'tcp'", got=repr(self.transport)
            )
        if Address.parse(self.bind).port:
            raise ConfigError(
                subject="Local(bind=)",
                expected="port 0, for every shard and the coordinator need one each",
                got=repr(self.bind),
            )
        Address.parse(self.bind).resolve_loopback()
        if self.transport != "tcp" and self.relay is not None:
            raise ConfigError(subject="Local(relay=)", expected='transport="tcp"', got=repr(self.transport))
        if self.restarts is not None and not isinstance(self.restarts, Restarts):
            raise ConfigError(
                subject="Local(restarts=)", expected="squall.Restarts(...) or None", got=repr(self.restarts)
            )

    def warm_up(self) -> None:
        """Begin to start the process that roles are forked from; returns at once."""
        if self._zygote is not None and self._zygote.is_lost:
            self.close()
        if self._zygote is None:
            self._zygote = Zygote.start(modules=["squall.cluster.role"])

    def expect(self, job: Job) -> None:
        """Refuse what cannot be done here; see `squall.training.execution.Cluster`."""
        from squall.cluster.chaos import expect_kinds

        expect_kinds(job.faults, "squall.Local", is_tcp=self.transport == "tcp")

    def run(self, execution: Execution) -> Ending:
        """Carry out a run; see `squall.training.execution.Cluster`."""
        from squall.cluster.launch import Launch
        from squall.cluster.weather import suffering

        if not self._is_busy.acquire(blocking=False):
            raise ConfigError(
                subject="this Local cluster",
                expected="one run at a time",
                got="a second run while the first goes on",
                remedy="Give each its own squall.Local().",
            )
        try:
            if execution.prepared.cut is not None and self._tcp_plan(None) is not None:
                raise ConfigError(
                    subject="Local, over TCP, of a model that is cut over partitions",
                    expected='transport="shared", on a system with memfd_create',
                    got=repr(self.transport),
                    remedy="This version does not have both yet: use partitions=1, or shared memory.",
                )
            self.warm_up()
            assert self._zygote is not None
            restarts = NEVER if self.restarts is None else self.restarts
            job, prepared = execution.prepared.job, execution.prepared
            began = execution.clock.began + prepared.time_s
            with suffering(job.faults, job.seed, began, self.relay) as relay:
                return Launch(execution, self._zygote, self._tcp_plan(relay), restarts).run()
        finally:
            self._is_busy.release()
            if not self._is_kept:
                self.close()

    def _tcp_plan(self, relay: Callable[[str, str, str], str] | None) -> TcpPlan | None:
        """How roles connect over TCP, with a token of this run's own; None where they share memory."""
        has_memfd = hasattr(os, "memfd_create")
        if self.transport == "shared" and not has_memfd:
            raise ConfigError(
                subject='Local(transport="shared")',
                expected="a system with memfd_create",
                got=sys.platform,
                remedy='Use transport="auto" or "tcp".',
            )
        if self.transport != "tcp" and has_memfd:
            return None
        return TcpPlan(bind=self.bind, advertise=self.advertise, relay=relay)

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
