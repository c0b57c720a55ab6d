"""The random generators of a process: torch's for the CPU, NumPy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all three. `torch.manual_seed` itself costs a hundred times more, for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_state() -> tuple[Any, ...]:
    """Where all three stand: a value that can be compared, sent to another process and set again.

    >>> seed_everything(1)
    >>> state = random_state()
    >>> first = random.random()
    >>> state == random_state()
    False
    >>> set_random_state(state)
    >>> random.random() == first
    True
    """
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    inner = numpy["state"]
    words = (inner["key"].tobytes(), inner["pos"], numpy["has_gauss"], numpy["gauss"])
    return torch.default_generator.get_state().numpy().tobytes(), words, random.getstate()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put all three where `random_state` found them."""
    torchs, (words, *rest), python = state
    torch.default_generator.set_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
    np.random.set_state(("MT19937", np.frombuffer(words, dtype=np.uint32), *rest))
    random.setstate(python)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the caller's generators back as they were, whatever is drawn or seeded in the block.

    >>> torch.default_generator.manual_seed(1)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> with random_state_kept():
    ...     seed_everything(2)
    >>> torch.initial_seed()
    1
    """
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
