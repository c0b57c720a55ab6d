"""Graphs as plain data: extents, arguments, dead nodes."""

import pytest

from squall.model.graph import (
    Extent,
    Graph,
    Named,
    Node,
    Ref,
    Source,
    Value,
    concrete,
    refs_in,
    without_dead,
)


def value(name: str, source: Source = Source.NODE) -> Value:
    return Value(name=name, source=source, shape=(Extent(), 2), dtype="float32")


def node(name: str, args: tuple[object, ...], output: int, is_random: bool = False) -> Node:
    return Node(target=f"aten.{name}.default", args=args, outputs=(output,), name=name, is_random=is_random)


@pytest.mark.parametrize(
    ("form", "batch", "number", "text"),
    [
        ("batch", 3, 3, "batch"),
        (("add", ("mul", 2, "batch"), -1), 3, 5, "2 * batch + -1"),
        (("mul", 3, ("add", "batch", 1)), 4, 15, "3 * (batch + 1)"),
        (("floordiv", ("add", "batch", 1), 2), 4, 2, "(batch + 1) // 2"),
        (("truediv", 1, "batch"), 4, 0.25, "1 / batch"),
        (("mod", "batch", 3), 4, 1, "batch % 3"),
        (("pow", "batch", 2), 4, 16, "batch ** 2"),
        (("max", "batch", ("mul", 2, 3)), 4, 6, "max(batch, 2 * 3)"),
        (("min", "batch", 3), 4, 3, "min(batch, 3)"),
    ],
)
def test_an_extents_number_is_what_its_text_says(form: object, batch: int, number: float, text: str) -> None:
    extent = Extent(form)
    assert extent.at(batch) == number == eval(text, {"batch": batch})
    assert str(extent) == text


def test_arguments_become_concrete_for_a_batch_size_at_any_depth() -> None:
    given = ((Extent(), (Extent(("mul", 2, "batch")), 3)), {"size": Extent(), "other": Ref(1)})
    assert concrete(given, 5) == ((5, (10, 3)), {"size": 5, "other": Ref(1)})


def test_the_inputs_of_a_node_are_its_refs_in_order_each_once() -> None:
    made = Node(
        target="aten.cat.default",
        args=((Ref(3), Ref(1)), Ref(3)),
        kwargs={"out": Ref(0), "dtype": Named("dtype", "float32")},
        outputs=(4,),
        name="cat",
    )
    assert made.inputs == (3, 1, 0)
    assert [ref.index for ref in refs_in(made.args)] == [3, 1, 3]


def test_what_nobody_reads_is_dropped_unless_it_draws() -> None:
    graph = Graph(
        values=(value("x", Source.INPUT), value("dead"), value("drawn"), value("kept"), value("state")),
        nodes=(
            node("relu", (Ref(0),), 1),
            node("bernoulli", (Ref(0),), 2, is_random=True),
            node("tanh", (Ref(0),), 3),
            node("neg", (Ref(3),), 4),
        ),
        outputs=(Ref(3), 7),
        mutations=(("count", 4),),
    )

    kept = without_dead(graph)

    assert [n.name for n in kept.nodes] == ["bernoulli", "tanh", "neg"]
    assert [v.name for v in kept.values] == ["x", "drawn", "kept", "state"]
    assert kept.outputs == (Ref(2), 7)
    assert kept.mutations == (("count", 3),)
    assert kept.nodes[2].args == (Ref(2),)


def test_users_are_found_in_order() -> None:
    graph = Graph(
        values=(value("x", Source.INPUT), value("y"), value("z")),
        nodes=(node("relu", (Ref(0),), 1), node("add", (Ref(1), Ref(0)), 2)),
        outputs=(Ref(2),),
    )
    assert graph.users == {0: (0, 1), 1: (1,), 2: ()}


def test_a_hash_depends_on_what_is_computed_and_not_on_the_line() -> None:
    def graph(target: str, line: str) -> Graph:
        made = Node(target=target, args=(Ref(0),), outputs=(1,), name="n", line=line)
        return Graph(values=(value("x", Source.INPUT), value("y")), nodes=(made,), outputs=(Ref(1),))

    one = graph("aten.relu.default", "line 1").schema_hash
    assert one == graph("aten.relu.default", "line 2").schema_hash
    assert one != graph("aten.tanh.default", "line 1").schema_hash
