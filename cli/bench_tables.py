"""How `kvrt bench` shows its rows to people, and passes them on to scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..bench.axes import bytes_word
from .report import Column, Row, Write, make_report

FOR_PEOPLE = ("table", "md")


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _tokens(value: int) -> str:
    return f"{value:,}"


def _bytes(key: str, head: str) -> Column:
    return Column(key, head, bytes_word, least=7)


def _format_column(names: Sequence[str]) -> Column:
    return Column("kv", "kv", least=max(map(len, names)), left=True)


_BITS = Column("bits_per_element", "bits", _number(2), least=5)
_MEMORY = (_bytes("cache_bytes", "cache"), _bytes("peak_bytes", "peak"))
_READING = (
    Column("read_GBps", "GB/s", _number(1), least=5),
    Column("read_share", "of device", _share),
)
_CHECK = (
    Column("check_kld", "KLD", _number(4), least=6),
    Column("check_top1", "top-1 %", _number(1)),
)
_FILL = Column("fill", "fill", left=True, least=9)
_REMARKS = Column("remarks", "remarks", "; ".join, left=True)


def case_columns(
    model: str, names: Sequence[str], tests: Iterable[str], varied: Sequence[str], checked: bool
) -> list[Column]:
    """The columns of tests; `varied` are fields whose values differ between rows."""
    return [
        Column("model", "model", least=len(model)),
        _format_column(names),
        _BITS,
        *(Column(field, field) for field in varied),
        _FILL,
        Column("test", "test", least=max(map(len, tests)), left=True),
        Column(("mean_tokens_per_s", "std_tokens_per_s"), "t/s", _mean, least=14),
        *_MEMORY,
        *_READING,
        *(_CHECK if checked else ()),
        _REMARKS,
    ]


def _mean(mean: float, deviation: float) -> str:
    return f"{mean:.2f} ± {deviation:.2f}"


def scan_columns(names: Sequence[str], varied: Sequence[str], checked: bool) -> list[Column]:
    """The columns of a scan's contexts."""
    return [
        _format_column(names),
        _BITS,
        *(Column(field, field) for field in varied),
        _FILL,
        Column("context", "context", _tokens, least=9),
        *_MEMORY,
        Column(("decode_us", "std_us"), "us a token", _time, least=16),
        *_READING,
        *(_CHECK if checked else ()),
        _REMARKS,
    ]


def _time(middle: float, deviation: float) -> str:
    return f"{middle:,.0f} ± {deviation:,.0f}"


def trend_columns(names: Sequence[str], varied: Sequence[str]) -> list[Column]:
    """The columns of what a scan says of each format over all contexts."""
    return [
        _format_column(names),
        *(Column(field, field) for field in varied),
        Column(("slope_us_per_1k", "slope_error_us_per_1k"), "us per 1k tokens", _slope),
        Column("intercept_us", "us at 0", _number(0)),
        Column("break_even", "faster than f16"),
        Column("fits_tokens", "tokens that fit", _tokens),
    ]


def _slope(slope: float, error: float | None) -> str:
    return f"{slope:,.0f}" if error is None else f"{slope:,.0f} ± {error:,.0f}"


def trend_row(row: Row, base: bool, compared: bool) -> Row:
    """A row for `trend_columns`; `compared`: whether f16 was there, `base`: whether it is this."""
    first = row["break_even_tokens"]
    if base or not compared:
        told = ""
    elif first is None:
        told = "never"
    else:
        told = "from the first token" if first == 0 else f"from {first:,}"
        if first > row["context"]:
            told += ", extrapolated"
    if told and not row["slopes_differ"]:
        told += ", within noise"
    return {**row, "break_even": told}


def memory_columns(names: Sequence[str], tests: Sequence[str]) -> list[Column]:
    """The columns of `--dry-run`."""
    return [
        _format_column(names),
        _BITS,
        *([Column("test", "test", left=True, least=max(map(len, tests)))] if tests else []),
        Column("context", "context", _tokens, least=9),
        Column("batch", "batch"),
        _bytes("weight_bytes", "weights"),
        _bytes("token_bytes", "tokens alone"),
        _bytes("cache_bytes", "cache"),
        _bytes("total_bytes", "together"),
        Column("weight_share", "weights %", _percent),
        Column("cache_share", "cache %", _percent),
        Column("fits_tokens", "tokens that fit", _tokens),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


class ScanReport:
    """A scan in one form of output.

    Tables for people grow context by context, and end with one of the trends. Scripts get all rows
    when the scan is done: each carries the trend of its format.
    """

    def __init__(
        self, kind: str, points: Sequence[Column], trends: Sequence[Column], write: Write
    ) -> None:
        self._for_people = kind in FOR_PEOPLE
        self._points = make_report(kind, points, write)
        self._trends = make_report(kind, trends, write) if self._for_people else None
        self._write = write
        self._found: list[Row] = []

    def __enter__(self) -> ScanReport:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._points.close()
        if self._trends is not None and self._found:
            self._write("\n")
            with self._trends as report:
                for row in self._found:
                    report.row(row)

    def point(self, row: Row) -> None:
        """A context is done."""
        if self._for_people:
            self._points.row(row)

    def trend(self, rows: Sequence[Row], summary: Row) -> None:
        """All contexts are done: the rows of a format, and one for the table of trends."""
        if self._for_people:
            self._found.append(summary)
        else:
            for row in rows:
                self._points.row(row)
