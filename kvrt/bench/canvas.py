"""A grid of characters to draw lines on: braille dots, or one dot a character in ASCII."""

from collections.abc import Iterable

Cell = tuple[str, int | None]  # a character, and the series whose colour it has

SEVERAL = "*"  # where marks of two series meet

# Bits of the dots of a braille character, by row and column.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Canvas:
    """`rows` lines of `columns` characters; places are shares of the way across and up, 0 ... 1."""

    def __init__(self, columns: int, rows: int, unicode: bool) -> None:
        self.columns, self.rows, self._unicode = columns, rows, unicode
        self._dots: dict[tuple[int, int], tuple[int, int]] = {}  # cell -> bits, series
        self._marks: dict[tuple[int, int], Cell] = {}

    def row(self, up: float) -> int:
        """The line of a place, 0 at the top."""
        return self._dot(0.0, up)[1] // (4 if self._unicode else 1)

    def column(self, across: float) -> int:
        """The column of a place, 0 at the left."""
        return self._dot(across, 0.0)[0] // (2 if self._unicode else 1)

    def line(self, series: int, places: Iterable[tuple[float, float]]) -> None:
        """A dot at each place that is on the canvas."""
        for across, up in places:
            if not (0 <= across <= 1 and 0 <= up <= 1):
                continue
            x, y = self._dot(across, up)
            bit = _BRAILLE[y % 4][x % 2] if self._unicode else 1
            cell = self.column(across), self.row(up)
            self._dots[cell] = self._dots.get(cell, (0, 0))[0] | bit, series

    def mark(self, series: int, across: float, up: float, letter: str) -> None:
        """A letter over all lines."""
        cell = self.column(across), self.row(up)
        other = self._marks.get(cell, (letter, series))
        self._marks[cell] = other if other[1] == series else (SEVERAL, None)

    def lines(self) -> list[list[Cell]]:
        """The lines, from the top."""
        return [[self._cell(x, y) for x in range(self.columns)] for y in range(self.rows)]

    def _cell(self, x: int, y: int) -> Cell:
        if (x, y) in self._marks:
            return self._marks[x, y]
        if (x, y) not in self._dots:
            return " ", None
        bits, series = self._dots[x, y]
        return chr(0x2800 + bits) if self._unicode else ".", series

    def _dot(self, across: float, up: float) -> tuple[int, int]:
        """The dot of a place, from the upper left."""
        x_dots, y_dots = (2, 4) if self._unicode else (1, 1)
        x_last, y_last = self.columns * x_dots - 1, self.rows * y_dots - 1
        return round(across * x_last), round((1 - up) * y_last)
