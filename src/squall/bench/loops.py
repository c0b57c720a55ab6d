"""What Squall is compared with, each in a process of its own: a plain loop, DistributedDataParallel, and the bare copies.

Every function takes settings and returns what JSON can hold; `squall.bench.workers` starts it. All use torch's own
fused Adagrad, the fastest that there is.
"""

import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from squall.bench.nets import Net
from squall.bench.workers import meet
from squall.data import order
from squall.rules.apply import CHUNK

LEARNING_RATE = 0.01


def plain_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """An ordinary training loop.

    Args:
        settings: "net", "batch_size", "threads", "steps" that count and "warm" ones before.

    Returns:
        "examples_per_s".
    """
    torch.set_num_threads(settings["threads"])
    net = Net(**settings["net"])
    return {"examples_per_s": _rate_of(net.build(), _batches(net, settings["batch_size"]), settings)}


def data_parallel(settings: dict[str, Any]) -> dict[str, Any]:
    """One of two processes of DistributedDataParallel over gloo.

    Args:
        settings: as of `plain_loop`, and "rank" and "store", the name of a file that is not there yet.

    Returns:
        "examples_per_s" of both together.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _meet_over_gloo(settings)
    net = Net(**settings["net"])
    model = DistributedDataParallel(net.build(), gradient_as_bucket_view=True)
    batches = _batches(net, settings["batch_size"], first=settings["rank"], every=2)
    rate = 2 * _rate_of(model, batches, settings)
    dist.destroy_process_group()
    return {"examples_per_s": rate}


def pipeline(settings: dict[str, Any]) -> dict[str, Any]:
    """One of two stages of torch's own pipeline over gloo: one forward, one backward.

    Args:
        settings: as of `data_parallel`, and "first", how many of the net's modules the first stage has, and "microbatches".

    Returns:
        "examples_per_s".
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    _meet_over_gloo(settings)
    net = Net(**settings["net"])
    whole, is_first = net.build(), settings["rank"] == 0
    assert isinstance(whole, nn.Sequential)
    model = whole[: settings["first"]] if is_first else whole[settings["first"] :]
    stage = PipelineStage(model, settings["rank"], 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, settings["microbatches"], loss_fn=cross_entropy)

    def learn(x: Tensor, y: Tensor) -> None:
        if is_first:
            schedule.step(x)
        else:
            schedule.step(target=y)

    rate = _rate_of(model, _batches(net, settings["batch_size"]), settings, learn)
    dist.destroy_process_group()
    return {"examples_per_s": rate}


def _meet_over_gloo(settings: dict[str, Any]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(settings["threads"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{settings['store']}"
    dist.init_process_group("gloo", init_method=store, rank=settings["rank"], world_size=2)


def terms(settings: dict[str, Any]) -> dict[str, Any]:
    """The terms of the ceiling for two replicas, while the other process does the same at the same time.

    Args:
        settings: as of `plain_loop`.

    Returns:
        "step_s" of the plain loop; "copy_s" of all gradients to other memory; "copy_and_check_s", the same in chunks,
        each summed while it is in the cache, which is the cheapest exact check for finiteness; and "fetch_s", one
        copy of all parameters.
    """
    torch.set_num_threads(settings["threads"])
    peer, net = settings["peer"], Net(**settings["net"])
    model, repeats = net.build(), settings["steps"]
    batches = _batches(net, settings["batch_size"])
    meet(peer)
    rate = _rate_of(model, batches, settings)
    parameters = [parameter.detach() for parameter in model.parameters()]
    # The loop ended with a step, which left the last gradients where they are.
    here = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    there = [torch.zeros_like(gradient) for gradient in here]
    works: dict[str, Callable[[], None]] = {
        "copy_s": lambda: _copy(there, here),
        "copy_and_check_s": lambda: _copy_and_check(there, here),
        "fetch_s": lambda: _copy(parameters, there),
    }
    told = {"step_s": settings["batch_size"] / rate}
    for name, work in works.items():
        work()  # touches the memory
        meet(peer)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        told[name] = (time.perf_counter() - began) / repeats
    return told


def _copy(target: list[Tensor], source: list[Tensor]) -> None:
    for to, of in zip(target, source, strict=True):
        to.copy_(of)


def _copy_and_check(target: list[Tensor], source: list[Tensor]) -> None:
    for to, of in zip(target, source, strict=True):
        for chunk, values in zip(*(torch.split(part.view(-1), CHUNK) for part in (to, of)), strict=True):
            chunk.copy_(values)
            chunk.sum().item()


def _batches(net: Net, batch_size: int, *, first: int = 0, every: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches for ever: those of Squall, shuffled anew every epoch, out of memory with one call."""
    x, y = net.data()
    starts = range(first * batch_size, len(x) - batch_size + 1, every * batch_size)
    for epoch in count():
        shuffled = torch.from_numpy(order(len(x), 0, epoch))
        for start in starts:
            chosen = shuffled[start : start + batch_size]
            yield x.index_select(0, chosen), y.index_select(0, chosen)


def _rate_of(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    settings: dict[str, Any],
    learn: Callable[[Tensor, Tensor], None] | None = None,
) -> float:
    """Train; examples per second after the first steps.

    Args:
        learn: makes the gradients of a minibatch; None: the model's own, of its mean cross-entropy.
    """

    def by_itself(x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    learn = learn or by_itself
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, fused=True)
    steps, warm = settings["steps"], settings["warm"]
    began = time.perf_counter()
    for step in range(warm + steps):
        if step == warm:
            began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        learn(x, y)
        optimizer.step()
    return float(steps * settings["batch_size"] / (time.perf_counter() - began))
