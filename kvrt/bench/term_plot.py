"""A scan in a terminal: a chart of decode time against context, and bars of cache bytes."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .axes import (
    bytes_word,
    context_place,
    context_ticks,
    context_word,
    polyline,
    round_ticks,
    shorten,
    time_unit,
)
from .canvas import SEVERAL, Canvas, Cell
from .fit import Line
from .plot import Series, measured

_BESIDE = 110  # columns from which the bars stand beside the chart
_GAP = 3  # columns between the two
_LETTERS = string.ascii_lowercase + string.ascii_uppercase
_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Of the 256 of a terminal: legible on black and on white. The first format has the text's own.
_COLOURS = (None, 33, 208, 36, 170, 178, 75, 161, 99, 142, 203, 72)

_Line = list[Cell]
_Points = list[tuple[int, float]]  # contexts, microseconds


def draw(
    series: Sequence[Series], width: int, height: int, unicode: bool = True, colour: bool = False
) -> str:
    """The chart as lines of at most `width` columns (40 at least), without a last line break.

    The chart is `height` lines high (8 at least). The bars, a line a format, stand beside it where
    there is room, else below. A letter stands for a format at its measured points and at the end
    of its line; the lines are the fits where there are any. `unicode` False: ASCII only.
    """
    width, height = max(width, 40), max(height, 8)
    if not series:
        return ""
    look = _Look(unicode, colour)
    timed = any(measured(one.contexts, one.decode_us) for one in series)
    if not timed:
        lines = _bars(series, width, look)
    elif width < _BESIDE:
        lines = [*_chart(series, width, height, look), [], *_bars(series, width, look)]
    else:
        right = (width - _GAP) * 2 // 5
        left = width - _GAP - right
        chart, bars = _chart(series, left, height, look), _bars(series, right, look)
        tall = max(len(chart), len(bars))
        chart += [[]] * (tall - len(chart))
        bars += [[]] * (tall - len(bars))
        lines = [_wide(one, left + _GAP) + two for one, two in zip(chart, bars)]
    return "\n".join(look.line(line) for line in lines)


@dataclass(frozen=True)
class _Look:
    """What may be used to draw."""

    unicode: bool
    colour: bool

    def line(self, cells: _Line) -> str:
        """The cells as text, in colour where that was asked for."""
        text = ""
        for letter, owner in cells:
            code = None if owner is None else _COLOURS[owner % len(_COLOURS)]
            paint = self.colour and code is not None and letter != " "
            text += f"\x1b[38;5;{code}m{letter}\x1b[0m" if paint else letter
        return text.rstrip()

    def bar(self, share: float, columns: int) -> str:
        """A bar over so much of the columns; what is there at all is seen."""
        if not self.unicode:
            return "#" * max(round(share * columns), share > 0)
        eighths = max(round(share * columns * 8), share > 0)
        return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def name(self, name: str, columns: int) -> str:
        """The name in at most so many columns."""
        if not self.unicode:
            name = name.encode("ascii", "replace").decode()
        return shorten(name, columns)


def _cells(text: str, owner: int | None = None) -> _Line:
    return [(letter, owner) for letter in text]


def _wide(line: _Line, columns: int) -> _Line:
    return line + _cells(" " * (columns - len(line)))


def _letter(index: int) -> str:
    return _LETTERS[index] if index < len(_LETTERS) else "?"


def _bars(series: Sequence[Series], width: int, look: _Look) -> list[_Line]:
    """A line a format: its letter, its name, and the bytes of its cache at its longest context."""
    ends = [measured(one.contexts, one.cache_bytes)[-1:] for one in series]
    longest = max((at for end in ends for at, _ in end), default=0)
    most = max((count for end in ends for _, count in end), default=0.0)
    words = []
    for end in ends:
        word = "".join(bytes_word(count) for _, count in end)
        at = "".join(f" at {context_word(at)}" for at, _ in end if at != longest)
        words.append(f"{word}{at}")
    word_columns = max(map(len, words))
    name_columns = min(
        max(len(one.name) for one in series), max(width - word_columns - 4 - 12, width // 4)
    )
    bar_columns = max(width - word_columns - name_columns - 4, 0)
    lines = [_cells(f"KV cache at {context_word(longest)} tokens")]
    for index, (one, end, word) in enumerate(zip(series, ends, words)):
        share = end[0][1] / most if end and most > 0 else 0.0
        head = f"{_letter(index)} {look.name(one.name, name_columns):<{name_columns}} "
        bar = f"{look.bar(share, bar_columns):<{bar_columns}}"
        lines.append(_cells(head + bar, index) + _cells(f" {word:>{word_columns}}"))
    return lines


def _chart(series: Sequence[Series], width: int, height: int, look: _Look) -> list[_Line]:
    """The chart: a title, height - 3 lines of it, the axis and its ticks."""
    rows = [measured(one.contexts, one.decode_us) for one in series]
    contexts = sorted({at for row in rows for at, _ in row})
    times = [time for row in rows for _, time in row]
    unit, name = time_unit(max(times))
    name = name if look.unicode else name.replace("µ", "u")
    low, high = _range(min(times) / unit, max(times) / unit)
    least = next((context for context in contexts if context > 0), 1)
    places = [context_place(context, least) for context in contexts]
    span = places[-1] - places[0]

    def across(context: float) -> float:
        return (context_place(context, least) - places[0]) / span if span > 0 else 0.5

    def up(time: float) -> float:
        return (time / unit - low) / (high - low)

    ticks = round_ticks(low, high, max(2, (height - 3) // 3))
    margin = max(len(f"{tick:g}") for tick in ticks) + 2  # up to the axis and with it
    most = max(_ends(rows, lambda time: round(up(time) * (height - 4))).values(), key=len)
    canvas = Canvas(width - margin - 1 - len(most), height - 3, look.unicode)
    for index, row in enumerate(rows):
        canvas.line(index, _curve(series[index].line, row, across, up, 8 * width))
        for at, time in row:
            canvas.mark(index, across(at), up(time), _letter(index))
    ends = _ends(rows, lambda time: canvas.row(up(time)))
    words = {canvas.row(up(tick * unit)): f"{tick:g}" for tick in ticks}
    side, tick_mark, corner, flat = "│┤└─" if look.unicode else "|++-"
    drawn = canvas.lines()
    met = any(cell == (SEVERAL, None) for cells in drawn for cell in cells)
    hint = f"; {SEVERAL} is several" if met else ""
    lines = [_cells(f"decode time per token, {name}{hint}")]
    for at, cells in enumerate(drawn):
        word = words.get(at, "")
        head = f"{word:>{margin - 2}} {tick_mark if word else side}"
        letters: _Line = [(_letter(index), index) for index in ends.get(at, [])]
        lines.append(_cells(head) + cells + _cells(" ") + letters)
    lines.append(_cells(" " * (margin - 1) + corner + flat * (width - margin)))
    below = [
        (margin + canvas.column(across(tick)), context_word(tick))
        for tick in context_ticks(contexts, max(canvas.columns // 6, 1))
    ]
    lines.append(_cells(_centred(below, width)))
    return lines


def _range(low: float, high: float) -> tuple[float, float]:
    """The ends of the axis of times: from 0, unless that would press all lines together.

    It is a fifth of the longest time at least, so that noise does not look like a difference.
    """
    low = 0.0 if low < high / 2 or low == high else min(low, 0.8 * high)
    room = max(0.06 * (high - low), 1e-6)
    return max(low - room, 0.0), high + room


def _ends(rows: Sequence[_Points], place: Callable[[float], int]) -> dict[int, list[int]]:
    """The series that end in each line of the chart, the slowest first."""
    order = sorted((-row[-1][1], index) for index, row in enumerate(rows) if row)
    ends: dict[int, list[int]] = {}
    for time, index in order:
        ends.setdefault(place(-time), []).append(index)
    return ends


def _curve(
    line: Line | None,
    row: _Points,
    across: Callable[[float], float],
    up: Callable[[float], float],
    steps: int,
) -> list[tuple[float, float]]:
    """Places along the fit from the first measured point to the last, or from point to point."""
    if line is None or len(row) < 2:
        return polyline([(across(at), up(time)) for at, time in row], steps)
    first, last = row[0][0], row[-1][0]
    # Dense where contexts are short, for those are the widest apart on the axis.
    contexts = [first + (last - first) * (step / steps) ** 3 for step in range(steps + 1)]
    return [(across(context), up(line.at(context))) for context in contexts]


def _centred(words: Sequence[tuple[int, str]], width: int) -> str:
    """Words about their columns; one that would touch a word right of it is left out."""
    text, free = [" "] * width, width
    for column, word in reversed(words):
        start = min(max(column - len(word) // 2, 0), width - len(word))
        if start + len(word) <= free:
            text[start : start + len(word)] = word
            free = start - 1
    return "".join(text)
