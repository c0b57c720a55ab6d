"""What of a machine's facts is fine, what deserves a look, and what makes training impossible; and what to do about it.

A decider: it reads no file and measures nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from squall.doctor.facts import Facts
from squall.doctor.speeds import Speeds
from squall.observe.units import human_bytes

LEAST_MEMORY_BYTES = 1_000_000_000
LEAST_FILES, COMFORTABLE_FILES = 64, 1024
LEAST_PORTS = 1000
LEAST_BUFFER_BYTES = 208_000
BUSY_LOAD = 0.5
"""Processes that may want to run, beside ours, before figures of speed mean little."""
SLOW_COPY = 2e9
SLOW_LOOPBACK = 0.5e9
SLOW_ROUND_TRIP_S = 200e-6


class Verdict(StrEnum):
    """How a finding is: nothing to do, worth a look, or training cannot work."""

    OK = "ok"
    LOOK = "look"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: what was looked at.
        value: what was found, for people.
        advice: what to do; empty if nothing is to be done.
    """

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""


def judge(facts: Facts, speeds: Speeds | str, zygote: float | str) -> list[Finding]:
    """Say what of the facts is fine.

    Args:
        speeds: what was measured, or why it could not be.
        zygote: the seconds until the process that roles are forked from had forked one, or why it did not.
    """
    return [
        *_software(facts),
        _zygote(zygote),
        *_cores(facts),
        *_memory(facts),
        *_files(facts),
        *_network(facts),
        *_speeds(speeds),
    ]


