"""Lists, ranges and byte counts as people write them: `0,4096`, `512-8192*2`, `1k:1M`, `48GB`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import UsageError
from ..kvstore.grammar import quoted

MAX_VALUES = 1000
MAX_COUNT = 1 << 30
MAX_BYTES = 1 << 60

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}
_NUMBER = r"([0-9]+)([kKmM]?)"
_RANGE = re.compile(rf"{_NUMBER}(?:-{_NUMBER}(?:([+*]){_NUMBER})?)?")
_DOUBLING = re.compile(rf"{_NUMBER}:{_NUMBER}")
_BYTES = re.compile(r"([0-9]+)(?:\.([0-9]{1,9}))?\s*(?:([kKmMgGtT])([iI](?=[bB]))?)?[bB]?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_DIGITS = 32  # more are beyond every range here, decimals too; int() refuses thousands of them


def parse_counts(text: str, option: str, low: int = 0, high: int = MAX_COUNT) -> list[int]:
    """The values of a list of numbers and ranges, in the order written, each once.

    A range is A-B (all of them), A-B+STEP or A-B*FACTOR and holds B if it meets it; a number may
    end with k or M, which are 1024 and 1024 ** 2. Raises UsageError, which names `option`: what is
    no such list, a value outside `low` to `high`, a range that never ends, over 1,000 values.
    """
    values: dict[int, None] = {}
    for part in text.split(","):
        for value in _range(part.strip(), text, option, low, high):
            _add(value, values, option)
    return list(values)


def parse_scan(text: str, option: str = "--scan", low: int = 1, high: int = MAX_COUNT) -> list[int]:
    """The lengths of a scan, ascending, each once.

    A:B doubles from A and always holds B; else as `parse_counts`. Raises UsageError as it does.
    """
    values: dict[int, None] = {}
    for part in map(str.strip, text.split(",")):
        match = _DOUBLING.fullmatch(part)
        if match is None:
            found = _range(part, text, option, low, high, ", or A:B, which doubles")
        else:
            first, last = _number(match[1], match[2]), _number(match[3], match[4])
            found = _doubling(first, last, part, option, low, high)
        for value in found:
            _add(value, values, option)
    return sorted(values)


def parse_bytes(text: str, option: str) -> int:
    """A number of bytes: `48GB` and `48G` are 48e9, `48GiB` is 48 * 1024 ** 3, `500` is 500.

    A fraction needs a unit; less than a byte of it is dropped. Raises UsageError, which names
    `option`.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[2] and not match[3]):
        raise UsageError(
            f"{option}: expected a number of bytes, such as 500M, 48GB or 48GiB, got {quoted(text)}"
        )
    unit = (1024 if match[4] else 1000) ** _POWERS[match[3].lower()] if match[3] else 1
    decimals = match[2] or ""
    count = _number(match[1] + decimals, "") * unit // 10 ** len(decimals)
    if not 1 <= count <= MAX_BYTES:
        raise UsageError(f"{option}: expected 1 byte to 1 EiB, got {quoted(text)}")
    return count


def _range(part: str, text: str, option: str, low: int, high: int, also: str = "") -> Iterator[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(
            f"{option}: {quoted(part)} is neither a whole number nor a range, expected a list "
            f"such as 512 or 0,4k or 0-8k+1k or 512-8k*2{also}"
            f"{'' if part == text else f', got {quoted(text)}'}"
        )
    first = _number(match[1], match[2])
    last = _number(match[3], match[4]) if match[3] else first
    sign, step = match[5] or "+", _number(match[6], match[7]) if match[6] else 1
    _check_ends(first, last, part, option, low, high)
    if step == 0 or (sign == "*" and (step == 1 or first == 0)):
        raise UsageError(
            f"{option}: {quoted(part)} never ends: "
            + ("0 stays 0" if sign == "*" and first == 0 else f"{sign}{step} leads nowhere")
        )
    while first <= last:
        yield first
        first = first + step if sign == "+" else first * step


def _doubling(first: int, last: int, part: str, option: str, low: int, high: int) -> Iterator[int]:
    _check_ends(first, last, part, option, low, high)
    if first == 0:
        raise UsageError(f"{option}: {quoted(part)} never ends: 0 stays 0")
    while first < last:
        yield first
        first *= 2
    yield last


def _check_ends(first: int, last: int, part: str, option: str, low: int, high: int) -> None:
    for value in (first, last):
        if not low <= value <= high:
            raise UsageError(f"{option}: expected {low:,} to {high:,}, got {quoted(part)}")
    if last < first:
        raise UsageError(f"{option}: {quoted(part)} goes backwards, expected the smaller one first")


def _number(digits: str, suffix: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits[:_DIGITS]) * _SUFFIXES[suffix.lower()]


def _add(value: int, values: dict[int, None], option: str) -> None:
    values[value] = None
    if len(values) > MAX_VALUES:
        raise UsageError(
            f"{option}: more than {MAX_VALUES:,} values; A-B+STEP and A-B*FACTOR take fewer"
        )
