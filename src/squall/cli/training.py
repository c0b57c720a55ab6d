"""``squall train`` and ``squall resume``: a job, a warm cluster, a run directory, and what is said at the end."""

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from squall.cli.outcome import WRONG_REQUEST, say
from squall.cli.summary import closing_summary
from squall.cluster.local import Local
from squall.errors import ConfigError, SquallError, UserCodeError
from squall.faults import faults_of
from squall.observe.files import next_numbered
from squall.training.directory import RunDirectory

if TYPE_CHECKING:
    from squall.training.job import Job

NUMBERED = "-N"
"""An ``--out`` that ends so gets the next number instead."""

FINISHED = ("steps", "epochs", "time")


def train(request: str, settings: Sequence[str], out: Path | None, *, chaos: str = "", as_json: bool) -> None:
    """Train what a recipe says.

    Args:
        request: ``NAME``, ``FILE.py`` or either with ``:FUNCTION``.
        settings: ``"strategy.n_push=5"`` and the like.
        out: the run directory; ``parent/name-N`` means the next free number; None: a new temporary one.
        chaos: what is to go wrong, beside what the recipe says.
        as_json: end standard output with the figures as one JSON object.

    Raises:
        ConfigError, RunError, KeyboardInterrupt: as `squall.fit`.
    """
    pairs = [setting_of(text) for text in settings]
    faults = faults_of(chaos, "--chaos")
    # Before anything that imports torch: the process that roles are forked from imports it at the same time.
    with Local() as cluster:
        with _quick_imports(cluster):
            import squall.api  # noqa: F401  used below, by name
            from squall.training.recipe import find
        job = made_by(lambda: find(request, pairs), request)
        with _Directory(out or job.directory) as path:
            job = replace(job, out=path, chaos=(*job.faults, *faults))
            carry_out(job, cluster, resume=False, as_json=as_json)


def resume(path: Path, settings: Sequence[str] = (), *, as_json: bool) -> None:
    """Go on with a run of a recipe from its newest checkpoint; one that is finished stays as it is, and is summed up.

    Args:
        settings: as of `train`, after those that the run began with.

    Raises:
        ConfigError: there is no such run, or it is not of a recipe; and as `squall.fit`.
    """
    directory = RunDirectory.open(path)
    told = directory.read_json(directory.job).get("recipe")
    if told is None:
        raise ConfigError(
            subject=f"the run {str(path)!r}",
            expected="a run of a recipe",
            got="one that a script began",
            remedy=f"Go on with it there: squall.fit(job, resume=True), with out={str(path)!r}.",
        )
    pairs = [setting_of(text) for text in settings]
    with Local() as cluster:
        with _quick_imports(cluster):
            from squall.training.recipe import job_of
        job = made_by(lambda: job_of(told, pairs), told["name"])
        carry_out(replace(job, out=path), cluster, resume=True, as_json=as_json)


def carry_out(job: "Job", cluster: Local, *, resume: bool, as_json: bool) -> None:
    """Run a job, and sum it up however it ends."""
    from squall.api import fit

    assert job.directory is not None
    directory = RunDirectory(job.directory.absolute())
    before = _written_at(directory)
    try:
        fit(replace(job, cluster=job.cluster or cluster), resume=resume)
    finally:
        # A failed or interrupted run has figures and a directory too; a refused one has none, or those of old.
        if _written_at(directory) != before or (resume and sys.exception() is None):
            sum_up(directory, as_json=as_json)


def sum_up(directory: RunDirectory, *, as_json: bool) -> None:
    """Print what a run came to: lines for people, or one JSON object."""
    metrics = directory.read_json(directory.result)
    if as_json:
        print(json.dumps({**metrics, "path": str(directory.path)}), flush=True)
        return
    plot = directory.loss_plot if directory.loss_plot.exists() else None
    # Whoever asked is shown the error itself, after this.
    shown = {name: value for name, value in metrics.items() if name != "error"}
    for line in closing_summary(shown, directory.path, finished=metrics["why"] in FINISHED, plot=plot):
        print(line)
    sys.stdout.flush()


def _written_at(directory: RunDirectory) -> int | None:
    return directory.result.stat().st_mtime_ns if directory.result.exists() else None


@contextmanager
def _quick_imports(cluster: Local) -> Iterator[None]:
    """Import without looking for garbage, which takes a tenth of the time, and end at once on a signal.

    What is imported may catch a KeyboardInterrupt and go on. Nothing has been started yet but the process that
    roles will be forked from.
    """

    def leave(number: int, frame: object) -> None:
        cluster.abandon()
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for number, handler in before.items():
            signal.signal(number, handler)


def setting_of(setting: str) -> tuple[str, str]:
    """The name and the value of ``NAME=VALUE``."""
    name, sign, value = setting.partition("=")
    if not (name and sign):
        raise ConfigError(
            subject=f"--set {setting}",
            expected="NAME=VALUE, as in --set strategy.n_push=5",
            got=repr(setting),
        )
    return name, value


def made_by(make: "Callable[[], Job]", request: str) -> "Job":
    """The recipe's job; an exception in the user's file is shown with its traceback, and was a wrong request."""
    try:
        return make()
    except SquallError:
        raise
    except Exception as error:
        told = UserCodeError.of(error, role=f"the recipe {request}", step="")
        say(told)
        print(told.traceback.rstrip(), file=sys.stderr)
        raise SystemExit(WRONG_REQUEST) from None


class _Directory:
    """The directory of a new run, made beforehand so that it can be named however the run ends; gone if not used."""

    def __init__(self, out: Path | None) -> None:
        self._out = out

    def __enter__(self) -> Path:
        out = self._out
        if out is None:
            self._path, self._is_new = Path(tempfile.mkdtemp(prefix="squall-")), True
        elif out.name.endswith(NUMBERED):
            self._path, self._is_new = next_numbered(out.parent, out.name.removesuffix(NUMBERED)), True
        else:
            self._path, self._is_new = out, False
        return self._path

    def __exit__(self, *exc: object) -> None:
        if self._is_new and not any(self._path.iterdir()):
            self._path.rmdir()
