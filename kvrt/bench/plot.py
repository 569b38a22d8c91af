"""The picture of a scan: cache bytes, peak bytes and decode time against context."""

import importlib.util
import io
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..paths import NOT_REPLACEABLE, atomic_write, is_replaceable
from .axes import (
    bytes_ticks,
    context_place,
    context_ticks,
    context_word,
    letter,
    round_ticks,
    shorten,
    spread,
    time_unit,
)
from .fit import Line

_ENDINGS = (".png", ".svg")
_INSTALL = "python -m pip install 'kvrt[plot]'"

# Distinct for the colour-blind (after Okabe and Ito; Tol for the later ones) and dark enough for
# text on white; from the eighth on lines are dashed, for no twelve colours are safe by themselves.
_COLOURS = (
    "#262626", "#0072B2", "#C44E00", "#008060", "#B8568F", "#A67400", "#3B93C9",
    "#882255", "#332288", "#7A7A1F", "#AA3344", "#44776B",
)  # fmt: skip
_SOLID = 7
_MARKERS = "osD^v<>"

_WIDTH, _HEIGHT, _DPI = 11.5, 5.0, 140  # inches; 1610 x 700 pixels
_FONT = 9.0  # points
_SHORT = 12  # characters; longer names are a letter in the panels and written out below them
_LONG = 72  # characters of a name written out
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": _FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "svg.hashsalt": "kvrt",  # names inside the file are random without it
}


@dataclass(frozen=True)
class Series:
    """What was measured of one format; the sequences are as long as `contexts`, in tokens.

    A number that was not measured is None. `line` is the fit of decode_us against the context.
    """

    name: str
    contexts: Sequence[int]
    cache_bytes: Sequence[float]
    peak_bytes: Sequence[float | None]
    decode_us: Sequence[float | None]
    line: Line | None


def measured(contexts: Sequence[int], numbers: Sequence[float | None]) -> list[tuple[int, float]]:
    """The (context, number) pairs that exist, by context."""
    pairs = zip(contexts, numbers)
    return sorted((at, y) for at, y in pairs if y is not None and math.isfinite(y))


