"""The made-up text that codebooks are fitted to besides prose: the same everywhere, and of use."""

import random
import re

import pytest

from kvrt.lookup_text import lookup_text

PROSE = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. Why not?\n"

BEGINNING = """\
Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. The serial number \
of the not in Redfield is 058124. Why not? Wendell Petrov's telephone extension is 61532.

def sea_long"""


def test_it_is_the_same_everywhere() -> None:
    """Calibrations are made of it: another text is another calibration."""
    text = lookup_text(PROSE, 2000, 10)
    assert text.startswith(BEGINNING)
    random.seed(1)
    assert lookup_text(PROSE, 2000, 10) == text


@pytest.mark.parametrize("prose", [PROSE * 40, "", "1234 %&\n\n", "Ach, so!", "é世"])
def test_any_prose_will_do(prose: str) -> None:
    text = lookup_text(prose, 50_000, 0)
    assert len(text) >= 50_000
    digits = sum(map(str.isdigit, text))
    assert 0.05 < digits / len(text) < 0.6
    assert text.isprintable() or set(text) - {"\n", "\t"} <= {*filter(str.isprintable, text)}


@pytest.mark.parametrize("characters", [0, 1, 999, 20_000])
def test_it_is_as_long_as_asked_for_and_not_much_longer(characters: int) -> None:
    text = lookup_text(PROSE * 40, characters, 3)
    assert characters <= len(text) < characters + 20_000
    assert lookup_text(PROSE * 40, 25_000, 3).startswith(text)


def test_seeds_and_proses_differ() -> None:
    texts = {lookup_text(prose, 3000, seed) for prose in (PROSE, "") for seed in range(5)}
    assert len(texts) == 10


def test_what_it_has() -> None:
    text = lookup_text(PROSE * 40, 200_000, 0)
    assert "never mind how long precisely" in text  # sentences, with facts between them
    assert re.search(r"^def [a-z]+_[a-z]+\(", text, re.MULTILINE)
    assert re.search(r'^  \{"id": \d+, "name": "[A-Z][a-z]+ [A-Z][a-z]+",', text, re.MULTILINE)
    assert re.search(r"^\| .* \|$", text, re.MULTILINE)
    assert re.search(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", text)
    assert re.search(r"locker of [A-Z][a-z]+ [A-Z][a-z]+ opens with \d{4,8}\.", text)


def test_some_pairs_are_looked_up_again() -> None:
    lines = lookup_text(PROSE, 200_000, 0).splitlines()
    again = [line for line in lines if re.fullmatch(r"\w+(: | = | -> )\d{4,}", line)]
    assert len(set(again)) < len(again)
