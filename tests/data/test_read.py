"""Tests of squall.data.read: whole files in, a source or one line of refusal out.

Faults planted, each caught: `targets` ignored for npz; labels not checked against classes; lengths not
compared; inputs and labels swapped accepted; a zip error not translated; a gzip error not translated; classes
ignored when there are no targets.
"""

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from squall.data import read
from squall.errors import ConfigError, DataError
from tests.data.files import SHARED, gzipped, idx_bytes, needs_shared, npz_bytes, refusal, write

IMAGES = np.arange(36, dtype=np.uint8).reshape(6, 3, 2)
LABELS = np.arange(6, dtype=np.uint8)
TABLE = "a,b,c\n" + "".join(f"{i / 2},{i},{i % 3}\n" for i in range(6))
NAMED = '"","a","kind"\n' + "".join(f'"{i}",{i * 2},"{"AB"[i % 2]}"\n' for i in range(6))
SPARSE = "".join(f"{i % 2} 1:{i} 3:0.5\n" for i in range(6))
GOOD = {
    "idx": idx_bytes(IMAGES),
    "idx.gz": gzipped(idx_bytes(IMAGES)),
    "float idx": idx_bytes(IMAGES.astype("f4")),
    "npz": npz_bytes(x=IMAGES, y=LABELS),
    "compressed npz": npz_bytes(True, x=IMAGES, y=LABELS),
    "npz.gz": gzipped(npz_bytes(x=IMAGES, y=LABELS)),
    "csv": TABLE.encode(),
    "csv.gz": gzipped(TABLE.encode()),
    "named csv": NAMED.encode(),
    "libsvm": SPARSE.encode(),
    "libsvm.gz": gzipped(SPARSE.encode()),
}


def tree(*args: Any, **options: Any) -> Any:
    return read(*args, **options).tree


def test_a_source_hands_out_tensors_of_inputs_and_targets(tmp_path: Path) -> None:
    images = write(tmp_path, idx_bytes(IMAGES), "images")
    labels = write(tmp_path, gzipped(idx_bytes(LABELS)), "labels")

    source = read(images, labels, classes=6)
    x, y = source.batch(np.array([5, 0]))

    assert source.num_examples == 6
    assert torch.equal(x, torch.tensor(IMAGES[[5, 0]]) / 255)
    assert torch.equal(y, torch.tensor([5, 0]))


def test_kinds_can_be_mixed(tmp_path: Path) -> None:
    images = write(tmp_path, npz_bytes(images=IMAGES, labels=LABELS), "images")
    labels = write(tmp_path, "7\n" * 6, "labels")
    assert tree(images, labels)[1].tolist() == [7] * 6
    sparse = write(tmp_path, SPARSE, "sparse")
    assert tree(sparse, labels)[1].tolist() == [7] * 6


def test_images_can_be_the_targets_of_images(tmp_path: Path) -> None:
    images = write(tmp_path, idx_bytes(IMAGES))
    inputs, targets = tree(images, images)
    assert np.array_equal(inputs, targets)


def test_targets_of_another_length_are_refused_with_both_files(tmp_path: Path) -> None:
    images, labels = write(tmp_path, GOOD["idx"], "images"), write(tmp_path, idx_bytes(LABELS[:5]), "labels")
    message = refusal(images, labels)
    assert f"{labels}: expected 6 targets, one for each example of {images}, but got 5" in message


def test_labels_out_of_range_are_refused_with_the_file_and_row(tmp_path: Path) -> None:
    images, labels = write(tmp_path, GOOD["idx"], "images"), write(tmp_path, idx_bytes(LABELS), "labels")
    assert f"{labels}, row 6 (index 5): expected a class label in 0..4, but got 5" in refusal(
        images, labels, classes=5
    )


def test_labels_given_as_inputs_are_refused(tmp_path: Path) -> None:
    images, labels = write(tmp_path, GOOD["idx"], "images"), write(tmp_path, idx_bytes(LABELS), "labels")
    assert "Give the images first" in refusal(labels, images)


def test_classes_without_targets_are_refused(tmp_path: Path) -> None:
    assert "got inputs alone" in refusal(write(tmp_path, GOOD["idx"]), classes=6)


