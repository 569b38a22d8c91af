"""One reporter for every command that measures: rows in, a table, markdown, CSV or JSON out.

It knows no command. A row is a mapping of JSON-like values. csv, json and jsonl hold all of its
fields with all their digits; table and md show the columns that a command chose for people.
"""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import click

from ..errors import KvrtError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Row = Mapping[str, Any]
Write = Callable[[str], None]

OUTPUTS = ("table", "md", "csv", "json", "jsonl")
OBJECT = "object"


@dataclass(frozen=True)
class Column:
    """A column for people.

    `key`: the field that is shown, or several, which `show` gets as its arguments. A row in which
    the (first) field is absent or None shows nothing. `least`: characters to keep for it where
    rows are written before all are known. `left`: text; numbers go to the right. The first column
    always goes to the left.
    """

    key: str | tuple[str, ...]
    head: str
    show: Callable[..., str] = str
    least: int = 0
    left: bool = False

    def cell(self, row: Row) -> str:
        """What a row shows here."""
        keys = (self.key,) if isinstance(self.key, str) else self.key
        values = [row.get(key) for key in keys]
        return "" if values[0] is None else self.show(*values)


class Report(ABC):
    """Takes the rows of one run and writes them, as soon as its form allows.

    As a context manager it closes at the end, after an error or Ctrl-C too, so that what was
    written is whole.
    """

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        self._columns = columns
        self._write = write
        self._closed = False

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def heading(self, text: str) -> None:  # noqa: B027
        """A line above the rows; only tables for people have a place for it."""

    def attach(self, **fields: Any) -> None:  # noqa: B027
        """Facts beside the rows; only the one object of `--json` has a place for them."""

    @abstractmethod
    def row(self, row: Row) -> None:
        """Take the next row. A value that JSON does not know is a TypeError."""

    def close(self) -> None:
        """Write what is still missing. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._finish()

    def _finish(self) -> None:  # noqa: B027
        """Write the end."""

    def _put(self, text: str) -> None:
        try:
            self._write(text)
        except (OSError, KvrtError):
            self._closed = True  # what could not be written has no end to write
            raise


class _Table(Report):
    """Aligned columns, written at the end: only then are their widths known."""

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        super().__init__(columns, write)
        self._lines: list[list[str]] = []

    def heading(self, text: str) -> None:
        self._put(text + "\n")

    def row(self, row: Row) -> None:
        self._lines.append([column.cell(row) for column in self._columns])

    def _finish(self) -> None:
        if not self._lines:
            return
        lines = [[column.head for column in self._columns], *self._lines]
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = []
        for line in lines:
            cells = _aligned(self._columns, line, widths)
            text.append("  ".join(cells).rstrip() + "\n")
        self._put("".join(text))


class _Markdown(Report):
    """A GitHub table, row by row; it reads well as plain text while cells keep to the widths."""

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        super().__init__(columns, write)
        self._widths = [max(len(column.head), column.least, 3) for column in columns]
        self._begun = False

    def heading(self, text: str) -> None:
        self._put(text + "\n\n")  # without the empty line the heading would be a row

    def row(self, row: Row) -> None:
        text = ""
        if not self._begun:
            self._begun = True
            text = self._line([column.head for column in self._columns]) + self._rule()
        self._put(text + self._line([column.cell(row) for column in self._columns]))

    def _line(self, cells: Sequence[str]) -> str:
        escaped = [" ".join(cell.split()).replace("|", r"\|") for cell in cells]
        return f"| {' | '.join(_aligned(self._columns, escaped, self._widths))} |\n"

    def _rule(self) -> str:
        rules = [
            "-" * width if _is_left(self._columns, place) else "-" * (width - 1) + ":"
            for place, width in enumerate(self._widths)
        ]
        return f"| {' | '.join(rules)} |\n"


class _Csv(Report):
    """All fields, quoted as RFC 4180 says; a line ends as every line on stdout does.

    A cell is the text itself or JSON: `true`, a number, a list; None is empty.
    """

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        super().__init__(columns, write)
        self._fields: list[str] = []

    def row(self, row: Row) -> None:
        text = ""
        if not self._fields:
            self._fields = list(row)
            text = self._line(self._fields)
        unknown = [field for field in row if field not in self._fields]
        if unknown:
            raise KeyError(f"the first row lacks {', '.join(unknown)}")
        self._put(text + self._line([self._cell(row.get(field)) for field in self._fields]))

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(cells)
        return buffer.getvalue()

    @staticmethod
    def _cell(value: Any) -> str:
        value = finite(value)
        if value is None:
            return ""
        return value if isinstance(value, str) else _json(value)


class _JsonLines(Report):
    """One object a line."""

    def row(self, row: Row) -> None:
        self._put(_json(row) + "\n")


class _JsonArray(Report):
    """An array of objects, one a line; each line is whole at once, whatever else is written."""

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        super().__init__(columns, write)
        self._begun = False

    def row(self, row: Row) -> None:
        text = _json(row)
        before = "," if self._begun else "[\n"
        self._begun = True
        self._put(f"{before}{text}\n")

    def _finish(self) -> None:
        self._put("]\n" if self._begun else "[]\n")


class _JsonObject(Report):
    """One object at the end: `{"rows": [...]}`, and what was attached."""

    def __init__(self, columns: Sequence[Column], write: Write) -> None:
        super().__init__(columns, write)
        self._rows: list[Row] = []
        self._extra: dict[str, Any] = {}

    def attach(self, **fields: Any) -> None:
        self._extra.update(fields)

    def row(self, row: Row) -> None:
        self._rows.append(dict(row))

    def _finish(self) -> None:
        self._put(_json({"rows": self._rows, **self._extra}) + "\n")


_REPORTS: Mapping[str, Callable[[Sequence[Column], Write], Report]] = {
    "table": _Table,
    "md": _Markdown,
    "csv": _Csv,
    "json": _JsonArray,
    "jsonl": _JsonLines,
    OBJECT: _JsonObject,
}


def make_report(kind: str, columns: Sequence[Column], write: Write) -> Report:
    """A report of one of OUTPUTS, or OBJECT; `write` takes whole pieces of text."""
    return _REPORTS[kind](columns, write)


def output_options(default: str) -> Callable[[Function], Function]:
    """-o/--output and --json; the command gets `output`, one of OUTPUTS or OBJECT.

    They exclude each other: the one is an array of rows, the other an object.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(output: str | None, as_json: bool, **rest: Any) -> Any:
            if as_json and output is not None:
                raise UsageError(
                    '--json and -o exclude each other: --json is one object {"rows": [...]}, '
                    "-o json an array of rows"
                )
            return function(output=OBJECT if as_json else output or default, **rest)

        wrapped: Any = click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object, at the end."
        )(call)
        wrapped = click.option(
            "-o",
            "--output",
            type=click.Choice(OUTPUTS),
            help=f"How to print the rows.  [default: {default}]",
        )(wrapped)
        return cast(Function, wrapped)

    return decorate


def finite(value: Any) -> Any:
    """The value without numbers that JSON does not have: NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _json(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def _aligned(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if _is_left(columns, place) else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths))
    ]


def _is_left(columns: Sequence[Column], place: int) -> bool:
    return place == 0 or columns[place].left