def is_possible(findings: list[Finding]) -> bool:
    """Whether training is possible: nothing is bad."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def _finding(name: str, value: str, *, bad: str = "", look: str = "") -> Finding:
    """The worst of two complaints counts; an empty one is none."""
    verdict = Verdict.BAD if bad else Verdict.LOOK if look else Verdict.OK
    return Finding(name=name, value=value, verdict=verdict, advice=bad or look)


def _software(facts: Facts) -> list[Finding]:
    found = [_finding("system", f"{facts.system}, {facts.processor or 'processor unknown'}")]
    for name, version in facts.versions.items():
        missing = "" if version else f"It cannot be imported: reinstall it with pip install {name}."
        value = version or "not there"
        if name == "torch" and version:
            value += f", kernels for {facts.kernels}"
        found.append(_finding(name, value, bad=missing, look=_old(name, version)))
    return found


def _old(name: str, version: str | None) -> str:
    """Whether a version is older than what Squall is tested with."""
    if name != "torch" or not version:
        return ""
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
    return "" if numbers >= [2, 9] else "Squall needs torch 2.9 or newer: upgrade it."


def _zygote(zygote: float | str) -> Finding:
    name = "starting roles"
    if isinstance(zygote, str):
        return _finding(
            name, "not possible", bad=f"{zygote} Until then only squall.InProcess() works on this machine."
        )
    return _finding(name, f"{zygote:.1f} s until the first process")


def _cores(facts: Facts) -> list[Finding]:
    granted = facts.cores_usable if facts.cores_granted is None else facts.cores_granted
    share = f", {granted:.2g} granted" if granted < facts.cores_usable else ""
    few = (
        ""
        if granted >= 2
        else "Replicas take turns on fewer than two cores: more than one will not be faster."
    )
    told = ", ".join(f"{name}={value}" for name, value in facts.thread_variables.items())
    many = (
        "More threads than cores: unset the variables, or lower them."
        if (facts.threads or 1) > max(granted, 1)
        else ""
    )
    busy = f"Others want to run: speeds measured now mean little (bound {BUSY_LOAD:g})."
    return [
        _finding("cores", f"{facts.cores}, {facts.cores_usable} usable{share}", look=few),
        _finding("threads", f"torch uses {facts.threads}" + (f", {told}" if told else ""), look=many),
        _finding("load", f"{facts.load:.2f}", look=busy if facts.load > BUSY_LOAD else ""),
    ]


def _memory(facts: Facts) -> list[Finding]:
    left = _left(facts)
    little = (
        f"Less than {human_bytes(LEAST_MEMORY_BYTES)}: torch alone needs some 300 MB in each process that is "
        "not forked. Stop others, or raise the limit."
        if left is not None and left < LEAST_MEMORY_BYTES
        else ""
    )
    limited = (
        "A limit on address space counts what is mapped and never used: lift it with ulimit -v unlimited."
        if facts.address_space_bytes is not None
        else ""
    )
    return [
        _finding(
            "memory",
            f"{_bytes(facts.memory_bytes)}, {_bytes(facts.memory_free_bytes)} free, limit of the control group: "
            f"{_bytes(facts.memory_limit_bytes, 'none')}",
            look=little,
        ),
        _finding("address space", f"limit: {_bytes(facts.address_space_bytes, 'none')}", look=limited),
    ]


def _left(facts: Facts) -> int | None:
    """Memory that may still be taken: the tighter of the machine's and the control group's."""
    lefts = [facts.memory_free_bytes]
    if facts.memory_limit_bytes is not None:
        lefts.append(facts.memory_limit_bytes - (facts.memory_used_bytes or 0))
    return min((left for left in lefts if left is not None), default=None)


def _files(facts: Facts) -> list[Finding]:
    limit = facts.open_files
    few = limit is not None and limit < COMFORTABLE_FILES
    most = facts.open_files_most
    raise_it = f"Each replica and shard needs a few: raise it with ulimit -n {most or 4096}."
    none = limit is not None and limit < LEAST_FILES
    return [
        _finding(
            "open files",
            f"{limit or 'no limit'}, may be raised to {most or 'any number'}",
            bad=raise_it if none else "",
            look=raise_it if few else "",
        ),
        _finding("/dev/shm", f"{_bytes(facts.shm_bytes)} free (Squall puts nothing there)"),
        _finding(
            "shared memory",
            "memfd_create is there" if facts.has_memfd else "no memfd_create",
            look="" if facts.has_memfd else "Roles will talk over TCP, which copies more.",
        ),
        _finding(
            "processes",
            "fork and pidfd are there" if facts.has_fork else "no fork or no pidfd",
            bad="" if facts.has_fork else "squall.Local needs Linux 5.3 or newer: use squall.InProcess().",
        ),
    ]


def _network(facts: Facts) -> list[Finding]:
    found = []
    for host, error in facts.loopback.items():
        remedy = f'squall.Local(transport="tcp") cannot listen on {host}; shared memory works without.'
        found.append(_finding(f"loopback {host}", error or "can listen", look=remedy if error else ""))
    ports = facts.ports
    count = None if ports is None else ports[1] - ports[0] + 1
    narrow = "A narrow range runs out: widen net.ipv4.ip_local_port_range."
    found.append(
        _finding(
            "ports",
            "unknown" if ports is None else f"{ports[0]} to {ports[1]}",
            look=narrow if count is not None and count < LEAST_PORTS else "",
        )
    )
    for name, size in (("wmem_max", facts.send_buffer_bytes), ("rmem_max", facts.receive_buffer_bytes)):
        small = f"Large tensors over TCP go slower: raise it with sysctl net.core.{name}=4194304."
        is_small = size is not None and size < LEAST_BUFFER_BYTES
        found.append(_finding(f"net.core.{name}", _bytes(size), look=small if is_small else ""))
    return found


def _speeds(speeds: Speeds | str) -> list[Finding]:
    if isinstance(speeds, str):
        return [_finding("speeds", "not measured", look=speeds)]
    slow = "Slower than usual: something else is running, or the machine is throttled."
    copies = (
        f"{_rate(speeds.copy_bytes_per_s)} with one thread, {_rate(speeds.copy_by_two_bytes_per_s)} with two"
    )
    unix = f"{_micro(speeds.unix_round_trip_s)} a round trip, {_rate(speeds.unix_bytes_per_s)}"
    tcp = f"{_micro(speeds.tcp_round_trip_s)} a round trip, {_rate(speeds.tcp_bytes_per_s)}"
    is_slow = {
        "memory copies": speeds.copy_bytes_per_s < SLOW_COPY,
        "Unix sockets": speeds.unix_round_trip_s > SLOW_ROUND_TRIP_S
        or speeds.unix_bytes_per_s < SLOW_LOOPBACK,
        "TCP on loopback": speeds.tcp_round_trip_s > SLOW_ROUND_TRIP_S
        or speeds.tcp_bytes_per_s < SLOW_LOOPBACK,
    }
    values = {"memory copies": copies, "Unix sockets": unix, "TCP on loopback": tcp}
    return [_finding(name, value, look=slow if is_slow[name] else "") for name, value in values.items()]


def _bytes(size: int | None, otherwise: str = "unknown") -> str:
    return otherwise if size is None else human_bytes(size)


def _rate(rate: float) -> str:
    return f"{human_bytes(rate)}/s"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} microseconds"
