"""`squall.fit` and `squall.start`: a job, the default cluster, the live view and Ctrl-C put together."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from squall.cluster.local import Local
from squall.errors import ConfigError
from squall.observe.events import Event
from squall.training.execution import Cluster
from squall.training.fit import Handle, Publish, StopRequest, carry_out, way_on
from squall.training.job import Job
from squall.training.run import Run


def fit(*args: Any, resume: bool = False, **settings: Any) -> Run:
    """Train, and return the run.

    Args:
        *args, **settings: a `Job`, or its arguments.
        resume: go on from the newest checkpoint in the job's `out`.

    Raises:
        ConfigError: the request is wrong; nothing was started.
        RunError: the run could not finish.
        KeyboardInterrupt: on Ctrl-C, after a clean end that leaves a run directory which resumes, as it says. A second
            Ctrl-C does not wait.

    >>> import torch, squall
    >>> x = torch.randn(64, 3)
    >>> run = squall.fit(
    ...     torch.nn.Linear(3, 1), (x, x.sum(dim=1, keepdim=True)), loss="mse", batch_size=8,
    ...     cluster=squall.InProcess(), progress=False,
    ... )
    >>> run.metrics["why"], run.predict(x).shape
    ('epochs', torch.Size([64, 1]))
    """
    job = job_from(args, settings)
    stop = StopRequest()
    with cluster_of(job) as cluster, view_of(job) as show, _signals(stop):
        run = carry_out(job, cluster=cluster, resume=resume, publish=show, stop=stop)
    if stop.why == INTERRUPTED:
        raise KeyboardInterrupt(f"go on with {way_on(job, run.path)}")
    if stop.why == TERMINATED:
        if job.progress and job.recipe is None:  # else whoever made the recipe's job says it
            print(f"squall: go on with {way_on(job, run.path)}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM)
    return run


def start(*args: Any, resume: bool = False, **settings: Any) -> Handle:
    """Train in the background, and return a handle: `events()`, `stop()`, `result()`. Takes what `fit` takes."""
    job = job_from(args, settings)

    def work(publish: Publish, stop: StopRequest) -> Run:
        with cluster_of(job) as cluster:
            return carry_out(job, cluster=cluster, resume=resume, publish=publish, stop=stop)

    return Handle(work)


INTERRUPTED = "interrupted"
TERMINATED = "terminated"


def job_from(args: tuple[Any, ...], settings: dict[str, Any]) -> Job:
    """The job that `fit` and `start` were given, as a value or by its arguments."""
    if args and isinstance(args[0], Job):
        if len(args) > 1:
            raise ConfigError(
                subject="squall.fit",
                expected="a Job, or the arguments of one",
                got="a Job and more",
                remedy="Use dataclasses.replace(job, ...).",
            )
        return replace(args[0], **settings) if settings else args[0]
    return Job(*args, **settings)


def cluster_of(job: Job) -> AbstractContextManager[Cluster]:
    """The job's cluster; by default processes of this machine, begun here and ended with the block."""
    if job.cluster is None:
        return Local()
    if not hasattr(job.cluster, "run"):
        raise ConfigError(
            subject="Job(cluster=)",
            expected="squall.Local(), squall.InProcess() or another cluster",
            got=repr(job.cluster),
        )
    return nullcontext(job.cluster)


def view_of(job: Job) -> AbstractContextManager[Callable[[Event], None]]:
    """What shows a run's events to a person, if that is wanted."""
    return _live(job) if job.progress else nullcontext(lambda event: None)


@contextmanager
def _live(job: Job) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console

    from squall.cli.live import LiveView

    with LiveView(Console(file=sys.stderr), total_replicas=job.replicas) as view:
        yield view.show


@contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request to stop, and a second SIGINT into KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: object) -> None:
        if stop.why is not None or not stop.is_heard:
            raise KeyboardInterrupt
        stop.request(INTERRUPTED)

    def on_terminate(number: int, frame: object) -> None:
        if not stop.is_heard:
            raise SystemExit(128 + signal.SIGTERM)
        stop.request(TERMINATED)

    old = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
