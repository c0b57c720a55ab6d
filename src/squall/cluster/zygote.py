"""A fresh process that imports torch once and forks each role from there, so that a role starts in milliseconds.

    launcher                        zygote                                   role
      start ----- Popen ------------> imports torch, then waits
      <------------- ready
      spawn(target, arguments, fds) -> fork --------------------------------> target(arguments, fds)
      <------------- spawned pid                                              exits, or is killed
      <------------- exited pid, status
      its channel ends -------------> kills its roles, exits
      its lifeline ends ------------------------------------------------------> exits

The user's ``__main__`` is never run again, so scripts without a main guard, notebooks and programs on standard input
all work. The zygote never runs user code and holds no run's state. It and the roles are in sessions of their own:
Ctrl-C in the terminal reaches the launcher only. Nothing of them outlives the launcher, however that died: roles watch
a pipe whose other end only the launcher holds, and the zygote watches the launcher and kills what is left.

The channel is private to the two: a message is a JSON object, a zero byte, and raw bytes.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from squall.closes import Closes
from squall.errors import RunError
from squall.wire.channel import Channel
from squall.wire.waiting import wait

PRELOADED = ("torch", "torch.optim", "numpy")
# A fork after a matrix product with two threads hangs in the child's first one. Roles set their own number later.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

CLOSING_S = 0.1
# Imports make no garbage worth looking for, and looking costs a tenth of their time.
_BOOTSTRAP = """
import gc, json, sys
gc.disable()
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from squall.cluster.zygote import serve
serve(settings)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A role has ended.

    Attributes:
        name, pid: as spawned.
        returncode: as in `subprocess`: the exit code, or minus the signal; None if the zygote was lost before it.
    """

    name: str
    pid: int
    returncode: int | None


@dataclass(slots=True, eq=False)
class Role:
    """A role that has not ended yet. Its descriptor names it even when its pid has been given to another process."""

    name: str
    pid: int
    pidfd: int

    def kill(self, number: signal.Signals) -> None:
        """Send a signal; to one that has just ended does nothing."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


@dataclass(slots=True, eq=False)
class Claim:
    """What one run starts through a zygote that others may use as well: it is told of the ends of these roles alone.

    Claims of one zygote may be used by a thread each. `Zygote.claim` makes one.
    """

    _zygote: "Zygote"
    _poll: select.epoll = field(default_factory=select.epoll)
    # An eventfd, up while `exits` has something that was heard while somebody waited for something else.
    _news: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    _ended: list[tuple[Exit, int | None]] = field(
        default_factory=list
    )  # each with its pidfd, until it is told
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._poll.register(self._news, select.EPOLLIN)

    def spawn(
        self,
        name: str,
        target: str,
        arguments: bytes = b"",
        fds: Sequence[int] = (),
        *,
        log: int | None = None,
    ) -> int:
        """Fork a role, as `Zygote.spawn` does."""
        return self._zygote._spawn(self, name, target, arguments, fds, log)

    def roles(self) -> tuple[Role, ...]:
        """Those that have been spawned here, and whose end has not been heard yet."""
        return self._zygote._roles_of(self)

    def exits(self) -> list[Exit]:
        """Return the roles of this claim that have ended since the last call, without waiting."""
        with self._zygote._lock:
            self._zygote._look()
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news)
            ended, self._ended = self._ended, []
        for _, pidfd in ended:
            if pidfd is not None:
                os.close(pidfd)  # not before: whoever holds this claim may have been about to send a signal
        return [exit_ for exit_, _ in ended]

    def fileno(self) -> int:
        """Readable when `exits` has something new to look at; for a poll of the caller's own."""
        return self._poll.fileno()

    def close(self) -> None:
        """Nobody waits here any more; the roles go on. Twice does nothing."""
        with self._zygote._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._zygote._claims.discard(self)
            for _, pidfd in self._ended:
                if pidfd is not None:
                    os.close(pidfd)
            self._ended = [(exit_, None) for exit_, _ in self._ended]
            self._poll.close()
            os.close(self._news)

    def _take(self, role: Role, returncode: int | None) -> None:
        """A role of this claim has ended."""
        told = Exit(name=role.name, pid=role.pid, returncode=returncode)
        if self._is_closed:
            os.close(role.pidfd)
        else:
            os.eventfd_write(self._news, 1)
            self._ended.append((told, role.pidfd))


