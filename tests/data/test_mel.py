"""Tests of squall.data.mel against sums written out, and against sounds whose answer is known.

Faults planted by hand, each seen to fail a test: a window that begins with its frame · a Hann window · amplitude instead of
power · the decimal logarithm · filters of the next band · a hop of 11 ms · frames rounded down · half as
many bins.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from squall.data.mel import NUM_BANDS, fft_size, filters, log_mel, num_frames

RATE = 8000


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, 0.1, count).astype(np.float32)


def test_one_frame_is_the_sum_that_the_formulas_say() -> None:
    samples = noise(1600)
    frame, window, size = 7, 200, fft_size(200)
    start = frame * 80 + 40 - 100  # centred on the middle of its 10 ms
    n = np.arange(window)
    taken = samples[start : start + window].astype(float) * (
        0.54 - 0.46 * np.cos(2 * np.pi * n / (window - 1))
    )
    bins = np.arange(size // 2 + 1)
    spectrum = (taken * np.exp(-2j * np.pi * bins[:, None] * n / size)).sum(axis=1)
    power = (spectrum.real**2 + spectrum.imag**2) / size
    hertz = 700 * (np.exp(np.linspace(0, 1127.01 * np.log(1 + 4000 / 700), NUM_BANDS + 2) / 1127.01) - 1)
    expected = []
    for band in range(NUM_BANDS):
        total = 0.0
        for at, value in zip(bins * RATE / size, power, strict=True):
            total += value * np.interp(at, hertz[band : band + 3], [0.0, 1.0, 0.0])
        expected.append(np.log(total + 1e-10))

    np.testing.assert_allclose(log_mel(samples, RATE)[frame], expected, rtol=1e-4)


def test_bins_lie_less_than_half_the_narrowest_band_apart() -> None:
    assert fft_size(200) == 512


@pytest.mark.parametrize("band", [0, 5, 20, 39])
def test_a_tone_is_loudest_in_its_own_band(band: int) -> None:
    centre = filters(RATE, 8192)[band].argmax() * RATE / 8192
    tone = np.sin(2 * np.pi * centre * np.arange(4000) / RATE).astype(np.float32)
    assert (log_mel(tone, RATE)[5:-5].argmax(axis=1) == band).all()


def test_every_band_hears_something_and_neighbours_add_up_to_one() -> None:
    weights = filters(RATE, fft_size(200))
    assert (weights.max(axis=1) > 0).all()
    peaks = weights.argmax(axis=1)
    np.testing.assert_allclose(weights[:, peaks[0] + 1 : peaks[-1]].sum(axis=0), 1.0)


def test_a_click_is_heard_by_the_frames_whose_windows_hold_it() -> None:
    samples = np.zeros(1600, np.float32)
    samples[800] = 1.0  # the first sample of frame 10
    loud = np.flatnonzero(log_mel(samples, RATE).max(axis=1) > -20)
    assert loud.tolist() == [9, 10]


@pytest.mark.parametrize("count", [1, 79, 80, 81, 500])
def test_there_is_a_frame_for_each_ten_milliseconds_begun_and_beyond_both_ends_is_silence(count: int) -> None:
    samples = noise(count)
    features = log_mel(samples, RATE)
    assert features.shape == (num_frames(count, RATE), NUM_BANDS) == (int(np.ceil(count / 80)), NUM_BANDS)
    longer = log_mel(np.concatenate([samples, np.zeros(400, np.float32)]), RATE)
    np.testing.assert_array_equal(longer[: len(features)], features)


def test_silence_has_a_finite_logarithm() -> None:
    assert np.isfinite(log_mel(np.zeros(800, np.float32), RATE)).all()
