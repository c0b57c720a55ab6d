"""The bytes of one data file, inflated if it is a gzip, and what kind of file they make.

Nothing is believed before it is seen: bytes are read in bounded steps, and a compressed file may become

- 256 MiB, whatever its size, or 200 times its own size if that is more (text and images reach 5 to 50),
- but never more than 4 GiB.
"""

import codecs
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from io import BufferedReader

from squall.errors import ConfigError, DataError

KINDS = "squall.data.read takes idx, CSV, npz and libsvm files, and a gzip of each"
COPY_AGAIN = "Make or download the file again"

_STEP_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_FREE_BYTES = 256 << 20
_MAX_RATIO = 200
_MAX_BYTES = 4 << 30
# What reading a torn or altered gzip stream raises; OSError covers the disk and BadGzipFile.
_READ_ERRORS = (OSError, EOFError, zlib.error)
# A label, a blank, and "index:value": no table has that.
_LIBSVM_ROW = re.compile(rb"^[ \t]*[^\s,;:]+[ \t]+(?:-?\d+|qid):[^\s,;]+(?:[ \t][^,;\n]*)?\r?$", re.MULTILINE)


class Kind(Enum):
    """Which reader understands a file."""

    IDX = "idx"
    NPZ = "npz"
    LIBSVM = "libsvm"
    TABLE = "CSV"


def max_inflated(compressed_bytes: int) -> int:
    """How far that many compressed bytes may be inflated [bytes].

    >>> max_inflated(1000), max_inflated(10**7)
    (268435456, 2000000000)
    """
    return min(_MAX_BYTES, max(_FREE_BYTES, _MAX_RATIO * compressed_bytes))


class Content:
    """The bytes of an open file, read as far as someone asked.

    Attributes:
        name: the file's path as the user gave it, for messages.
        raw: the file itself, as it lies on the disk.
        data: the inflated bytes read so far.
        is_gzip: `raw` is a gzip of the content.
    """

    def __init__(self, name: str, raw: BufferedReader) -> None:
        self.name, self.raw = name, raw
        self.data = bytearray()
        self._ended = False
        self.is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        self._file_bytes = os.fstat(raw.fileno()).st_size
        self._limit = max_inflated(self._file_bytes) if self.is_gzip else None
        self._stream: BufferedReader | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if self.is_gzip else raw

    def read_up_to(self, stop: int | None = None) -> bytearray:
        """Read until `stop` bytes are there, or all of them; then return what is there.

        Raises:
            DataError: the gzip is cut short or altered, inflates too far, or the disk does not answer.
        """
        while not self._ended and (stop is None or len(self.data) < stop):
            step = _STEP_BYTES if stop is None else min(_STEP_BYTES, stop - len(self.data))
            try:
                # Not read(): at a torn end it would drop what came before.
                piece = self._stream.read1(step)
            except _READ_ERRORS as error:
                raise self._unreadable(error) from error
            self._ended = not piece
            self.data += piece
            if self._limit is not None and len(self.data) > self._limit:
                raise self.refusal(
                    expected=f"a gzip that inflates to at most {self._limit} bytes",
                    got="one that goes on",
                    remedy="If it is meant to be that large, unpack it first.",
                )
        return self.data

    def count_up_to(self, stop: int) -> int:
        """How many of the first `stop` bytes there are; reads them only where they must be inflated."""
        return len(self.read_up_to(stop)) if self.is_gzip else min(stop, self._file_bytes)

    def refusal(
        self, *, expected: str, got: str, remedy: str = f"{COPY_AGAIN}.", place: str = ""
    ) -> DataError:
        """The error that names this file, the place in it, and what to do."""
        subject = f"{self.name}, {place}" if place else self.name
        return DataError(subject=subject, expected=expected, got=got, remedy=remedy)

    def _unreadable(self, error: Exception) -> DataError:
        if isinstance(error, EOFError):
            got = f"one that is cut short (after {len(self.data)} bytes of content)"
            return self.refusal(expected="a whole gzip stream", got=got)
        if isinstance(error, zlib.error | gzip.BadGzipFile):
            return self.refusal(expected="a sound gzip stream", got=one_line(str(error)))
        return self.refusal(expected="a file that can be read", got=one_line(str(error)), remedy="")


@contextmanager
def open_content(path: str | os.PathLike[str]) -> Iterator[Content]:
    """Open a regular file that is not empty.

    Raises:
        ConfigError: `path` is not a path.
        DataError: the file is missing, empty, a directory, a pipe or a device, or may not be read.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise ConfigError(subject="squall.data.read", expected="a path", got=repr(path))
    name = one_line(os.fsdecode(path), limit=5000)
    with _open_regular(path, name) as raw:
        try:
            content = Content(name, raw)
        except OSError as error:
            raise _cannot_open(name, error) from error
        if not content.read_up_to(1):
            got = "a gzip of nothing" if content.is_gzip else "an empty file (0 bytes)"
            raise content.refusal(expected="data", got=got)
        yield content


def recognise(content: Content) -> Kind:
    """Say what kind of file it is by its first bytes; the name plays no part.

    Raises:
        DataError: it is none of them; a file that is not text is refused before the rest of it is read.
    """
    head = bytes(content.read_up_to(_HEAD_BYTES))
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return Kind.NPZ
    if head.startswith(b"\0\0"):
        return Kind.IDX
    if head.startswith(b"\x93NUMPY"):
        raise content.refusal(
            expected=f"a kind of file that can be read ({KINDS})",
            got="a single .npy array",
            remedy="Put inputs and targets into one file: numpy.savez(path, x=inputs, y=targets).",
        )
    if head.startswith(b"\x1f\x8b"):
        raise content.refusal(expected="one gzip", got="a gzip within a gzip", remedy="Unpack it once.")
    _decode(content, head, is_whole=False)
    return Kind.LIBSVM if _LIBSVM_ROW.search(head) else Kind.TABLE


def text_lines(content: Content) -> list[str]:
    """All lines of a UTF-8 text, without line ends, byte order mark or empty lines at the end.

    Raises:
        DataError: a byte is not UTF-8, or is zero (so this is no text at all); names its offset.
    """
    text = _decode(content, content.read_up_to(), is_whole=True)
    lines = text.removeprefix("\ufeff").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _decode(content: Content, data: bytes | bytearray, is_whole: bool) -> str:
    at = data.find(0)
    if at < 0:
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(data, final=is_whole)
        except UnicodeDecodeError as error:
            at = error.start
    raise content.refusal(
        place=f"byte {at}",
        expected="UTF-8 text, or an idx or npz file",
        got=f"byte 0x{data[at]:02x}",
        remedy=f"{KINDS}; if this is text, save it as UTF-8." if data[at] else f"{KINDS}.",
    )


def one_line(text: str, limit: int = 80) -> str:
    """The text on one printable line, shortened in the middle of nowhere if it is long.

    >>> one_line("two\\nlines")
    'two\\\\nlines'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def _open_regular(path: str | os.PathLike[str], name: str) -> BufferedReader:
    try:
        # Asked before opening: opening a pipe would wait for its writer.
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _cannot_open(name, error) from error
    got = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
    raise DataError(subject=name, expected="a file", got=got, remedy=f"{KINDS}.")


def _cannot_open(name: str, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(
        subject=name,
        expected="a file that can be read",
        got=one_line(reason.lower()),
        remedy="Check the path and its permissions.",
    )
