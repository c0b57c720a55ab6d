"""What a step is said to take: against sums worked out by hand, and bytes against the messages of the engine.

Faults planted by hand, each seen to fail a test: gradients' bytes on the link of the values · a line that sends two
messages at once · latency left out · contention also between hosts · speeds ignored · memory of one microbatch only · of no
gradients · parameters sent for each microbatch · as many microbatches under way as partitions.
"""

from collections import Counter
from dataclasses import replace

import pytest

from squall.errors import ConfigError
from squall.partition import planner
from squall.partition.agenda import BackwardFirst, policy_for
from squall.partition.compiler import program_of
from squall.partition.cost import LOCAL, Machine, OpTime
from squall.partition.predict import (
    BEGIN_S,
    LAUNCH_S,
    Prediction,
    links_of,
    predict,
    refuse_what_does_not_fit,
)
from squall.partition.program import Program
from squall.partition.together import Together
from tests.partition.whole import case, loss_of

SECOND = OpTime(forward_s=1.0, backward_s=2.0, is_compute=True)
FREE = OpTime(forward_s=0.0, backward_s=0.0, is_compute=True)
MACHINE_S = BEGIN_S + LAUNCH_S


def dense(how: str, count: int, batch: int = 4) -> Program:
    graph = case("dense")[0].graph
    return program_of(graph, getattr(planner, how)(graph, count), batch, loss_of(graph))


def timed(program: Program, op: OpTime = SECOND) -> list[OpTime]:
    """Each linear layer takes so long, all else nothing."""
    return [op if "linear" in node.target else FREE for node in program.graph.nodes]


def hosts(count: int, **settings: float) -> list[Machine]:
    return [Machine(host=f"h{p}", **settings) for p in range(count)]  # type: ignore[arg-type]


def test_one_partition_takes_the_sum_of_its_ops() -> None:
    program = dense("horizontal", 1)
    found = predict(program, timed(program), hosts(1), measured_at=4)
    assert found.step_s == pytest.approx(3 * 3.0 + 2 * MACHINE_S)
    assert found.busy_s == pytest.approx((found.step_s,))
    assert found.links == {}


def test_layers_in_line_take_turns_and_microbatches_overlap() -> None:
    program = dense("horizontal", 3)
    slow = predict(program, timed(program), hosts(3), measured_at=4)
    assert slow.step_s == pytest.approx(9.0, rel=0.01)
    assert slow.busy_s == pytest.approx((3.0, 3.0, 3.0), rel=0.01)
    program = dense("horizontal", 3, batch=1)
    quick = predict(program, timed(program), hosts(3), measured_at=4, microbatches=4, policy=BackwardFirst(3))
    # Four microbatches of a quarter each over three machines: (4 + 3 - 1) slots of 0.75.
    assert quick.step_s == pytest.approx(6 * 0.75, rel=0.02)


def test_the_slowest_of_a_line_does_not_wait_for_its_first_gradient() -> None:
    program = dense("horizontal", 2, batch=1)
    times = [FREE] * len(program.graph.nodes)
    for part, op in zip(program.parts, (SECOND, replace(SECOND, forward_s=0.7, backward_s=1.3)), strict=True):
        nodes = [task.node for piece in part.pieces for task in piece.tasks]
        times[next(at for at in nodes if "linear" in program.graph.nodes[at].target)] = op

    found, few = (
        predict(program, times, hosts(2), measured_at=4, microbatches=4, policy=policy)
        for policy in (policy_for(2, 4), BackwardFirst(2))
    )

    assert found.step_s == pytest.approx(found.busy_s[0], rel=0.01) == pytest.approx(3.0, rel=0.01)
    assert few.step_s == pytest.approx(3.0 + 0.25, rel=0.01)


def test_halves_of_every_layer_take_half() -> None:
    program = dense("vertical", 2)
    found = predict(program, timed(program), hosts(2), measured_at=4)
    assert found.step_s == pytest.approx(4.5, rel=0.02)


