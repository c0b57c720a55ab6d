"""Fixtures that tests share; above all one warm cluster of processes."""

from collections.abc import Iterator

import pytest

from squall.cluster.local import Local


@pytest.fixture(scope="session")
def local() -> Iterator[Local]:
    """Processes of this machine, kept warm for all tests of a worker."""
    with Local() as cluster:
        yield cluster
