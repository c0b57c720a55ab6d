"""A plan as a picture: a lane for each partition, a row for each layer, and what crosses between them with its bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any

from squall.observe.units import human_bytes

_LABEL, _LANE, _MARGIN = 210, 200, 24
_BOX, _LINE, _GAP, _HEAD = 38, 14, 28, 128
_LEGEND = (
    "Box: what a partition computes of a layer, and how many parameters of it it owns. Bar: its share.",
    "Above a box: the bytes a step that it is sent, and by which partitions.",
    "⇅ as many bytes go back as gradients.   ↓ none go back.",
)
_COLOURS = ("#4c78a8", "#e0862c", "#3f9a57", "#b8527a", "#7a6bb0", "#8a6d4a", "#3b9aa6", "#9a9a34")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What one partition does of a layer.

    Attributes:
        text: which part, as in ``"0:8 of 16"``.
        part: of the layer's result, 0 to 1.
        parameter_bytes: of the layer that it owns.
    """

    text: str
    part: float
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What a layer on one partition is sent by another.

    Attributes:
        up, down: bytes a step of values, and of their gradients that go back.
    """

    sender: int
    receiver: int
    up: int
    down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer: its module, the ops in it, a box or None for each partition, and what crosses on the way to it."""

    name: str
    ops: str
    boxes: tuple[Box | None, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything that is drawn.

    Attributes:
        title, subtitle: a line each.
        heads: lines about each partition.
    """

    title: str
    subtitle: str
    heads: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "title": self.title,
            "subtitle": self.subtitle,
            "heads": [list(lines) for lines in self.heads],
            "rows": [
                {
                    "name": row.name,
                    "ops": row.ops,
                    "boxes": [box and [box.text, box.part, box.parameter_bytes] for box in row.boxes],
                    "edges": [[edge.sender, edge.receiver, edge.up, edge.down] for edge in row.edges],
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Picture":
        """What `to_json` gave."""
        rows = []
        for row in data["rows"]:
            boxes = tuple(
                box and Box(text=str(box[0]), part=float(box[1]), parameter_bytes=int(box[2]))
                for box in row["boxes"]
            )
            edges = tuple(Edge(sender=a, receiver=b, up=up, down=down) for a, b, up, down in row["edges"])
            rows.append(Row(name=str(row["name"]), ops=str(row["ops"]), boxes=boxes, edges=edges))
        heads = tuple(tuple(map(str, lines)) for lines in data["heads"])
        return cls(title=str(data["title"]), subtitle=str(data["subtitle"]), heads=heads, rows=tuple(rows))


def picture(drawn: Picture) -> str:
    """The picture as SVG."""
    y, parts = _HEAD, []
    for row in drawn.rows:
        incoming = _incoming(row)
        y += _GAP + _LINE * max((len(lines) for lines in incoming.values()), default=0)
        parts.append("".join(_row(row, y, incoming)))
        y += _BOX
    lanes = "".join(_lane(p, lines, y) for p, lines in enumerate(drawn.heads))
    width, height = _LABEL + _LANE * len(drawn.heads) + _MARGIN, y + 34 + 14 * len(_LEGEND)
    notes = [_text(_MARGIN, y + 32 + 14 * at, line, colour="#555") for at, line in enumerate(_LEGEND)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        f"{_text(_MARGIN, 28, drawn.title, size=15, weight='bold')}\n"
        f"{_text(_MARGIN, 44, drawn.subtitle, colour='#555')}\n{lanes}\n"
        f"{chr(10).join(parts)}\n{chr(10).join(notes)}\n</svg>\n"
    )


def _lane(p: int, lines: Sequence[str], bottom: int) -> str:
    x = _LABEL + _LANE * p
    tint = f'<rect x="{x + 4}" y="56" width="{_LANE - 8}" height="{bottom - 46}" rx="6" fill="{_colour(p)}" opacity="0.08"/>'
    head = _text(x + 14, 74, f"partition {p}", size=13, weight="bold", colour=_colour(p))
    rest = [_text(x + 14, 90 + 14 * at, line, colour="#333") for at, line in enumerate(lines)]
    return "".join([tint, head, *rest])


def _incoming(row: Row) -> dict[int, list[str]]:
    """For each receiver the lines about what it is sent; senders of the same bytes share one."""
    found: dict[int, dict[tuple[int, int], list[int]]] = {}
    for edge in row.edges:
        found.setdefault(edge.receiver, {}).setdefault((edge.up, edge.down), []).append(edge.sender)
    return {
        receiver: [
            f"{_bytes(up, down)} from {'each of ' if len(senders) > 1 else ''}{', '.join(map(str, senders))}"
            for (up, down), senders in groups.items()
        ]
        for receiver, groups in found.items()
    }


def _bytes(up: int, down: int) -> str:
    if down == up:
        return f"⇅ {human_bytes(up)}"
    return f"↓ {human_bytes(up)}" + (f" ↑ {human_bytes(down)}" if down else "")


def _row(row: Row, y: int, incoming: Mapping[int, Sequence[str]]) -> Iterator[str]:
    lines = max((len(each) for each in incoming.values()), default=0)
    top = y - _GAP - _LINE * lines + 2
    for edge in row.edges:
        yield _arrow(edge, top, y - 1)
    for receiver, texts in incoming.items():
        for at, text in enumerate(texts):
            at_y = y - 7 - _LINE * (len(texts) - 1 - at)
            yield _text(_LABEL + _LANE * receiver + _LANE // 2, at_y, text, anchor="middle", is_haloed=True)
    yield _text(_MARGIN, y + 17, _fitted(row.name or "the model itself"), weight="bold", colour="#222")
    yield _text(_MARGIN, y + 31, _fitted(row.ops), colour="#666", size=10)
    for p, box in enumerate(row.boxes):
        if box is not None:
            yield _box(p, box, y)


def _box(p: int, box: Box, y: int) -> str:
    x, width, colour = _LABEL + _LANE * p + 12, _LANE - 24, _colour(p)
    bar = max(2, round(width * box.part))
    owns = f"{human_bytes(box.parameter_bytes)} of parameters" if box.parameter_bytes else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX}" rx="4" fill="white" stroke="{colour}"/>'
        f'<rect x="{x}" y="{y + _BOX - 4}" width="{bar}" height="4" fill="{colour}"/>'
        f"{_text(x + 8, y + 15, box.text)}{_text(x + 8, y + 29, owns, colour='#666', size=10)}"
    )


def _arrow(edge: Edge, top: int, bottom: int) -> str:
    x1, x2 = (_LABEL + _LANE * p + _LANE // 2 for p in (edge.sender, edge.receiver))
    width = 0.8 + 0.5 * log10(max(edge.up, 1))
    path = f"M{x1},{top} C{x1},{bottom} {x2},{top} {x2},{bottom - 6}"
    colour = _colour(edge.sender)
    head = f"M{x2 - 4},{bottom - 7} L{x2 + 4},{bottom - 7} L{x2},{bottom} Z"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:.1f}" opacity="0.45"/>'
        f'<path d="{head}" fill="{colour}" opacity="0.7"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    weight: str = "normal",
    colour: str = "#000",
    anchor: str = "start",
    is_haloed: bool = False,
) -> str:
    halo = (
        ' stroke="white" stroke-width="4" paint-order="stroke" stroke-linejoin="round"' if is_haloed else ""
    )
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}"{halo}>{escape(text)}</text>'
    )


def _fitted(text: str) -> str:
    """As much of a text as fits into the column of labels."""
    most = (_LABEL - _MARGIN) // 7
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _colour(p: int) -> str:
    return _COLOURS[p % len(_COLOURS)]
