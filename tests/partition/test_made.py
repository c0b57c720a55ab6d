"""A worker of a model that nobody has whole: its own share and no more, in processes of their own.

Faults planted by hand, each seen to fail a test: the whole model made and then cut · a share handed on as a view of the whole
tensor · a whole tensor taken for a share.
"""

import ctypes
import multiprocessing
import os
import re
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.model.capture import capture
from squall.model.deferred import defer
from squall.model.graph import Graph, Source
from squall.partition import planner
from squall.partition.compiler import program_of
from squall.partition.engine import Message, Worker, inputs_for
from squall.partition.made import made_share
from squall.partition.pieces import Piece, take
from squall.partition.plan import Plan
from squall.partition.regions import Region
from tests.models import EXAMPLES
from tests.partition.whole import loss_of

MB = 1_000_000
EXAMPLES_HERE = 4


class Wide(nn.Module):
    """Linear layers with a loss, in all so many megabytes of parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_the_shares_are_parts_of_what_the_model_would_be() -> None:
    deferred = defer(EXAMPLES["resnet"].make, seed=2)
    captured = capture(deferred.model, (torch.zeros(2, 3, 8, 8),))
    graph = captured.graph
    for plan in (planner.vertical(graph, 3), planner.horizontal(graph, 2), planner.random(graph, 4, 1)):
        for p in range(plan.partitions):
            share = made_share(graph, plan, p, deferred.value)
            for index, tensor in share.items():
                whole = deferred.value(graph.values[index].name)
                region = plan.regions(index, tuple(whole.shape))[p]
                assert torch.equal(tensor, take(Piece(Region.whole(tuple(whole.shape)), whole), region))
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def memory() -> dict[str, int]:
    """Of this process, bytes: resident in proportion (PSS), and the largest resident set so far; files apart.

    What is mapped of files is torch's own code, shared with however many other processes there are at the moment; and
    what the allocator has free, of temporary tensors, it gives back first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    told = Path("/proc/self/smaps_rollup").read_text() + Path("/proc/self/status").read_text()
    found = dict(re.findall(r"^(Pss|Pss_File|VmHWM|RssFile):\s+(\d+)", told, re.M))
    kib = {name: int(value) for name, value in found.items()}
    return {"pss": 1024 * (kib["Pss"] - kib["Pss_File"]), "peak": 1024 * (kib["VmHWM"] - kib["RssFile"])}


def packed(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    return [
        (m.sender, m.receiver, m.value, m.micro, m.is_gradient, [tensor.numpy() for tensor in m.tensors])
        for m in messages
    ]


def unpacked(told: Sequence[Any]) -> Message:
    sender, receiver, value, micro, is_gradient, arrays = told
    return Message(
        sender=sender,
        receiver=receiver,
        value=value,
        micro=micro,
        is_gradient=is_gradient,
        tensors=tuple(torch.from_numpy(array) for array in arrays),
    )


def work(pipe: Connection, graph: Graph, plan: Plan, width: int, layers: int, p: int) -> None:
    """One partition in a process: make the share, do a step with messages over the pipe, tell what it took."""
    torch.set_num_threads(1)
    program = program_of(graph, plan, EXAMPLES_HERE, loss_of(graph))
    worker = Worker(p, made_share(graph, plan, p, defer(lambda: Wide(width, layers), seed=1).value))
    x = torch.randn(EXAMPLES_HERE, width, generator=torch.Generator().manual_seed(1))
    (index,) = graph.from_outside(Source.INPUT)
    pipe.send(packed(worker.begin(program, [inputs_for(program, p, {index: x})])))
    while True:
        while (sent := worker.run_one()) is not None:
            pipe.send(packed(sent))
        pipe.send(worker.is_finished)
        if worker.is_finished:
            break
        worker.receive(unpacked(pipe.recv()))
    worker.finish()
    taken = memory()
    norms = {graph.values[at].name: float(g.square().sum()) for at, g in worker.gradients.items()}
    pipe.send({**taken, "norms": norms})


def carry(pipes: Sequence[Connection]) -> list[dict[str, Any]]:
    """Hand messages on between processes until each has told what it took."""
    told: dict[int, dict[str, Any]] = {}
    pending: dict[int, list[Any]] = {p: [] for p in range(len(pipes))}
    waits: set[int] = set()
    while len(told) < len(pipes):
        ready = multiprocessing.connection.wait([pipe for p, pipe in enumerate(pipes) if p not in told], 0.01)
        for pipe in ready:
            p = next(at for at, each in enumerate(pipes) if each is pipe)
            word = pipe.recv()  # type: ignore[union-attr]
            if isinstance(word, dict):
                told[p] = word
            elif isinstance(word, list):
                for message in word:
                    pending[message[1]].append(message)
            elif not word:
                waits.add(p)
        for p in [each for each in waits if pending[each]]:
            waits.discard(p)
            pipes[p].send(pending[p].pop(0))
    return [told[p] for p in range(len(pipes))]


def measured(width: int, layers: int, how: str, partitions: int) -> list[dict[str, Any]]:
    """What each partition took; processes are forked from one that has imported torch and done nothing."""
    model = defer(lambda: Wide(width, layers), seed=1).model
    graph = capture(model, (torch.zeros(EXAMPLES_HERE, width),)).graph
    plan = getattr(planner, how)(graph, partitions)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.partition.test_made"])
    pairs = [context.Pipe() for _ in range(partitions)]
    processes = [
        context.Process(target=work, args=(theirs, graph, plan, width, layers, p))
        for p, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    try:
        return carry([mine for mine, _ in pairs])
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def check_memory(width: int, layers: int, how: str, partitions: int, slack: int = 45 * MB) -> None:
    """Count what the model takes: more than the same processes with a tiny one."""
    model = width * width * 4 * layers
    training, largest = 2 * model, width * width * 4
    found, plain = measured(width, layers, how, partitions), measured(8, layers, how, partitions)
    taken = [
        {key: big[key] - small[key] for key in ("pss", "peak")}
        for big, small in zip(found, plain, strict=True)
    ]
    for each in taken:
        assert each["pss"] < 0.45 * training
        assert each["pss"] < training / partitions + slack
        # While it is made, one whole tensor beside the share; in the step, the gradient of the share.
        assert each["peak"] < training / partitions + largest + slack
    assert sum(each["pss"] for each in taken) > 0.9 * training


IS_LINUX = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="memory is counted as Linux tells it"
)


@IS_LINUX
def test_a_worker_in_its_own_process_never_has_more_than_its_share() -> None:
    check_memory(width=2500, layers=8, how="vertical", partitions=4)  # 200 MB


@IS_LINUX
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["vertical", "horizontal"])
def test_two_gigabytes_over_four_processes_leave_none_above_its_share(how: str) -> None:
    check_memory(width=5600, layers=16, how=how, partitions=4, slack=150 * MB)


def test_processes_that_made_their_own_share_compute_what_one_process_computes() -> None:
    width, layers = 40, 3
    deferred = defer(lambda: Wide(width, layers), seed=1)
    whole = Wide(width, layers)
    whole.load_state_dict({name: deferred.value(name) for name, _ in whole.named_parameters()})
    x = torch.randn(EXAMPLES_HERE, width, generator=torch.Generator().manual_seed(1))
    whole(x).backward()

    found = measured(width, layers, "vertical", 2)

    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        mine = sum(each["norms"].get(name, 0.0) for each in found)
        assert mine == pytest.approx(float(parameter.grad.square().sum()), rel=1e-5)
