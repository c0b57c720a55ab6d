"""Random masks: the published generator, any region alike, and no correlation that a simple test would see."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from squall.partition import masks
from squall.partition.masks import Draw, keep_mask, random_bits
from squall.partition.pieces import Piece, take
from squall.partition.regions import Region
from tests.partition.cutting import random_cut

# The generator's first words from seed 1234567, as published with the reference code of Vigna.
KNOWN = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix(seed: int) -> Iterator[int]:
    """The generator, one word after another, in Python integers."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        word = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        yield word ^ (word >> 31)


def test_the_words_are_those_of_the_published_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_key", lambda *parts: 1234567)
    assert random_bits(Region.whole((5,)), Draw(), 0).tolist() == KNOWN
    assert list(itertools.islice(splitmix(1234567), 5)) == KNOWN


def test_parts_of_a_minibatch_have_its_mask_whichever_axis_counts_examples() -> None:
    rng = random.Random(2)
    for shape in [(12,), (6, 5), (4, 6, 3), (2, 6, 2, 3)]:
        for axis, size in enumerate(shape):
            for parts in (each for each in (2, 3) if size % each == 0):
                whole = keep_mask(Region.whole(shape), 0.6, Draw(seed=2), 3).chunk(parts, axis)
                for part, expected in enumerate(whole):
                    draw = Draw(seed=2, part=part, parts=parts)
                    small = tuple(expected.shape)
                    for region in random_cut(small, 3, rng):
                        mine = keep_mask(region, 0.6, draw, 3, axis)
                        assert torch.equal(mine, take(Piece(Region.whole(small), expected), region))


def test_a_mask_does_not_depend_on_the_cut() -> None:
    rng = random.Random(1)
    for shape in [(), (7,), (4, 6), (2, 3, 4)]:
        whole = keep_mask(Region.whole(shape), 0.6, Draw(seed=2), 3)
        for _ in range(20):
            for region in random_cut(shape, 3, rng):
                expected = take(Piece(Region.whole(shape), whole), region)
                assert torch.equal(keep_mask(region, 0.6, Draw(seed=2), 3), expected)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_elements_are_kept_as_often_as_asked(probability: float) -> None:
    kept = keep_mask(Region.whole((400, 500)), probability, Draw(), 0).double().mean().item()
    assert abs(kept - probability) <= 5 * (probability * (1 - probability) / 200_000) ** 0.5


def test_every_part_of_the_name_gives_another_mask() -> None:
    names = [
        (Draw(), 0),
        (Draw(seed=1), 0),
        (Draw(epoch=1), 0),
        (Draw(position=1), 0),
        (Draw(), 1),
        (Draw(seed=-1), 0),
    ]
    drawn = [keep_mask(Region.whole((100, 100)), 0.5, *name).double().numpy().ravel() for name in names]
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_neighbours_are_not_correlated() -> None:
    kept = keep_mask(Region.whole((300, 300)), 0.5, Draw(seed=9), 2).double().numpy()
    for one, other in ((kept[:, :-1], kept[:, 1:]), (kept[:-1], kept[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02
