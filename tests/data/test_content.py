"""Tests of squall.data.content: opening, inflating and recognising files, whatever they are called.

Faults planted, each caught: the limit on inflating removed; gzip told by the name; a cut gzip read as far as it
goes; zero bytes allowed in text; only the first 64 KiB of a text checked; a multi-byte character across that
border refused; pipes opened; the name shortened in messages; text split at U+2028.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import squall.data.content as content_module
from squall.data.content import Kind, open_content, recognise, text_lines
from squall.errors import ConfigError, DataError
from tests.data.files import gzipped, idx_bytes, npz_bytes, write


def kind_of(file: Path) -> Kind:
    with open_content(file) as content:
        return recognise(content)


def lines_of(file: Path) -> list[str]:
    with open_content(file) as content:
        return text_lines(content)


def refused(file: Path) -> str:
    with pytest.raises(DataError) as caught:
        recognise_and_read(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def recognise_and_read(file: Path) -> None:
    with open_content(file) as content:
        recognise(content)
        text_lines(content)


@pytest.mark.parametrize("wrap", [bytes, gzipped])
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (idx_bytes(np.zeros((2, 2), np.uint8)), Kind.IDX),
        (npz_bytes(x=np.zeros(2)), Kind.NPZ),
        (b"1,2\n3,4\n", Kind.TABLE),
        (b"+1 3:1 4:2\n-1 3:0.5\n", Kind.LIBSVM),
        (b"1\n2\n3 1:4\n", Kind.LIBSVM),
        (b"-1 0:1 # index from 0\r\n", Kind.LIBSVM),
        (b"1 2:abc 3:1\n", Kind.LIBSVM),
        (b"when,x\n2020-01-01 10:30,5\n", Kind.TABLE),
        (b"1 2 3\n", Kind.TABLE),
    ],
)
def test_a_file_is_recognised_by_its_content(
    tmp_path: Path, data: bytes, kind: Kind, wrap: type[bytes]
) -> None:
    assert kind_of(write(tmp_path, wrap(data), "misleading.npz.gz")) is kind


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (gzipped(b""), "a gzip of nothing"),
        (b"\x93NUMPY\x01\0", r"single \.npy array"),
        (gzipped(gzipped(b"1,2\n")), "gzip within a gzip"),
        (b"RIFF\x10\0\0\0WAVE", "byte 5: .*0x00"),
        (b"abc \xe9t\xe9\n", "byte 4: expected UTF-8 text.*0xe9.*save it as UTF-8"),
        (b"1,2\n" * 20_000 + b"\xff\n", "byte 80000: .*0xff"),
        (b"1,2\n" * 20_000 + b"\0\n", "byte 80000: .*0x00"),
        ("1,é".encode()[:-1], "byte 2: .*0xc3"),
        (gzipped(b"1,2\n")[:-8] + bytes(8), "sound gzip stream, but got CRC"),
        (gzipped(b"1,2\n") + b"tail", "sound gzip stream"),
    ],
)
def test_what_is_no_data_file_is_refused_with_the_place(tmp_path: Path, data: bytes, message: str) -> None:
    file = write(tmp_path, data)
    with pytest.raises(DataError, match=message):
        recognise_and_read(file)
    assert refused(file).startswith(str(file))


def test_a_gzip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gzipped(b"1,2\n3,4\n" * 50)
    for length in range(2, len(whole)):
        assert "cut short" in refused(write(tmp_path, whole[:length]))


def test_a_cut_gzip_says_how_far_it_goes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(48, 58, 40_000).astype(np.uint8).tobytes()
    message = refused(write(tmp_path, gzipped(noise)[:-100]))
    assert int(message.split("after ")[1].split()[0]) > 30_000


def test_a_gzip_in_two_members_is_one_text(tmp_path: Path) -> None:
    assert lines_of(write(tmp_path, gzipped(b"1,2\n") + gzipped(b"3,4\n"))) == ["1,2", "3,4"]


def test_a_gzip_bomb_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_module, "_FREE_BYTES", 1 << 20)
    file = write(tmp_path, gzipped(b"1,2\n" * (1 << 20)))

    with open_content(file) as content:
        with pytest.raises(DataError, match="inflates to at most"):
            content.read_up_to()
        assert len(content.data) <= (2 << 20) + max(1 << 20, 200 * file.stat().st_size)


def test_a_text_is_cut_into_lines_at_newlines_only(tmp_path: Path) -> None:
    text = "\ufeff1,a\u2028b\r\n2,\u00a0c\x0b\n\n3,d\n \n\n"
    assert lines_of(write(tmp_path, text)) == ["1,a\u2028b", "2,\u00a0c\x0b", "", "3,d"]


def test_a_character_on_the_border_of_the_first_bytes_is_whole(tmp_path: Path) -> None:
    text = "1" * ((1 << 16) - 1) + "é,2\n"
    assert kind_of(write(tmp_path, text)) is Kind.TABLE


def test_a_missing_file_a_directory_and_a_pipe_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert "no such file" in refused(tmp_path / "missing")
    assert "a directory" in refused(tmp_path)
    assert "a pipe" in refused(tmp_path / "pipe")
    assert "or device" in refused(Path(os.devnull))
    assert "not a directory" in refused(write(tmp_path, b"x") / "below")
    assert "null" in refused(Path("zero\0byte"))
    assert "name too long" in refused(tmp_path / ("x" * 300))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path, b"1,2\n")
    monkeypatch.setattr("builtins.open", refuse)  # root may read every file, whatever its mode

    assert "permission denied" in refused(file)


def test_a_name_is_shown_whole_and_on_one_line(tmp_path: Path) -> None:
    assert r"two\nlines" in refused(tmp_path / "two\nlines")
    assert "x" * 200 in refused(tmp_path / ("x" * 200))


@pytest.mark.parametrize("wrong", [3, None, [b"x"]])
def test_what_is_no_path_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="expected a path"), open_content(wrong):  # type: ignore[arg-type]
        pass
