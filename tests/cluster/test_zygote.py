"""Tests of squall.cluster.zygote: real processes, few; all but one zygote import nothing heavy.

Faults planted to check these tests, each caught: the lifeline not watched and the launcher's end not seen - roles left
when the channel ends - what a role forked left behind - setsid left out of the child - the zygote's own descriptors
left open in a role - pidfds not closed after an exit - the exit code of an exception 0 - the import path of the start
used for every spawn - the check for one thread left out - SIGKILL after the grace left out - no news of an end heard during a spawn -
an end told to whoever asks first - a reply taken by another thread's request - news of an end for one claim heard by another
left untold.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from squall.cluster import zygote as zygotes
from squall.cluster.payload import pack
from squall.cluster.zygote import Exit, Role, Zygote
from squall.errors import RunError
from squall.wire.channel import Channel
from squall.wire.waiting import wait

pytestmark = pytest.mark.processes

TARGETS = """
import json, os, signal, sys
from squall.wire.channel import Channel

def report(arguments, fds):
    facts = {
        "arguments": arguments.decode(), "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(),
        "directory": os.getcwd(), "input": sys.stdin.read(), "fds": len(os.listdir("/proc/self/fd")),
        "main": getattr(sys.modules["__main__"], "__file__", None), "threads": os.environ["OMP_NUM_THREADS"],
        "name": open("/proc/self/comm").read().strip(), "modules": sorted({"torch", "numpy"} & sys.modules.keys()),
    }
    Channel.from_fd(fds[0]).send(json.dumps(facts).encode())

def trains(arguments, fds):
    from squall.cluster.payload import Payload, unpack
    model, x = unpack(Payload(fd=fds[1], header=arguments))
    loss = model(x).sum()
    loss.backward()
    Channel.from_fd(fds[0]).send(str(loss.item()).encode())

def leaves(arguments, fds):
    sys.exit(int(arguments))

def raises(arguments, fds):
    print("before the mistake")
    raise LookupError("no such thing")

def stays(arguments, fds):
    if arguments == b"stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.write(fds[0], json.dumps([os.getpid(), child]).encode() + b"\\n")
    while True:
        signal.pause()
"""

LAUNCHER = """
import json, os, select, signal
print("the user's own program runs", flush=True)
from squall.cluster import zygote
zygote.PRELOADED = ()
started = zygote.Zygote.start()
for number in range(2):
    started.spawn(f"role{number}", "targets_of_zygote_tests:stays", b"stubborn", fds=[1])
holder = os.fork()  # as a data loader does: it holds the launcher's end of everything open
if not holder:
    signal.pause()
