"""Fixtures that tests share; above all one warm cluster of processes."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from squall.cluster.local import Local

# How fast a busy machine draws examples says nothing about what is tested. In CI the same ones are drawn each time.
settings.register_profile(
    "squall",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("squall")


@pytest.fixture(scope="session")
def warm() -> Iterator[Local]:
    """What keeps the process warm, for all tests of a worker, that roles are forked from."""
    with Local() as cluster:
        yield cluster


@pytest.fixture
def local(warm: Local) -> Local:
    """Processes of this machine. One for each test: a run that hangs holds up no other."""
    return beside(warm)


@pytest.fixture
def local_tcp(local: Local) -> Local:
    """The same, its roles connected over TCP."""
    return over_tcp(local)


def over_tcp(local: Local, **settings: Any) -> Local:
    """Another cluster that forks its roles from the same warm process, and connects them over TCP."""
    return beside(local, transport="tcp", **settings)


def beside(local: Local, **settings: Any) -> Local:
    """Another cluster that forks its roles from the same warm process."""
    local.warm_up()
    cluster = Local(**settings)
    cluster._zygote, cluster._is_kept = local._zygote, True
    return cluster
