"""Tests of squall.data.npz: arrays by name, never unpickled.

Faults planted, each caught: allow_pickle; any two arrays taken in order; test arrays taken for training ones;
Fortran order ignored; the header's size believed; zip comments and tails ignored; a lost member ignored; an
array that is not a number read as bytes; the limit on inflating removed.
"""

import io
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import squall.data.content as content_module
from squall.data import read
from squall.errors import DataError
from tests.data.files import gzipped, idx_bytes, npz_bytes, refusal, write

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + version + size + text + data


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tree(*args: Any, **options: Any) -> Any:
    return read(*args, **options).tree


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("wrap", [bytes, gzipped])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ("x", "y"),
        ("X", "Y"),
        ("inputs", "targets"),
        ("images", "labels"),
        ("data", "target"),
        ("x_train", "y_train"),
        ("train_images", "train_labels"),
    ],
)
def test_inputs_and_targets_go_by_the_usual_names(
    tmp_path: Path, x: str, y: str, wrap: type[bytes], compressed: bool
) -> None:
    arrays: dict[str, Any] = {"a_first": Y[:2], y: Y, x: X, "x_test": X[:1], "y_test": Y[:1]}
    data = npz_bytes(compressed, **arrays)

    inputs, targets = tree(write(tmp_path, wrap(data)))

    assert np.array_equal(inputs, X)
    assert np.array_equal(targets, Y)


def test_a_part_names_its_arrays(tmp_path: Path) -> None:
    file = write(
        tmp_path, npz_bytes(train_images=X, train_labels=Y, val_images=X[:2], val_labels=Y[:2, None])
    )

    inputs, targets = tree(file, part="val")

    assert (inputs.tolist(), targets.tolist()) == (X[:2].tolist(), [0, 1])
    assert "part 'test' (as in test_images" in refusal(file, part="test")


def test_one_array_is_inputs_alone(tmp_path: Path) -> None:
    assert np.array_equal(tree(write(tmp_path, npz_bytes(anything=X))), X)


def test_inputs_and_targets_may_lie_in_two_files(tmp_path: Path) -> None:
    images = write(tmp_path, npz_bytes(x_test=X[:1], x_train=X), "images")
    labels = write(tmp_path, npz_bytes(whatever=Y), "labels")

    inputs, targets = tree(images, labels, classes=6)

    assert np.array_equal(inputs, X)
    assert np.array_equal(targets, Y)


def test_arrays_of_other_names_are_refused_with_the_names_found(tmp_path: Path) -> None:
    assert "these: first, second" in refusal(write(tmp_path, npz_bytes(first=X, second=Y)))
    assert "these: x, q" in refusal(write(tmp_path, npz_bytes(x=X, q=Y)))


@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", ">i8", "<f2", ">f4", "<f8"])
def test_every_type_of_number_and_order_of_axes_is_read(tmp_path: Path, dtype: str) -> None:
    x = np.asfortranarray(X.astype(dtype))
    expected = X.astype(dtype).astype(np.float32) / (255 if dtype == "u1" else 1)

    inputs, _ = tree(write(tmp_path, npz_bytes(x=x, y=Y)))

    assert np.allclose(inputs, expected)
    assert inputs.shape == X.shape


@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00"])
def test_every_version_of_the_array_header_is_read(tmp_path: Path, version: bytes) -> None:
    member = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }", b"\0\0\x80?\0\0\0@", version)
    assert tree(write(tmp_path, zipped({"x.npy": member}))).tolist() == [[1], [2]]


