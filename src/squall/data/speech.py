"""Recordings of speech and the labels of their frames, as they come: a zip of WAV files, and a CSV of states.

The names of the files are DIGIT_SPEAKER_INDEX.wav, as in the Free Spoken Digit Dataset. A row of the CSV says that a
state of a phone lasts for so many frames of 10 ms: ``file,phone,state,start_frame,n_frames``; further columns are
left alone.
"""

import csv
import io
import os
import re
import wave
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squall.data.mel import log_mel, num_frames
from squall.errors import DataError

_COLUMNS = ("file", "phone", "state", "start_frame", "n_frames")
_MOST_BYTES = 64 << 20  # of one recording; whatever claims to be longer is not unpacked
_SAMPLE_BYTES = 2

State = tuple[str, int]
"""A phone and one of its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One file, heard and labelled.

    Attributes:
        name: without its ending.
        speaker, index: out of the name.
        features: log-mel, shape (F, 40), float32.
        labels: number of each frame's state, shape (F,), int64.
    """

    name: str
    speaker: str
    index: int
    features: NDArray[np.float32]
    labels: NDArray[np.int64]

    @property
    def word(self) -> str:
        """What is said, and who says it."""
        return self.name.rsplit("_", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """All recordings of an archive, by name, and the states that occur in them, in sorted order."""

    recordings: tuple[Recording, ...]
    states: tuple[State, ...]


def read_speech(
    archive: str | os.PathLike[str], states: str | os.PathLike[str], *, rate: int = 8000
) -> Speech:
    """Read recordings and compute their features, once.

    Args:
        archive: a zip of mono WAV files of 16 bits.
        states: the CSV with their labels.
        rate: that the files must have [samples a second].
    Raises:
        DataError: a file is missing, cut short or of another kind, or the labels do not fit the recordings; names
            the file and the place.
    """
    rows = _read_states(str(states))
    known = sorted({(phone, state) for parts in rows.values() for _, phone, state, _, _ in parts})
    numbers = {state: number for number, state in enumerate(known)}
    recordings = []
    for name, samples in _read_archive(str(archive), rate):
        place = f"{states}, {name}"
        if name not in rows:
            raise _refusal(place, "labels for every recording", "none", "Add its rows, or take the file out.")
        labels = _labels(place, rows.pop(name), num_frames(len(samples), rate), numbers)
        _, speaker, index = name.rsplit("_", 2)
        features = log_mel(samples, rate)
        recordings.append(
            Recording(name=name, speaker=speaker, index=int(index), features=features, labels=labels)
        )
    if rows:
        name = min(rows)
        raise _refusal(
            f"{states}, {name}",
            f"labels of recordings in {archive}",
            "labels without a recording",
            "Give the archive that the labels were made for.",
        )
    recordings.sort(key=lambda recording: recording.name)
    return Speech(recordings=tuple(recordings), states=tuple(known))


def with_context(features: NDArray[np.float32], context: int) -> NDArray[np.float32]:
    """Each frame with its neighbours on both sides, the ends repeated: shape (F, (2 x context + 1) x bands).

    >>> with_context(np.array([[1.0], [2.0], [3.0]], np.float32), 1).tolist()
    [[1.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 3.0]]
    """
    at = np.arange(len(features))[:, None] + np.arange(-context, context + 1)
    joined: NDArray[np.float32] = features[at.clip(0, len(features) - 1)].reshape(len(features), -1)
    return joined


# The archive ---------------------------------------------------------------------------------------------


def _read_archive(path: str, rate: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise _missing(path, "a zip of WAV files") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise _refusal(
            path, "a zip of WAV files", str(error), "Fetch it again: it may be cut short."
        ) from None
    with archive:
        members = [info for info in archive.infolist() if info.filename.lower().endswith(".wav")]
        if not members:
            raise _refusal(path, "WAV files in the zip", "none", "Give the archive of recordings.")
        for info in members:
            place = f"{path}, {info.filename}"
            name = info.filename.rsplit("/", 1)[-1][: -len(".wav")]
            if re.fullmatch(r"[^_]+_[^_]+_\d+", name) is None:
                raise _refusal(place, "a name like 7_anna_12.wav", name, "Rename it, or take it out.")
            if info.file_size > _MOST_BYTES:
                got = f"one of {info.file_size:,}"
                raise _refusal(place, f"a file of at most {_MOST_BYTES:,} bytes", got, "Cut it into parts.")
            try:
                content = archive.read(info)
            except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
                raise _refusal(place, "a whole file", str(error), "Fetch the archive again.") from None
            yield name, _samples(place, content, rate)


def _samples(place: str, content: bytes, rate: int) -> NDArray[np.float32]:
    """The samples of a WAV file, full scale is 1."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
            told = file.getnframes()
            raw = file.readframes(told)
    except (wave.Error, EOFError) as error:
        got = str(error) or "a file that is cut short"
        raise _refusal(place, "a WAV file", got, "Fetch it again, or take it out.") from None
    if form != (rate, 1, _SAMPLE_BYTES):
        got = f"{form[0]} Hz, {form[1]} channel(s), {8 * form[2]} bits"
        raise _refusal(place, f"{rate} Hz, 1 channel, 16 bits", got, f"Convert it to {rate} Hz mono first.")
    if len(raw) != told * _SAMPLE_BYTES or not told:
        got = f"{len(raw) // _SAMPLE_BYTES}"
        raise _refusal(place, f"{told or 'some'} samples", got, "Fetch it again: it is cut short.")
    return np.frombuffer(raw, "<i2").astype(np.float32) / 32768.0


# The labels ----------------------------------------------------------------------------------------------

_Row = tuple[int, str, int, int, int]  # line, phone, state, start, frames


def _read_states(path: str) -> dict[str, list[_Row]]:
    """The rows of each recording, in the order of the file."""
    rows: dict[str, list[_Row]] = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                got = f"none named {', '.join(missing)}"
                raise _refusal(path, f"columns {', '.join(_COLUMNS)}", got, "Give the CSV of states.")
            for row in reader:
                rows.setdefault(str(row["file"]), []).append(_row(f"{path}, row {reader.line_num}", row))
    except FileNotFoundError:
        raise _missing(path, "the CSV of states") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _refusal(path, "a CSV in UTF-8", str(error), "Give the CSV of states.") from None
    return rows


def _row(place: str, row: dict[str, str | None]) -> _Row:
    try:
        state, start, frames = (int(row[name] or "") for name in ("state", "start_frame", "n_frames"))
    except ValueError:
        got = ", ".join(repr(row[name]) for name in ("state", "start_frame", "n_frames"))
        raise _refusal(place, "three whole numbers", got, "Mend the row.") from None
    return int(place.rsplit(" ", 1)[1]), str(row["phone"]), state, start, frames


def _labels(place: str, rows: list[_Row], frames: int, numbers: dict[State, int]) -> NDArray[np.int64]:
    """One label a frame; the rows must follow one another from the first frame to the last."""
    remedy = f"A frame is 10 ms begun; {frames} of them must be labelled, each once, in order."
    labels: list[int] = []
    for line, phone, state, start, count in rows:
        if start != len(labels) or count < 1:
            got = f"{count} that begin at {start}"
            raise _refusal(f"{place} (row {line})", f"frames that begin at {len(labels)}", got, remedy)
        if start + count > frames:
            got = f"labels up to {start + count}"
            raise _refusal(f"{place} (row {line})", f"{frames} frames, as in the recording", got, remedy)
        labels += [numbers[phone, state]] * count
    if len(labels) != frames:
        raise _refusal(place, f"{frames} frames, as in the recording", f"labels for {len(labels)}", remedy)
    return np.array(labels, np.int64)


def _missing(path: str, what: str) -> DataError:
    return _refusal(path, what, "no such file", "Check the path.")


def _refusal(subject: str, expected: str, got: str, remedy: str) -> DataError:
    return DataError(subject=subject, expected=expected, got=got, remedy=remedy)
