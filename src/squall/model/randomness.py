"""The random generators of a process: torch's for the CPU, NumPy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all three. `torch.manual_seed` itself costs a hundred times more, for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


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
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
