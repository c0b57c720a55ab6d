"""One run from job to result: prepare, carry out on a cluster, finish the run directory."""

import json
import queue
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np
from torch import nn

from squall.errors import ConfigError, RunError, RunExistsError, SquallError
from squall.faults import in_words
from squall.model.parameters import master_dtype
from squall.observe.events import Ended, Evaluated, Event
from squall.observe.files import write_atomic
from squall.observe.ledger import LedgerWriter, read_ledger, rows_to_take_back
from squall.observe.loggers import Logger
from squall.observe.metrics import MetricsLog, read_history
from squall.observe.plots import plan_svg, plot_loss
from squall.observe.tally import blocks_redone, summarise, times_one_replica
from squall.shard.store import write_tensors
from squall.shard.tensors import push_file
from squall.training.best import BestKeeper
from squall.training.checkpoint import MANIFEST, Checkpoint, newest_checkpoint, read_checkpoint
from squall.training.directory import RunDirectory
from squall.training.evaluation import load_slices
from squall.training.execution import Cluster, Ending, Execution, RunClock
from squall.training.job import Job
from squall.training.keeping import CheckpointKeeper
from squall.training.prepare import Prepared, prepare
from squall.training.recorder import NO_BETTER, Patience, Recorder
from squall.training.remote import Copying, RemoteCheckpoints
from squall.training.run import MODELLED, Run

Publish = Callable[[Event], None]
FINISHED = ("steps", "epochs", "time", NO_BETTER)
"""Ends that a job asked for."""


