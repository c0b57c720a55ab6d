"""A small archive of recordings and the labels of their frames, made here."""

import io
import wave
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SPEAKERS, WORDS, INDICES = ("anna", "ben"), (0, 7), tuple(range(5))
HEADER = "file,phone,state,start_frame,n_frames,how"


def wav(samples: int, *, rate: int = 8000, channels: int = 1, width: int = 2, seed: int = 0) -> bytes:
    """A WAV file of noise."""
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(-9000, 9000, samples * channels).astype("<i2").tobytes()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        out.writeframes(values if width == 2 else bytes(samples * channels * width))
    return file.getvalue()


def recordings() -> dict[str, bytes]:
    """Of each speaker five of each word, 800 to 1,000 samples long."""
    names = [f"{word}_{speaker}_{index}" for word in WORDS for speaker in SPEAKERS for index in INDICES]
    return {f"{name}.wav": wav(800 + 10 * at, seed=at) for at, name in enumerate(names)}


def rows_of(files: Mapping[str, bytes]) -> list[str]:
    """Three states, Z before A, for each file; the last one takes what is left."""
    rows = []
    for name, content in files.items():
        with wave.open(io.BytesIO(content)) as file:
            frames = -(-file.getnframes() // 80)
        stem = name.removesuffix(".wav")
        rows += [f"{stem},Z,0,0,2,aligned", f"{stem},Z,1,2,3,aligned", f"{stem},A,0,5,{frames - 5},uniform"]
    return rows


def write(
    folder: Path, files: Mapping[str, bytes] | None = None, rows: Sequence[str] | None = None
) -> tuple[Path, Path]:
    """Write an archive and its labels; by default both as they should be."""
    files = recordings() if files is None else files
    archive, states = folder / "small.zip", folder / "small_states.csv"
    with zipfile.ZipFile(archive, "w") as out:
        for name, content in files.items():
            out.writestr(name, content)
    states.write_text("\n".join([HEADER, *(rows_of(recordings()) if rows is None else rows)]) + "\n")
    return archive, states
