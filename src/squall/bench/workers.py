"""Processes for what Squall is compared with: each fresh, forked from one that has imported torch, and ended for sure.

They are started the way Squall starts its roles, so that neither side has an advantage in memory or imports.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from squall.closes import Closes
from squall.cluster.zygote import Role, Zygote
from squall.errors import RunError
from squall.wire.waiting import wait

PATIENCE_S = 600.0
PRELOADED = ("squall.bench.workers", "squall.bench.loops")

Function = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes and returns what JSON can hold; found by its module and name, in another process."""


class Workers(Closes):
    """Starts processes that run one function each; used as a ``with`` block."""

    def __init__(self) -> None:
        self._zygote = Zygote.start(modules=PRELOADED)

    def start(self, function: Function, settings: Sequence[dict[str, Any]]) -> "Team":
        """Start one process for each of the settings, at the same time.

        Args:
            function: called with the settings. Two processes get a descriptor of a connection to one another, as
                "peer".
        """
        place = [function.__module__, function.__name__]
        ends = [socket.socketpair() for _ in settings]
        pair = socket.socketpair() if len(settings) == 2 else ()
        try:
            for number, (one, (_, far)) in enumerate(zip(settings, ends, strict=True)):
                told = json.dumps({"function": place, "settings": one}).encode()
                fds = [far.fileno(), *(end.fileno() for end in pair[number : number + 1])]
                self._zygote.spawn(f"{function.__name__}{number}", f"{__name__}:serve", told, fds)
            known = self._zygote.roles()[-len(settings) :]
            return Team(self._zygote, [near for near, _ in ends], known)
        finally:
            for end in (*(far for _, far in ends), *pair):
                end.close()

    def run(self, function: Function, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start them, and wait for what they return, in order.

        Raises:
            RunError: one of them failed, with what it printed, or took too long.
        """
        return self.start(function, settings).results()

    def close(self) -> None:
        self._zygote.close()


class Team:
    """Processes that have been started together.

    Attributes:
        roles: of each, which can be sent signals even if its number has been given to another process.
    """

    def __init__(self, zygote: Zygote, ends: list[socket.socket], roles: Sequence[Role]) -> None:
        self._zygote = zygote
        self._ends = ends
        self.roles = roles

    def results(self, patience_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """What they return, in order; see `Workers.run`."""
        until = time.monotonic() + patience_s
        try:
            return [self._result(end, role, until) for end, role in zip(self._ends, self.roles, strict=True)]
        except BaseException:
            for role in self.roles:
                with contextlib.suppress(OSError):
                    role.kill(signal.SIGKILL)
            raise
        finally:
            for end in self._ends:
                end.close()
            self._wait_for_ends()

    def _result(self, end: socket.socket, role: Role, until: float) -> dict[str, Any]:
        told = b""
        while wait([end], max(0.0, until - time.monotonic())):
            data = end.recv(1 << 16)
            if not data:
                if not told:
                    raise RunError(reason=f"{role.name} failed: {self._zygote.log_text()}")
                result: dict[str, Any] = json.loads(told)
                return result
            told += data
        raise RunError(reason=f"{role.name} had not ended in time")

    def _wait_for_ends(self) -> None:
        """Until they have all ended: what is measured next should have the machine for itself."""
        pids = {role.pid for role in self.roles}
        while pids & {role.pid for role in self._zygote.roles()}:
            wait([self._zygote], 1.0)
            self._zygote.exits()


def serve(arguments: bytes, fds: list[int]) -> None:
    """The whole life of such a process: call what it was told to, and write what comes of it."""
    request = json.loads(arguments)
    module, name = request["function"]
    function: Function = getattr(importlib.import_module(module), name)
    told = json.dumps(function(request["settings"] | {"peer": fds[1] if len(fds) > 1 else None})).encode()
    with socket.socket(fileno=fds[0]) as end:
        end.sendall(told)


def meet(peer: int) -> None:
    """Wait for the other of two processes to come to the same place."""
    os.write(peer, b"m")
    if not os.read(peer, 1):
        raise RunError(reason="the other process is gone")
