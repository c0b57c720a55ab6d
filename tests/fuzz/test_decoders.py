"""Any bytes, from a peer that is broken or means harm: every decoder takes or refuses them, and nothing else happens.

Faults planted by hand, each seen to fail a test here: a struct.error that is not turned into a refusal · a header whose
length is below its own size · a transfer that is written before its header is compared · a proof that is not compared.
"""

import random
import resource
import time

import pytest

from tests.fuzz.targets import TARGETS, mutant


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_do_harm(name: str) -> None:
    fuzz(name, seconds=1.2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_do_harm_for_long(name: str) -> None:
    fuzz(name, seconds=60.0)


def fuzz(name: str, seconds: float) -> None:
    seed = random.randrange(1 << 32)
    lots, target = random.Random(seed), TARGETS[name]
    until = time.monotonic() + seconds
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0
    while time.monotonic() < until:
        data = mutant(lots)
        try:
            target(data)
        except Exception as error:
            raise AssertionError(
                f"{name} took {data!r} (seed {seed}, number {count}) badly: {error!r}"
            ) from error
        count += 1
    assert count > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, (
        "[kB] something was allocated"
    )
