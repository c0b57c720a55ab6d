"""What this machine is: read from the system, nothing measured and nothing judged.

What cannot be read on this system is None.
"""

import importlib
import os
import platform
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import squall

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_UNLIMITED = 1 << 60  # version 1 of control groups writes a huge number for "no limit"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a machine is.

    Attributes:
        system, processor: its kernel, and its processor's name.
        versions: "python", "squall", and "torch", "numpy", "safetensors", "msgspec"; None for what cannot be imported.
        kernels: the instruction set that torch's own CPU kernels use, as in "AVX512".
        cores: of the machine; `cores_usable`: this process may run on; `cores_granted`: its control group's quota,
            None for no limit.
        threads: torch's number of threads here; `thread_variables`: the environment's, by name.
        load: the load average of the last minute [processes].
        memory_bytes, memory_free_bytes: of the machine.
        memory_limit_bytes, memory_used_bytes: of this process's control group; None for no limit.
        address_space_bytes: the limit of `ulimit -v`; None for none.
        open_files, open_files_most: the limit of `ulimit -n`, and how far it may be raised.
        shm_bytes: free in /dev/shm, which Squall does not need but torch's data loaders do.
        has_memfd, has_fork: whether memory without a name and processes by fork are there.
        loopback: for each family of addresses an error's text, or "" if one can listen there.
        ports: the range that ports of outgoing connections are taken from.
        send_buffer_bytes, receive_buffer_bytes: how large a socket's buffers may be made.
    """

    system: str
    processor: str | None
    versions: dict[str, str | None]
    kernels: str | None
    cores: int
    cores_usable: int
    cores_granted: float | None
    threads: int | None
    thread_variables: dict[str, str]
    load: float
    memory_bytes: int | None
    memory_free_bytes: int | None
    memory_limit_bytes: int | None
    memory_used_bytes: int | None
    address_space_bytes: int | None
    open_files: int | None
    open_files_most: int | None
    shm_bytes: int | None
    has_memfd: bool
    has_fork: bool
    loopback: dict[str, str]
    ports: tuple[int, int] | None
    send_buffer_bytes: int | None
    receive_buffer_bytes: int | None


def look(root: Path = Path("/")) -> Facts:
    """Look at this machine.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie.

    >>> facts = look()
    >>> facts.cores_usable >= 1, facts.versions["squall"] == squall.__version__
    (True, True)
    """
    torch = _imported("torch")
    memory = _memory(root)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(root),
        versions=_versions(torch),
        kernels=None if torch is None else torch.backends.cpu.get_cpu_capability(),
        cores=os.cpu_count() or 1,
        cores_usable=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        cores_granted=_granted(root),
        threads=None if torch is None else torch.get_num_threads(),
        thread_variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        load=os.getloadavg()[0],
        memory_bytes=memory.get("MemTotal"),
        memory_free_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=_group_bytes(root, "memory.max", "memory/memory.limit_in_bytes"),
        memory_used_bytes=_group_bytes(root, "memory.current", "memory/memory.usage_in_bytes"),
        address_space_bytes=_limit(resource.getrlimit(resource.RLIMIT_AS)[0]),
        open_files=_limit(files[0]),
        open_files_most=_limit(files[1]),
        shm_bytes=_free_bytes(root / "dev/shm"),
        has_memfd=hasattr(os, "memfd_create"),
        has_fork=hasattr(os, "fork") and hasattr(os, "pidfd_open"),
        loopback={"127.0.0.1": _listening("127.0.0.1"), "::1": _listening("::1")},
        ports=_ports(root),
        send_buffer_bytes=_number(root / "proc/sys/net/core/wmem_max"),
        receive_buffer_bytes=_number(root / "proc/sys/net/core/rmem_max"),
    )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # a broken installation raises whatever it likes
        return None


def _versions(torch: Any) -> dict[str, str | None]:
    found = {"python": platform.python_version(), "squall": squall.__version__}
    modules = {"torch": torch, **{name: _imported(name) for name in ("numpy", "safetensors", "msgspec")}}
    return found | {name: getattr(module, "__version__", None) for name, module in modules.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _memory(root: Path) -> dict[str, int]:
    """Of /proc/meminfo: name to bytes."""
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _processor(root: Path) -> str | None:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or None


def _group_files(root: Path, second: str, first: str) -> list[Path]:
    """Where a control group's setting may lie, in version 2 (with its parents, which bind too) or 1."""
    groups = root / "sys/fs/cgroup"
    own = next(
        (line[3:].strip("/") for line in _text(root / "proc/self/cgroup").splitlines() if line[:3] == "0::"),
        "",
    )
    places = [groups / own, *(groups / own).parents]
    inside = [place for place in places if place == groups or groups in place.parents]
    return [place / second for place in inside] + [groups / first]


def _group_bytes(root: Path, second: str, first: str) -> int | None:
    """The tightest of the control group's numbers; None if none of them is a limit."""
    found = [_number(path) for path in _group_files(root, second, first)]
    return min((number for number in found if number is not None and number < _UNLIMITED), default=None)


def _granted(root: Path) -> float | None:
    """How many cores' worth of time the control group may use."""
    shares = []
    for path in _group_files(root, "cpu.max", "cpu/cpu.max"):
        words = _text(path).split()
        if len(words) == 2 and words[0].isdigit():
            shares.append(int(words[0]) / int(words[1]))
    quota, period = (_number(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota and period:
        shares.append(quota / period)
    return min(shares, default=None)


def _free_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _listening(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _ports(root: Path) -> tuple[int, int] | None:
    words = _text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None
