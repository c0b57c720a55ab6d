"""Tests of squall.data.idx: the format of MNIST, byte by byte.

Faults planted, each caught: little-endian dimensions; trailing bytes ignored; a short file padded; a dimension
of 0 accepted; memory allocated by the header; type codes shifted by one; a file of the wrong size read before
it is refused.
"""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squall.data.content import open_content
from squall.data.idx import read_idx
from squall.errors import DataError
from tests.data.files import gzipped, idx_bytes, write

IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


def array_of(file: Path) -> np.ndarray[Any, Any]:
    with open_content(file) as content:
        return read_idx(content).array


@pytest.mark.parametrize("wrap", [bytes, gzipped])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
def test_every_type_and_shape_comes_back(tmp_path: Path, dtype: str, wrap: type[bytes]) -> None:
    for shape in ((24,), (6, 4), (4, 3, 2), (2, 3, 2, 2)):
        array = (np.arange(24) - 3).astype(dtype).reshape(shape)
        found = array_of(write(tmp_path, wrap(idx_bytes(array))))
        assert found.dtype.str[1:] == dtype
        assert np.array_equal(found, array)


def test_the_documented_bytes_are_two_images(tmp_path: Path) -> None:
    file = write(tmp_path, bytes.fromhex("00000803 00000002 00000001 00000002 00ff 0180"))
    assert array_of(file).tolist() == [[[0, 255]], [[1, 128]]]


@pytest.mark.parametrize("wrap", [bytes, gzipped])
def test_a_file_cut_or_continued_anywhere_is_refused(tmp_path: Path, wrap: type[bytes]) -> None:
    whole = idx_bytes(IMAGES)
    for length in range(1, len(whole)):
        with pytest.raises(DataError, match="byte"):
            array_of(write(tmp_path, wrap(whole[:length])))
    with pytest.raises(
        DataError, match=r"byte 40: expected 24 bytes.*\(4 x 3 x 2\), but got more \(trailing"
    ):
        array_of(write(tmp_path, wrap(whole + b"\0")))


def test_a_short_file_says_how_many_examples_are_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"byte 31: expected 24 bytes .* but got 15 \(2\.50 of 4 examples\)"):
        array_of(write(tmp_path, gzipped(idx_bytes(IMAGES)[:-9])))


@pytest.mark.parametrize(
    "magic", ["00000703", "00000a03", "00000f03", "00000800", "00000809", "000008ff", "000008"]
)
def test_a_wrong_magic_number_is_refused_and_shown(tmp_path: Path, magic: str) -> None:
    with pytest.raises(DataError, match=f"byte 0: expected an idx magic number.*got 0x{magic}"):
        array_of(write(tmp_path, bytes.fromhex(magic) + idx_bytes(IMAGES)[4:] * (len(magic) == 8)))


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_a_dimension_of_0_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="dimensions above 0"):
        array_of(write(tmp_path, b"\0\0\x08\x03" + struct.pack(">3I", *shape)))


@pytest.mark.parametrize("wrap", [bytes, gzipped])
@pytest.mark.parametrize("dims", [3, 8])
def test_a_header_that_promises_the_world_allocates_nothing(
    tmp_path: Path, wrap: type[bytes], dims: int
) -> None:
    data = bytes([0, 0, 0x0E, dims]) + b"\xff" * 4 * dims + bytes(784)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="4294967295"):
            array_of(write(tmp_path, wrap(data)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One step of reading, whatever was promised.
    assert peak < 2 << 20


def test_a_large_file_of_the_wrong_size_is_refused_unread(tmp_path: Path) -> None:
    file = write(tmp_path, b"\0\0\x08\x01\xff\xff\xff\xff")
    with file.open("r+b") as stream:
        stream.truncate(1 << 30)  # a hole: takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="expected 4294967295 bytes"):
            array_of(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
