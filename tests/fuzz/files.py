"""One function for everything that decodes what lies on disk, or is typed: any bytes are taken, or refused by the error of their kind.

Where a checksum stands before the decoder it is made to fit, so that what lies behind it is reached.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

import squall
from squall.errors import MISFITS, ConfigError, CorruptError, RemoteProtocolError
from squall.faults import parse
from squall.loop.door import served
from squall.loop.line import _layout, rule_of
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.observe.ledger import _HEADER, LEDGER_DTYPE, read_ledger
from squall.observe.metrics import read_history
from squall.partition import plan as numbered
from squall.partition.model_plan import Plan
from squall.rules.apply import SliceState
from squall.shard.books import SliceBook
from squall.shard.commits import HEADS, LogHead, RefuseCommit, decoded
from squall.shard.first import first_states
from squall.shard.frames import Frames, write_frame
from squall.shard.recovery import recover
from squall.shard.snapshot import Place, read_snapshot, write_snapshot
from squall.shard.store import read_slices, shard_file, write_slices
from squall.training.checkpoint import MANIFEST, finish_checkpoint, read_checkpoint, verify_checkpoint
from squall.training.first import trained
from squall.training.prepare import first_books
from squall.wire.connection import CODEC
from tests.fuzz.examples import example

FOLDER = tempfile.TemporaryDirectory(prefix="squall-fuzz-")
HERE = Path(FOLDER.name)

MODEL = nn.Linear(3, 2)
LAYOUT = Layout.balanced(ParameterSpace.of(MODEL), num_shards=1)
RULE = squall.Adagrad(learning_rate=0.1)
PLACE = Place(folder=HERE / "shard", shard=0, schema=LAYOUT.space.schema_hash)


def fresh() -> tuple[list[SliceState], list[SliceBook]]:
    states = first_states(LAYOUT, LAYOUT.slices, RULE, trained(MODEL).__getitem__)
    return states, first_books(LAYOUT)


def written(name: str, data: bytes) -> Path:
    path = HERE / name
    path.write_bytes(data)
    return path


# Snapshots and logs -----------------------------------------------------------------------------------------


def frames(data: bytes) -> object:
    """A reader of frames yields what is whole, and says why it stopped."""
    path = Frames(written("frames", data))
    return [decoded(head) for head, _ in path], path.damage


def with_head(source: list[tuple[bytes, bytes]], data: bytes, path: Path) -> None:
    """A file of frames, one of which has another head, and a checksum that fits."""
    at = data[0] % len(source) if data else 0
    with path.open("wb") as file:
        for number, (head, payload) in enumerate(source):
            write_frame(file.fileno(), data[1:] if number == at else head, [memoryview(payload)])


def snapshot(data: bytes) -> object:
    """A snapshot with a strange head is no snapshot."""
    with_head(SNAPSHOT, data, PLACE.path(2, "snapshot"))
    try:
        return read_snapshot(PLACE, 2, fresh()[0])
    except CorruptError as error:
        return error


def log(data: bytes) -> object:
    """What a log has after a strange head is passed over."""
    place = Place(folder=HERE / "logs", shard=0, schema=PLACE.schema)
    with_head(LOG, data, place.path(1, "log"))
    try:
        return recover(place, *fresh(), RULE)
    except CorruptError as error:
        return error


# Checkpoints ------------------------------------------------------------------------------------------------


def manifest(data: bytes) -> object:
    """A manifest that is altered and sealed anew: the checkpoint is read, or is corrupt."""
    try:
        inner = json.loads(data)
        seal = hashlib.sha256(json.dumps(inner, indent=1).encode()).hexdigest()
        data = json.dumps({"sha256": seal, "manifest": inner}).encode()
    except (ValueError, RecursionError):
        pass
    (HERE / "checkpoint" / MANIFEST).write_bytes(data)
    found = []
    for read in (read_checkpoint, verify_checkpoint):
        try:
            found.append(read(HERE / "checkpoint"))
        except CorruptError as error:
            found.append(error)
    return found


def slices(data: bytes) -> object:
    """A shard's file in a checkpoint."""
    try:
        return read_slices(written("slices", data), LAYOUT.slices)
    except CorruptError as error:
        return error


