"""Tests of ``squall explain``: what real and simulated runs left is told, for people and as JSON.

Faults planted here by hand, each seen to fail a test: tensors counted as slices · a damaged checkpoint taken · a run that goes
on told as cut off · the oldest checkpoint taken.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import squall
from squall.cli.app import app
from squall.cli.explain import durable, explain, lines
from squall.cluster.local import Local
from tests.conftest import beside
from tests.processes.helpers import job


def told_by_command(path: Path) -> tuple[dict[str, Any], str]:
    runner = CliRunner()
    as_json, as_text = (runner.invoke(app, ["explain", str(path), *more]) for more in (["--json"], []))
    assert as_json.exit_code == as_text.exit_code == 0
    return json.loads(as_json.output.splitlines()[-1]), as_text.output


def test_a_simulated_run_with_a_death_is_told_to_the_end(tmp_path: Path) -> None:
    cluster = squall.Simulated(seed=1, faults="kill:replica1,restart=2@step=5")
    run = squall.fit(job(cluster, threads=1, epochs=3, out=tmp_path / "run"))
    told, text = told_by_command(tmp_path / "run")

    assert (told["state"], told["cause"], told["minibatches"]) == ("done", None, 120)
    assert told["lost"] == 0
    shown = [record["blocks_redone"] for record in run.history if record["event"] == "Progress"]
    assert told["redone"] == run.metrics["blocks_redone"] == shown[-1] > 0
    assert (
        told["redone"]
        == json.loads(CliRunner().invoke(app, ["ledger", str(run.path), "--json"]).output)["redone"]
    )
    assert shown == sorted(shown)
    [death] = told["deaths"]
    assert (death["role"], death["incarnation"]) == ("replica1", 0)
    assert death["back_s"] - death["time_s"] == pytest.approx(2.0, abs=0.1)
    assert "120 of 120 minibatches on every slice" in text
    assert "next    squall ledger" in text


@pytest.mark.processes
def test_a_run_whose_replicas_are_all_killed_is_told_with_its_cause_and_what_is_kept(
    local: Local, tmp_path: Path
) -> None:
    cluster, out = beside(local, restarts=None), tmp_path / "run"
    with pytest.raises(squall.NoReplicaError) as caught:
        squall.fit(
            job(cluster, threads=1, epochs=100, chaos="kill:replica0@step=20; kill:replica1@step=30", out=out)
        )
    told, text = told_by_command(out)

    assert told["state"] == "failed"
    assert told["cause"] == " ".join(str(caught.value).split())
    assert "replica0.0 was killed by SIGKILL, as the chaos 'kill:replica0@step=20' says" in told["cause"]
    assert told["minibatches"] == told["durable"]["minibatches"] >= 50
    assert told["lost"] == 0
    assert [death["role"] for death in told["deaths"]] in (
        ["replica0.0", "replica1.0"],
        ["replica1.0", "replica0.0"],
    )
    assert f"next    squall resume {out}" in text


@pytest.mark.processes
def test_a_shard_that_came_back_is_told_to_have(local: Local, tmp_path: Path) -> None:
    out, chaos = tmp_path / "run", "kill:shard0,restart=100ms@step=100"
    squall.fit(job(local, threads=1, epochs=10, durability="ack", chaos=chaos, out=out))
    told, _ = told_by_command(out)
    assert (told["state"], told["minibatches"]) == ("done", 400)
    [death] = told["deaths"]
    assert death["role"] == "shard0"
    assert 0.09 < death["back_s"] - death["time_s"] < 10.0


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_counts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    squall.fit(
        job(squall.InProcess(), threads=1, epochs=3, checkpoint_every=1.0, keep_checkpoints=3, out=out)
    )
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    file = out / "checkpoints" / names[-1] / "shard0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    kept = durable(out / "checkpoints")
    assert kept is not None
    assert kept.path == f"checkpoints/{names[-2]}"
    assert str(file) in kept.damaged[0]
    story = explain(out)
    assert story.lost == 120 - kept.minibatches > 0
    assert any("damaged" in line for line in lines(story, out))


def test_a_run_that_was_cut_off_and_one_that_goes_on_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    squall.fit(job(squall.InProcess(), threads=1, epochs=1, out=out))
    metrics = out / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    row = {"role": "coordinator", "name": "coordinator", "pid": os.getpid()}
    (out / "processes.json").write_text(json.dumps([row]))
    assert explain(out).state == "cut off"  # this process has that number, and another name
    name = Path("/proc/self/comm").read_text()
    Path("/proc/self/comm").write_text("coordinator")
    try:
        assert explain(out).state == "going on"
    finally:
        Path("/proc/self/comm").write_text(name)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert told.exit_code == 2
