"""Log-mel features of speech, in NumPy alone: what a filter bank hears in each hundredth of a second."""

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 0.025
HOP_S = 0.010
NUM_BANDS = 40
_LEAST_POWER = 1e-10  # what silence is taken for, so that its logarithm is finite


def num_frames(num_samples: int, rate: int) -> int:
    """Frames of so many samples: one for each 10 ms begun.

    >>> num_frames(8000, 8000), num_frames(8001, 8000)
    (100, 101)
    """
    hop = round(HOP_S * rate)
    return -(-num_samples // hop)


def log_mel(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """The logarithm of the power in each of 40 mel bands, every 10 ms, through a Hamming window of 25 ms.

    The window of frame t is centred on the 10 ms that begin at t x 10 ms; beyond both ends there is silence.

    Args:
        samples: shape (N,), float32, full scale is 1.
        rate: samples a second [Hz].
    Returns:
        shape (ceil(N / hop), 40), float32.

    >>> log_mel(np.zeros(800, np.float32), 8000).shape
    (10, 40)
    """
    window, hop = round(WINDOW_S * rate), round(HOP_S * rate)
    frames = num_frames(len(samples), rate)
    before = (window - hop) // 2
    padded = np.zeros((frames - 1) * hop + window, np.float32)
    kept = samples[: len(padded) - before]
    padded[before : before + len(kept)] = kept
    cut = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    size = fft_size(window)
    power = np.abs(np.fft.rfft(cut * np.hamming(window), n=size)) ** 2 / size
    mel: NDArray[np.float32] = np.log(power @ filters(rate, size).T + _LEAST_POWER).astype(np.float32)
    return mel


def fft_size(window: int) -> int:
    """Twice the next power of two, so that the lowest bands, narrower than the rest, have bins of their own."""
    return 2 << (window - 1).bit_length()


def filters(rate: int, size: int) -> NDArray[np.float64]:
    """Triangles that overlap by half, evenly spaced in mel from 0 to half the rate.

    Returns:
        shape (40, size / 2 + 1): weight of each bin of the spectrum in each band.
    """
    top = _to_mel(rate / 2)
    edges = _to_hertz(np.linspace(0.0, top, NUM_BANDS + 2))
    bins = np.arange(size // 2 + 1) * rate / size
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    weights: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return weights


def _to_mel(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def _to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    hertz: NDArray[np.float64] = 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return hertz