class StopRequest:
    """A request to end a run early; the first reason holds.

    Attributes:
        is_heard: the run has started and will act on it; before, and after, nobody does.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.is_heard = False

    def request(self, why: str) -> None:
        self.why = self.why or why


def carry_out(job: Job, *, cluster: Cluster, resume: bool, publish: Publish, stop: StopRequest) -> Run:
    """Run a job to its end.

    Args:
        cluster: where.
        resume: go on from the newest checkpoint of the job's directory.
        publish: called with every event.
        stop: ask it to end early; a run so ended can be resumed.

    Raises:
        ConfigError: before anything has started.
        RunError: the run could not finish; its directory says what happened.
    """
    began = monotonic()
    if cluster.is_modelled:
        _check_modelled(job, resume)
    cluster.expect(job)
    remote = _remote(job, resume)
    # By no name here: of what it goes on from nothing is kept once the shards have it.
    prepared = prepare(job, _checkpoint_of(job, remote) if resume else None)
    if resume and job.directory is not None and (why := _finished(job.directory, prepared)) is not None:
        finished = RunDirectory.open(job.directory)
        publish(Ended(time_s=prepared.time_s, why=f"it was finished before: {why}. {more(job, finished)}"))
        return Run(finished, job)
    began -= prepared.time_s
    directory = (
        RunDirectory.open(job.directory, is_new=remote is not None)
        if resume and job.directory
        else RunDirectory.create(job.directory)
    )
    compute = MODELLED if cluster.is_modelled else "real"
    _describe(directory, prepared, began_at=time() - (monotonic() - began), compute=compute)
    if resume:
        roll_back(directory, prepared)
    best = _best_keeper(prepared, directory)
    copying = Copying(remote, job.keep_checkpoints)
    with MetricsLog(directory.metrics) as log, _told(publish, job.loggers) as told:
        redone = blocks_redone(read_ledger(directory.ledger)) if resume else 0
        recorder = _recorder(prepared, log, told, best, redone)
        execution = Execution(
            prepared=prepared,
            directory=directory,
            recorder=recorder,
            best=best,
            checkpoints=CheckpointKeeper(directory.checkpoints, prepared),
            may_go_on=lambda: stop.why or recorder.reason_to_stop(),
            clock=RunClock(began),
            on_sealed=copying.sealed,
        )
        try:
            stop.is_heard = True
            ending = cluster.run(execution)
            _write_traffic(directory, ending)
            model = None if cluster.is_modelled else _finish(execution, ending)
            copying.close()
            if ending.error is not None:
                raise ending.error
        except SquallError as error:
            with suppress(RunError):
                copying.close()
            why = "diverged" if "diverged" in str(error) else "failed"
            _write_result(execution, why=why, error=str(error))
            recorder.tick(execution.now(), final=True)
            recorder.happened(Ended(time_s=execution.now(), why=why, error=str(error)))
            if any(directory.checkpoints.glob(f"*/{MANIFEST}")):
                error.add_note(f"What is kept can be gone on with: {way_on(job, directory.path)}.")
            raise
        _write_result(execution, why=ending.why, error=None, ending=ending)
        recorder.tick(execution.now(), final=True)
        recorder.happened(Ended(time_s=execution.now(), why=ending.why))
    if model is not None:
        plot_loss(read_history(directory.metrics), directory.loss_plot, _title(prepared))
    return Run(directory, job, model)


# Before ----------------------------------------------------------------------------------------------------


def _check_modelled(job: Job, resume: bool) -> None:
    """Refuse what cannot be had where no gradient is computed."""
    asked = {
        "keep_best=": job.keep_best is not None,
        "checkpoint_every=": job.checkpoint_every is not None,
        "record=True": job.record,
        "resume=True": resume,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                subject='a run with compute="modelled"',
                expected=f"no {name}, since no gradient is computed",
                got=name,
                remedy='Leave it out, or use compute="real".',
            )


def _remote(job: Job, resume: bool) -> RemoteCheckpoints | None:
    """Where checkpoints are copied to, if the job says so; a new run must not mix its own with those of another."""
    if job.checkpoint_to is None:
        return None
    remote = RemoteCheckpoints(job.checkpoint_to)
    if not resume and remote.whole():
        raise RunExistsError(
            subject=f"Job(checkpoint_to={job.checkpoint_to!r})",
            expected="a place without checkpoints",
            got=f"{len(remote.whole())} of another run",
            remedy="Choose another, or go on with that run: resume=True.",
        )
    return remote


def _checkpoint_of(job: Job, remote: RemoteCheckpoints | None) -> Checkpoint:
    if job.directory is None:
        raise ConfigError(
            subject="resume=True", expected="out=, the directory of the run to go on with", got="out=None"
        )
    if remote is not None:
        checkpoints = RunDirectory.open(job.directory, is_new=True).checkpoints
        remote.bring(checkpoints)
        return newest_checkpoint(checkpoints)
    return newest_checkpoint(RunDirectory.open(job.directory).checkpoints)


def _finished(path: Path, prepared: Prepared) -> str | None:
    """Why a run that is to be resumed has ended already, with all that is now asked for; None if it goes on."""
    directory = RunDirectory.open(path, is_new=True)  # what it goes on from may be kept elsewhere
    if not (directory.result.exists() and directory.model.exists()):
        return None
    why = str(directory.read_json(directory.result).get("why"))
    is_over = next(prepared.plan.blocks(prepared.settled), None) is None
    return why if why in FINISHED and is_over else None


def more(job: Job, directory: RunDirectory) -> str:
    """How to train on a run that is finished."""
    bounds = {"epochs": job.num_epochs, "steps": job.num_steps}
    changed = {name: 2 * bound for name, bound in bounds.items() if bound is not None}
    return f"More trains on: {way_on(job, directory.path, **changed)}."


def roll_back(directory: RunDirectory, prepared: Prepared) -> None:
    """Take back, in the ledger, what was applied after the checkpoint that the run goes on from, and is lost."""
    versions = {book.slice: book.version for book in prepared.books}
    rows = list(rows_to_take_back(read_ledger(directory.ledger), versions, prepared.time_s))
    with LedgerWriter(directory.ledger / f"rolled-back-{prepared.starts}.ledger") as writer:
        for row in rows:
            writer.append(row)


def _best_keeper(prepared: Prepared, directory: RunDirectory) -> BestKeeper | None:
    if prepared.job.keep_best is None:
        return None
    names = [] if prepared.evaluation is None else prepared.evaluation.names
    return BestKeeper.of(prepared.job.keep_best, names, directory.path)


@contextmanager
def _told(publish: Publish, loggers: Sequence[Logger]) -> Iterator[Publish]:
    """Tell everyone who wants to know; loggers are closed at the end."""

    def tell(event: Event) -> None:
        publish(event)
        for logger in loggers:
            logger.log(event)

    try:
        yield tell
    finally:
        for logger in loggers:
            logger.close()


def _recorder(
    prepared: Prepared, log: MetricsLog, publish: Publish, best: BestKeeper | None, redone: int
) -> Recorder:
    job = prepared.job
    per_epoch = prepared.plan.minibatches_per_epoch
    return Recorder(
        log=log,
        publish=publish,
        total_minibatches=prepared.plan.total,
        minibatches=prepared.settled.num_minibatches,
        evaluate_every=job.evaluate_every * per_epoch if prepared.evaluation is not None else None,
        patience=None if job.patience is None or best is None else Patience(best, job.patience),
        roles=tuple(f"replica{replica}.0" for replica in range(job.replicas)),
        now=prepared.time_s,
        redone=redone,
    )


def _describe(directory: RunDirectory, prepared: Prepared, *, began_at: float, compute: str) -> None:
    """Write down what was asked for, and how parameters lie on the shards."""
    job, layout = prepared.job, prepared.layout
    told: dict[str, Any] = {
        "recipe": None if job.recipe is None else asdict(job.recipe),
        "model": type(prepared.model).__name__,
        "strategy": _plain(job.strategy),
        "compute": compute,
        "identity": prepared.identity,
        "layout": layout.layout_json(),
        "chaos": in_words(job.faults),
        "began_at": began_at,  # second 0 of the run, as seconds since 1970
    }
    for name in (
        "replicas",
        "microbatches",
        "shards",
        "epochs",
        "steps",
        "time_s",
        "seed",
        "record",
        "precision",
        "evaluate_every",
        "checkpoint_every",
        "durability",
    ):
        told[name] = _plain(getattr(job, name))
    told["partitions"] = job.num_partitions
    directory.write_json(directory.job, told)
    rows = [(spec.shard, spec.num_bytes) for spec in layout.slices]
    write_atomic(directory.plan, plan_svg(rows, replicas=job.replicas, model=told["model"]))
    directory.partitions.unlink(missing_ok=True)  # a resumed run may be cut in another way
    if prepared.cut is not None:
        directory.write_json(directory.partitions, prepared.cut.named().to_json())
    if job.record:
        _begin_record(directory, prepared)


def _plain(value: Any) -> Any:
    if hasattr(value, "describe"):
        return value.describe()
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def _begin_record(directory: RunDirectory, prepared: Prepared) -> None:
    """What a replay starts from: the layout and the first values."""
    directory.pushes.mkdir(exist_ok=True)
    if prepared.starts:
        return
    rows = [
        row | {"file": push_file(row["slice"]), "dtype": master_dtype(row["dtype"])}
        for row in prepared.layout.layout_json()
    ]
    directory.write_json(directory.pushes / "layout.json", rows)
    write_tensors(directory.pushes / "initial.safetensors", prepared.first.values or {})


# After -----------------------------------------------------------------------------------------------------


def _write_traffic(directory: RunDirectory, ending: Ending) -> None:
    rows = [
        {"sender": sender, "receiver": receiver, "bytes": num_bytes, "messages": messages}
        for (sender, receiver), (num_bytes, messages) in ending.traffic.items()
    ]
    directory.write_json(directory.traffic, rows)


def _finish(execution: Execution, ending: Ending) -> nn.Module:
    """Seal the checkpoint, and make the model and what is measured on it."""
    prepared, directory = execution.prepared, execution.directory
    folder = directory.checkpoints / ending.checkpoint
    execution.seal()
    model = prepared.whole()
    vectors = [state.params for state in read_checkpoint(folder).states]
    load_slices(model, prepared.layout, vectors, ending.buffers)
    del vectors
    write_tensors(directory.model, model.state_dict())
    if prepared.evaluation is not None and ending.why in FINISHED:
        values = prepared.evaluation.of_model(model)
        if execution.best is not None:
            execution.best.offer(values, model, ending.minibatches)
        now, epoch = execution.now(), execution.recorder.epoch
        execution.recorder.happened(
            Evaluated(time_s=now, epoch=epoch, minibatches=ending.minibatches, metrics=values)
        )
    return model.eval()


def way_on(job: Job, path: Path, **changed: Any) -> str:
    """What to type, or to write, to go on with a run.

    >>> way_on(Job(nn.Linear(1, 1), train=None), Path("runs/a"), epochs=4)
    "squall.fit(..., epochs=4, out='runs/a', resume=True)"
    """
    if job.recipe is not None:
        words = [f"--set {name}={value}" for name, value in changed.items()]
        return " ".join(["squall resume", shlex.quote(str(path)), *words])
    words = [f"{name}={value!r}, " for name, value in changed.items()]
    return f"squall.fit(..., {''.join(words)}out={str(path)!r}, resume=True)"


def _write_result(execution: Execution, *, why: str, error: str | None, ending: Ending | None = None) -> None:
    recorder, directory, prepared = execution.recorder, execution.directory, execution.prepared
    ledger = read_ledger(directory.ledger)
    summary = summarise(ledger)
    recorder.counted_redone(summary.redone)
    times = times_one_replica(ledger, warm_start=prepared.plan.warm_start, replicas=prepared.job.replicas)
    progress = recorder.progress(execution.now())
    job = execution.prepared.job
    result: dict[str, Any] = {
        "why": why,
        "error": error,
        "train_loss": progress.train_loss,
        **({} if recorder.last_evaluation is None else recorder.last_evaluation.metrics),
        "wall_s": execution.clock.real(),
        **({"virtual_s": execution.now()} if execution.clock.is_virtual else {}),
        "clock": "virtual" if execution.clock.is_virtual else "real",
        "minibatches": recorder.meter.minibatches,
        "samples_per_second": summary.samples_per_second,
        "times_one_replica": None if error is not None or prepared.starts else times,
        **({} if ending is None else _between_partitions(execution, ending)),
        "staleness_mean": summary.staleness_mean,
        "staleness_variance": summary.staleness_variance,
        "pushes_applied": summary.applied,
        "blocks_redone": summary.redone,
        "blocks_repeated": summary.repeated,
        "blocks_refused": len(recorder.refused),
        "refused": [f"{event.block}: {event.why}" for event in recorder.refused],
        "shards_recovered": len(recorder.recovered),
        "minibatches_rolled_back": sum(event.lost for event in recorder.recovered),
        "unkept": [f"{role}: {why}" for role, why in recorder.unkept.items()],
        "connections_refused": recorder.connections_refused,
        "replicas": job.replicas,
        "shards": job.shards,
        "resumed": execution.prepared.starts,
    }
    plain = {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in result.items()
    }
    directory.write_json(directory.result, json.loads(json.dumps(plain)))


def _between_partitions(execution: Execution, ending: Ending) -> dict[str, float]:
    """Of a model that was cut, what its workers sent one another and what the plan says [bytes a minibatch].

    Beside the tensors that the plan counts, processes send small messages, and minibatches that were lost or done again.
    """
    prepared = execution.prepared
    meter = execution.recorder.meter
    before, done = meter.minibatches_before, meter.minibatches - meter.minibatches_before
    sent = sum(
        num_bytes
        for (sender, receiver), (num_bytes, _) in ending.traffic.items()
        if sender.startswith("replica") and receiver.startswith("replica")
    )
    if prepared.cut is None or done <= 0 or not sent:  # nor is anything sent where nothing is computed
        return {}
    minibatches, per_epoch = prepared.minibatches, prepared.plan.minibatches_per_epoch
    lasts = (before + done) // per_epoch - before // per_epoch  # of an epoch: these may be short
    planned = sum(
        times * sum(prepared.cut.links(examples).values())
        for examples, times in (
            (minibatches.size(0), done - lasts),
            (minibatches.size(per_epoch - 1), lasts),
        )
    )
    return {"partition_bytes": sent / done, "partition_bytes_planned": planned / done}


def _title(prepared: Prepared) -> str:
    job = prepared.job
    return f"{type(prepared.model).__name__}: {job.replicas} replicas, {job.shards} shards"


# In the background -----------------------------------------------------------------------------------------


class Handle:
    """A run that goes on in the background; `squall.start` returns it.

    >>> # for event in handle.events(): print(event)
    """

    def __init__(self, work: Callable[[Publish, StopRequest], Run]) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stop = StopRequest()
        self._run: Run | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(work,), name="squall-run", daemon=True)
        self._thread.start()

    def _work(self, work: Callable[[Publish, StopRequest], Run]) -> None:
        try:
            self._run = work(self._events.put, self._stop)
        except BaseException as error:
            self._error = error
        finally:
            self._events.put(None)

    def events(self) -> Iterator[Event]:
        """Yield what happens, as it happens, until the run is over. For one reader."""
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)

    def stop(self) -> None:
        """Ask the run to end: it waits for acknowledgements, leaves a checkpoint, and can be resumed."""
        self._stop.request("stopped")

    def result(self, timeout_s: float | None = None) -> Run:
        """Wait for the end and return the run.

        Raises:
            RunError: what the run failed with; whatever else was raised in it.
            TimeoutError: it is still going on after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the run is still going on after {timeout_s} s")
        if self._error is not None:
            raise self._error
        if self._run is None:
            raise RunError(reason="the run ended without a result")
        return self._run
