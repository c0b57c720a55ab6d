"""Numbers and words as people read them: bytes, seconds and rates with their unit, one line of text."""

import math

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def human_bytes(size: float) -> str:
    """Say a number of bytes with three digits and a decimal prefix.

    >>> human_bytes(999), human_bytes(41_943_040), human_bytes(999_999)
    ('999 B', '41.9 MB', '1.00 MB')
    """
    if not math.isfinite(size):
        return f"{size} B"
    power = 0
    # From 999.5 on three digits would round up to 1000: the next unit says it better.
    while abs(size) >= 999.5 and power < len(_SIZES) - 1:
        size, power = size / 1000, power + 1
    if power == 0 or abs(size) >= 99.95:
        return f"{size:.0f} {_SIZES[power]}"
    return f"{size:.1f} {_SIZES[power]}" if abs(size) >= 9.995 else f"{size:.2f} {_SIZES[power]}"


def human_seconds(seconds: float) -> str:
    """Say a time with the two units that matter.

    >>> human_seconds(0.25), human_seconds(59.96), human_seconds(3725), human_seconds(200_000)
    ('0.2 s', '1 min 00 s', '1 h 02 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "an unknown time"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def human_rate(rate: float) -> str:
    """Say how many a second: whole numbers from ten on, else one digit behind the point.

    >>> human_rate(12345.6), human_rate(3.14159)
    ('12,346', '3.1')
    """
    return f"{rate:,.0f}" if abs(rate) >= 9.95 else f"{rate:.1f}"


def one_line(words: str) -> str:
    """Words from elsewhere as one harmless line: what cannot be printed (line ends, escapes) becomes a blank.

    >>> one_line("ValueError:\\n  \\x1b[31mred")
    'ValueError: [31mred'
    """
    return " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())
