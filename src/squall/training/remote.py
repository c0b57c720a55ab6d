"""Checkpoints kept somewhere else too: copied to a URL of fsspec's as they become whole, and brought back from there.

An object store has no rename, and a copy may end half way. So the manifest is written last and taken away first: what has
one is whole, and all else counts for nothing.
"""

import contextlib
import queue
import threading
from pathlib import Path, PurePosixPath

from squall.errors import ConfigError, RunError
from squall.observe.files import write_atomic
from squall.training.checkpoint import MANIFEST


class RemoteCheckpoints:
    """The checkpoints at a URL, each in a folder that is called by its number.

    Args:
        url: as fsspec takes it, as in ``"s3://bucket/runs/a"`` or ``"memory://a"``.

    Raises:
        ConfigError: nothing can be written there, or fsspec or what it needs for this kind of URL is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped,unused-ignore]

            self._fs, path = url_to_fs(url)
            self._root = str(path).rstrip("/")
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(f"{self._root}/squall.txt", b"Checkpoints of a run of Squall.\n")
        except Exception as error:  # whatever the store raises
            raise ConfigError(
                subject=f"Job(checkpoint_to={url!r})",
                expected="a URL that fsspec can write to",
                got=f"{type(error).__name__}: {error}",
                remedy="pip install fsspec, and what the error names; then look at the address and your credentials.",
            ) from error

    def put(self, folder: Path) -> None:
        """Copy a whole checkpoint, its manifest last."""
        into = f"{self._root}/{folder.name}"
        manifest = (folder / MANIFEST).read_bytes()
        self._fs.makedirs(into, exist_ok=True)
        for file in sorted(folder.iterdir()):
            if file.name != MANIFEST:
                self._fs.put_file(str(file), f"{into}/{file.name}")
                self._expect_size(f"{into}/{file.name}", file.stat().st_size)
        self._fs.pipe_file(f"{into}/{MANIFEST}", manifest)
        self._expect_size(f"{into}/{MANIFEST}", len(manifest))

    def _expect_size(self, path: str, num_bytes: int) -> None:
        self._fs.invalidate_cache()
        if (got := int(self._fs.info(path)["size"])) != num_bytes:
            raise OSError(f"{path}: expected {num_bytes} bytes, but got {got}")

    def clear(self, kept: int) -> None:
        """Remove all that is older than the newest `kept` whole ones."""
        whole = self.whole()
        if len(whole) < kept:
            return
        for name in self._numbered():
            if int(name) < int(whole[-kept]):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._root}/{name}/{MANIFEST}")
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    def whole(self) -> list[str]:
        """Names of those with a manifest, the oldest first."""
        return [name for name in self._numbered() if self._fs.exists(f"{self._root}/{name}/{MANIFEST}")]

    def _numbered(self) -> list[str]:
        self._fs.invalidate_cache()
        names = {PurePosixPath(str(path)).name for path in self._fs.ls(self._root, detail=False)}
        return sorted((name for name in names if name.isdigit()), key=int)

    def bring(self, checkpoints: Path) -> str | None:
        """Bring back the newest one, if the folder has none as new; return its name."""
        whole = self.whole()
        here = [int(path.parent.name) for path in checkpoints.glob(f"*/{MANIFEST}")]
        if not whole or int(whole[-1]) <= max(here, default=-1):
            return None
        name = whole[-1]
        folder = checkpoints / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._fs.ls(f"{self._root}/{name}", detail=False):
            file = PurePosixPath(str(path)).name
            if file != MANIFEST:
                self._fs.get_file(str(path), str(folder / file))
        write_atomic(folder / MANIFEST, self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}"))
        return name


class Copying:
    """Copies checkpoints in a thread, while training goes on.

    Args:
        remote: where to; None: nowhere.
        kept: how many stay there.
    """

    def __init__(self, remote: RemoteCheckpoints | None, kept: int) -> None:
        self._remote, self._kept = remote, kept
        self._orders: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def sealed(self, folder: Path) -> None:
        """A checkpoint has become whole."""
        if self._remote is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._remote,), name="copying", daemon=True
            )
            self._thread.start()
        self._orders.put(folder)

    def _work(self, remote: RemoteCheckpoints) -> None:
        is_ending = False
        while not is_ending and (folder := self._orders.get()) is not None:
            while not self._orders.empty():  # a newer one waits
                if (newer := self._orders.get()) is None:
                    is_ending = True
                else:
                    folder = newer
            try:
                remote.put(folder)
                remote.clear(self._kept)
                self._error = None
            except Exception as error:  # the store is away for a while; the next one may get through
                self._error = error if folder.exists() else None

    def close(self) -> None:
        """Wait until the newest is there.

        Raises:
            RunError: it could not be copied; in the run directory it is whole.
        """
        if self._thread is None:
            return
        self._orders.put(None)
        self._thread.join()
        self._thread = None
        if self._error is not None and self._remote is not None:
            raise RunError(
                reason=f"the last checkpoint could not be copied to {self._remote.url}: "
                f"{type(self._error).__name__}: {self._error}. In the run directory it is whole."
            ) from self._error