@pytest.mark.parametrize("options", [{"classes": 0}, {"classes": -1}, {"part": "test"}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read(write(tmp_path, GOOD["idx"]), write(tmp_path, idx_bytes(LABELS), "labels"), **options)


# --- damage: whatever is done to a file, it loads, or is refused in one line


def damaged(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Every truncation; every byte changed; and some rougher handling."""
    yield from (data[:length] for length in range(len(data)))
    for at, byte in enumerate(data):
        other = chance.choice([byte ^ 1, byte ^ 0x80, byte ^ 0xFF, chance.randrange(256)])
        yield data[:at] + bytes([other]) + data[at + 1 :]
    for _ in range(60):
        at, stop = sorted(chance.choices(range(len(data)), k=2))
        yield data[:at] + data[stop:]
        yield (
            data[:at]
            + chance.choice([b"\0", b",", b"\n", b":", b'"', b"9" * 30, b"1e999", b"nan"])
            + data[at:]
        )
    yield from (data + tail for tail in (b"\0", b"x"))


def tree_or_refusal(*args: Any, **options: Any) -> Any:
    try:
        return tree(*args, **options)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("kind", GOOD)
def test_a_damaged_file_loads_or_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    labels = write(tmp_path, idx_bytes(LABELS), "labels") if "idx" in kind else None
    file = write(tmp_path, GOOD[kind])
    whole = tree(file, labels)
    has_checksum = "npz" in kind or "gz" in kind
    refusals = 0

    for data in damaged(GOOD[kind], random.Random(0)):
        file.write_bytes(data)
        found = tree_or_refusal(file, labels, classes=6)
        if isinstance(found, str):
            refusals += 1
            assert found.startswith(str(file))
            assert "\n" not in found
        elif has_checksum:
            # What was changed was no data: a time, a comment.
            assert all(np.array_equal(a, b) for a, b in zip(found, whole, strict=True))

    assert refusals > len(GOOD[kind])


# --- real files


@needs_shared
@pytest.mark.parametrize(
    ("files", "options", "shape", "labels"),
    [
        (["image/mnist/t10k-even-{}.gz"], {"classes": 10}, (5000, 28, 28), range(10)),
        (["image/fashion/train6k-{}.gz"], {"classes": 10}, (6000, 28, 28), range(10)),
        (["image/digits8x8/digits.csv.gz"], {"classes": 10}, (1797, 64), range(10)),
        (["image/optdigits/optdigits.tra"], {"classes": 10}, (3823, 64), range(10)),
        (["image/usps/usps_train.npz"], {"classes": 10}, (7291, 256), range(10)),
        (["image/pneumonia/pneumonia_train_val.npz"], {"classes": 2}, (2428, 28, 28), range(2)),
        (["image/pneumonia/pneumonia_train_val.npz"], {"part": "val"}, (270, 28, 28), range(2)),
        (["tabular/a9a.gz"], {}, (32561, 123), [-1, 1]),
        (["tabular/a9a.gz"], {"classes": 2, "width": 124}, (32561, 124), range(2)),
        (["tabular/letter.csv.gz"], {"classes": 26}, (20000, 16), range(26)),
        (["tabular/higgs7k_train.tsv.gz"], {"classes": 2, "target_column": 0}, (7000, 28), range(2)),
        (["tabular/breast_cancer.csv"], {"classes": 2}, (569, 30), range(2)),
    ],
)
def test_real_files_load(files: list[str], options: dict[str, Any], shape: Any, labels: Any) -> None:
    names = ["images-idx3-ubyte", "labels-idx1-ubyte"] if "{}" in files[0] else [""]
    inputs, targets = tree(*(SHARED / files[0].format(name) for name in names), **options)

    assert inputs.shape == shape
    assert np.unique(targets).tolist() == list(labels)


@needs_shared
def test_targets_in_a_text_beside_the_inputs_load() -> None:
    folder = SHARED / "tabular"
    inputs, targets = tree(folder / "diabetes_data_raw.csv.gz", folder / "diabetes_target.csv.gz")
    assert (inputs.shape, targets.shape) == ((442, 10), (442,))


@needs_shared
@pytest.mark.parametrize(
    "name",
    [
        "image/cifar10/train_1000.bin.gz",
        "image/omniglot/images_background_small1.zip",
        "speech/fsdd/fsdd_train.zip",
        "speech/fsdd/fsdd_train_states.csv",
        "tabular/rcv1_small.vw.gz",
        "text/enwiki105.txt.gz",
        "text/wordsim353.tsv",
        "sentiment/sst/train.txt.gz",
        "sentiment/uci/yelp_labelled.txt",
        "xml/bibtex-train.arff.gz",
    ],
)
def test_real_files_of_other_kinds_are_refused(name: str) -> None:
    assert refusal(SHARED / name).startswith(str(SHARED / name))


def corrupt_files() -> list[str]:
    if not SHARED.is_dir():
        return []
    with (SHARED / "bad" / "expected.tsv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["file"] for row in rows if row["should"] != "load"]


@needs_shared
@pytest.mark.parametrize("name", corrupt_files())
def test_corrupt_files_are_refused(name: str) -> None:
    bad = SHARED / "bad"
    if "-labels-" in name:
        files = [bad / "good-images-idx3-ubyte.gz", bad / name]
    elif "-images-" in name:
        files = [bad / name, bad / "good-labels-idx1-ubyte.gz"]
    else:
        files = [bad / name]
    assert f"{bad / name}" in refusal(*files, classes=10)


@needs_shared
def test_sound_files_beside_the_corrupt_ones_load() -> None:
    bad = SHARED / "bad"
    inputs, targets = tree(bad / "good-images-idx3-ubyte.gz", bad / "good-labels-idx1-ubyte.gz", classes=10)
    assert (inputs.shape, len(targets)) == ((100, 28, 28), 100)
