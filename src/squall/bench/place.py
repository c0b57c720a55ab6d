"""Where figures are measured: warm processes, shared by all, so that each side starts in a tenth of a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import squall
from squall.bench.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Place:
    """The two sides' warm processes.

    Attributes:
        workers: starts what Squall is compared with.
        cluster: Squall's own, over shared memory.
    """

    workers: Workers
    cluster: squall.Local


@contextmanager
def open_place() -> Iterator[Place]:
    """Start both, and end them with the block."""
    with Workers() as workers, squall.Local() as cluster:
        yield Place(workers=workers, cluster=cluster)