@dataclass(slots=True, eq=False)
class Zygote(Closes):
    """The launcher's side: starts roles, and tells which have ended.

    Attributes:
        pid: of the zygote itself.
        is_lost: it died; its roles go on, and their ends are still seen, but none can be started.

    `start` returns at once, so that the launcher can import torch itself meanwhile::

        with Zygote.start(modules=["squall.shard.server"]) as zygote:
            pid = zygote.spawn("shard0", "squall.shard.server:main", arguments, fds=[payload.fd], log=log.fileno())
            poll.register(zygote.fileno())  # readable when `exits` has something to tell
    """

    pid: int
    is_lost: bool
    _process: "subprocess.Popen[bytes]"
    _channel: Channel
    _lifeline: int
    _log: IO[bytes]
    _is_ready: bool = False
    _is_closed: bool = False
    _roles: dict[int, tuple[Role, Claim]] = field(default_factory=dict)  # by pid
    _claims: set[Claim] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a request and its reply belong together
    _own: Claim = field(init=False)

    def __post_init__(self) -> None:
        self._own = self.claim()

    @classmethod
    def start(cls, *, modules: Sequence[str] = ()) -> Self:
        """Start a zygote and return at once.

        Args:
            modules: imported beside torch and NumPy, once for all roles. Not the user's: those belong in a role.
        """
        ours, theirs = Channel.pair()
        lifeline_end, lifeline = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the zygote
        passed = (theirs.fileno(), lifeline_end)
        settings = {
            "path": _import_path(),
            "modules": [*PRELOADED, *modules],
            "channel": theirs.fileno(),
            "lifeline": lifeline_end,
            "launcher": os.getpid(),
        }
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOTSTRAP, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            env=os.environ | ONE_THREAD,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline_end)
        return cls(process.pid, False, process, ours, lifeline, log)

    def claim(self) -> Claim:
        """A claim on this zygote, for one run."""
        with self._lock:
            claim = Claim(self)
            self._claims.add(claim)
            if not self.is_lost and not self._is_closed:
                claim._poll.register(self._channel.fileno(), select.EPOLLIN)
            return claim

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until it has imported everything. `spawn` does so too.

        Raises:
            RunError: it died, with what it printed, or it took too long.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            while not self._is_ready:
                if not wait([self._channel], max(0.0, until - time.monotonic())):
                    raise self._error(f"did not finish its imports within {timeout_s:g} s")
                self._receive()

    def spawn(
        self,
        name: str,
        target: str,
        arguments: bytes = b"",
        fds: Sequence[int] = (),
        *,
        log: int | None = None,
    ) -> int:
        """Fork a role; return its pid. What follows of it is told by `exits`, and to no `Claim`.

        Args:
            name: what `exits` calls it, and `ps`, shortened.
            target: ``"module:function"``, called in the role as ``function(arguments, fds)``. When it returns, the
                role exits with 0; SystemExit is taken at its word; another exception is printed, and exits with 1.
            fds: copies of these go to the role, under other numbers, in this order.
            log: a descriptor for its standard output and error; None for the zygote's own (`log_text`).

        Raises:
            RunError: the zygote is gone, has more than one thread, or the system forks no more.
        """
        return self._own.spawn(name, target, arguments, fds, log=log)

    def _spawn(
        self, claim: Claim, name: str, target: str, arguments: bytes, fds: Sequence[int], log: int | None
    ) -> int:
        with self._lock:
            return self._spawn_alone(claim, name, target, arguments, fds, log)

    def _spawn_alone(
        self, claim: Claim, name: str, target: str, arguments: bytes, fds: Sequence[int], log: int | None
    ) -> int:
        if self._is_closed:
            raise RunError(reason=f"cannot start {name!r}: the process that starts the roles was closed")
        self.wait_ready()
        request = {
            "name": name,
            "target": target,
            "has_log": log is not None,
            "path": _import_path(),  # a notebook may have changed both since the start
            "directory": os.getcwd(),
        }
        try:
            self._channel.send(_packed(request, arguments), [*fds, *([] if log is None else [log])])
        except ConnectionError as error:
            self._take_what_is_there()
            raise self._error(f"died before it could start {name!r}") from error
        while True:
            reply, received = self._receive()
            if "spawned" in reply:
                self._roles[reply["spawned"]] = Role(name, reply["spawned"], *received), claim
                return int(reply["spawned"])
            if "refused" in reply:
                raise self._error(f"could not start {name!r}: {reply['refused']}")

    def roles(self) -> tuple[Role, ...]:
        """Those that have been spawned, through whatever claim, and whose end has not been heard yet."""
        with self._lock:
            return tuple(role for role, _ in self._roles.values())

    def _roles_of(self, claim: Claim) -> tuple[Role, ...]:
        with self._lock:
            return tuple(role for role, its in self._roles.values() if its is claim)

    def exits(self) -> list[Exit]:
        """Return the roles of no `Claim` that have ended since the last call, without waiting."""
        return self._own.exits()

    def fileno(self) -> int:
        """Readable when `exits` has something new to look at; for a poll of the caller's own."""
        return self._own.fileno()

    def _look(self) -> None:
        """Take what is there to be heard, whomever it is for."""
        if self._is_closed:
            return
        self._take_what_is_there()
        if self.is_lost:
            for role in self.roles():
                if _has_ended(role.pidfd):
                    self._ended(role.pid, None)

    def log_text(self) -> str:
        """The last of what the zygote, and roles without a log of their own, have printed."""
        num_bytes = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 8000, max(0, num_bytes - 8000)).decode(errors="replace")

    def kill(self) -> None:
        """End it at once, even while it imports; for one that has started no role yet."""
        self._process.kill()

    def close(self, grace_s: float = 5.0) -> None:
        """End the roles: by SIGTERM, after `grace_s` by SIGKILL; then the zygote. Twice does nothing."""
        if self._is_closed:
            return
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            for role in self.roles():
                role.kill(number)
            self._wait_for_exits(patience_s)
        self._is_closed = True
        self._channel.close()
        os.close(self._lifeline)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        for role in self.roles():
            os.close(role.pidfd)
        self._roles.clear()
        for claim in tuple(self._claims):
            claim.close()

    def _wait_for_exits(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        with self._lock:
            self._look()
        while self._roles and (left_s := until - time.monotonic()) > 0:
            if self.is_lost:
                wait([role.pidfd for role in self.roles()], left_s)
            else:
                wait([self._channel], min(left_s, CLOSING_S))  # somebody else may hear of it first
            with self._lock:
                self._look()

    def _take_what_is_there(self) -> None:
        while not self.is_lost and wait([self._channel], 0):
            with contextlib.suppress(RunError):  # says that the zygote is lost, which `is_lost` says as well
                self._receive()

    def _receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Take one message; what can be settled here is."""
        received = self._channel.receive()
        if received is None:
            self._lose()
            raise self._error("died")
        message, _ = _unpacked(received[0])
        if "exited" in message:
            self._ended(message["exited"], message["returncode"])
        self._is_ready |= "ready" in message
        return message, received[1]

    def _ended(self, pid: int, returncode: int | None) -> None:
        role, claim = self._roles.pop(pid)
        claim._take(role, returncode)

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for claim in self._claims:
                claim._poll.unregister(self._channel.fileno())
                for role in self._roles_of(claim):
                    claim._poll.register(role.pidfd, select.EPOLLIN)

    def _error(self, what: str) -> RunError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0 if self.is_lost else 0.0)
        status = self._process.returncode
        state = "" if status is None else f" (exit status {status})"
        said = self.log_text().strip() or "nothing"
        return RunError(reason=f"the process that starts the roles {what}{state}. It printed: {said}")


def serve(settings: dict[str, Any]) -> NoReturn:
    """The zygote's whole life, after `Zygote.start` has started it."""
    server = _Server(Channel.from_fd(settings["channel"]), settings["lifeline"])
    # Not only the channel's end is watched: children that the launcher forks may hold it open.
    launcher = os.pidfd_open(settings["launcher"])
    for module in settings["modules"]:
        importlib.import_module(module)
    _name_process("squall-zygote")
    gc.freeze()  # a collection in a role would write to, and so copy, every page that the imports made
    gc.enable()
    server.run(launcher)
    os._exit(0)


@dataclass(slots=True, eq=False)
class _Server:
    """The zygote's own side: one thread, one poll, one process per role."""

    channel: Channel
    lifeline: int
    pids: dict[int, int] = field(default_factory=dict)  # by pidfd

    def run(self, launcher: int) -> None:
        """Serve until the launcher closes the channel or dies; then leave no role behind."""
        try:
            self.channel.send(_packed({"ready": os.getpid()}))
            while launcher not in (ready := self._wait(launcher)):
                for pidfd in ready & self.pids.keys():
                    self._reap(pidfd)
                if self.channel.fileno() in ready and not self._take_request():
                    break
        except ConnectionError:
            pass  # the launcher died while it was being told something
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids.values():
            _reaped(pid)

    def _wait(self, launcher: int) -> set[int]:
        poll = select.poll()
        for fd in (launcher, self.channel.fileno(), *self.pids):
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll()}

    def _reap(self, pidfd: int) -> None:
        pid = self.pids.pop(pidfd)
        os.close(pidfd)
        self.channel.send(_packed({"exited": pid, "returncode": _reaped(pid)}))

    def _take_request(self) -> bool:
        received = self.channel.receive()
        if received is None:
            return False
        request, arguments = _unpacked(received[0])
        try:
            self._spawn(request, arguments, received[1])
        except (OSError, RuntimeError) as error:
            self.channel.send(_packed({"refused": str(error)}))
        for fd in received[1]:
            os.close(fd)
        return True

    def _spawn(self, request: dict[str, Any], arguments: bytes, fds: tuple[int, ...]) -> None:
        threads = os.listdir("/proc/self/task")
        if len(threads) != 1:
            raise RuntimeError(f"expected one thread before a fork, but got {len(threads)}")
        pid = os.fork()
        if pid == 0:
            _be_role(self, request, arguments, list(fds))
        pidfd = os.pidfd_open(pid)
        self.pids[pidfd] = pid
        self.channel.send(_packed({"spawned": pid}), [pidfd])