# Plans, faults, ledgers, histories ----------------------------------------------------------------------------


def plan(data: bytes) -> object:
    """`squall.Plan.load`."""
    try:
        return str(Plan.load(written("plan", data)))
    except (CorruptError, ConfigError) as error:
        return error


def plan_of_a_graph(data: bytes) -> object:
    """The same by numbers; who reads it knows these errors."""
    try:
        return numbered.Plan.from_json(data.decode(errors="replace"))
    except (ConfigError, *MISFITS) as error:
        return error


def faults(data: bytes) -> object:
    """The language of faults, as typed."""
    try:
        return parse(data.decode(errors="replace"))
    except ConfigError as error:
        return error


def ledger(data: bytes) -> object:
    """A ledger's file."""
    (HERE / "ledger").mkdir(exist_ok=True)
    written("ledger/shard0.ledger", data)
    try:
        return read_ledger(HERE / "ledger", "shard0.ledger")
    except CorruptError as error:
        return error


def history(data: bytes) -> object:
    """`metrics.jsonl`."""
    try:
        return read_history(written("metrics.jsonl", data))
    except CorruptError as error:
        return error


def door_told(data: bytes) -> object:
    """What a loop makes of what a door says is served."""
    try:
        told = CODEC.decode(data)
        return (_layout(told), rule_of(told)) if isinstance(told, type(SERVED)) else None
    except RemoteProtocolError as error:
        return error


# Seeds ------------------------------------------------------------------------------------------------------


def _frames_of(path: Path) -> list[tuple[bytes, bytes]]:
    return [(head, bytes(payload)) for head, payload in Frames(path)]


def _prepare() -> None:
    for name in ("shard", "logs", "checkpoint"):
        (HERE / name).mkdir()
    write_snapshot(PLACE, 1, *fresh(), 0)
    write_slices(HERE / "checkpoint" / shard_file(0), *fresh())
    finish_checkpoint(
        HERE / "checkpoint",
        layout=LAYOUT,
        buffers={"mean": torch.zeros(1)},
        minibatches=3,
        time_s=1.0,
        identity={"seed": 0},
        starts=0,
    )


_prepare()
SNAPSHOT = _frames_of(PLACE.path(1, "snapshot"))
HEAD = LogHead(format=1, shard=0, schema=PLACE.schema, incarnation=0, begin=0)
REFUSED = RefuseCommit(number=1, block=example(squall.blocks.Block))
LOG = [(HEADS.encode(noun), b"") for noun in (HEAD, REFUSED, REFUSED)]
SERVED = served(LAYOUT, RULE.describe(), ["127.0.0.1:1"], life=1)
MANIFEST_TEXT = json.dumps(json.loads((HERE / "checkpoint" / MANIFEST).read_text())["manifest"]).encode()
_PLAN = squall.plan(MODEL, torch.zeros(4, 3), partitions=2, how="vertical")
_NUMBERED = numbered.Plan(partitions=2, schema_hash="0", holdings=(((None, None), None),), staged={})

FILES: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "frames": (frames, [PLACE.path(1, "snapshot").read_bytes()]),
    "snapshot": (snapshot, [bytes([at]) + head for at, (head, _) in enumerate(SNAPSHOT)]),
    "log": (log, [bytes([at]) + head for at, (head, _) in enumerate(LOG)]),
    "manifest": (manifest, [MANIFEST_TEXT]),
    "slices": (slices, [(HERE / "checkpoint" / shard_file(0)).read_bytes(), save({"a": torch.zeros(2)})]),
    "plan": (plan, [json.dumps(_PLAN.to_json()).encode()]),
    "plan_of_a_graph": (plan_of_a_graph, [json.dumps(_NUMBERED.to_json()).encode()]),
    "faults": (
        faults,
        [b"drop:push.reply=0.05;pause:replica2,3s@step=20", b"kill:replica1,restart=1@p=0.01"],
    ),
    "ledger": (ledger, [_HEADER + bytes(LEDGER_DTYPE.itemsize)]),
    "history": (history, [b'{"event": "Progress", "time_s": 1.5}\n{"a": [1, null]}\n']),
    "door_told": (door_told, [CODEC.encode(SERVED)]),
}
