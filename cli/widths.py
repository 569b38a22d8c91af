"""How many values and channels a compressed cache keeps at each width, for people and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..trizone.segment import Widths

_GAP = "  "


def width_lines(layers: Sequence[Widths]) -> list[str]:
    """A line of totals, and a table with a line for each layer; none for no layers.

    Widths that no layer has are left out of the table.
    """
    if not layers:
        return []
    tokens = _total([layer.tokens for layer in layers])
    channels = _total([layer.channels for layer in layers])
    kept, kept_channels = (_share(counts) for counts in (tokens, channels))
    lines = [
        f"kept: {kept} of what was compressed, {kept_channels} of the channels of keys; of all "
        "heads so many tokens (V) and channels (K) have 16, 8, 4, 2 or 0 bits:"
    ]
    columns = [["layer", *(str(number) for number in range(len(layers))), "all"]]
    for name, total, rows in (
        ("V", tokens, [layer.tokens for layer in layers]),
        ("K", channels, [layer.channels for layer in layers]),
    ):
        for width in (width for width, count in total.items() if count):
            counts = [row[width] for row in rows]
            columns.append([f"{name} {width}", *(f"{count:,}" for count in [*counts, sum(counts)])])
    return lines + _table(columns)


def width_fields(layers: Sequence[Widths]) -> list[dict[str, Any]]:
    """A mapping for each layer, for JSON: bits, as text, to counts."""
    return [
        {
            "layer": number,
            "tokens": {str(width): count for width, count in layer.tokens.items()},
            "channels": {str(width): count for width, count in layer.channels.items()},
        }
        for number, layer in enumerate(layers)
    ]


def _total(rows: Sequence[dict[int, int]]) -> dict[int, int]:
    return {width: sum(row[width] for row in rows) for width in rows[0]}


def _share(counts: dict[int, int]) -> str:
    """The share that is kept at all."""
    total = sum(counts.values())
    return f"{100 * (total - counts[0]) / max(total, 1):.1f} %"


def _table(columns: Sequence[Sequence[str]]) -> list[str]:
    sizes = [max(map(len, column)) for column in columns]
    return [_GAP.join(cell.rjust(size) for cell, size in zip(row, sizes)) for row in zip(*columns)]
