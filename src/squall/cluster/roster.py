"""The processes of one run, as their launcher holds them: started, heard, told, and gone."""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from squall.cluster.payload import Payload
from squall.cluster.zygote import Exit, Zygote
from squall.wire.channel import Channel
from squall.wire.connection import Connection
from squall.wire.waiting import wait

ROLE_MAIN = "squall.cluster.role:main"
END_S = 5.0


@dataclass(eq=False)
class RoleProcess:
    """A role that was started.

    Attributes:
        kind: "replica", "shard", "coordinator" or "evaluator".
        incarnation: which life of it this is, from 0.
        connection: to it.
        ports: that it listens at.
        is_gone: its process has ended.
    """

    name: str
    kind: str
    pid: int
    incarnation: int
    connection: Connection
    ports: list[int]
    is_gone: bool = False


class Roster:
    """Starts roles through a zygote and passes on what they say and how they end.

    Args:
        zygote: where roles are forked from.
        logs: directory for the roles' output.
    """

    def __init__(self, zygote: Zygote, logs: Path) -> None:
        self.roles: dict[str, RoleProcess] = {}
        self._zygote = zygote
        self._claim = zygote.claim()  # for others may start roles from it at the same time
        self._logs = logs
        self._by_fd: dict[int, RoleProcess] = {}
        self._replaced: list[RoleProcess] = []  # though their processes may live
        self._epoll = select.epoll()
        self._epoll.register(self._claim.fileno(), select.EPOLLIN)

    @staticmethod
    def number_of(role: RoleProcess) -> int:
        """Its number among those of its kind: 2 of "replica2.0"."""
        return int(role.name.removeprefix(role.kind).partition(".")[0])

    def of_kind(self, kind: str) -> list[RoleProcess]:
        return [role for role in self.roles.values() if role.kind == kind]

    def spawn(
        self,
        kind: str,
        name: str,
        payload: Payload,
        settings: Mapping[str, Any],
        fds: Sequence[int] = (),
        *,
        incarnation: int = 0,
        ports: Sequence[int] = (),
    ) -> None:
        """Start a role; copies of `fds` go to it. One of this name is not heard any more.

        Raises:
            RunError: the zygote cannot.
        """
        ours, theirs = Channel.pair()
        told = {"role": kind, "name": name, "header": payload.header.hex(), **settings}
        log = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            passed = [payload.fd, theirs.fileno(), *fds]
            pid = self._claim.spawn(name, ROLE_MAIN, json.dumps(told).encode(), passed, log=log)
        finally:
            os.close(log)
            theirs.close()
        role = RoleProcess(name, kind, pid, incarnation, Connection(ours, name), list(ports))
        if (before := self.roles.get(name)) is not None:
            self._replace(before)
        self.roles[name] = role
        self._by_fd[ours.fileno()] = role
        self._epoll.register(ours.fileno(), select.EPOLLIN)

    def _replace(self, before: RoleProcess) -> None:
        fd = before.connection.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        before.connection.close()
        if not before.is_gone:
            self._replaced.append(before)

    def send(self, role: RoleProcess, message: Any, fds: Sequence[int] = ()) -> None:
        """Tell a role something; if it is gone, that is told by `hear`."""
        with contextlib.suppress(ConnectionError):
            role.connection.send(message, fds)

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Send a role a signal; False if it has ended already."""
        role = self.roles[name]
        for process in self._claim.roles():
            if process.pid == role.pid and not role.is_gone:
                process.kill(number)
                return True
        return False

    def hear(self, timeout_s: float) -> Iterator[tuple[RoleProcess, Any]]:
        """Yield what roles have said, and an `Exit` for each that has ended, after all that it had said.

        Raises:
            RemoteProtocolError: a role said something that is no message.
        """
        for fd, _ in self._epoll.poll(timeout_s):
            if (role := self._by_fd.get(fd)) is not None:
                yield from self._received(role)
        yield from self._exits()

    def _received(self, role: RoleProcess) -> Iterator[tuple[RoleProcess, Any]]:
        received = role.connection.receive()
        if received is not None:
            yield role, received[0]
            return
        fd = role.connection.fileno()
        self._epoll.unregister(fd)
        del self._by_fd[fd]

    def _exits(self) -> Iterator[tuple[RoleProcess, Exit]]:
        for ended in self._claim.exits():
            role = self.roles.get(ended.name)
            if role is None or role.pid != ended.pid:
                self._note_end(ended)
                continue
            while role.connection.fileno() in self._by_fd:
                yield from self._received(role)
            role.is_gone = True
            yield role, ended

    def _note_end(self, ended: Exit) -> None:
        """One that was replaced has ended at last."""
        self._replaced = [role for role in self._replaced if role.pid != ended.pid]

    def describe(self) -> list[dict[str, Any]]:
        """The rows of processes.json."""
        host = socket.gethostname()
        known = [
            (role.kind, role.name, role.pid, role.incarnation, role.ports) for role in self.roles.values()
        ]
        return [
            {"role": kind, "name": name, "host": host, "pid": pid, "incarnation": incarnation, "ports": ports}
            for kind, name, pid, incarnation, ports in [*known, ("zygote", "zygote", self._zygote.pid, 0, [])]
        ]

    def close(self) -> None:
        """Kill what is left of these roles, and only these."""
        roles = (*self.roles.values(), *self._replaced)
        pids = {role.pid for role in roles}
        for process in self._claim.roles():
            if process.pid in pids:
                process.kill(signal.SIGKILL)
        until = time.monotonic() + END_S
        while any(not role.is_gone for role in roles) and time.monotonic() < until:
            wait([self._claim], END_S)
            for ended in self._claim.exits():
                for role in roles:
                    role.is_gone |= role.pid == ended.pid
        for role in self.roles.values():
            role.connection.close()
        self._epoll.close()
        self._claim.close()
