"""Tests of squall.doctor.facts: what this machine is, held against the standard library, and machines made of files.

Faults planted here by hand, each seen to fail a test: kilobytes taken for bytes · the largest limit of nested control groups ·
version 1's huge number taken for a limit · quota and period swapped · a broken torch that raises.
"""

import importlib
import os
import platform
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from squall.doctor.facts import look


def machine(tmp_path: Path, **files: str) -> Path:
    """Files of a machine, by path with two underscores for a slash."""
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_it_says_of_this_machine_what_others_say() -> None:
    facts = look()

    assert facts.versions["python"] == platform.python_version()
    assert facts.versions["torch"] == torch.__version__
    assert facts.kernels == torch.backends.cpu.get_cpu_capability()
    assert facts.cores_usable == len(psutil.Process().cpu_affinity())
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.has_memfd == hasattr(os, "memfd_create")
    assert facts.loopback["127.0.0.1"] == ""


def test_memory_is_told_in_bytes(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__meminfo="MemTotal:  2000 kB\nMemAvailable:  1500 kB\nHugePages_Total: 0\n")

    facts = look(root)

    assert (facts.memory_bytes, facts.memory_free_bytes) == (2_048_000, 1_536_000)


def test_the_tightest_limit_of_nested_control_groups_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/job/step/memory.max", "5000000\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/job/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/job/step/cpu.max", "max 100000\n")

    facts = look(tmp_path)

    assert facts.memory_limit_bytes == 1_000_000
    assert facts.cores_granted == 1.5


def test_version_1_of_control_groups_is_read_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")

    facts = look(tmp_path)

    assert facts.memory_limit_bytes is None
    assert facts.cores_granted == 0.5


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    facts = look(tmp_path)

    known = (
        facts.memory_bytes,
        facts.memory_limit_bytes,
        facts.cores_granted,
        facts.ports,
        facts.send_buffer_bytes,
    )
    assert known == (None,) * 5
    assert facts.shm_bytes is None


def test_a_broken_torch_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = importlib.import_module

    def broken(name: str) -> Any:
        if name == "torch":
            raise OSError("libtorch_cpu.so: cannot open shared object file")
        return whole(name)

    monkeypatch.setattr("squall.doctor.facts.importlib.import_module", broken)
    facts = look()

    assert facts.versions["torch"] is None
    assert facts.kernels is None
    assert facts.threads is None
