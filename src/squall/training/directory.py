"""The run directory: what lies where, and who may begin in it."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from squall.errors import ConfigError, CorruptError, RunExistsError
from squall.observe.files import write_atomic


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The places of one run.

    Attributes:
        path: the directory itself; it exists.
    """

    path: Path

    @property
    def job(self) -> Path:
        """What was asked for, as JSON; its presence says that this is a run."""
        return self.path / "job.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def plan(self) -> Path:
        return self.path / "plan.svg"

    @property
    def partitions(self) -> Path:
        """How each replica's model was cut, as `squall.Plan` writes it; only there if it was."""
        return self.path / "partitions.json"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pushes(self) -> Path:
        return self.path / "pushes"

    @property
    def processes(self) -> Path:
        return self.path / "processes.json"

    @property
    def traffic(self) -> Path:
        return self.path / "traffic.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def write_json(self, path: Path, value: Any) -> None:
        write_atomic(path, json.dumps(value, indent=2) + "\n")

    @classmethod
    def create(cls, out: Path | None) -> "RunDirectory":
        """Begin a run in `out`, or in a new temporary directory.

        Raises:
            RunExistsError: there is a run already.
            ConfigError: it cannot be a directory.
        """
        if out is None:
            directory = cls(Path(tempfile.mkdtemp(prefix="squall-")))
        else:
            directory = cls(out.absolute())
            if directory.job.exists():
                raise RunExistsError(
                    subject=f"the run directory {str(out)!r}",
                    expected="a new one",
                    got="a directory that holds a run",
                    remedy=f"Choose another out=, or go on with that run: resume=True, or `squall resume {out}`.",
                )
        directory._make_folders()
        return directory

    @classmethod
    def open(cls, path: Path, *, is_new: bool = False) -> "RunDirectory":
        """Find a run that is there.

        Args:
            is_new: it may be missing, since what it goes on from is kept elsewhere, too.

        Raises:
            ConfigError: there is none.
        """
        directory = cls(path.absolute())
        if not is_new and not directory.job.is_file():
            raise ConfigError(
                subject=f"the run directory {str(path)!r}",
                expected="a run: a directory with a job.json",
                got="no such directory" if not path.exists() else "a directory without one",
                remedy="Give the directory that the run's summary named.",
            )
        directory._make_folders()
        return directory

    def _make_folders(self) -> None:
        try:
            for folder in (self.path, self.ledger, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                subject=f"the run directory {str(self.path)!r}",
                expected="a directory that can be written to",
                got=f"{type(error).__name__}: {error.strerror}",
            ) from error

    def read_json(self, path: Path) -> Any:
        """Read a JSON file of the run.

        Raises:
            CorruptError: it is torn or altered.
        """
        try:
            return json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CorruptError(
                subject=str(path), expected="a JSON file of a run", got=f"{type(error).__name__}: {error}"
            ) from error
