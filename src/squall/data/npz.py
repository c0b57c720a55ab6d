"""npz files: NumPy arrays by name, in a zip. Never unpickled.

The inputs and targets of a part ("train", "test", "val"; none is the bare name) go by one of the pairs of
names in `_PAIRS`, in small or capital letters: ``x`` and ``y``, ``train_images`` and ``train_labels``,
``x_test`` and ``y_test``. Other arrays of the file are left alone.

Source: NumPy Enhancement Proposal 1, "A simple file format for NumPy arrays".
"""

import io
import math
import re
import struct
import zipfile
import zlib
from typing import IO

import numpy as np

from squall.data.content import COPY_AGAIN, Content, max_inflated, one_line
from squall.data.values import Found, Values
from squall.errors import DataError

_PAIRS = (
    ("x", "y"),
    ("inputs", "targets"),
    ("images", "labels"),
    ("data", "labels"),
    ("data", "targets"),
    ("data", "target"),
    ("features", "labels"),
    ("features", "targets"),
)
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)
_STEP_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_MAX_DIMS = 32
# The last record of a zip: magic number, members in all, bytes of comment after it; large ones count elsewhere.
_END = struct.Struct("<4s6xH8xH")
_COUNTED_ELSEWHERE = 0xFFFF
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([^'"]*)['"]""")
_FORTRAN = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([0-9,\s]*)\)""")
_NUMBERS = re.compile(r"[<>=|]?[biuf][0-9]{1,2}")
_SAVE = "Save them with numpy.savez(path, x=inputs, y=targets)."


def read_npz(content: Content, part: str | None) -> Found:
    """Read inputs and targets by their names; a file of one array has inputs only.

    Raises:
        DataError: not an npz, no such names (lists those it has), or an array that is torn, not made of
            numbers, pickled, or of another size than its header says.
    """
    with _Archive(content) as archive:
        pair = _find_pair(archive.names, part)
        if pair is not None:
            return Found(inputs=archive.array(pair[0]), targets=archive.array(pair[1]))
        if len(archive.names) > 1 or part is not None:
            raise _no_such_names(archive, part)
        return Found(inputs=archive.array(archive.names[0]))


def read_npz_targets(content: Content, part: str | None) -> Values:
    """Read the targets alone, from a file beside the inputs."""
    with _Archive(content) as archive:
        return archive.array(_only(archive, part, role=1))


def read_npz_inputs(content: Content, part: str | None) -> Values:
    """Read the inputs alone; the targets come from another file."""
    with _Archive(content) as archive:
        return archive.array(_only(archive, part, role=0))


def _find_pair(names: list[str], part: str | None) -> tuple[str, str] | None:
    by_lower = {name.lower(): name for name in names}
    for one_part in [part] if part is not None else [None, "train"]:
        for inputs, targets in _PAIRS:
            for x, y in zip(_spellings(inputs, one_part), _spellings(targets, one_part), strict=True):
                if x in by_lower and y in by_lower:
                    return by_lower[x], by_lower[y]
    return None


def _spellings(word: str, part: str | None) -> list[str]:
    return [word] if part is None else [f"{part}_{word}".lower(), f"{word}_{part}".lower()]


def _only(archive: "_Archive", part: str | None, role: int) -> str:
    """The one array that can play the role: 0 inputs, 1 targets."""
    if part is None and len(archive.names) == 1:
        return archive.names[0]
    by_lower = {name.lower(): name for name in archive.names}
    for one_part in [part] if part is not None else [None, "train"]:
        for pair in _PAIRS:
            for spelling in _spellings(pair[role], one_part):
                if spelling in by_lower:
                    return by_lower[spelling]
    raise _no_such_names(archive, part)


def _no_such_names(archive: "_Archive", part: str | None) -> DataError:
    wanted = "named x and y (or images and labels, ...)"
    if part is not None:
        wanted = f"of part {part!r} (as in {part}_images and {part}_labels)"
    got = f"these: {one_line(', '.join(archive.names), limit=200)}"
    return archive.content.refusal(expected=f"arrays {wanted}", got=got, remedy=_SAVE)


class _Archive:
    """The zip around the arrays."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._file: IO[bytes] = io.BytesIO(content.read_up_to()) if content.is_gzip else content.raw
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._check_ends()
        except _ZIP_ERRORS as error:
            raise self._torn(error) from error
        names = self._zip.namelist()
        if not names or not all(name.endswith(".npy") for name in names):
            others = [name for name in names if not name.endswith(".npy")][:3]
            got = f"a zip of {one_line(', '.join(others)) or 'nothing'}"
            raise content.refusal(expected="a zip of .npy arrays (an npz)", got=got, remedy=_SAVE)
        self._members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
        self.names = list(self._members)

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def array(self, name: str) -> Values:
        """Read one array whole, in bounded steps, and check it against its own header and checksum."""
        info = self._members[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise self._refusal(
                name, "a stored or deflated array", "another compression, or encryption", _SAVE
            )
        try:
            with self._zip.open(info) as stream:
                return self._read(name, stream, max_inflated(info.compress_size))
        except _ZIP_ERRORS as error:
            raise self._torn(error, name) from error

    def _read(self, name: str, stream: IO[bytes], limit: int) -> Values:
        dtype, shape, in_fortran_order = self._header(name, stream)
        promised = math.prod(shape) * dtype.itemsize
        if promised > limit:
            got = f"{promised} bytes by its header"
            raise self._refusal(name, f"at most {limit} bytes", got, "Save it uncompressed: numpy.savez.")
        data = _read_in_steps(stream, promised + 1)
        if len(data) != promised:
            got = f"{len(data)}" if len(data) < promised else "more"
            raise self._refusal(name, f"{promised} bytes, as its header says {shape}", got, f"{COPY_AGAIN}.")
        order = "F" if in_fortran_order else "C"
        array = np.frombuffer(data, dtype).reshape(shape, order=order)  # type: ignore[call-overload]
        return Values(array=array, file=f"{self.content.name}, {_place(name)}")

    def _header(self, name: str, stream: IO[bytes]) -> tuple[np.dtype[np.generic], tuple[int, ...], bool]:
        text = _header_text(stream)
        descr, fortran, shape = (pattern.search(text) for pattern in (_DESCR, _FORTRAN, _SHAPE))
        if fortran is None or shape is None:
            raise self._refusal(name, "the header of a .npy array", "something else", f"{COPY_AGAIN}.")
        if descr is None or not _NUMBERS.fullmatch(descr[1]):
            kind = one_line(repr(descr[1])) if descr else "named fields"
            got = f"pickled objects ({kind})" if descr and "O" in descr[1] else f"dtype {kind}"
            remedy = "Pickles are never loaded: convert the array to numbers and save it again."
            raise self._refusal(name, "an array of numbers", got, remedy)
        sizes = tuple(int(size) for size in shape[1].split(",") if size.strip())
        if not sizes or len(sizes) > _MAX_DIMS or 0 in sizes:
            raise self._refusal(
                name, f"1 to {_MAX_DIMS} dimensions above 0", f"shape {one_line(str(sizes))}", _SAVE
            )
        try:
            return np.dtype(descr[1]), sizes, fortran[1] == "True"
        except TypeError as error:
            raise self._refusal(name, "a dtype that NumPy knows", repr(descr[1]), f"{COPY_AGAIN}.") from error

    def _check_ends(self) -> None:
        """zipfile looks past bytes before and after the archive, and past members it lost count of; we do not."""
        members, comment = self._zip.infolist(), self._zip.comment
        self._file.seek(-_END.size - len(comment), io.SEEK_END)
        magic, num_members, comment_bytes = _END.unpack(self._file.read(_END.size))
        is_last = magic == b"PK\x05\x06" and comment_bytes == len(comment)
        is_first = min((info.header_offset for info in members), default=0) == 0
        if not (is_first and is_last):
            raise zipfile.BadZipFile("there are bytes before its first or after its last record")
        if len({info.filename for info in members}) < len(members):
            raise zipfile.BadZipFile("two members have the same name")
        if num_members not in (len(members), _COUNTED_ELSEWHERE):
            raise zipfile.BadZipFile(f"{num_members} members are counted, {len(members)} found")

    def _refusal(self, name: str, expected: str, got: str, remedy: str) -> DataError:
        return self.content.refusal(place=_place(name), expected=expected, got=got, remedy=remedy)

    def _torn(self, error: Exception, name: str | None = None) -> DataError:
        place = "" if name is None else _place(name)
        got = one_line(str(error)) or type(error).__name__
        return self.content.refusal(place=place, expected="a whole and sound npz", got=got)


def _place(name: str) -> str:
    return f"array {one_line(repr(name))}"


def _header_text(stream: IO[bytes]) -> str:
    """The text between a .npy array's magic number and its data; empty if it is not one."""
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8 or magic[6] not in (1, 2, 3):
        return ""
    width = 2 if magic[6] == 1 else 4
    size = int.from_bytes(stream.read(width), "little")
    if size > _MAX_HEADER_BYTES:
        return ""
    return stream.read(size).decode("latin-1")


def _read_in_steps(stream: IO[bytes], stop: int) -> bytearray:
    data = bytearray()
    while len(data) < stop:
        piece = stream.read(min(_STEP_BYTES, stop - len(data)))
        if not piece:
            break
        data += piece
    return data
