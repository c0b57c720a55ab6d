"""Where examples come from: anything that can hand out a minibatch by the indices of its examples.

Importing this file does not import torch; making the first minibatch does.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from squall.data.tree import leaves, map_leaves
from squall.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

# What torch.from_numpy takes: bool, signed and unsigned integers, floats up to 64 bits, complex up to 128.
_TENSOR_KINDS = "biufc"
_MAX_ITEM_BYTES = {"f": 8, "c": 16}
_INDEXED_ONLY = (
    "Squall redoes minibatches by their number, so it needs examples that it can index: write a Dataset with "
    "__len__ and __getitem__, or collect the examples into tensors first."
)


class Source(ABC):
    """A fixed set of examples that can be asked for in any order, any number of times.

    Subclass it for data that is neither tensors nor a Dataset. The same index must always give the same
    example, up to randomness seeded by the caller: a minibatch that was lost is asked for again.

    >>> class Squares(Source):
    ...     num_examples = 10
    ...     def batch(self, indices):
    ...         return indices**2
    >>> Squares().batch(np.array([2, 3]))
    array([4, 9])
    """

    num_examples: int

    @abstractmethod
    def batch(self, indices: NDArray[np.int64]) -> Any:
        """The examples at `indices`, shape (B,), as one minibatch: any pytree."""


@final
class TensorSource(Source):
    """Examples that lie in memory, along the first dimension of every leaf of a pytree.

    Leaves are kept, not copied. A minibatch is a new tree of the same shape whose leaves are tensors.

    Attributes:
        tree: nested tuples, named tuples, lists and dicts of tensors and NumPy arrays; not to be written to.
        num_examples: length of the first dimension, the same for all leaves.
    Raises:
        DataError: no leaf, a leaf that is not a tensor or an array of numbers, no examples, or lengths that
            differ.

    >>> source = TensorSource({"image": np.zeros((3, 2), np.float32), "label": np.array([4, 5, 6])})
    >>> source.num_examples, source.batch(np.array([2, 0]))["label"]
    (3, tensor([6, 4]))
    """

    def __init__(self, tree: Any) -> None:
        found = leaves(tree)
        lengths = [(path, _length(path, leaf)) for path, leaf in found]
        if not lengths:
            raise DataError(subject="a data set", expected="tensors or arrays", got=repr(tree))
        first_path, self.num_examples = lengths[0]
        for path, length in lengths:
            if length != self.num_examples:
                raise DataError(
                    subject=f"data{path}",
                    expected=f"{self.num_examples} examples, as many as in data{first_path}",
                    got=str(length),
                    remedy="Give every tensor the same first dimension: one row for each example.",
                )
        if self.num_examples == 0:
            raise DataError(subject=f"data{first_path}", expected="at least one example", got="none")
        self.tree = map_leaves(_owned, tree)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        index = _index(indices)
        return map_leaves(lambda leaf: _rows(leaf, indices, index), self.tree)


@final
class DatasetSource(Source):
    """A map-style Dataset and the function that joins its examples into a minibatch.

    What the dataset or the function raises goes through unchanged.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` (and ``__getitems__``, which is preferred, as in torch).
        collate: list of examples -> minibatch; None is torch's ``default_collate``.
    Raises:
        DataError: the dataset is empty.

    >>> DatasetSource([(0.0, 1), (2.0, 3)]).batch(np.array([1, 0]))
    [tensor([2., 0.], dtype=torch.float64), tensor([3, 1])]
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate = dataset, collate
        self.num_examples = len(dataset)
        if self.num_examples == 0:
            raise DataError(subject=type(dataset).__name__, expected="at least one example", got="none")

    def batch(self, indices: NDArray[np.int64]) -> Any:
        numbers = indices.tolist()
        if getattr(self.dataset, "__getitems__", None):
            examples = self.dataset.__getitems__(numbers)
        else:
            examples = [self.dataset[i] for i in numbers]
        return _default_collate()(examples) if self.collate is None else self.collate(examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How examples become minibatches.

    Attributes:
        source: where they come from.
        batch_size: examples of a minibatch, above 0.
        drop_last: leave a short last minibatch out.
        num_workers: processes that load minibatches ahead; 0 loads them where they are used.
        worker_init: called with its number in each of these processes, before it loads anything.
    """

    source: Source
    batch_size: int
    drop_last: bool = False
    num_workers: int = 0
    worker_init: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_workers < 0:
            raise ConfigError(
                subject="loading data",
                expected="batch_size >= 1 and num_workers >= 0",
                got=f"batch_size={self.batch_size}, num_workers={self.num_workers}",
            )


def as_source(train: Any, batch_size: int) -> Loading:
    """Take whatever a user calls training data.

    Args:
        train: a `Source`, a map-style Dataset, a DataLoader, or a pytree of tensors or arrays. Of a DataLoader
            the dataset, batch size, collate function, drop_last, num_workers and worker_init_fn are taken; the
            order is Squall's, and generator, pin_memory, prefetch_factor and the like are left alone.
            A TensorDataset is indexed whole, not example by example.
        batch_size: examples of a minibatch; a DataLoader brings its own.
    Raises:
        DataError: the data can only be iterated over, or is no data at all.
        ConfigError: a DataLoader with a sampler of its own, or without a batch size.

    >>> loading = as_source((np.zeros((10, 4)), np.zeros(10)), batch_size=4)
    >>> loading.source.num_examples, loading.batch_size
    (10, 4)
    """
    from torch.utils.data import DataLoader

    if isinstance(train, Source):
        return Loading(source=train, batch_size=batch_size)
    if isinstance(train, DataLoader):
        return _loading_of(train)
    if isinstance(train, str | bytes | PurePath):
        raise DataError(
            subject="train",
            expected="data",
            got=f"the path {str(train)!r}",
            remedy="Read it first: squall.data.read(path).",
        )
    if _is_pytree(train):
        return Loading(source=TensorSource(train), batch_size=batch_size)
    return Loading(source=_source_of(train, None), batch_size=batch_size)


def _loading_of(loader: "DataLoader[Any]") -> Loading:
    _refuse_iterable(loader.dataset)
    _refuse_own_sampling(loader)
    collate = None if loader.collate_fn is _default_collate() else loader.collate_fn
    assert loader.batch_size is not None
    return Loading(
        source=_source_of(loader.dataset, collate),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        worker_init=loader.worker_init_fn,
    )


def _refuse_own_sampling(loader: "DataLoader[Any]") -> None:
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        own = f"batch_size=None, batch_sampler={type(loader.batch_sampler).__name__}"
    elif type(sampler) is SequentialSampler:
        return
    elif type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
            return
        own = "a RandomSampler with replacement or num_samples"
    else:
        own = type(sampler).__name__
    raise ConfigError(
        subject="the DataLoader given as train",
        expected="a batch size, and torch's SequentialSampler or RandomSampler",
        got=own,
        remedy="Squall fixes the order of examples itself, so that lost work can be redone: pass the dataset "
        "and batch_size (repeat or leave out examples in the dataset), or subclass squall.data.Source.",
    )


def _source_of(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Source:
    from torch.utils.data import TensorDataset

    _refuse_iterable(dataset)
    if type(dataset) is TensorDataset and collate is None:
        return TensorSource(tuple(dataset.tensors))
    return DatasetSource(dataset, collate)


def _refuse_iterable(dataset: Any) -> None:
    from torch.utils.data import IterableDataset

    # torch's Dataset has __getitem__ but no __len__ until a subclass gives it one.
    indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if indexed and not isinstance(dataset, IterableDataset):
        return
    raise DataError(
        subject="train",
        expected="tensors, a Dataset with __len__ and __getitem__, a DataLoader of one, or a squall.data.Source",
        got=type(dataset).__name__,
        remedy=_INDEXED_ONLY,
    )


def _is_pytree(value: Any) -> bool:
    return isinstance(value, tuple | list | dict | np.ndarray) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    # If torch was never imported, nobody can hold a tensor; asking this way does not import it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _length(path: str, leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        kind, item_bytes = leaf.dtype.kind, leaf.dtype.itemsize
        if kind not in _TENSOR_KINDS or item_bytes > _MAX_ITEM_BYTES.get(kind, 8):
            raise DataError(
                subject=f"data{path}",
                expected="an array of numbers that torch knows",
                got=f"dtype {leaf.dtype}",
                remedy="Convert it, for instance with .astype(numpy.float32).",
            )
    elif not _is_tensor(leaf):
        raise DataError(
            subject=f"data{path}",
            expected="a torch tensor or a NumPy array",
            got=type(leaf).__name__,
            remedy="Make it one, or wrap separate examples in a Dataset with __len__ and __getitem__.",
        )
    if leaf.ndim == 0:
        raise DataError(
            subject=f"data{path}",
            expected="a first dimension that counts examples",
            got="a single number",
            remedy="Stack examples into one tensor, or wrap them in a Dataset with __len__ and __getitem__.",
        )
    return int(leaf.shape[0])


def _owned(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        # torch knows the machine's own byte order only.
        return leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf.detach()


def _index(indices: NDArray[np.int64]) -> "Tensor":
    """The same in memory of its own, since `indices` may not be written to, and torch's may."""
    import torch

    return torch.from_numpy(np.array(indices, dtype=np.int64))


def _rows(leaf: Any, indices: NDArray[np.int64], index: "Tensor") -> "Tensor":
    import torch

    if isinstance(leaf, np.ndarray):
        # The rows are a new array, writable and ours, so that the tensor may share it.
        return torch.from_numpy(np.asarray(leaf).take(indices, axis=0))
    return torch.index_select(leaf, 0, index.to(leaf.device))


def _default_collate() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate

    return default_collate
