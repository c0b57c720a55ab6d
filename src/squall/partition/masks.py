"""Random masks that do not depend on how a model is cut: element `i` of op `site` has its own number.

The generator is counter-based: SplitMix64's finalizer over `key + (i + 1) * gamma`, where the key is made, with the
same finalizer, from (seed, epoch, position, site). So any partition can make any part of a mask, and nobody sends one.

Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from squall.partition.regions import AnyRegion, Region

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """Names the random numbers of one minibatch: the run's seed, the epoch, and the minibatch's position in it."""

    seed: int = 0
    epoch: int = 0
    position: int = 0


def keep_mask(region: AnyRegion, probability: float, draw: Draw, site: int) -> Tensor:
    """Which elements of a region are kept, each with this probability; a bool tensor of shape `region.sizes`.

    Args:
        region: of the op's whole output; a microbatch names the whole minibatch's rows.
        probability: of being kept, in [0, 1].
        draw: the minibatch.
        site: number of the op in its graph.

    >>> whole = keep_mask(Region.whole((4, 6)), 0.5, Draw(seed=3), site=7)
    >>> part = keep_mask(Region.of((4, 6), (1, 3), (2, 6)), 0.5, Draw(seed=3), site=7)
    >>> bool((whole[1:3, 2:6] == part).all())
    True
    """
    if probability >= 1:
        return torch.ones(region.sizes, dtype=torch.bool)
    bits = random_bits(region, draw, site)
    return torch.from_numpy(np.asarray(bits < np.uint64(int(probability * 2**64))))


def random_bits(region: AnyRegion, draw: Draw, site: int) -> NDArray[np.uint64]:
    """One 64-bit word for each element of a region, shape `region.sizes`."""
    words = _numbers(region)
    words += np.uint64(1)
    words *= np.uint64(_GAMMA)
    words += np.uint64(_key(draw.seed, draw.epoch, draw.position, site))
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words


def _numbers(region: AnyRegion) -> NDArray[np.uint64]:
    """The row-major numbers of a region's elements."""
    if not isinstance(region, Region):
        return np.fromiter(region.indices, dtype=np.uint64, count=region.size)
    numbers = np.zeros((), dtype=np.uint64)
    for at, axis in enumerate(region.axes):
        stride = prod(region.shape[at + 1 :])
        index = np.fromiter(axis, dtype=np.uint64, count=axis.size)
        numbers = numbers[..., None] + index * np.uint64(stride)
    return np.array(numbers, dtype=np.uint64)


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key + _GAMMA + (part & _WORD)) & _WORD)
    return key


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _WORD
    word = (word ^ (word >> 27)) * _SECOND & _WORD
    return word ^ (word >> 31)
