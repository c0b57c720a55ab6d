"""Tests of squall.data.tree: walking and rebuilding nested containers.

Faults planted, each caught: named tuples rebuilt as tuples; lists rebuilt as tuples; dict values in sorted
order; a path without its quotes.
"""

from typing import NamedTuple

from squall.data.tree import leaves, map_leaves


class Pair(NamedTuple):
    left: object
    right: object


TREE = {"b": Pair([1, (2,)], 3), "a": 4}


def test_a_rebuilt_tree_has_the_same_containers() -> None:
    doubled = map_leaves(lambda leaf: leaf * 2, TREE)

    assert doubled == {"b": Pair([2, (4,)], 6), "a": 8}
    assert type(doubled["b"]) is Pair
    assert list(doubled) == ["b", "a"]


def test_leaves_come_in_the_order_of_the_tree_with_the_path_to_each() -> None:
    found = leaves(TREE)

    assert [leaf for _, leaf in found] == [1, 2, 3, 4]
    assert [eval("TREE" + path, {"TREE": TREE}) for path, _ in found] == [1, 2, 3, 4]


def test_a_single_leaf_is_a_tree() -> None:
    assert leaves(5) == [("", 5)]
    assert map_leaves(str, 5) == "5"
