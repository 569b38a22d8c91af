"""Per cent by depth and length: as a table in colours for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench.axes import context_word, shorten
from .bench.plot import write_figure

# From 0 to 100 % in equal steps, of the 256 colours of a terminal: dark to bright, so that they are
# told apart without their hue. White letters are read on the first five, black ones on the others.
_SCALE = (53, 54, 60, 24, 30, 36, 71, 113, 185, 227)
_WHITE, _BLACK, _DARK = 231, 16, 5
_CELL = 6  # columns of a terminal

_ACROSS, _FONT = 3, 9.0  # panels in a row, points
_PANEL, _LEFT, _RIGHT, _TOP, _ROW = 3.2, 0.88, 0.75, 0.7, 0.34  # inches
_HEAD, _FOOT = 0.4, 0.6  # inches above and below a panel
_TITLE = 48  # characters of a panel's title


@dataclass(frozen=True)
class Heatmap:
    """One format's shares in per cent: shares[i][j] at depths[i] (0 ... 100) and lengths[j] tokens.

    `note` is said of all of them, behind the name.
    """

    name: str
    lengths: Sequence[int]
    depths: Sequence[float]
    shares: Sequence[Sequence[float]]
    note: str = ""


def draw(heatmap: Heatmap, colour: bool = False) -> str:
    """A table of a row a depth and a column a length, with means, without a last line break."""
    heads = [f"{context_word(length):>{_CELL}}" for length in heatmap.lengths]
    lines = [
        f"{heatmap.name}  {heatmap.note}".rstrip(),
        f"{'depth':<6}{''.join(heads)}  {'mean':>5}",
    ]
    for depth, row in zip(heatmap.depths, heatmap.shares):
        lines.append(_line(f"{depth:.0f} %", row, colour))
    lines.append(_line("mean", [_mean(column) for column in zip(*heatmap.shares)], colour))
    return "\n".join(lines)


def _line(head: str, shares: Sequence[float], colour: bool) -> str:
    cells = "".join(_cell(share, colour) for share in shares)
    return f"{head:<6}{cells}  {_mean(shares):>5.0f}"


def _cell(share: float, colour: bool) -> str:
    text = f"{share:>{_CELL - 1}.0f} " if colour else f"{share:>{_CELL}.0f}"
    if not colour:
        return text
    step = min(int(share / 100 * len(_SCALE)), len(_SCALE) - 1)
    letters = _WHITE if step < _DARK else _BLACK
    return f"\x1b[38;5;{letters};48;5;{_SCALE[step]}m{text}\x1b[0m"


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


def write_heatmaps(path: Path, heatmaps: Sequence[Heatmap], title: str, subtitle: str) -> None:
    """Draw a panel for each as PNG or SVG, by the ending of `path`; all have one scale of colours.

    Equal input gives an equal file. Raises UsageError where matplotlib does not load, StorageError
    where the file cannot be written. `bench.plot.check_plot` tells before.
    """
    write_figure(path, lambda figure: _draw_panels(figure, heatmaps, title, subtitle))


def _draw_panels(figure: Any, heatmaps: Sequence[Heatmap], title: str, subtitle: str) -> None:
    across = min(len(heatmaps), _ACROSS)
    rows = -(-len(heatmaps) // across)
    tall = max((len(one.depths) for one in heatmaps), default=1)
    panel = max(_ROW * tall, 1.2)
    width = max(across, 2) * (_LEFT + _PANEL) + _RIGHT  # two at least, for the words above
    height = _TOP + rows * (_HEAD + panel + _FOOT)
    figure.set_size_inches(width, height)

    def text(up: float, words: str, **look: Any) -> None:
        figure.text(0.18 / width, up / height, shorten(words, 150), parse_math=False, **look)

    text(height - 0.34, title, size=_FONT + 4, weight="bold")
    text(height - 0.6, subtitle, color="#666666")
    shown = None
    for index, one in enumerate(heatmaps):
        row, column = divmod(index, across)
        left = _LEFT + column * (_LEFT + _PANEL)
        bottom = height - _TOP - row * (_HEAD + panel + _FOOT) - _HEAD - panel
        box = (left / width, bottom / height, _PANEL / width, panel / height)
        shown = _draw_panel(figure.add_axes(box), one)
    if shown is not None:
        left, bottom = across * (_LEFT + _PANEL) + 0.15, height - _TOP - _HEAD - panel
        box = (left / width, bottom / height, 0.12 / width, panel / height)
        beside = figure.add_axes(box)
        scale = figure.colorbar(shown, cax=beside, ticks=[0, 50, 100])
        scale.outline.set_visible(False)


def _draw_panel(panel: Any, heatmap: Heatmap) -> Any:
    shown = panel.imshow(
        [list(row) for row in heatmap.shares], vmin=0, vmax=100, cmap="viridis", aspect="auto"
    )
    panel.set_title(
        f"{shorten(heatmap.name, _TITLE - len(heatmap.note))}  {heatmap.note}",
        loc="left", size=_FONT, weight="bold", parse_math=False,
    )  # fmt: skip
    panel.set_xticks(range(len(heatmap.lengths)), map(context_word, heatmap.lengths))
    panel.set_yticks(range(len(heatmap.depths)), [f"{depth:.0f} %" for depth in heatmap.depths])
    panel.tick_params(length=0)
    panel.set_xlabel("length, tokens", color="#555555")
    panel.set_ylabel("depth", color="#555555")
    for spine in panel.spines.values():
        spine.set_visible(False)
    for i, row in enumerate(heatmap.shares):
        for j, share in enumerate(row):
            colour = "white" if share < 60 else "black"
            panel.text(j, i, f"{share:.0f}", ha="center", va="center", color=colour)
    return shown