def test_a_fast_machine_takes_less_and_processes_of_one_host_hinder_one_another() -> None:
    program = dense("vertical", 2)
    fast = predict(program, timed(program), hosts(2, speed=3.0), measured_at=4)
    assert fast.step_s == pytest.approx(1.5, rel=0.02)
    shared = [Machine(host="one")] * 2
    compute = predict(program, timed(program), shared, measured_at=4)
    assert 4.5 * 1.03 < compute.step_s < 4.5 * 1.1
    memory = timed(program, OpTime(forward_s=1.0, backward_s=2.0, is_compute=False))
    assert 4.5 * 1.4 < predict(program, memory, shared, measured_at=4).step_s <= 4.5 * 2.02
    one_core = [Machine(host="one", cores=1)] * 2
    assert predict(program, timed(program), one_core, measured_at=4).step_s > 4.5 * 1.4


def test_a_slow_line_adds_its_bytes_and_its_latency_one_message_after_another() -> None:
    program = dense("horizontal", 2)
    free = timed(program, FREE)
    plain = predict(program, free, hosts(2, bytes_per_s=1e15, latency_s=1e-12), measured_at=4).step_s
    up = sum(program.bytes_up().values())
    slow = predict(program, free, hosts(2, bytes_per_s=float(up), latency_s=0.5), measured_at=4)
    assert slow.step_s - plain == pytest.approx(1 + 0.5 + 1 + 0.5, rel=1e-3)  # up, and its gradients back
    near = predict(program, free, [Machine()] * 2, measured_at=4)
    assert near.step_s - plain == pytest.approx(2 * (LOCAL[0] + up / LOCAL[1]), rel=0.01)
    # To two receivers a line sends one message at a time.
    vertical = dense("vertical", 3)
    sent = [sum(s for (a, _), s in links_of(vertical).items() if a == p) for p in range(3)]
    found = predict(
        vertical, timed(vertical, FREE), hosts(3, bytes_per_s=1.0, latency_s=1e-12), measured_at=4
    )
    assert found.step_s >= max(sent) * 0.999


@pytest.mark.parametrize("name", ["mlp", "resnet", "decoder", "local"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_on_each_link_are_those_that_the_engine_sends(name: str, microbatches: int) -> None:
    if microbatches == 2 and name == "resnet":
        pytest.skip("batch normalisation couples examples")
    captured, model, minibatch = case(name)
    for seed in range(2):
        plan = planner.random(captured.graph, 3, seed)
        together = Together(captured, model, plan)
        together.step(minibatch, microbatches=microbatches)
        sent: Counter[tuple[int, int]] = Counter()
        for (sender, receiver, _, _), size in together.links.items():
            sent[sender, receiver] += size
        assert links_of(together.program(4 // microbatches), microbatches) == sent


def test_memory_is_what_is_held_and_a_machine_without_it_is_refused_by_name_and_bytes() -> None:
    program = dense("horizontal", 3)
    found = predict(program, timed(program), hosts(3), measured_at=4)
    units, item = 24, 8
    weights = (units * units + units) * item
    assert found.parameter_bytes == (weights,) * 3
    assert all(need >= 2 * weights for need in found.memory_bytes)
    micro = dense("horizontal", 3, batch=1)
    more = predict(micro, timed(micro), hosts(3), measured_at=4, microbatches=4)
    few = predict(micro, timed(micro), hosts(3), measured_at=4, microbatches=4, policy=BackwardFirst(1))
    assert more.memory_bytes[0] - 2 * weights == pytest.approx(4 * (few.memory_bytes[0] - 2 * weights))
    small = [*hosts(2), Machine(host="tiny", memory_bytes=9000)]
    with pytest.raises(
        ConfigError,
        match=rf"partition 2 on machine 'tiny': expected at most 9,000 bytes.*{weights:,} are parameters",
    ):
        refuse_what_does_not_fit(found, small)


def test_it_is_kept_as_plain_data() -> None:
    program = dense("vertical", 2)
    found = predict(program, timed(program), hosts(2), measured_at=4)
    assert Prediction.from_json(found.to_json()) == found
    assert found.bytes == sum(found.links.values())


def test_a_machine_needs_figures_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"Machine\(speed=\): expected a number above 0, but got 0"):
        Machine(speed=0)
