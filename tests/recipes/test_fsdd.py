"""Tests of squall.recipes.fsdd on recordings made here.

Faults planted by hand, each seen to fail a test: a recording learned from and tested on · the held-out speaker learned from ·
features scaled by those of the test part · a context of six · the path of the labels not taken.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import squall
from squall.cli.listing import recipe_lines
from squall.data.speech import read_speech
from squall.training.recipe import find
from tests.data.speech_files import write


def job(folder: Path, **settings: object) -> squall.Job:
    archive, _ = write(folder)
    told = {"data": archive, **settings}
    return find("fsdd", [(name, str(value)) for name, value in told.items()])


def labels_of(folder: Path, *names: str) -> list[int]:
    speech = read_speech(*write(folder))
    return [label for each in speech.recordings if each.name in names for label in each.labels.tolist()]


def test_an_input_is_eleven_frames_of_forty_bands_scaled_by_those_that_are_learned_from(
    tmp_path: Path,
) -> None:
    made = job(tmp_path)
    inputs, labels = made.train
    assert inputs.shape == (len(labels), 440)
    assert inputs.dtype == np.float32
    middle = inputs[:, 200:240]
    np.testing.assert_allclose(middle.mean(axis=0), 0.0, atol=1e-4)
    np.testing.assert_allclose(middle.std(axis=0), 1.0, atol=0.01)
    assert made.model()(torch.zeros(2, 440)).shape == (2, 3)  # type: ignore[operator]


def test_the_last_fifth_of_each_speakers_recordings_of_a_word_is_tested_on(tmp_path: Path) -> None:
    made = job(tmp_path)
    expected = labels_of(tmp_path, "0_anna_4", "0_ben_4", "7_anna_4", "7_ben_4")
    assert made.test[1].tolist() == expected
    every = sum(len(each.labels) for each in read_speech(*write(tmp_path)).recordings)
    assert len(made.train[1]) == every - len(expected)


def test_a_speaker_may_be_held_out_instead(tmp_path: Path) -> None:
    made = job(tmp_path, held_out="ben")
    names = [f"{word}_ben_{index}" for word in (0, 7) for index in range(5)]
    assert made.test[1].tolist() == labels_of(tmp_path, *names)
    assert len(made.train[1]) + len(made.test[1]) == sum(
        len(each.labels) for each in read_speech(*write(tmp_path)).recordings
    )


def test_context_layers_and_the_path_of_the_labels_are_settings(tmp_path: Path) -> None:
    archive, states = write(tmp_path)
    moved = states.rename(tmp_path / "labels.csv")
    settings = {"data": archive, "states": moved, "context": 1, "hidden": "(8,)", "epochs": 2}
    made = find("fsdd", [(name, str(value)) for name, value in settings.items()])
    shapes = [tuple(value.shape) for value in made.model().state_dict().values()]  # type: ignore[operator]
    assert shapes == [(8, 120), (8,), (3, 8), (3,)]
    assert made.epochs == 2


def test_it_trains_and_its_run_is_opened_again_with_the_same_data(tmp_path: Path) -> None:
    made = job(tmp_path, hidden="(8,)", epochs=1, batch_size=16)
    run = squall.fit(replace(made, cluster=squall.InProcess(), out=tmp_path / "run", progress=False))
    assert 0.0 <= run.metrics["test_accuracy"] <= 1.0
    assert squall.load(tmp_path / "run").predict(made.test[0]).shape == (len(made.test[1]), 3)


def test_without_the_recordings_it_says_how_to_name_them() -> None:
    with pytest.raises(squall.ConfigError, match=r"the path of the recordings.*--set data=fsdd_train.zip"):
        find("fsdd")


def test_a_path_without_a_file_and_a_speaker_who_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(squall.ConfigError, match=r"nowhere_states.csv: .* no such file"):
        find("fsdd", [("data", str(tmp_path / "nowhere.zip"))])
    with pytest.raises(squall.ConfigError, match=r"speakers anna, ben, but got held_out='eve'"):
        job(tmp_path, held_out="eve")


def test_it_is_listed() -> None:
    assert any(line.startswith("fsdd ") and "spoken digits" in line for line in recipe_lines())
