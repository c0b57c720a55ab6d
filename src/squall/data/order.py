"""The order of examples, and the seed of every minibatch: the same whoever computes it.

Both depend on their arguments only: not on the process, the replica, `PYTHONHASHSEED` or the clock.
A loop of your own that uses them sees exactly the minibatches and the random masks that `fit` uses.
"""

import numpy as np
from numpy.typing import NDArray

from squall.errors import ConfigError

_MASK_64 = 2**64 - 1
# The constants of splitmix64: an odd step near 2^64 / golden ratio, and two multipliers that mix well.
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of `n` examples that one epoch goes through.

    Args:
        n: examples of the data set, at least 0.
        seed: the run's seed, in [0, 2**64).
        epoch: pass over the data, from 0.
    Returns:
        each of 0..n-1 once, shape (n,), int64; a new array.
    Raises:
        ConfigError: an argument is negative, or 2**64 and above.

    >>> order(5, seed=0, epoch=0), order(5, seed=0, epoch=1)
    (array([0, 3, 2, 1, 4]), array([4, 3, 2, 0, 1]))
    """
    _check("squall.data.order", n=n, seed=seed, epoch=epoch)
    # A spawn key, unlike a list of numbers, cannot run into the words of a long seed.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))))
    return generator.permutation(np.arange(n, dtype=np.int64))


def seed_for(seed: int, epoch: int, position: int) -> int:
    """The seed of one minibatch's randomness: of torch, NumPy and `random` alike.

    Args:
        seed: the run's seed, in [0, 2**64).
        epoch: pass over the data, from 0.
        position: the minibatch's position in that epoch's order, from 0.
    Returns:
        an integer in [0, 2**32), which `torch.manual_seed`, `numpy.random.seed` and `random.seed` take.
    Raises:
        ConfigError: an argument is negative, or 2**64 and above.
    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (its mixer,
        once for each argument).

    >>> seed_for(0, 0, 0), seed_for(0, 0, 1), seed_for(0, 1, 0)
    (595752380, 1109241648, 2492623918)
    """
    _check("squall.data.seed_for", seed=seed, epoch=epoch, position=position)
    state = 0
    for value in (seed, epoch, position):
        # A NumPy integer would overflow where Python's own grow.
        state = _mixed((state + _STEP) & _MASK_64 ^ int(value))
    return state >> 32


def _mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK_64
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK_64
    return word ^ (word >> 31)


def _check(subject: str, **arguments: int) -> None:
    for name, value in arguments.items():
        if not 0 <= value <= _MASK_64:
            raise ConfigError(
                subject=subject,
                expected=f"{name} in [0, 2**64)",
                got=f"{name}={value}",
                remedy="Count seeds, epochs and positions from 0.",
            )
