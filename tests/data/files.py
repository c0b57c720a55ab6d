"""Small data files for tests, written byte by byte: no code of the readers has a part in them."""

import gzip
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squall.data import read
from squall.errors import DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not beside the repository")

_IDX_TYPES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    code = _IDX_TYPES[array.dtype.str[1:]]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def npz_bytes(compressed: bool = False, **arrays: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def write(folder: Path, data: bytes | str, name: str = "file") -> Path:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


def refusal(*args: Any, **options: Any) -> str:
    """The one line with which `read` refuses."""
    with pytest.raises(DataError) as caught:
        read(*args, **options)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert str(args[0]) in message or str(args[1]) in message
    return message
