"""Tests of squall.observe.units at the edges where a unit or a digit changes.

Faults planted here by hand, each seen to fail a test: 1,000 instead of 999.5 as the edge of a unit · seconds rounded
after the choice of unit · 10 instead of 9.95 as the edge of `human_rate` · line ends kept by `one_line`.
"""

import pytest

from squall.observe.units import human_bytes, human_rate, human_seconds, one_line


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1234, "1.23 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (4e18, "4000 PB"),
        (float("inf"), "inf B"),
    ],
)
def test_bytes_have_three_digits_and_the_largest_fitting_unit(size: float, words: str) -> None:
    assert human_bytes(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (86_399.7, "1 d 0 h"),
        (float("inf"), "an unknown time"),
    ],
)
def test_times_have_the_two_units_that_matter(seconds: float, words: str) -> None:
    assert human_seconds(seconds) == words


@pytest.mark.parametrize(("rate", "words"), [(0, "0.0"), (9.94, "9.9"), (9.96, "10"), (1234.5, "1,234")])
def test_rates_lose_their_fraction_from_ten_on(rate: float, words: str) -> None:
    assert human_rate(rate) == words


def test_one_line_has_no_line_end_no_escape_and_no_half_character() -> None:
    assert one_line("a\r\nb\x1b[2J\x07 c\udc80") == "a b [2J c"
