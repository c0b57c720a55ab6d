"""A push and a fetch of 42 million float32 between two processes, against the bare arithmetic, and against a raw socket.

One shard in a process of its own serves 168 MB with Adagrad to a worker, once over shared memory and once over TCP.

- "shared step", "TCP step": a push, applied, and the fetch of the new values; over shared memory with the copy of the
  gradient to where the shard reads it. "bare": one fused Adagrad pass and two copies in one process. Target: a shared
  step takes at most 1.3 times as long.
- "raw": the same bytes one way through a loopback socket into memory that is there, and one byte back. "TCP fetch" and
  "TCP push": as a fetch, and as a push that the shard has had already, so that nothing is computed but the check for
  finiteness. Targets: at least 0.85 of the raw socket's speed.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.place import Place
from squall.bench.rounds import alternate
from squall.bench.served import Bare, RawSocket, ServedShard, layout_of

NUMEL, QUICK_NUMEL = 42_000_000, 100_000
NAMES = ("raw", "TCP fetch", "TCP push", "TCP step", "shared step", "bare")


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    numel = QUICK_NUMEL if settings.quick else NUMEL
    (told,) = place.workers.run(measure_rounds, [{"numel": numel, "rounds": settings.rounds}])
    rounds = told["rounds"]
    return Report(
        series=series_of(rounds, NAMES, "s"),
        ratios={
            "shared step / bare": ratio_of(rounds, "shared step", "bare", target=1.3, at_most=True),
            "raw / TCP fetch": ratio_of(rounds, "raw", "TCP fetch", target=0.85),
            "raw / TCP push": ratio_of(rounds, "raw", "TCP push", target=0.85),
        },
        sizes={"megabytes": numel * 4 / 1e6},
    )


def measure_rounds(settings: dict[str, Any]) -> dict[str, Any]:
    """The whole of it, in a process with one thread: all rounds, in seconds."""
    torch.set_num_threads(1)
    numel: int = settings["numel"]
    layout = layout_of(numel)
    raw, bare = RawSocket(numel), Bare(numel)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        shared = ServedShard(layout, "shared", Path(one))
        tcp = ServedShard(layout, "tcp", Path(other))
        gradient = torch.full((numel,), 0.5)
        tcp.exchange.views.gradients[0][0].copy_(gradient)
        works: dict[str, Callable[[], None]] = {
            "raw": raw.send,
            "TCP fetch": tcp.fetch,
            "TCP push": tcp.push_again,
            "TCP step": tcp.step,
            "shared step": partial(_with_copy, shared, gradient),
            "bare": bare.step,
        }
        tcp.step()
        for work in works.values():
            work()  # touches the memory
        sides = [partial(_timed, name, work) for name, work in works.items()]
        rounds = alternate(sides, settings["rounds"])
        for made in (shared, tcp, raw):
            made.close()
    return {"rounds": rounds}


def _timed(name: str, work: Callable[[], None]) -> Mapping[str, float]:
    began = time.perf_counter()
    work()
    return {name: time.perf_counter() - began}


def _with_copy(shard: ServedShard, source: Tensor) -> None:
    """A step over shared memory, as a worker has it: the gradient has to get there first."""
    next(iter(shard.exchange.views.gradients[0].values())).copy_(source)
    shard.step()
