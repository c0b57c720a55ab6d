"""Where else a run's figures go: loggers are told every event, and are closed at the end."""

from pathlib import Path
from typing import Any, Protocol, final

from squall.errors import ConfigError
from squall.keywords import named
from squall.observe.events import Evaluated, Event, Progress


class Logger(Protocol):
    """Told every event of a run, in the launcher."""

    def log(self, event: Event) -> None: ...

    def close(self) -> None: ...


@named
@final
class TensorBoard:
    """Writes training loss, speed, staleness and what evaluations measure for TensorBoard, over minibatches done.

    Args:
        directory: where; one for each run.

    Raises:
        ConfigError: TensorBoard is not installed; said when the run begins.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._writer: Any = None

    def log(self, event: Event) -> None:
        if self._writer is None:
            self._writer = self._open()
        if not isinstance(event, Progress | Evaluated):
            return
        for name, value in figures_of(event).items():
            self._writer.add_scalar(name, value, event.minibatches)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                subject="squall.TensorBoard",
                expected="the package tensorboard",
                got=str(error),
                remedy="Install it: pip install 'squall[tensorboard]'.",
            ) from error
        return SummaryWriter(str(self.directory))


def figures_of(event: Event) -> dict[str, float]:
    """The numbers of an event that make curves over minibatches; none for most events.

    >>> figures_of(Evaluated(time_s=1.0, epoch=0, minibatches=3, metrics={"test_loss": 0.5}))
    {'test/loss': 0.5}
    """
    match event:
        case Progress(train_loss=loss, examples_per_second=speed, staleness=staleness):
            figures = {"train/loss": loss, "run/examples_per_second": speed, "run/staleness": staleness}
            return {name: value for name, value in figures.items() if value is not None}
        case Evaluated(metrics=metrics):
            return {name.replace("_", "/", 1): value for name, value in metrics.items()}
        case _:
            return {}
