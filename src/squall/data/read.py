"""Read a data set from files: what kind they are is told by their content, and nothing is loaded by half."""

import os
from dataclasses import dataclass
from typing import TypeAlias

from squall.data.content import Content, Kind, open_content, recognise
from squall.data.idx import read_idx
from squall.data.libsvm import read_libsvm
from squall.data.npz import read_npz, read_npz_inputs, read_npz_targets
from squall.data.source import TensorSource
from squall.data.table import read_table, read_table_targets
from squall.data.values import Found, Values, to_inputs, to_targets
from squall.errors import ConfigError, DataError

Path: TypeAlias = str | os.PathLike[str]


def read(
    inputs: Path,
    targets: Path | None = None,
    classes: int | None = None,
    target_column: int | None = -1,
    *,
    part: str | None = None,
    width: int | None = None,
) -> TensorSource:
    """Read idx, CSV, npz or libsvm files, each as it is or as a gzip; file names play no part.

    Inputs become float32 of the file's own shape: (n, rows, columns) for images, (n, features) for tables.
    uint8 is taken for pixels and scaled to [0, 1]; other numbers stay as they are. Targets that are all
    whole numbers become int64 class labels, shape (n,); other targets float32.

    Args:
        inputs: the file with the inputs. CSV, npz and libsvm hold the targets too.
        targets: the file with the targets, row by row; None takes those of the first file, if it has some.
        classes: check that every target is a label in [0, classes). With 2, the -1 and +1 of a libsvm file
            become 0 and 1.
        target_column: the column of a CSV with the targets, if no `targets` are given; None if there is none.
        part: which arrays of an npz: "train", "test", "val", ...; None takes ``x`` and ``y`` (or ``images`` and
            ``labels``, ...), then those of "train".
        width: columns of a libsvm file's inputs, at least its largest index; None takes that index.
    Returns:
        a source of (inputs, targets), or of inputs alone if there are no targets.
    Raises:
        DataError: a file is missing, cut short, altered, of another kind, or holds what cannot be trained on;
            names the file and the row or byte. Raised before anything is trained, or allocated by a header.
        ConfigError: the arguments contradict themselves.

    >>> import pathlib, tempfile, numpy as np
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(folder.name) / "points.csv"
    >>> _ = file.write_text("width,height,kind\\n1.5,2,0\\n2.5,1,1\\n")
    >>> source = read(file, classes=2)
    >>> source.batch(np.array([1]))
    (tensor([[2.5000, 1.0000]]), tensor([1]))
    >>> read(file, classes=1)
    Traceback (most recent call last):
    squall.errors.DataError: ...points.csv, row 3: expected a class label in 0..0, but got 1. ...
    >>> folder.cleanup()
    """
    request = _Request(
        classes=classes,
        target_column=target_column if targets is None else None,
        part=part,
        width=width,
        is_alone=targets is None,
    )
    with open_content(inputs) as content:
        found = _read_inputs(content, request)
    labels = found.targets
    if targets is not None:
        with open_content(targets) as content:
            labels = _read_targets(content, request)
    return _source(found.inputs, labels, classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for: see `read`. `is_alone`: the first file has to bring the targets, if there are any."""

    classes: int | None
    target_column: int | None
    part: str | None
    width: int | None
    is_alone: bool

    def __post_init__(self) -> None:
        for name, value in (("classes", self.classes), ("width", self.width)):
            if value is not None and value < 1:
                raise ConfigError(subject="squall.data.read", expected=f"{name} >= 1", got=f"{name}={value}")

    def check(self, content: Content, kind: Kind) -> None:
        """Refuse what only another kind of file understands, rather than ignore it."""
        for name, value, own in (("part", self.part, Kind.NPZ), ("width", self.width, Kind.LIBSVM)):
            if value is not None and kind is not own:
                raise ConfigError(
                    subject=f"{content.name} with {name}={value!r}",
                    expected=f"an {own.value} file" if own is Kind.NPZ else f"a {own.value} file",
                    got=f"{kind.value}",
                    remedy=f"Leave {name} out.",
                )


def _read_inputs(content: Content, request: _Request) -> Found:
    kind = recognise(content)
    request.check(content, kind)
    match kind:
        case Kind.IDX:
            return Found(inputs=_examples(content, read_idx(content)))
        case Kind.NPZ:
            if request.is_alone:
                return read_npz(content, request.part)
            return Found(inputs=read_npz_inputs(content, request.part))
        case Kind.TABLE:
            return read_table(content, request.target_column)
        case Kind.LIBSVM:
            found = read_libsvm(content, request.width, signs_are_classes=request.classes == 2)
            return found if request.is_alone else Found(inputs=found.inputs)


def _read_targets(content: Content, request: _Request) -> Values:
    match recognise(content):
        case Kind.IDX:
            return read_idx(content)
        case Kind.NPZ:
            return read_npz_targets(content, request.part)
        case Kind.TABLE:
            return read_table_targets(content)
        case Kind.LIBSVM:
            raise content.refusal(
                expected="targets alone",
                got="a libsvm file, which holds inputs too",
                remedy="Give it as inputs: its labels come with it.",
            )


def _examples(content: Content, values: Values) -> Values:
    if values.array.ndim > 1:
        return values
    raise content.refusal(
        expected="inputs: images, or rows of numbers",
        got="an idx of single numbers, as labels are",
        remedy="Give the images first and the labels as targets.",
    )


def _source(inputs: Values, targets: Values | None, classes: int | None) -> TensorSource:
    if targets is None:
        if classes is not None:
            raise DataError(
                subject=inputs.file,
                expected=f"class labels, as classes={classes} was given",
                got="inputs alone",
                remedy="Give the file with the labels as targets.",
            )
        return TensorSource(to_inputs(inputs))
    if len(inputs.array) != len(targets.array):
        raise DataError(
            subject=targets.file,
            expected=f"{len(inputs.array)} targets, one for each example of {inputs.file}",
            got=str(len(targets.array)),
            remedy="Give two files that belong together.",
        )
    # Targets first: they are small, and what is wrong with them is found before inputs are converted.
    converted = to_targets(targets, classes)
    return TensorSource((to_inputs(inputs), converted))
