"""Tests of squall.data.source: everything that a user may call training data.

Faults planted, each caught: a loader's batch size, collate function, workers or drop_last ignored; a
RandomSampler with replacement accepted; a list as a loader's dataset taken for a pytree; arrays handed out
without a copy; only the first two lengths compared; object arrays accepted; user errors
wrapped; a TensorDataset collated one by one; torch imported at the top of the file.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from squall.data import DatasetSource, Loading, Source, TensorSource, as_source
from squall.errors import ConfigError, DataError

INDICES = np.array([4, 0, 4])


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 7:
            raise KeyError("the user's own error")
        return torch.tensor([float(i * i)]), i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Labelled(NamedTuple):
    image: Any
    label: Any


def double_labels(examples: list[Any]) -> Any:
    return torch.stack([x for x, _ in examples]), [2 * y for _, y in examples]


# --- tensors and arrays


def test_a_minibatch_of_tensors_has_the_shape_of_the_tree() -> None:
    data = {"pair": Labelled(torch.arange(10), np.arange(10.0)), "more": [torch.ones(10, 2)]}

    found = TensorSource(data).batch(INDICES)

    assert type(found["pair"]) is Labelled
    assert found["pair"].image.tolist() == [4, 0, 4]
    assert torch.equal(found["pair"].label, torch.tensor([4.0, 0.0, 4.0], dtype=torch.float64))
    assert found["more"][0].shape == (3, 2)


def test_a_minibatch_of_an_array_is_a_tensor_of_its_own() -> None:
    array = np.arange(10, dtype=np.float32)

    found = TensorSource(array).batch(np.arange(10))
    found.zero_()

    assert array.tolist() == list(range(10))


def test_an_array_that_is_read_only_mapped_or_of_foreign_byte_order_becomes_tensors(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10.0))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    foreign = np.arange(10, dtype=">i4")

    found = TensorSource((mapped, foreign)).batch(INDICES)

    assert [leaf.tolist() for leaf in found] == [[4.0, 0.0, 4.0], [4, 0, 4]]


def test_tensors_that_require_gradients_are_handed_out_without_history() -> None:
    assert not TensorSource(torch.ones(3, requires_grad=True)).batch(np.array([0])).requires_grad


def test_leaves_of_unequal_length_are_refused_by_path_and_length() -> None:
    with pytest.raises(
        DataError, match=r"data\['y'\]\[1\]: expected 3 examples, as many as in data\['x'\], but got 2"
    ):
        TensorSource({"x": torch.ones(3), "y": (np.ones(3), np.ones(2))})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (torch.ones(0, 4), "at least one example"),
        ((), "tensors or arrays"),
        (np.array([None, "a"], dtype=object), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.ones(2, np.longdouble), "dtype float128"),
        ((torch.ones(2), [1, 2]), r"data\[1\]\[0\]: expected a torch tensor or a NumPy array, but got int"),
        ([(torch.ones(2), torch.tensor(1))], r"data\[0\]\[1\].*Dataset with __len__"),
        ({"x": None}, "NoneType"),
    ],
)
def test_what_cannot_be_indexed_as_tensors_is_refused(tree: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TensorSource(tree)


# --- datasets


def test_a_dataset_is_collated_as_torch_does() -> None:
    source = DatasetSource(Squares())

    x, y = source.batch(INDICES)

    (expected_x, expected_y) = next(iter(DataLoader(Squares(), sampler=[4, 0, 4], batch_size=3)))
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)
    assert source.num_examples == 10


def test_a_dataset_that_fetches_many_at_once_is_asked_once() -> None:
    asked = []

    class Batched(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [(torch.zeros(1), i) for i in indices]

    DatasetSource(Batched()).batch(INDICES)

    assert asked == [[4, 0, 4]]


def test_an_error_of_the_users_dataset_goes_through_unchanged() -> None:
    with pytest.raises(KeyError, match="the user's own error"):
        as_source(Squares(), 4).source.batch(np.array([7]))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="at least one example"):
        DatasetSource([])


# --- as_source


def test_a_source_and_a_pytree_take_the_given_batch_size() -> None:
    source = TensorSource(torch.ones(3))

    assert as_source(source, 2) == Loading(source=source, batch_size=2)
    assert as_source((torch.ones(3), np.ones(3)), 2).source.num_examples == 3


def test_a_loader_brings_its_batch_size_collate_function_workers_and_drop_last() -> None:
    loader = DataLoader(
        Squares(), batch_size=3, collate_fn=double_labels, num_workers=2, drop_last=True, shuffle=True
    )

    loading = as_source(loader, 99)

    assert (loading.batch_size, loading.num_workers, loading.drop_last) == (3, 2, True)
    assert loading.source.batch(np.array([2, 3]))[1] == [4, 6]


def test_a_loader_over_a_list_of_examples_is_a_dataset_not_a_tree() -> None:
    loading = as_source(DataLoader([(torch.ones(5), 1), (torch.ones(5), 2)], batch_size=2), 99)  # type: ignore[arg-type]

    x, y = loading.source.batch(np.array([1, 0]))

    assert (loading.source.num_examples, x.shape, y.tolist()) == (2, (2, 5), [2, 1])


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(data, batch_size=2)])
def test_a_tensor_dataset_is_indexed_whole(wrap: Any) -> None:
    source = as_source(wrap(TensorDataset(torch.arange(5), torch.arange(5) * 10)), 2).source

    assert isinstance(source, TensorSource)
    assert [leaf.tolist() for leaf in source.batch(INDICES)] == [[4, 0, 4], [40, 0, 40]]


def test_a_tensor_dataset_with_a_collate_function_of_its_own_is_collated() -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(5), torch.arange(5)), batch_size=2, collate_fn=double_labels
    )
    assert as_source(loader, 2).source.batch(np.array([3]))[1] == [6]


def test_a_subset_keeps_its_own_numbering() -> None:
    source = as_source(Subset(Squares(), [3, 5]), 2).source
    assert (source.num_examples, source.batch(np.array([1]))[1].tolist()) == (2, [5])


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_size=None),
        lambda data: DataLoader(data, batch_sampler=[[0, 1]]),
        lambda data: DataLoader(data, sampler=SubsetRandomSampler([0, 1])),
        lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)),
        lambda data: DataLoader(data, sampler=RandomSampler(data, num_samples=4)),
    ],
)
def test_a_loader_that_chooses_examples_itself_is_refused_with_what_to_do(make: Any) -> None:
    with pytest.raises(ConfigError, match="pass the dataset and batch_size"):
        as_source(make(Squares()), 2)


@pytest.mark.parametrize(
    "data",
    [Stream(), DataLoader(Stream()), iter([1]), (i for i in range(3)), {1, 2}, 5, None, object()],
    ids=lambda data: type(data).__name__,
)
def test_data_that_can_only_be_iterated_over_are_refused_with_the_way_on(data: Any) -> None:
    with pytest.raises(DataError, match="__len__ and __getitem__"):
        as_source(data, 2)


@pytest.mark.parametrize("path", ["train.csv", b"train.csv", Path("train.csv")])
def test_a_path_is_refused_with_the_reader_to_use(path: Any) -> None:
    with pytest.raises(DataError, match=r"squall\.data\.read"):
        as_source(path, 2)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 1, "num_workers": -1}])
def test_a_loading_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="batch_size >= 1"):
        Loading(source=TensorSource(torch.ones(1)), **wrong)  # type: ignore[arg-type]


def test_a_source_must_say_how_to_make_a_minibatch() -> None:
    class Half(Source):
        num_examples = 1

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_reading_data_does_not_import_torch() -> None:
    program = (
        "import sys, numpy as np; from squall.data import TensorSource, digits, order, read, seed_for\n"
        "digits(); TensorSource((np.ones(3), np.ones(3))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
