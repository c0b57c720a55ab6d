"""Checksummed frames in a file: what a shard's log and its snapshots are made of.

::

    bytes of head (4) | bytes of payload (8) | CRC-32 of these and of what follows (4) | head | payload

All numbers are little-endian. A reader stops at the first frame that is torn or altered and says where; CRC-32 sees
every altered byte, and every run of up to 32 altered bits.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

_SIZES = struct.Struct("<IQ")
_CHECK = struct.Struct("<I")
_START_BYTES = _SIZES.size + _CHECK.size


def write_frame(fd: int, head: bytes, payload: Sequence[memoryview] = ()) -> int:
    """Append a frame to a file and return its bytes; straight from the payload's memory.

    Raises:
        OSError: the disk is full, or will not be written to. A part of the frame may be there, which no reader takes.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = write_frame(file.fileno(), b"three", [memoryview(b"abc")]), write_frame(file.fileno(), b"none")
    ...     [(head, bytes(payload)) for head, payload in Frames(Path(file.name))]
    [(b'three', b'abc'), (b'none', b'')]
    """
    sizes = _SIZES.pack(len(head), sum(part.nbytes for part in payload))
    check = zlib.crc32(head, zlib.crc32(sizes))
    for part in payload:
        check = zlib.crc32(part, check)
    start = memoryview(sizes + _CHECK.pack(check) + head)
    _write_all(fd, [start, *(part.cast("B") for part in payload if part.nbytes)])
    return start.nbytes + sum(part.nbytes for part in payload)


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if written:
            parts[0] = parts[0][written:]


class Frames:
    """The frames of a file, in order, up to the first that is not whole.

    Attributes:
        damage: after the last: why it was the last; empty if the file ends there.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damage = ""

    def __iter__(self) -> Iterator[tuple[bytes, bytearray]]:
        with open(self._path, "rb") as file:
            left, at = os.fstat(file.fileno()).st_size, 0
            while left:
                start = file.read(_START_BYTES)
                if len(start) < _START_BYTES:
                    return self._stop("is torn", at)
                head_bytes, payload_bytes = _SIZES.unpack_from(start)
                left -= _START_BYTES + head_bytes + payload_bytes
                if left < 0:  # looked at before memory is taken
                    return self._stop("is torn, or its size was altered", at)
                head, payload = file.read(head_bytes), bytearray(payload_bytes)
                file.readinto(payload)
                check = zlib.crc32(payload, zlib.crc32(head, zlib.crc32(start[: _SIZES.size])))
                if check != _CHECK.unpack_from(start, _SIZES.size)[0]:
                    return self._stop("does not fit its checksum", at)
                yield head, payload
                at += _START_BYTES + head_bytes + payload_bytes
        return None

    def _stop(self, what: str, at: int) -> None:
        self.damage = f"{self._path.name}: what lies at byte {at} {what}"
