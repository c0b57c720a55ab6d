"""idx files: the format of MNIST.

    0, 0, type, number of dimensions | each dimension, 4 bytes, big-endian | the numbers, big-endian

Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", section on file formats.
"""

import math
import struct

import numpy as np

from squall.data.content import COPY_AGAIN, Content
from squall.data.values import Values
from squall.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 8


def read_idx(content: Content) -> Values:
    """Read the one array of an idx file, with its own shape and type.

    Memory grows with the bytes that are there, never with what the header promises.

    Raises:
        DataError: the header is not one, or promises more or fewer bytes than there are.
    """
    dtype, shape, header_bytes = _header(content)
    promised = math.prod(shape) * dtype.itemsize
    got = content.count_up_to(header_bytes + promised + 1) - header_bytes
    if got != promised:
        raise _wrong_size(content, shape, header_bytes, promised, got)
    data = content.read_up_to(header_bytes + promised)
    array = np.frombuffer(data, dtype, offset=header_bytes).reshape(shape)
    return Values(array=array, file=content.name)


def _header(content: Content) -> tuple[np.dtype[np.generic], tuple[int, ...], int]:
    magic = bytes(content.read_up_to(4)[:4])
    if len(magic) < 4 or magic[2] not in _TYPES or not 1 <= magic[3] <= _MAX_DIMS:
        raise content.refusal(
            place="byte 0",
            expected=f"an idx magic number: 0, 0, a type (8, 9, 11 to 14) and 1 to {_MAX_DIMS} dimensions",
            got=f"0x{magic.hex()}",
        )
    num_dims = magic[3]
    header_bytes = 4 + 4 * num_dims
    dims = bytes(content.read_up_to(header_bytes)[4:header_bytes])
    if len(dims) < 4 * num_dims:
        raise content.refusal(
            place=f"byte {4 + len(dims)}",
            expected=f"a header of {header_bytes} bytes for {num_dims} dimensions",
            got="the end of the file",
        )
    shape = struct.unpack(f">{num_dims}I", dims)
    if 0 in shape:
        raise content.refusal(place="byte 4", expected="dimensions above 0", got=_times(shape))
    return np.dtype(_TYPES[magic[2]]), shape, header_bytes


def _wrong_size(
    content: Content, shape: tuple[int, ...], header_bytes: int, promised: int, got: int
) -> DataError:
    examples = f"{got / (promised // shape[0]):.2f} of {shape[0]} examples"
    return content.refusal(
        place=f"byte {header_bytes + min(got, promised)}",
        expected=f"{promised} bytes of data, as its header says {_times(shape)}",
        got=f"{got} ({examples})" if got < promised else "more (trailing bytes)",
        remedy=f"{COPY_AGAIN}, or correct its header.",
    )


def _times(shape: tuple[int, ...]) -> str:
    return "(" + " x ".join(map(str, shape)) + ")"
