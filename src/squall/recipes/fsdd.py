"""A small network tells which state of which phone each hundredth of a second of spoken digits belongs to.

The data are not part of Squall: ``--set data=fsdd_train.zip`` says where the recordings lie, the Free Spoken Digit
Dataset (8 kHz, CC BY-SA 4.0), and ``--set states=...`` where the labels of their frames lie, if not beside them.
"""

from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from torch import nn

import squall
from squall.data.mel import NUM_BANDS
from squall.data.speech import Recording, read_speech, with_context
from squall.errors import ConfigError

BATCH_SIZE = 64
HELD_OUT_SHARE = 5
"""Of the recordings of one word by one speaker, the last of so many are tested on."""


def fsdd(
    data: str = "",
    states: str = "",
    context: int = 5,
    hidden: tuple[int, ...] = (256, 256),
    held_out: str = "",
) -> squall.Job:
    """Frames of speech, each with its neighbours, to the states of a hidden Markov model.

    With a context of five frames on each side and 40 mel bands an input has 440 numbers, as the first layer of the
    speech model of Dean et al. (section 5) has 11 frames.

    Args:
        data: a zip of WAV files.
        states: a CSV of labels; by default the file beside `data` that is named like it, with ``_states.csv``.
        context: frames on each side.
        hidden: units of the hidden layers.
        held_out: a speaker to test on; by default the last fifth of each speaker's recordings of each word.
    """
    if not data:
        raise ConfigError(
            subject="the recipe fsdd",
            expected="the path of the recordings, a zip of WAV files",
            got="none",
            remedy="Say --set data=fsdd_train.zip; its frame labels lie beside it in fsdd_train_states.csv, or say --set states=FILE.",
        )
    speech = read_speech(data, states or Path(data).with_suffix("").as_posix() + "_states.csv")
    train, test = _split(speech.recordings, held_out)
    every = np.concatenate([recording.features for recording in train])
    mean, spread = every.mean(axis=0), every.std(axis=0) + 1e-3

    def examples(recordings: list[Recording]) -> tuple[np.ndarray, np.ndarray]:
        inputs = [with_context((each.features - mean) / spread, context) for each in recordings]
        return np.concatenate(inputs), np.concatenate([each.labels for each in recordings])

    sizes = ((2 * context + 1) * NUM_BANDS, *hidden, len(speech.states))
    return squall.Job(
        lambda: network(sizes),
        examples(train),
        test=examples(test),
        strategy=squall.Downpour(warm_start=200, rule=squall.Adagrad(learning_rate=0.02)),
        replicas=2,
        shards=2,
        batch_size=BATCH_SIZE,
        epochs=5,
        threads=1,
    )


def network(sizes: tuple[int, ...]) -> nn.Module:
    """Layers of these sizes, inputs first, with rectifiers between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _split(recordings: tuple[Recording, ...], held_out: str) -> tuple[list[Recording], list[Recording]]:
    """What is learned from and what is tested on; no recording is in both."""
    train: list[Recording] = []
    test: list[Recording] = []
    for _, group in groupby(recordings, key=lambda recording: recording.word):
        by_index = sorted(group, key=lambda recording: recording.index)
        if held_out:
            (test if by_index[0].speaker == held_out else train).extend(by_index)
        else:
            first = len(by_index) - len(by_index) // HELD_OUT_SHARE
            train += by_index[:first]
            test += by_index[first:]
    if not train or not test:
        speakers = sorted({recording.speaker for recording in recordings})
        raise ConfigError(
            subject="the recipe fsdd",
            expected=f"recordings to learn from and others to test on, of the speakers {', '.join(speakers)}",
            got=f"held_out={held_out!r}",
            remedy=f"Name one of several speakers, or give at least {HELD_OUT_SHARE} recordings of a word.",
        )
    return train, test
