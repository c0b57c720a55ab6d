"""Tests of squall.wire.memory.

Faults planted to check these tests, each caught: seals left out - size not compared on attach - the mapping dropped
before its tensors - MAP_SHARED for a private mapping - the range check without its offset - the received descriptor
left open on refusal - the memory check left out - a read-only mapping made writable.
"""

import fcntl
import gc
import os
import signal
import warnings

import pytest
import torch

from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from squall.wire import memory
from squall.wire.memory import SharedArena


def num_fds() -> int:
    gc.collect()  # of what other tests left
    return len(os.listdir("/proc/self/fd"))


def attached(arena: SharedArena, *, writable: bool = False, private: bool = False) -> SharedArena:
    return SharedArena.attach(os.dup(arena.fd), arena.num_bytes, writable=writable, private=private)


def test_what_one_writes_the_other_reads() -> None:
    arena = SharedArena.create(100)
    peer = attached(arena, writable=True)

    arena.tensor(torch.int64, offset=8, numel=2).copy_(torch.tensor([3, 4]))
    peer.tensor(torch.int64, offset=0, numel=1).fill_(2)

    assert arena.tensor(torch.int64, offset=0, numel=3).tolist() == [2, 3, 4]
    assert peer.bytes(0, 24).tobytes() == b"".join(n.to_bytes(8, "little") for n in (2, 3, 4))
    arena.close()
    peer.close()


def test_a_private_mapping_keeps_its_writes_to_itself() -> None:
    arena = SharedArena.create(8)
    arena.tensor(torch.float64, 0, 1).fill_(1)
    one, other = attached(arena, private=True), attached(arena, private=True)

    one.tensor(torch.float64, 0, 1).fill_(5)

    assert [a.tensor(torch.float64, 0, 1).item() for a in (arena, one, other)] == [1, 5, 1]
    for a in (arena, one, other):
        a.close()


def test_a_tensor_outlives_its_arena() -> None:
    arena = SharedArena.create(4 << 20)
    tensor = arena.tensor(torch.float32, offset=4, numel=1000)
    window = arena.tensor(torch.float32, offset=0, numel=1000)[1:]
    tensor.fill_(2)

    arena.close()
    gc.collect()

    assert window.sum().item() == 2 * 999
    assert tensor.add_(1).sum().item() == 3000


def test_closing_and_dropping_the_last_tensor_gives_everything_back() -> None:
    before = num_fds()
    for _ in range(3):
        arena = SharedArena.create(8)
        tensor = arena.tensor(torch.float32, 0, 2)
        arena.close()
        arena.close()
        del tensor, arena
    gc.collect()

    assert num_fds() == before


def test_a_write_to_a_read_only_mapping_kills_and_a_read_does_not_warn() -> None:
    arena = SharedArena.create(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = attached(arena).tensor(torch.float32, 0, 2)
    assert tensor.tolist() == [0, 0]

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's own handler would print a traceback
        tensor.fill_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    arena.close()


def test_nobody_can_shrink_or_grow_an_arena() -> None:
    arena = SharedArena.create(10_000)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 3 << 20])
def test_an_arena_of_any_size_can_be_used_to_its_last_byte(num_bytes: int) -> None:
    arena = SharedArena.create(num_bytes)
    peer = attached(arena)

    assert peer.tensor(torch.uint8, 0, num_bytes).sum().item() == 0
    assert peer.tensor(torch.float64, num_bytes, 0).shape == (0,)
    for offset, numel in ((0, num_bytes + 1), (num_bytes, 1), (-1, 1), (0, -1)):
        with pytest.raises(LocalProtocolError, match="expected a range"):
            peer.tensor(torch.uint8, offset, numel)
    arena.close()
    peer.close()


def test_an_element_lies_at_a_multiple_of_its_size() -> None:
    arena = SharedArena.create(64)
    with pytest.raises(LocalProtocolError, match="multiple"):
        arena.tensor(torch.float32, 2, 1)
    arena.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        arena.tensor(torch.float32, 0, 1)


@pytest.mark.parametrize("expected_bytes", [0, 4096, 8193, 1 << 40, -1])
def test_memory_of_another_size_than_expected_is_refused(expected_bytes: int) -> None:
    arena = SharedArena.create(5000)
    before = num_fds()

    with pytest.raises(RemoteProtocolError, match="expected shared memory of"):
        SharedArena.attach(os.dup(arena.fd), expected_bytes, writable=True)

    assert num_fds() == before
    arena.close()


def test_memory_that_its_maker_could_shrink_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)

    with pytest.raises(RemoteProtocolError, match="sealed"):
        SharedArena.attach(fd, 100, writable=False)


def test_a_descriptor_of_something_else_is_refused_and_closed() -> None:
    before = num_fds()
    end, other = os.pipe()

    with pytest.raises(RemoteProtocolError, match="expected shared memory"):
        SharedArena.attach(end, 100, writable=False)

    os.close(other)
    assert num_fds() == before


@pytest.mark.parametrize("num_bytes", [1 << 45, 1 << 62])
def test_more_memory_than_there_is_is_refused_with_the_way_out(num_bytes: int) -> None:
    before = num_fds()
    with pytest.raises(ConfigError, match=r"expected \d+ MiB to be free.*fewer replicas"):
        SharedArena.create(num_bytes)
    assert num_fds() == before


def test_memory_that_the_system_refuses_is_told_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_bytes", lambda: 1 << 63)
    before = num_fds()
    with pytest.raises(ConfigError, match="to be free, but got Cannot allocate memory"):
        SharedArena.create(1 << 50)
    assert num_fds() == before


def test_without_memfd_an_arena_is_a_file_that_nobody_can_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = SharedArena.create(1000)
    path = os.readlink(f"/proc/self/fd/{arena.fd}")
    peer = SharedArena.attach(os.dup(arena.fd), 1000, writable=False)

    arena.tensor(torch.float32, 0, 2).fill_(3.0)

    assert peer.tensor(torch.float32, 0, 2).tolist() == [3.0, 3.0]
    assert path.endswith("(deleted)")
    with pytest.raises(RemoteProtocolError, match="expected shared memory of"):
        SharedArena.attach(os.dup(arena.fd), 100_000, writable=False)
    arena.close()
    peer.close()
