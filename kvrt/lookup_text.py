"""Text that is rich in what prose lacks: numbers, keys, names, code; for codebooks.

Codebooks fitted to prose alone have no entries near the keys of rare digits and letters, and caches
lose what they are asked for. The text is made of a prose's words and sentences and of a seed, and
of nothing else: the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

FIRST_NAMES, LAST_NAMES, TOWNS, COMMON_WORDS = (
    names.split()
    for names in (
        "Alice Bruno Carla Dmitri Elena Farid Grace Hiro Ines Jonas Keiko Liam Marta Nadia Omar "
        "Priya Quentin Rosa Stefan Tara Umar Vera Wendell Xenia Yusuf Zoe",
        "Abbott Brandt Castillo Dubois Eriksen Fischer Gupta Hansen Ivanova Jensen Kowalski Larsen "
        "Moreau Nakamura Okafor Petrov Quigley Rossi Sato Tanaka Ueda Varga Weber Xu Yilmaz Zhang",
        "Ashford Brookdale Clearwater Dunmore Eastvale Fairview Greenhill Holmby Ironbridge "
        "Kingsley Lakeside Millbrook Northgate Oakham Pinehurst Redfield Silverton Thornbury "
        "Westport",
        "time year people way day man thing world life hand part place week case",
    )
)
SEPARATORS = (": ", " = ", " -> ", ",", "\t", " | ", ": ", ": ")


def lookup_text(prose: str, characters: int, seed: int) -> str:
    """At least so many characters of lists, tables, code, and sentences with facts between them."""
    maker = _Maker(prose, Random(seed))
    blocks: list[str] = []
    while sum(map(len, blocks)) < characters:
        blocks.append(maker.block())
    return "\n".join(blocks)


class _Maker:
    def __init__(self, prose: str, random: Random):
        self._random = random
        self._words = sorted(set(re.findall(r"[a-z]{3,10}", prose.lower()))) or COMMON_WORDS
        sentences = (" ".join(text.split()) for text in re.split(r"(?<=[.!?])\s+", prose))
        self._sentences = [text for text in sentences if text]
        self._keys: Sequence[Callable[[], str]] = (
            self._letters, self._word, lambda: f"{self._word()}_{self._word()}",
            lambda: self._hex(8), self._uuid, self._name, lambda: self._pick(TOWNS),
            lambda: f"{self._letters(2, 4).upper()}-{self._digits(2, 6)}", self._date,
            lambda: self._digits(3, 9),
        )  # fmt: skip
        self._values: Sequence[Callable[[], str]] = (
            lambda: self._digits(3, 9), lambda: self._digits(4, 8), lambda: self._digits(4, 8),
            lambda: f"{self._below(0, 10**6):,}", lambda: f"{self._below(0, 10**5) / 100:.2f}",
            self._uuid, lambda: self._hex(12), self._word, self._name, self._date, self._letters,
        )  # fmt: skip
        self._blocks: Sequence[Callable[[], str]] = (
            self._pairs, self._pairs, self._pairs, self._json, self._code, self._story,
            self._story, self._story, self._facts, self._table,
        )  # fmt: skip

    def block(self) -> str:
        return self._pick(self._blocks)()

    # Words and numbers. Of `Random`, `random` alone is promised to stay the same.

    def _below(self, low: int, high: int) -> int:
        """A number low ... high - 1."""
        return low + int(self._random.random() * (high - low))

    def _pick(self, of: Sequence[T]) -> T:
        return of[self._below(0, len(of))]

    def _digits(self, low: int, high: int) -> str:
        return "".join(str(self._below(0, 10)) for _ in range(self._below(low, high)))

    def _letters(self, low: int = 3, high: int = 9) -> str:
        return "".join(chr(97 + self._below(0, 26)) for _ in range(self._below(low, high)))

    def _hex(self, count: int) -> str:
        return "".join(self._pick("0123456789abcdef") for _ in range(count))

    def _uuid(self) -> str:
        return "-".join(self._hex(count) for count in (8, 4, 4, 4, 12))

    def _word(self) -> str:
        return self._pick(self._words)

    def _name(self) -> str:
        return f"{self._pick(FIRST_NAMES)} {self._pick(LAST_NAMES)}"

    def _date(self) -> str:
        year, month, day = self._below(1950, 2030), self._below(1, 13), self._below(1, 29)
        return f"{year}-{month:02d}-{day:02d}"

    # Blocks

    def _pairs(self) -> str:
        key, value, sign = self._pick(self._keys), self._pick(self._values), self._pick(SEPARATORS)
        rows = [f"{key()}{sign}{value()}\n" for _ in range(self._below(8, 60))]
        again = [self._pick(rows) for _ in range(self._below(2, 8))]  # some are looked up again
        return "".join([*rows, "\n", *again] if self._below(0, 2) else rows)

    def _json(self) -> str:
        rows = [
            f'  {{"id": {self._digits(2, 7)}, "name": "{self._name()}", '
            f'"{self._word()}": "{self._pick(self._values)()}", '
            f'"{self._word()}": {self._below(0, 10**6)}}}'
            for _ in range(self._below(4, 14))
        ]
        return "[\n" + ",\n".join(rows) + "\n]\n"

    def _code(self) -> str:
        names = [self._letters(1, 6) for _ in range(4)]
        lines = [f"def {self._word()}_{self._word()}({names[0]}, {names[1]}):"]
        for _ in range(self._below(4, 14)):
            a, b = self._pick(names), self._pick(names)
            statements = (
                f"    {a} = {b} * {self._digits(1, 5)} + {self._below(0, 99)}",
                f"    if {a} > 0x{self._hex(4)}: {b} = {self._word()}({a}, '{self._word()}')",
                f"    for {a} in range({self._below(1, 5000)}): self.{self._word()}.append({b})",
                f"    assert {a} == {self._digits(2, 7)}, '{self._word()} {self._word()}'",
            )
            lines.append(self._pick(statements))
        return "\n".join([*lines, f"    return {self._pick(names)}", ""])

    def _fact(self) -> str:
        number, name, town = self._digits(4, 9), self._name(), self._pick(TOWNS)
        facts = (
            f"The reference number of order {self._letters(2, 5).upper()} is {number}.",
            f"{name}'s telephone extension is {number[:5]}.",
            f"The serial number of the {self._word()} in {town} is {number}.",
            f"On {self._date()}, {name} paid {self._below(10, 10**6):,} dollars in {town}.",
            f"The locker of {name} opens with {number}.",
            f"Room {number[:3]} in {town} was booked by {name} under {self._letters().upper()}.",
        )
        return self._pick(facts)

    def _facts(self) -> str:
        return " ".join(self._fact() for _ in range(self._below(10, 40))) + "\n"

    def _story(self) -> str:
        start = self._below(0, max(len(self._sentences) - 50, 1))
        body = self._sentences[start : start + self._below(15, 50)]
        for _ in range(self._below(1, 8)):
            body.insert(self._below(0, len(body) + 1), self._fact())
        return " ".join(body) + "\n"

    def _table(self) -> str:
        columns = [self._pick(self._values) for _ in range(self._below(3, 6))]
        head = " | ".join(self._word() for _ in columns)
        rows = [" | ".join(make() for make in columns) for _ in range(self._below(6, 25))]
        return "".join(f"| {row} |\n" for row in (head, *rows))
