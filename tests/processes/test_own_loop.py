"""Users' own processes, however they are started, train together on one set of servers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import squall
from squall.cluster.local import Local
from tests.loop.serving import join, network, serving, train
from tests.processes.helpers import is_alive, wait_until
from tests.staleness import staleness_under_way

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 200

SCRIPT = """
import sys, squall, torch
from tests.loop.serving import network, train
torch.set_num_threads(1)
model = network(seed=3)
optimizer = squall.DownpourOptimizer(model, sys.argv[1], token=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
train(model, optimizer, int(sys.argv[3]))
optimizer.close()
"""


def work(address: str, token: str, is_ready: Any, go: Any) -> None:
    """What the process that multiprocessing spawns does."""
    torch.set_num_threads(1)
    model = network(seed=4)
    with squall.DownpourOptimizer(model, address, token=token) as optimizer:
        is_ready.set()
        go.wait()
        train(model, optimizer, NUM_STEPS)


def test_two_processes_at_once_count_every_push_once_and_are_one_update_behind(
    local: Local, tmp_path: Path
) -> None:
    """B47. One spawned by multiprocessing, one a program of its own; each step of one lies within one of the other."""
    context = multiprocessing.get_context("spawn")
    is_ready, go = context.Event(), context.Event()
    with serving(local, network(), out=tmp_path) as servers:
        spawned = context.Process(target=work, args=(servers.address, servers.token, is_ready, go))
        spawned.start()
        arguments = [sys.executable, "-c", SCRIPT, servers.address, servers.token, str(NUM_STEPS)]
        program = subprocess.Popen(
            arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert is_ready.wait(30)
        go.set()
        program.communicate("go\n", timeout=30)
        spawned.join(30)
        last = network()
        with join(servers, last) as optimizer:
            assert optimizer.version == 2 * NUM_STEPS

    assert (program.returncode, spawned.exitcode) == (0, 0)
    rows = servers.ledger()
    assert set(rows["outcome"]) == {"applied"}
    assert staleness_under_way(rows[rows["slice"] == 0]) == pytest.approx(1.0, abs=0.3)


def launched_by_torchrun() -> None:
    """What each process of torchrun does; see below."""
    torch.set_num_threads(1)
    model = network(seed=int(os.environ["RANK"]))
    with squall.DownpourOptimizer(model, os.environ["DOOR"], token=os.environ["TOKEN"]) as optimizer:
        train(model, optimizer, 20)


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_torchrun_starts_loops_as_any_other_program(local: Local, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("from tests.processes.test_own_loop import launched_by_torchrun as run\nrun()\n")
    arguments = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments.append(str(script))
    paths = os.pathsep.join([str(ROOT), *sys.path])
    with serving(local, network()) as servers:
        program = subprocess.run(
            arguments,
            cwd=ROOT,
            env=os.environ | {"DOOR": servers.address, "TOKEN": servers.token, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert program.returncode == 0, program.stderr
        with join(servers, network()) as optimizer:
            assert optimizer.version == 2 * 20


def forked(address: str, token: str, index: int) -> None:
    """What a process that multiprocessing forks does; the first one is killed while it pushes."""
    torch.set_num_threads(1)
    model = network(seed=index)
    with squall.DownpourOptimizer(model, address, token=token) as optimizer:
        train(model, optimizer, 10)
        if index == 0:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                train(model, optimizer, 10)


def test_forks_that_make_their_own_train_and_one_that_dies_in_a_step_disturbs_nobody(local: Local) -> None:
    """B18."""
    context = multiprocessing.get_context("fork")
    with serving(local, network(), out=None) as servers:
        workers = [
            context.Process(target=forked, args=(servers.address, servers.token, index)) for index in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(40)
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]
        with join(servers, network()) as optimizer:
            before = optimizer.version
            train(network(), optimizer, 1)
            assert optimizer.version == before + 1 > 30


def test_the_example_trains_in_two_processes_of_its_own(
    local: Local, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "own_loop.py"
    namespace: dict[str, Any] = {"__name__": "example", "__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), namespace)  # as a user would run it, but for a warm process
    monkeypatch.setattr(squall, "serve", partial(serving, local))

    namespace["main"]()

    said = capsys.readouterr().out
    assert "[0, 0]" in said
    assert float(said.split()[-1]) > 0.95


def test_ctrl_c_in_the_process_that_serves_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import squall, torch\n"
        "with squall.serve(torch.nn.Linear(2, 1)) as servers:\n"
        "    roles = servers._roster.roles.values()\n"
        "    print(servers._own_zygote.pid, *(role.pid for role in roles), servers.path, flush=True)\n"
        "    import threading; threading.Event().wait()\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert program.stdout is not None
    *pids, path = program.stdout.readline().split()
    os.kill(program.pid, signal.SIGINT)
    _, said = program.communicate(timeout=30)

    assert "KeyboardInterrupt" in said.splitlines()[-1]
    assert program.returncode in (1, -signal.SIGINT)
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids), 5, "every process to end")
    assert not Path(path).exists()
