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

from squall.partition.regions import AnyRegion, Region, Shape

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """Names the random numbers of one minibatch, or of one of its microbatches.

    Attributes:
        seed, epoch, position: the run's seed, the epoch, and the minibatch's position in it.
        part, parts: which of the minibatch's equal parts, and how many there are.
    """

    seed: int = 0
    epoch: int = 0
    position: int = 0
    part: int = 0
    parts: int = 1


def keep_mask(
    region: AnyRegion, probability: float, draw: Draw, site: int, examples: int | None = None
) -> Tensor:
    """Which elements of a region are kept, each with this probability; a bool tensor of shape `region.sizes`.

    Args:
        region: of the op's whole output, for the examples of the microbatch.
        probability: of being kept, in [0, 1].
        draw: the minibatch.
        site: number of the op in its graph.
        examples: the axis that counts examples; needed for parts of a minibatch, which have the whole one's mask.

    >>> whole = keep_mask(Region.whole((4, 6)), 0.5, Draw(seed=3), site=7)
    >>> part = keep_mask(Region.of((4, 6), (1, 3), (2, 6)), 0.5, Draw(seed=3), site=7)
    >>> bool((whole[1:3, 2:6] == part).all())
    True
    """
    if probability >= 1:
        return torch.ones(region.sizes, dtype=torch.bool)
    bits = random_bits(region, draw, site, examples)
    return torch.from_numpy(np.asarray(bits < np.uint64(int(probability * 2**64))))


def random_bits(region: AnyRegion, draw: Draw, site: int, examples: int | None = None) -> NDArray[np.uint64]:
    """One 64-bit word for each element of a region, shape `region.sizes`."""
    words = _numbers(region)
    if draw.parts > 1:
        words = _in_minibatch(words, region.shape, draw, examples)
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


def _in_minibatch(
    numbers: NDArray[np.uint64], shape: Shape, draw: Draw, examples: int | None
) -> NDArray[np.uint64]:
    """From numbers within a microbatch to those of the same elements within the minibatch."""
    assert examples is not None, "microbatches of a value without an axis of examples: see coupling.py"
    rows = np.uint64(prod(shape[examples:]))
    before, within = numbers // rows, numbers % rows
    return before * rows * np.uint64(draw.parts) + np.uint64(draw.part) * rows + within


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key + _GAMMA + (part & _WORD)) & _WORD)
    return key


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _WORD
    word = (word ^ (word >> 27)) * _SECOND & _WORD
    return word ^ (word >> 31)
