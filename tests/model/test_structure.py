"""Nested values taken apart and put together.

Fault planted here by hand, seen to fail a test: a dict that is a dataclass rebuilt without being filled.
"""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from squall.model.structure import Structure, is_plain

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Frozen:
    value: Any
    name: str = "a"

    def __post_init__(self) -> None:
        if isinstance(self.value, str):
            raise ValueError("made twice")


class Filled(OrderedDict[str, Any]):
    """A dict of its own kind."""


@pytest.mark.parametrize(
    ("tree", "rebuilt"),
    [
        ((torch.ones(1), [torch.ones(2), None]), ("0", ["1", None])),
        ({"b": torch.ones(1), "a": {"c": torch.ones(1)}}, {"b": "0", "a": {"c": "1"}}),
        (Point(torch.ones(1), 3), Point("0", 3)),
        (Filled(k=torch.ones(1)), Filled(k="0")),
        ((), ()),
    ],
)
def test_a_value_is_rebuilt_in_its_own_form(tree: Any, rebuilt: Any) -> None:
    tensors, structure = Structure.of(tree)
    made = structure.build([str(at) for at in range(len(tensors))])
    assert made == rebuilt
    assert type(made) is type(tree)


def test_a_bare_tensor_is_its_own_structure() -> None:
    assert Structure.of(torch.ones(1))[1].build(["it"]) == "it"


def test_a_dataclass_is_rebuilt_without_running_its_own_checks_again() -> None:
    _, structure = Structure.of(Frozen(torch.ones(1), name="b"))
    made = structure.build(["text"])
    assert (made.value, made.name) == ("text", "b")


@dataclass
class Output(OrderedDict[str, Any]):
    """As the outputs of transformers: a dict that a dataclass fills when it is made."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def test_a_dataclass_that_is_a_dict_fills_itself_again() -> None:
    _, structure = Structure.of(Output(logits=torch.ones(1)))
    made = structure.build(["it"])
    assert isinstance(made, Output)
    assert (made.logits, made["logits"]) == ("it", "it")


def test_structures_are_equal_when_form_and_constants_are() -> None:
    def of(tree: Any) -> Structure:
        return Structure.of(tree)[1]

    assert of({"a": torch.ones(1), "b": 1}) == of({"a": torch.zeros(3), "b": 1})
    assert of({"a": torch.ones(1), "b": 1}) != of({"a": torch.ones(1), "b": 2})
    assert of((torch.ones(1),)) != of([torch.ones(1)])


def test_paths_say_where_tensors_and_constants_are() -> None:
    _, structure = Structure.of(((torch.ones(1), 2), {"x": [torch.ones(1)]}))
    assert list(structure.leaf_paths()) == ["[0][0]", "[1]['x'][0]"]
    assert list(structure.constants()) == [("[0][1]", 2)]


def test_only_data_that_cannot_hide_a_tensor_is_plain() -> None:
    assert all(is_plain(x) for x in (1, 2.0, "a", None, True, torch.float32, torch.device("cpu")))
    assert not is_plain(object())