def _be_role(server: _Server, request: dict[str, Any], arguments: bytes, fds: list[int]) -> NoReturn:
    """The role's whole life, from the fork on. Nothing may return into the zygote's loop."""
    code = 1
    try:
        os.setsid()
        server.channel.close()
        for pidfd in server.pids:
            os.close(pidfd)
        if request["has_log"]:
            _redirect_output(fds.pop())
        sys.path[:] = request["path"]
        os.chdir(request["directory"])
        _name_process(request["name"])
        faulthandler.enable()
        threading.Thread(target=_watch, args=(server.lifeline,), name="lifeline", daemon=True).start()
        code = _called(request["target"], arguments, fds)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _called(target: str, arguments: bytes, fds: list[int]) -> int:
    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(arguments, fds)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reaped(pid: int) -> int:
    """Wait for a role that has ended or been killed, and end what it left in its session; return its exit code."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):  # while the dead role still holds the number
        os.killpg(pid, signal.SIGKILL)  # such as workers of its data loader
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _import_path() -> list[str]:
    return [str(entry) for entry in sys.path]


def _name_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name[:15])


def _redirect_output(log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _watch(lifeline: int) -> NoReturn:
    """Wait for the end of the launcher, which never writes anything."""
    os.read(lifeline, 1)
    os._exit(1)


def _has_ended(pidfd: int) -> bool:
    return bool(wait([pidfd], 0))


def _packed(message: dict[str, Any], data: bytes = b"") -> bytes:
    return json.dumps(message).encode() + b"\0" + data


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, rest = data.partition(b"\0")
    message = json.loads(header)
    assert isinstance(message, dict)
    return message, rest
