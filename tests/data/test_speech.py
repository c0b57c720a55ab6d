"""Tests of squall.data.speech: recordings made here, and what is wrong with them said by name.

Faults planted by hand, each seen to fail a test: states numbered as they come · a label too few accepted · a gap accepted ·
recordings without labels passed over · labels without recordings passed over · the rate not looked at · a short file
taken as it is · bytes taken for samples of another scale · a block of no length accepted · context cut
short on one side · recordings sorted by index.
"""

import io
import wave
from pathlib import Path

import numpy as np
import pytest

from squall.data.mel import log_mel
from squall.data.speech import read_speech, with_context
from squall.errors import DataError
from tests.data.speech_files import HEADER, recordings, rows_of, wav, write

SHARED = Path(__file__).parents[3] / "shared" / "data"


def test_recordings_and_their_labels_are_read_by_name(tmp_path: Path) -> None:
    speech = read_speech(*write(tmp_path))

    assert speech.states == (("A", 0), ("Z", 0), ("Z", 1))
    assert [recording.name for recording in speech.recordings] == sorted(name[:-4] for name in recordings())
    first = speech.recordings[0]
    assert (first.name, first.word, first.speaker, first.index) == ("0_anna_0", "0_anna", "anna", 0)
    assert first.labels.tolist() == [1, 1, 2, 2, 2, 0, 0, 0, 0, 0]
    with wave.open(io.BytesIO(recordings()["0_anna_0.wav"])) as file:
        samples = np.array(memoryview(file.readframes(800)).cast("h"), np.float32) / 2**15
    np.testing.assert_array_equal(first.features, log_mel(samples, 8000))


def test_a_folder_in_the_archive_and_rows_in_another_order_of_files_make_no_difference(
    tmp_path: Path,
) -> None:
    files = {f"recordings/{name}": content for name, content in recordings().items()}
    rows = rows_of(recordings())
    (tmp_path / "other").mkdir()
    plain = read_speech(*write(tmp_path))
    moved = read_speech(*write(tmp_path / "other", files, rows[30:] + rows[:30]))
    assert [each.labels.tolist() for each in moved.recordings] == [
        each.labels.tolist() for each in plain.recordings
    ]


def test_context_repeats_the_first_and_the_last_frame() -> None:
    features = np.arange(8, dtype=np.float32).reshape(4, 2)
    expected = []
    for frame in range(4):
        row: list[float] = []
        for at in range(frame - 2, frame + 3):
            row += features[min(max(at, 0), 3)].tolist()
        expected.append(row)
    assert with_context(features, 2).tolist() == expected
    assert with_context(features, 0).tolist() == features.tolist()


NAME = "7_ben_4.wav"
BAD_FILES = {
    "another rate": (wav(980, rate=16000), "expected 8000 Hz, 1 channel, 16 bits, but got 16000 Hz"),
    "two channels": (wav(980, channels=2), "2 channel"),
    "eight bits": (wav(980, width=1), "8 bits"),
    "a header cut short": (wav(980)[:30], "expected a WAV file"),
    "samples cut short": (wav(980)[:1000], "cut short"),
    "no samples": (wav(0), "expected some samples, but got 0"),
    "no sound at all": (b"once upon a time", "expected a WAV file"),
    "nothing": (b"", "expected a WAV file, but got a file that is cut short"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_recording_that_is_none_is_refused_by_name(what: str, tmp_path: Path) -> None:
    content, words = BAD_FILES[what]
    archive, states = write(tmp_path, recordings() | {NAME: content})
    with pytest.raises(DataError) as caught:
        read_speech(archive, states)
    assert str(caught.value).startswith(f"{archive}, {NAME}: ")
    assert words in str(caught.value)


def _without(prefix: str) -> list[str]:
    return [row for row in rows_of(recordings()) if not row.startswith(prefix)]


BAD_ROWS = {
    "none for a recording": (_without("7_ben_4"), "small_states.csv, 7_ben_4: expected labels for every"),
    "no such recording": ([*_without("?"), "8_ben_1,Z,0,0,9,x"], "8_ben_1: expected labels of recordings in"),
    "too few": (_without("7_ben_4,A"), "expected 13 frames, as in the recording, but got labels for 5"),
    "too many": ([*_without("?"), "7_ben_4,Z,0,13,1,x"], "(row 62): expected 13 frames"),
    "a gap": (
        _without("7_ben_4,Z,1"),
        "(row 60): expected frames that begin at 2, but got 8 that begin at 5",
    ),
    "an overlap": (
        [*_without("7_ben_4"), "7_ben_4,Z,0,0,2,x", "7_ben_4,Z,0,1,12,x"],
        "expected frames that begin at 2, but got 12 that begin at 1",
    ),
    "of no length": ([*_without("7_ben_4"), "7_ben_4,Z,0,0,0,x"], "frames that begin at 0"),
    "no number": ([*_without("?"), "7_ben_4,Z,one,13,1,x"], "row 62: expected three whole numbers"),
    "a row cut short": ([*_without("?"), "7_ben_4,Z"], "row 62: expected three whole numbers"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_labels_that_do_not_fit_the_frames_are_refused_by_file_and_row(what: str, tmp_path: Path) -> None:
    rows, words = BAD_ROWS[what]
    archive, states = write(tmp_path, rows=rows)
    with pytest.raises(DataError) as caught:
        read_speech(archive, states)
    assert str(states) in str(caught.value)
    assert words in str(caught.value)


def test_files_that_are_missing_or_of_another_kind_are_named(tmp_path: Path) -> None:
    archive, states = write(tmp_path)
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_bytes(b"")
    for arguments, words in (
        ((missing, states), "missing: expected a zip of WAV files, but got no such file"),
        ((archive, missing), "missing: expected the CSV of states, but got no such file"),
        ((states, states), "expected a zip of WAV files, but got File is not a zip file"),
        ((empty, states), "expected a zip of WAV files"),
        ((archive, archive), "expected a CSV in UTF-8"),
        ((archive, empty), "but got none named file, phone"),
    ):
        with pytest.raises(DataError) as caught:
            read_speech(*arguments)
        assert words in str(caught.value)


def test_an_archive_that_was_altered_or_holds_no_recordings_is_refused(tmp_path: Path) -> None:
    archive, states = write(tmp_path)
    content = bytearray(archive.read_bytes())
    content[500] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"0_anna_0.wav: expected a whole file, but got Bad CRC"):
        read_speech(archive, states)

    write(tmp_path, {"readme.txt": b"hello"})
    with pytest.raises(DataError, match="expected WAV files in the zip, but got none"):
        read_speech(archive, states)

    write(tmp_path, {"hello.wav": wav(80)}, [])
    with pytest.raises(DataError, match=r"hello.wav: expected a name like 7_anna_12.wav, but got hello"):
        read_speech(archive, states)


def test_a_header_is_not_enough_to_be_read(tmp_path: Path) -> None:
    """The columns may stand in another order, and others beside them."""
    rows = [",".join(reversed(row.split(","))) for row in rows_of(recordings())]
    archive, states = write(tmp_path, rows=rows)
    states.write_text(states.read_text().replace(HEADER, ",".join(reversed(HEADER.split(",")))))
    assert len(read_speech(archive, states).recordings) == 20


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data are not on this machine")
def test_the_real_recordings_have_as_many_frames_as_labels() -> None:
    speech = read_speech(SHARED / "speech/fsdd/fsdd_train.zip", SHARED / "speech/fsdd/fsdd_train_states.csv")
    assert len(speech.recordings) == 1000
    assert len(speech.states) == 60
    assert sum(len(recording.labels) for recording in speech.recordings) == 40_617