def check_plot(path: Path) -> None:
    """Raise UsageError unless `write_plot` can write a picture to `path`.

    Does not import matplotlib, which would count in a peak of resident memory measured later.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise UsageError(f"--plot {path}: expected a name that ends in .png or .svg")
    if path.is_dir():
        raise UsageError(f"--plot {path}: is a folder, expected the name of a file")
    if not is_replaceable(path):
        raise UsageError(f"--plot {path}: {NOT_REPLACEABLE}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--plot {path}: the folder {path.parent} is not writable")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib, which is not installed: {_INSTALL}")


def write_plot(path: Path, series: Sequence[Series], title: str, subtitle: str) -> None:
    """Draw the series and write them as PNG or SVG, by the ending of `path`.

    Raises what `write_figure` raises.
    """
    write_figure(path, lambda figure: _Picture(figure, series).draw(title, subtitle))


def write_figure(path: Path, draw: Callable[[Any], None]) -> None:
    """Write what `draw` puts on a matplotlib Figure as PNG or SVG, by the ending of `path`.

    Equal drawings give an equal file, whatever style the user has set up. Raises UsageError where
    matplotlib does not load, StorageError where the file cannot be written.
    """
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"--plot: matplotlib does not load ({reason}): {_INSTALL}") from error
    ending = path.suffix.lower()[1:]
    picture = io.BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # A name in letters that the font lacks is drawn with boxes; that is no news to anybody.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure(dpi=_DPI)
        FigureCanvasAgg(figure)  # measures texts; not pyplot, so nothing is left behind
        draw(figure)
        unnamed = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(picture, format=ending, dpi=_DPI, metadata=unnamed)
    atomic_write(path, picture.getvalue())


@dataclass(frozen=True)
class _Axis:
    """A vertical axis: `share` of a number is how far up it stands, 0 ... 1."""

    share: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


_MakeAxis = Callable[[Sequence[float]], _Axis]


def _bytes_axis(numbers: Sequence[float]) -> _Axis:
    low, high = math.log2(min(numbers)), math.log2(max(numbers))
    room = max(0.06 * (high - low), 0.1)
    low, high = low - room, high + room

    def share(count: float) -> float:
        return (math.log2(count) - low) / (high - low)

    return _Axis(share, bytes_ticks(2**low, 2**high, 8))


def _time_axis(numbers: Sequence[float]) -> _Axis:
    top = max(max(numbers), 1e-9) * 1.06
    unit, name = time_unit(top)
    ticks = [(tick * unit, f"{tick:g} {name}") for tick in round_ticks(0.0, top / unit, 8)]
    return _Axis(lambda time: time / top, ticks)


class _Picture:
    """One figure: three panels side by side, all on axes from 0 to 1 that are ticked by hand."""

    def __init__(self, figure: Any, series: Sequence[Series]) -> None:
        self.figure, self.series = figure, series
        self.long = [index for index, one in enumerate(series) if len(one.name) > _SHORT]
        self.labels = [shorten(one.name, _SHORT) for one in series]
        for rank, index in enumerate(self.long):
            self.labels[index] = letter(rank)
        self.key_rows = (len(self.long) + 1) // 2
        self.height = _HEIGHT + 0.19 * self.key_rows
        figure.set_size_inches(_WIDTH, self.height)
        self.contexts = sorted({context for one in series for context in one.contexts})
        self.least = next((context for context in self.contexts if context > 0), 1)
        places = [context_place(context, self.least) for context in self.contexts] or [0.0]
        room = max(0.03 * (places[-1] - places[0]), 0.1)
        self.left, self.right = places[0] - room, places[-1] + room

    def draw(self, title: str, subtitle: str) -> None:
        self._text(0.18, self.height - 0.32, title, size=_FONT + 4, weight="bold")
        self._text(0.18, self.height - 0.58, subtitle, color="#666666")
        label = max((self._width(text) for text in self.labels), default=0.0) + 0.28
        ticks = 0.78  # inches left of a panel
        width = (_WIDTH - 0.1 - 3 * (ticks + label)) / 3
        below = 0.62 + 0.19 * self.key_rows
        height = self.height - below - 1.12
        parts: tuple[tuple[str, list[Sequence[float | None]], _MakeAxis], ...] = (
            ("KV cache", [one.cache_bytes for one in self.series], _bytes_axis),
            ("Peak memory", [one.peak_bytes for one in self.series], _bytes_axis),
            ("Decode time per token", [one.decode_us for one in self.series], _time_axis),
        )
        for index, (name, numbers, make_axis) in enumerate(parts):
            left = ticks + index * (ticks + width + label)
            box = (left / _WIDTH, below / self.height, width / _WIDTH, height / self.height)
            self._panel(self.figure.add_axes(box), name, numbers, make_axis, height)
        self._key()

    def _panel(
        self,
        panel: Any,
        name: str,
        numbers: Sequence[Sequence[float | None]],
        make_axis: _MakeAxis,
        height: float,
    ) -> None:
        """One panel of `height` inches; numbers[i] are those of series i."""
        timed = make_axis is _time_axis
        rows = [measured(one.contexts, row) for one, row in zip(self.series, numbers)]
        if not timed:
            rows = [[(at, y) for at, y in row if y > 0] for row in rows]  # a log has no 0
        panel.set_title(name, loc="left", size=_FONT + 1, weight="bold", pad=10)
        panel.set(xlim=(0, 1), ylim=(0, 1))
        panel.tick_params(length=0)
        panel.tick_params(axis="x", pad=7)  # clear of the lowest word of the other axis
        panel.set_axisbelow(True)
        ticks = context_ticks(self.contexts, 7)
        panel.set_xticks([self._across(tick) for tick in ticks], map(context_word, ticks))
        fitted = timed and any(one.line for one in self.series)
        hint = " · lines are fits" if fitted else ""
        panel.set_xlabel(f"context, tokens{hint}", color="#555555")
        present = [y for row in rows for _, y in row]
        if not present:
            panel.set_yticks([])
            panel.text(0.5, 0.5, "not measured", ha="center", color="#888888")
            return
        axis = make_axis(present)
        panel.set_yticks(*zip(*((axis.share(tick), word) for tick, word in axis.ticks)))
        panel.grid(axis="y")
        for index, row in enumerate(rows):
            line = self.series[index].line if timed else None
            self._curve(panel, index, row, axis, line)
        ends = {index: row[-1] for index, row in enumerate(rows) if row}
        wanted = [axis.share(y) for _, y in ends.values()]
        gap = 1.25 * _FONT / (72 * height)
        for (index, (at, _)), own, free in zip(
            ends.items(), wanted, spread(wanted, gap, 0.02, 1.0)
        ):
            self._end(panel, index, (self._across(at), own), free)

    def _curve(
        self, panel: Any, index: int, row: list[tuple[int, float]], axis: _Axis, line: Line | None
    ) -> None:
        """The measured points, and the fit through them where there is one."""
        colour, dashes, marker = _look(index)
        x, y = [self._across(at) for at, _ in row], [axis.share(value) for _, value in row]
        if line is not None and len(row) > 1:
            first, last = row[0][0], row[-1][0]
            at = [first + (last - first) * (step / 256) ** 3 for step in range(257)]
            curve = [self._across(context) for context in at]
            panel.plot(curve, [axis.share(line.at(c)) for c in at], ls=dashes, color=colour, lw=1.6)
            dashes = "none"
        panel.plot(
            x, y, ls=dashes, marker=marker, color=colour, lw=1.6, ms=5,
            mec="white", mew=0.6, clip_on=False,
        )  # fmt: skip

    def _end(self, panel: Any, index: int, end: tuple[float, float], free: float) -> None:
        colour = _look(index)[0]
        # Dotted where it is long, lest it look like more of the line.
        dashes = "-" if 1 - end[0] < 0.12 else (0, (1, 4))
        look = {"color": colour, "lw": 0.6, "ls": dashes, "shrinkA": 1.5, "shrinkB": 3.5}
        leader = {**look, "arrowstyle": "-", "relpos": (0.0, 0.5)}
        panel.annotate(
            self.labels[index], end, (1.055, free), color=colour, va="center", size=_FONT,
            arrowprops=leader, annotation_clip=False, parse_math=False,
        )  # fmt: skip

    def _key(self) -> None:
        """The long names under the panels, in two columns."""
        for rank, index in enumerate(self.long):
            row, column = rank % self.key_rows, rank // self.key_rows
            across, up = 0.18 + column * _WIDTH / 2, 0.12 + 0.19 * (self.key_rows - 1 - row)
            colour, name = _look(index)[0], shorten(self.series[index].name, _LONG)
            self._text(across, up, self.labels[index], color=colour, weight="bold")
            self._text(across + 0.25, up, name, color=colour, size=_FONT - 1)

    def _across(self, context: float) -> float:
        return (context_place(context, self.least) - self.left) / (self.right - self.left)

    def _text(self, left: float, bottom: float, text: str, **look: Any) -> Any:
        """A text at inches from the lower left corner, in no notation."""
        place = (left / _WIDTH, bottom / self.height)
        return self.figure.text(*place, shorten(text, 150), parse_math=False, **look)

    def _width(self, text: str) -> float:
        """Inches of a label."""
        drawn = self._text(0, 0, text)
        width: float = drawn.get_window_extent().width / _DPI
        drawn.remove()
        return width


def _look(index: int) -> tuple[str, str, str]:
    """Colour, dashes and marker of series `index`."""
    dashes = "-" if index % len(_COLOURS) < _SOLID else "--"
    return _COLOURS[index % len(_COLOURS)], dashes, _MARKERS[index % len(_MARKERS)]