def test_pickled_objects_are_refused_and_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "sprung").touch, ()

    member = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", pickle.dumps([Trap()]))

    assert "pickled objects" in refusal(write(tmp_path, zipped({"x.npy": member})))
    assert "pickled objects" in refusal(write(tmp_path, npz_bytes(x=np.array([{}, None]), y=Y)))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a", "b"]), "dtype '<U1'"),
        (np.zeros(2, [("a", "f4")]), "named fields"),
        (np.zeros(2, "M8[s]"), "dtype"),
        (np.zeros(2, complex), "dtype '<c16'"),
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        (np.zeros(()), r"shape \(\)"),
        (np.array([1.0, np.nan]), r"array 'x', row 2 \(index 1\)"),
    ],
)
def test_an_array_that_cannot_be_trained_on_is_refused(tmp_path: Path, array: Any, message: str) -> None:
    assert re.search(message, refusal(write(tmp_path, npz_bytes(x=array))))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", bytes(8), "expected 12 bytes"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(8), "got more"),
        ("{'descr': '<f3', 'fortran_order': False, 'shape': (2,), }", bytes(8), "a dtype that NumPy knows"),
        ("{'descr': '<f4', 'fortran_order': 7, 'shape': (2,), }", bytes(8), "header of a .npy array"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }", bytes(8), "header of a .npy array"),
        ("__import__('os')", bytes(8), "header of a .npy array"),
        ("", bytes(8), "header of a .npy array"),
    ],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, header: str, data: bytes, message: str) -> None:
    assert message in refusal(write(tmp_path, zipped({"x.npy": npy(header, data)})))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_that_promises_the_world_allocates_nothing(tmp_path: Path, method: int) -> None:
    for count in (10**7, 10**12, 10**30):
        member = npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({count},), }}", bytes(800))
        tracemalloc.start()
        try:
            assert "array 'x'" in refusal(write(tmp_path, zipped({"x.npy": member}, method)))
            assert tracemalloc.get_traced_memory()[1] < 1 << 21
        finally:
            tracemalloc.stop()


def test_an_array_that_inflates_without_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "_FREE_BYTES", 1 << 20)
    assert "Save it uncompressed" in refusal(write(tmp_path, npz_bytes(True, x=np.zeros(4 << 20))))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (zipped({"a.txt": b"text", "x.npy": b""}), "a zip of a.txt"),
        (zipped({}), "a zip of nothing"),
        (npz_bytes(x=X) + b"\0", "sound npz"),
        (npz_bytes(x=X) + npz_bytes(x=X), "before its first"),
        (zipped({"x.npy": npz_bytes(x=X)}), "header of a .npy array"),
        (zipped({"x.npy": b""}), "header of a .npy array"),
        (zipped({"x.npy": bytes(99)}, zipfile.ZIP_BZIP2), "another compression"),
    ],
)
def test_a_zip_that_is_no_sound_npz_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refusal(write(tmp_path, data))


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    data = npz_bytes(x=X, y=Y).replace(b"y.npy", b"x.npy")
    assert "the same name" in refusal(write(tmp_path, data))


def test_an_array_hidden_in_a_comment_is_missed(tmp_path: Path) -> None:
    data = bytearray(npz_bytes(x=X, y=Y))
    first, second, end = data.index(b"PK\1\2"), data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    # The comment of the first record swallows the second.
    data[first + 32 : first + 34] = struct.pack("<H", end - second)
    assert "2 members are counted, 1 found" in refusal(write(tmp_path, bytes(data)))


def test_an_npz_with_a_comment_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, npz_bytes(x=X))
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b"made by hand"
    assert np.array_equal(tree(file), X)


def test_a_changed_byte_of_the_data_is_seen_by_its_checksum(tmp_path: Path) -> None:
    data = bytearray(npz_bytes(x=X, y=Y))
    at = bytes(data).index(X.tobytes()) + 5
    data[at] ^= 1
    assert "CRC" in refusal(write(tmp_path, bytes(data)))


def test_inputs_and_targets_of_unequal_length_are_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, npz_bytes(x=X, y=Y[:5])))
    assert "array 'y': expected 6 targets" in message
    with pytest.raises(DataError, match="expected 6 targets"):
        read(write(tmp_path, npz_bytes(x=X), "x"), write(tmp_path, idx_bytes(Y[:5].astype(np.uint8)), "y"))
