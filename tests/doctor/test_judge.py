"""Tests of squall.doctor.judge: verdicts on machines that nobody has.

Faults planted here by hand, each seen to fail a test: the control group's limit left out · the hard limit of open files judged ·
threads compared with all cores instead of the granted ones · one good finding taken for all · a verdict without advice.
"""

from dataclasses import replace
from typing import Any

import pytest

from squall.doctor.facts import Facts
from squall.doctor.judge import Finding, Verdict, is_possible, judge
from squall.doctor.speeds import Speeds

VERSIONS = {name: "9.9.9" for name in ("python", "squall", "torch", "numpy", "safetensors", "msgspec")}
FINE = Facts(
    system="Linux 6.1 x86_64",
    processor="a processor",
    versions=dict(VERSIONS),
    kernels="AVX2",
    cores=4,
    cores_usable=4,
    cores_granted=None,
    threads=4,
    thread_variables={},
    load=0.1,
    memory_bytes=16_000_000_000,
    memory_free_bytes=8_000_000_000,
    memory_limit_bytes=None,
    memory_used_bytes=None,
    address_space_bytes=None,
    open_files=4096,
    open_files_most=65536,
    shm_bytes=1_000_000,
    has_memfd=True,
    has_fork=True,
    loopback={"127.0.0.1": "", "::1": ""},
    ports=(32768, 60999),
    send_buffer_bytes=4_194_304,
    receive_buffer_bytes=4_194_304,
)
FAST = Speeds(
    copy_bytes_per_s=9e9,
    copy_by_two_bytes_per_s=12e9,
    unix_round_trip_s=10e-6,
    tcp_round_trip_s=20e-6,
    unix_bytes_per_s=4e9,
    tcp_bytes_per_s=4e9,
)


def findings(
    facts: Facts = FINE, speeds: Speeds | str = FAST, zygote: float | str = 1.5
) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(facts, speeds, zygote)}


def test_on_a_machine_that_is_fine_everything_is_ok() -> None:
    found = findings()

    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert is_possible(list(found.values()))


@pytest.mark.parametrize(
    ("change", "name", "verdict", "words"),
    [
        ({"versions": VERSIONS | {"torch": None}}, "torch", Verdict.BAD, "pip install torch"),
        ({"versions": VERSIONS | {"torch": "2.8.1+cpu"}}, "torch", Verdict.LOOK, "2.9"),
        ({"versions": VERSIONS | {"torch": "2.13.0+cpu"}}, "torch", Verdict.OK, ""),
        ({"cores_granted": 1.5}, "cores", Verdict.LOOK, "fewer than two"),
        ({"cores_granted": 2.0}, "threads", Verdict.LOOK, "More threads than cores"),
        ({"load": 3.0}, "load", Verdict.LOOK, "mean little"),
        (
            {"memory_limit_bytes": 2_000_000_000, "memory_used_bytes": 1_500_000_000},
            "memory",
            Verdict.LOOK,
            "limit",
        ),
        ({"memory_free_bytes": 100_000_000}, "memory", Verdict.LOOK, "Stop others"),
        ({"address_space_bytes": 1 << 33}, "address space", Verdict.LOOK, "ulimit -v"),
        ({"open_files": 256}, "open files", Verdict.LOOK, "ulimit -n 65536"),
        ({"open_files": 32}, "open files", Verdict.BAD, "ulimit -n 65536"),
        ({"open_files": None}, "open files", Verdict.OK, ""),
        ({"has_memfd": False}, "shared memory", Verdict.LOOK, "TCP"),
        ({"has_fork": False}, "processes", Verdict.BAD, "InProcess"),
        ({"loopback": {"::1": "no such address"}}, "loopback ::1", Verdict.LOOK, "shared memory works"),
        ({"ports": (40000, 40100)}, "ports", Verdict.LOOK, "ip_local_port_range"),
        ({"send_buffer_bytes": 4096}, "net.core.wmem_max", Verdict.LOOK, "sysctl"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    change: dict[str, Any], name: str, verdict: Verdict, words: str
) -> None:
    found = findings(replace(FINE, **change))

    assert found[name].verdict is verdict
    assert words in found[name].advice
    assert is_possible(list(found.values())) == (verdict is not Verdict.BAD)


def test_roles_that_cannot_be_started_make_training_impossible() -> None:
    found = findings(zygote="it was killed by signal 9.")

    assert found["starting roles"].verdict is Verdict.BAD
    assert "killed by signal 9" in found["starting roles"].advice


def test_slow_memory_and_sockets_deserve_a_look() -> None:
    slow = replace(FAST, copy_bytes_per_s=1e9, tcp_round_trip_s=1e-3, unix_bytes_per_s=1e8)

    assert [name for name, one in findings(speeds=slow).items() if one.verdict is Verdict.LOOK] == [
        "memory copies",
        "Unix sockets",
        "TCP on loopback",
    ]
    assert findings(speeds="OSError: no sockets left")["speeds"].advice == "OSError: no sockets left"


def test_nothing_that_is_not_ok_is_without_advice() -> None:
    worst = replace(
        FINE,
        versions=dict.fromkeys(VERSIONS),
        cores_granted=0.5,
        load=9.0,
        memory_free_bytes=0,
        address_space_bytes=1,
        open_files=3,
        has_memfd=False,
        has_fork=False,
        loopback={"127.0.0.1": "x", "::1": "x"},
        ports=(1, 2),
        send_buffer_bytes=1,
        receive_buffer_bytes=1,
    )
    for finding in findings(worst, speeds="x", zygote="x").values():
        assert bool(finding.advice) == (finding.verdict is not Verdict.OK), finding