# One write: the roles write into the same pipe, and an unbuffered print writes its newline apart.
os.write(1, json.dumps({"zygote": started.pid, "holder": holder}).encode() + b"\\n")
select.select([started], [], [])
"""


@pytest.fixture(scope="module", autouse=True)
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("targets")
    (room / "targets_of_zygote_tests.py").write_text(TARGETS)
    return room


@pytest.fixture(scope="module")
def zygote(targets: Path) -> Iterator[Zygote]:
    """One for the module; the import path is extended only after its start, as a notebook does."""
    with Zygote.start() as started:
        sys.path.append(str(targets))
        yield started
    sys.path.remove(str(targets))


@pytest.fixture
def light(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    """A zygote that a test may kill."""
    monkeypatch.setattr(zygotes, "PRELOADED", ())
    with Zygote.start() as started:
        yield started


def target(function: str) -> str:
    return f"targets_of_zygote_tests:{function}"


def ends(zygote: Zygote, count: int = 1, within_s: float = 20) -> list[Exit]:
    until, told = time.monotonic() + within_s, zygote.exits()
    while len(told) < count:
        left_s = until - time.monotonic()
        assert left_s > 0, f"only {told} ended, of {zygote.roles()}; the log says: {zygote.log_text()}"
        select.select([zygote], [], [], left_s)
        told += zygote.exits()
    return told


def answer(channel: Channel) -> bytes:
    assert wait([channel], 20)
    received = channel.receive()
    assert received is not None
    return received[0]


def reported(zygote: Zygote, arguments: bytes = b"") -> tuple[int, dict[str, Any]]:
    ours, theirs = Channel.pair()
    pid = zygote.spawn("replica0.1", target("report"), arguments, fds=[theirs.fileno()])
    theirs.close()
    facts: dict[str, Any] = json.loads(answer(ours))
    ours.close()
    assert ends(zygote) == [Exit(name="replica0.1", pid=pid, returncode=0)]
    return pid, facts


def staying(zygote: Zygote, how: bytes = b"") -> tuple[Role, list[int]]:
    """Spawn a role that stays, with a child of its own; return both pids."""
    end, other = os.pipe()
    pid = zygote.spawn("stays", target("stays"), how, fds=[other])
    os.close(other)
    with os.fdopen(end) as file:
        pids = json.loads(file.readline())
    return next(role for role in zygote.roles() if role.pid == pid), pids


def assert_all_end(pidfds: list[int]) -> None:
    left = set(pidfds)
    while left:
        ended, _, _ = select.select(left, [], [], 20)
        assert ended, f"{len(left)} of {len(pidfds)} processes were left"
        left -= set(ended)
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_role_starts_in_a_session_of_its_own_with_all_it_was_given(zygote: Zygote) -> None:
    pid, facts = reported(zygote, b"\0any bytes")

    assert facts["pid"] == facts["session"] == pid
    assert facts["parent"] == os.getsid(zygote.pid) == zygote.pid != os.getsid(0)
    assert facts["arguments"] == "\0any bytes"
    assert facts["directory"] == os.getcwd()
    assert (facts["input"], facts["main"], facts["threads"]) == ("", None, "1")
    assert facts["name"] == "replica0.1"
    assert facts["modules"] == ["numpy", "torch"]


@pytest.mark.parametrize(
    ("function", "arguments", "code"), [("leaves", b"0", 0), ("leaves", b"7", 7), ("raises", b"", 1)]
)
def test_how_a_role_ended_is_told(zygote: Zygote, function: str, arguments: bytes, code: int) -> None:
    pid = zygote.spawn("one", target(function), arguments)

    assert ends(zygote) == [Exit(name="one", pid=pid, returncode=code)]
    assert zygote.roles() == ()


def test_what_a_role_prints_and_why_it_raised_are_in_its_log(zygote: Zygote, tmp_path: Path) -> None:
    with (tmp_path / "role.log").open("wb") as log:
        zygote.spawn("one", target("raises"), log=log.fileno())
    ends(zygote)

    said = (tmp_path / "role.log").read_text()
    assert said.startswith("before the mistake\nTraceback")
    assert "targets_of_zygote_tests.py" in said
    assert said.endswith("LookupError: no such thing\n")


def test_an_end_that_was_heard_during_a_spawn_is_still_news(zygote: Zygote) -> None:
    first = zygote.spawn("first", target("leaves"), b"0")
    pidfd = next(role.pidfd for role in zygote.roles() if role.pid == first)
    assert select.select([pidfd], [], [], 20)[0]
    assert wait([zygote._channel], 20)  # the word of its end lies before the answer to the next spawn
    role, _ = staying(zygote)

    assert select.select([zygote], [], [], 0)[0]
    assert [e.name for e in zygote.exits()] == ["first"]
    assert not select.select([zygote], [], [], 0)[0]
    role.kill(signal.SIGKILL)
    ends(zygote)


def test_a_target_that_does_not_exist_is_an_exit_and_not_a_hang(zygote: Zygote) -> None:
    zygote.spawn("one", "no_such_module:main")
    assert [e.returncode for e in ends(zygote)] == [1]
    assert "no_such_module" in zygote.log_text()


def test_a_killed_role_is_told_with_its_signal_and_what_it_forked_ends_too(zygote: Zygote) -> None:
    role, pids = staying(zygote)
    pidfds = [os.pidfd_open(pid) for pid in pids]

    role.kill(signal.SIGKILL)

    assert ends(zygote) == [Exit(name="stays", pid=role.pid, returncode=-signal.SIGKILL)]
    assert_all_end(pidfds)


def test_fifty_roles_leave_no_descriptor_behind(zygote: Zygote) -> None:
    def counts() -> list[int]:
        return [reported(zygote)[1]["fds"], *(len(os.listdir(f"/proc/{p}/fd")) for p in ("self", zygote.pid))]

    before = counts()
    role, _ = staying(zygote)  # a role must not hold descriptors of its siblings either
    beside_another = reported(zygote)[1]["fds"]
    role.kill(signal.SIGKILL)
    ends(zygote)
    for _ in range(50):
        zygote.spawn("one", target("leaves"), b"0", fds=[0, 1])
    ends(zygote, count=50)

    assert counts() == before
    assert beside_another == before[0]


def test_a_role_trains_on_a_model_that_it_was_sent(zygote: Zygote) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(200, 200), torch.randn(50, 200)
    payload = pack((model, x))
    ours, theirs = Channel.pair()

    zygote.spawn("one", target("trains"), payload.header, fds=[theirs.fileno(), payload.fd])

    assert float(answer(ours)) == pytest.approx(model(x).sum().item(), rel=1e-4)
    assert [e.returncode for e in ends(zygote)] == [0]
    payload.close()
    ours.close()
    theirs.close()


def test_a_killed_launcher_leaves_no_process(targets: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(targets), *sys.path])},
    ) as launcher:
        try:
            assert launcher.stdin is not None
            assert launcher.stdout is not None
            launcher.stdin.write(LAUNCHER)
            launcher.stdin.close()
            first = launcher.stdout.readline()
            said = [json.loads(launcher.stdout.readline()) for _ in range(3)]
            roles = [pids for pids in said if isinstance(pids, list)]
            others = next(pids for pids in said if isinstance(pids, dict))
            pidfds = [os.pidfd_open(pid) for pid in (others["zygote"], *roles[0], *roles[1])]
            os.kill(roles[0][0], signal.SIGSTOP)  # one that cannot end by itself
        finally:
            launcher.kill()

        assert_all_end(pidfds)
        os.kill(others["holder"], signal.SIGKILL)
        assert (first, launcher.stdout.read()) == ("the user's own program runs\n", "")


def test_closing_ends_a_role_that_ignores_the_request(light: Zygote) -> None:
    role, pids = staying(light, b"stubborn")
    pidfds = [os.pidfd_open(pid) for pid in [*pids, light.pid]]

    light.close(grace_s=0.2)
    light.close()

    assert_all_end(pidfds)
    assert light.exits() == [Exit(name="stays", pid=role.pid, returncode=-signal.SIGKILL)]
    with pytest.raises(RunError, match="was closed"):
        light.spawn("late", target("leaves"), b"0")


def test_roles_outlive_a_killed_zygote_and_end_with_the_launcher_or_by_its_hand(light: Zygote) -> None:
    one, one_pids = staying(light)
    other, other_pids = staying(light)

    os.kill(light.pid, signal.SIGKILL)
    light._process.wait()
    with pytest.raises(RunError, match="died"):
        light.spawn("late", target("leaves"), b"0")
    assert light.is_lost
    assert light.exits() == []
    one.kill(signal.SIGKILL)

    assert ends(light) == [Exit(name="stays", pid=one.pid, returncode=None)]
    light.close(grace_s=5)
    assert light.exits() == [Exit(name="stays", pid=other.pid, returncode=None)]
    for pid in (one_pids[1], other_pids[1]):  # what roles fork is ended by the zygote, and that is gone
        os.kill(pid, signal.SIGKILL)


def test_roles_end_with_the_launcher_even_when_the_zygote_is_gone(light: Zygote) -> None:
    _, pids = staying(light)
    pidfd = os.pidfd_open(pids[0])
    os.kill(light.pid, signal.SIGKILL)

    os.close(light._lifeline)  # as the system does when the launcher dies

    assert_all_end([pidfd])
    light._lifeline = os.open(os.devnull, os.O_RDONLY)  # for close
    os.kill(pids[1], signal.SIGKILL)


def test_a_zygote_that_dies_at_an_import_says_what_it_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "PRELOADED", ())
    with Zygote.start(modules=["no_such_module"]) as started, pytest.raises(RunError) as caught:
        started.wait_ready()

    assert "died (exit status 1)" in str(caught.value)
    assert "No module named 'no_such_module'" in str(caught.value)


def test_nothing_is_forked_while_there_are_two_threads() -> None:
    ours, theirs = Channel.pair()
    server = zygotes._Server(theirs, -1)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        ours.send(zygotes._packed({"name": "one", "target": target("leaves"), "has_log": False}, b"0"))
        server._take_request()
    finally:
        stop.set()
        thread.join()

    reply, _ = zygotes._unpacked(answer(ours))
    assert "one thread before a fork, but got" in reply["refused"]
    assert server.pids == {}
    ours.close()
    theirs.close()


# Several runs on one zygote ----------------------------------------------------------------------------------


def test_each_claim_is_told_of_its_own_roles_whoever_hears_of_them_first(zygote: Zygote) -> None:
    mine, other = zygote.claim(), zygote.claim()
    pids = {claim: claim.spawn("leaver", "targets_of_zygote_tests:leaves", b"3") for claim in (mine, other)}
    assert [[role.pid for role in claim.roles()] for claim in (mine, other)] in (
        [[p] for p in pids.values()],
        [[], []],
    )

    until = time.monotonic() + 20
    told: list[Exit] = []
    while other.roles() and time.monotonic() < until:  # it hears of both, and takes one
        select.select([mine], [], [], 0.1)
        told += mine.exits()
    while mine.roles() and time.monotonic() < until:
        select.select([mine], [], [], 0.1)
        told += mine.exits()

    told += mine.exits()
    assert [ended.pid for ended in told] == [pids[mine]]
    assert select.select([other], [], [], 20)[0], "news for it, though another one heard it"
    assert [ended.pid for ended in other.exits()] == [pids[other]]
    assert zygote.exits() == []
    mine.close()
    other.close()
    other.close()


def test_claims_in_threads_of_their_own_get_their_own_replies(zygote: Zygote) -> None:
    failures: list[str] = []

    def use(code: int) -> None:
        claim = zygote.claim()
        for _ in range(8):
            pid = claim.spawn(f"role{code}", "targets_of_zygote_tests:leaves", str(code).encode())
            ended: list[Exit] = []
            until = time.monotonic() + 20
            while not ended and time.monotonic() < until:
                select.select([claim], [], [], 0.1)
                ended = claim.exits()
            if [(one.pid, one.returncode) for one in ended] != [(pid, code)]:
                failures.append(f"{pid} {code}: {ended}")
        claim.close()

    threads = [threading.Thread(target=use, args=(code,)) for code in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_a_claim_that_was_closed_leaves_its_roles_to_the_zygote(zygote: Zygote) -> None:
    claim = zygote.claim()
    reading, writing = os.pipe()
    claim.spawn("stayer", "targets_of_zygote_tests:stays", fds=[writing])
    os.close(writing)
    os.read(reading, 4096)
    (role,) = claim.roles()
    claim.close()
    role.kill(signal.SIGKILL)
    until = time.monotonic() + 20
    while role in zygote.roles() and time.monotonic() < until:
        select.select([zygote], [], [], 0.1)
        assert zygote.exits() == []
    assert role not in zygote.roles()
    os.close(reading)
