"""Tests of squall.training.remote: checkpoints that are copied to a URL, whole or not at all, and brought back.

Faults planted here by hand, each seen to fail a test: the manifest written first · the newest passed over when the run
ends · the oldest brought back · one without a manifest brought back · the manifest taken away last · an error of the store
forgotten · a new run in a place that has checkpoints.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import squall
from squall.training.checkpoint import MANIFEST, read_checkpoint
from squall.training.remote import Copying, RemoteCheckpoints
from tests.processes.helpers import applied_counts, job


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"memory://{request.node.name}"
    fsspec.filesystem("memory").store.clear()


def folder(tmp_path: Path, number: int) -> Path:
    """Something that looks like a checkpoint from outside."""
    path = tmp_path / "checkpoints" / f"{number:06d}"
    path.mkdir(parents=True)
    for name in ("shard0.safetensors", "buffers.safetensors", MANIFEST):
        (path / name).write_text(f"{name} of {number}")
    return path


def fit(out: Path, url: str, **settings: Any) -> squall.Run:
    usual = {"epochs": 2, "checkpoint_every": 0.5, "replicas": 1, "threads": 1}
    resume = settings.pop("resume", False)
    return squall.fit(
        job(squall.InProcess(), out=out, checkpoint_to=url, **(usual | settings)), resume=resume
    )


def test_a_run_leaves_its_newest_checkpoints_there_the_last_one_included(tmp_path: Path, url: str) -> None:
    run = fit(tmp_path / "run", url, keep_checkpoints=2)
    here = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    remote = RemoteCheckpoints(url)
    assert remote.whole()[-1] == here[-1]
    assert len(remote.whole()) <= 2
    store = fsspec.filesystem("memory")
    for file in (run.path / "checkpoints" / here[-1]).iterdir():
        assert store.cat_file(f"/{url.removeprefix('memory://')}/{here[-1]}/{file.name}") == file.read_bytes()


def test_a_run_whose_directory_is_gone_goes_on_to_the_same_parameters(tmp_path: Path, url: str) -> None:
    whole = fit(tmp_path / "whole", "memory://whole", epochs=4)
    fit(tmp_path / "run", url, epochs=2)
    shutil.rmtree(tmp_path / "run")
    run = fit(tmp_path / "elsewhere", url, epochs=4, resume=True)

    for name, value in whole.state_dict().items():
        assert torch.equal(run.state_dict()[name], value)
    assert {epoch for _, epoch in applied_counts(run)} == {
        e * 1_000_000 + p for e in (2, 3) for p in range(40)
    }
    assert run.metrics["resumed"] == 1
    assert int(RemoteCheckpoints(url).whole()[-1]) > 4


def test_what_is_newer_here_is_not_replaced(tmp_path: Path, url: str) -> None:
    remote = RemoteCheckpoints(url)
    for number in (1, 2):
        remote.put(folder(tmp_path, number))
    assert remote.bring(tmp_path / "checkpoints") is None
    shutil.rmtree(tmp_path / "checkpoints" / "000002")
    assert remote.bring(tmp_path / "checkpoints") == "000002"
    assert (tmp_path / "checkpoints" / "000002" / MANIFEST).read_text() == f"{MANIFEST} of 2"


def test_a_copy_that_ends_half_way_counts_for_nothing_and_goes_with_a_newer_one(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(url)
    remote.put(folder(tmp_path, 1))
    half = folder(tmp_path, 2)
    calls = []

    def put_file(one: str, other: str) -> None:
        calls.append(one)
        if len(calls) > 1:
            raise OSError("the line is gone")
        type(remote._fs).put_file(remote._fs, one, other)

    monkeypatch.setattr(remote._fs, "put_file", put_file)
    with pytest.raises(OSError, match="the line is gone"):
        remote.put(half)
    monkeypatch.undo()
    assert remote.whole() == ["000001"]
    assert remote.bring(tmp_path / "other") == "000001"
    remote.put(folder(tmp_path, 3))
    remote.clear(1)
    assert remote._numbered() == ["000003"]


def test_removal_begins_with_the_manifest(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteCheckpoints(url)
    for number in (1, 2):
        remote.put(folder(tmp_path, number))

    def rm(path: str, recursive: bool) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(remote._fs, "rm", rm)
    with pytest.raises(OSError, match="killed here"):
        remote.clear(1)
    assert remote.whole() == ["000002"]


def test_an_error_of_the_store_is_told_at_the_end_unless_a_later_copy_got_through(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(url)
    put = remote.put

    def refuses(path: Path) -> None:
        raise PermissionError("no room")

    monkeypatch.setattr(remote, "put", refuses)
    copying = Copying(remote, kept=2)
    copying.sealed(folder(tmp_path, 1))
    with pytest.raises(squall.RunError, match=rf"could not be copied to {url}: PermissionError: no room"):
        copying.close()
    monkeypatch.setattr(remote, "put", put)
    copying.sealed(folder(tmp_path, 2))
    copying.close()
    assert remote.whole() == ["000002"]


def test_a_new_run_refuses_a_place_that_has_checkpoints_and_a_url_that_nothing_can_be_written_to(
    tmp_path: Path, url: str
) -> None:
    fit(tmp_path / "run", url, epochs=1)
    with pytest.raises(squall.RunExistsError, match=r"but got \d of another run"):
        fit(tmp_path / "other", url, epochs=1)
    with pytest.raises(squall.ConfigError, match=r"Job\(checkpoint_to='nowhere://a'\): expected a URL"):
        fit(tmp_path / "other", "nowhere://a")
    assert read_checkpoint(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]).minibatches == 40
