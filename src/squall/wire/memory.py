"""Memory shared by file descriptor: no name, nothing to clean up, and nobody can shrink it under a reader.

A process makes an arena, sends its descriptor over a `squall.wire.channel.Channel`, and the peer attaches to it.
The memory goes back to the system when the last descriptor and mapping are gone, however their owners died.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError

HUGE_PAGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: `mmap` has no name for it yet
_MEMORY_IS_SHORT = {errno.ENOMEM, errno.ENOSPC, errno.EFAULT}


@dataclass(slots=True, eq=False)
class SharedArena:
    """A range of bytes that several processes map.

    Tensors keep the mapping alive: `close` gives back the descriptor, and the memory goes with the last tensor.

    Attributes:
        fd: the descriptor to send; -1 once closed. Processes that `exec` do not inherit it.
        num_bytes: as asked for; the file is longer, whole pages, and reads as zeros at first.

    >>> arena = SharedArena.create(64)
    >>> peer = SharedArena.attach(os.dup(arena.fd), 64, writable=False)
    >>> arena.tensor(torch.float32, offset=16, numel=2).fill_(0.5)
    tensor([0.5000, 0.5000])
    >>> peer.tensor(torch.float32, offset=12, numel=3)
    tensor([0.0000, 0.5000, 0.5000])
    >>> arena.close(), peer.close()
    (None, None)
    """

    fd: int
    num_bytes: int
    _map: mmap.mmap

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Make an arena of zeros, backed by memory from the start, that can neither shrink nor grow.

        Raises:
            ConfigError: the system has too little memory.
        """
        fd = _new_file(num_bytes)
        try:
            os.ftruncate(fd, _file_bytes(num_bytes))
            if has_memfd():
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
            mapping = _map(fd, num_bytes, writable=True, private=False)
            _reserve(mapping, fd)
        except OSError as error:
            os.close(fd)
            if error.errno in _MEMORY_IS_SHORT:
                raise _short_of_memory(num_bytes, error.strerror or str(error)) from error
            raise
        return cls(fd, num_bytes, mapping)

    @classmethod
    def attach(cls, fd: int, num_bytes: int, *, writable: bool, private: bool = False) -> Self:
        """Map an arena of another process. Owns `fd` from here on, also when it refuses it.

        Args:
            fd: received from its maker.
            num_bytes: what the receiver expects, from what it knows itself.
            writable: otherwise a write to a tensor kills this process (SIGSEGV): torch cannot mark tensors as such.
            private: copy on write: what this process writes stays here, and costs memory only then.

        Raises:
            RemoteProtocolError: not an arena, of another size, or one that its maker could still shrink.
        """
        try:
            _check_received(fd, num_bytes)
            return cls(fd, num_bytes, _map(fd, num_bytes, writable=writable or private, private=private))
        except BaseException:
            os.close(fd)
            raise

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Return the `numel` elements from byte `offset` on as a tensor, shape (numel,), of this very memory."""
        self._check_inside(offset, numel * dtype.itemsize)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if offset % dtype.itemsize:
            raise LocalProtocolError(
                reason=f"expected {dtype} at a multiple of its size, but got byte {offset}"
            )
        return torch.frombuffer(self._window(offset, numel * dtype.itemsize), dtype=dtype, count=numel)

    def bytes(self, offset: int, num_bytes: int) -> memoryview:
        """Return bytes ``[offset, offset + num_bytes)``, shared as well, and read-only where the mapping is."""
        self._check_inside(offset, num_bytes)
        return memoryview(self._map)[offset : offset + num_bytes]

    def close(self) -> None:
        """Give back the descriptor and this arena's own hold on the memory. Twice does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._map

    def _check_inside(self, offset: int, num_bytes: int) -> None:
        if self.fd < 0:
            raise LocalProtocolError(reason="expected an open arena, but got one that was closed")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise LocalProtocolError(
                reason=f"expected a range of the arena's {self.num_bytes} bytes, but got {num_bytes} bytes "
                f"from byte {offset} on"
            )

    def _window(self, offset: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        # torch.frombuffer warns, process-wide, about every read-only buffer. A ctypes array does not tell, and
        # carries the mapping along as an attribute.
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        window = (ctypes.c_char * num_bytes).from_address(address + offset)
        window._mapping = self._map  # type: ignore[attr-defined]
        return window


def has_memfd() -> bool:
    """Whether the system has files without a name that can be sealed.

    Where it has not, an arena is a temporary file, deleted at once: good enough for what the launcher hands to its own
    roles, while workers and shards had better connect over TCP.
    """
    return hasattr(os, "memfd_create")


def _new_file(num_bytes: int) -> int:
    if num_bytes < 0:
        raise LocalProtocolError(reason=f"expected a size of at least 0 bytes, but got {num_bytes}")
    available = _available_bytes()
    if num_bytes > available:
        # Asking the kernel is not enough: it grants more than it has, and later kills whoever touches it.
        raise _short_of_memory(num_bytes, f"{available / 2**20:.0f} MiB available")
    if not has_memfd():
        fd, path = tempfile.mkstemp(prefix="squall-")
        os.unlink(path)
        return fd
    return os.memfd_create("squall", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _map(fd: int, num_bytes: int, *, writable: bool, private: bool) -> mmap.mmap:
    sharing = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, _file_bytes(num_bytes), flags=sharing, prot=protection)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel built without huge pages
            raise
    return mapping


def _reserve(mapping: mmap.mmap, fd: int) -> None:
    """Take the memory now, as an error that can be read; the first write would be killed by SIGBUS."""
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, 0, len(mapping))  # a kernel before 5.14


def _check_received(fd: int, num_bytes: int) -> None:
    try:
        size = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS) if has_memfd() else _seals()
    except OSError as error:
        raise RemoteProtocolError(
            reason=f"expected shared memory, but got another descriptor: {error}"
        ) from error
    if num_bytes < 0 or size != _file_bytes(num_bytes):
        raise RemoteProtocolError(
            reason=f"expected shared memory of {_file_bytes(max(num_bytes, 0))} bytes, but got {size}"
        )
    if seals & _seals() != _seals():
        raise RemoteProtocolError(
            reason=f"expected shared memory sealed against shrinking and growing, but got seals {seals:#x}"
        )


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _file_bytes(num_bytes: int) -> int:
    """Whole pages, at least one; whole huge pages where it pays, for a file must cover one to get one."""
    unit = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    return max(num_bytes + unit - 1, unit) // unit * unit


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _short_of_memory(num_bytes: int, got: str) -> ConfigError:
    return ConfigError(
        subject="shared memory",
        expected=f"{num_bytes / 2**20:.0f} MiB to be free",
        got=got,
        remedy="Use fewer replicas or shards on this machine, or a smaller model.",
    )
