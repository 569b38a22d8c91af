"""Text to hide something in: sentences of a text, or made-up ones without a digit or a name."""

from __future__ import annotations

import re

import numpy as np

_LONGEST = 40  # words; a longer stretch without a full stop is cut

# Any part of a sentence goes with any other: 16^5 sentences, and none says anything of numbers.
_TIMES = (
    "In the early morning", "After the long rain", "On the last day of summer", "Before breakfast",
    "When the bells had rung", "Late in the afternoon", "During the quiet winter", "Once a week",
    "As the fog lifted", "Toward the end of the meal", "While the others slept", "At low tide",
    "In the middle of the harvest", "Shortly after noon", "On a cold evening", "Every spring",
)  # fmt: skip
_PEOPLE = (
    "the gardener", "an old sailor", "the youngest daughter", "a patient teacher", "the baker",
    "the carpenter", "a travelling musician", "the lighthouse keeper", "the doctor", "a shepherd",
    "the librarian", "the ferryman", "a careful clerk", "the widow next door", "the painter",
    "a boy from the village",
)  # fmt: skip
_DEEDS = (
    "carried", "repaired", "admired", "described", "forgot", "borrowed", "painted", "looked for",
    "cleaned", "found", "hid", "praised", "sold", "kept", "examined", "brought home",
)  # fmt: skip
_THINGS = (
    "a wooden chair", "the broken clock", "a basket of pears", "the blue curtains", "a worn map",
    "the heavy door", "a pair of boots", "the silver spoons", "a letter without a stamp",
    "the garden gate", "a bundle of firewood", "the copper kettle", "a small violin",
    "the fishing nets", "a jar of honey", "the grey horse",
)  # fmt: skip
_PLACES = (
    "behind the old mill", "beside the river", "in front of the church", "near the harbour",
    "at the edge of the wood", "under the stone bridge", "in the market square", "by the window",
    "on the road to the hills", "in the empty barn", "outside the inn", "at the foot of the stairs",
    "among the apple trees", "across the meadow", "in the upper room", "along the garden wall",
)  # fmt: skip


def filler(sentences: int, rng: np.random.Generator) -> list[str]:
    """So many made-up English sentences of nine to twenty words each, no two alike in a row."""
    parts = (_TIMES, _PEOPLE, _DEEDS, _THINGS, _PLACES)
    drawn = rng.integers(0, [len(part) for part in parts], (sentences, len(parts)))
    return [
        "{}, {} {} {} {}.".format(*(part[place] for part, place in zip(parts, row)))
        for row in drawn.tolist()
    ]


def sentences(text: str) -> list[str]:
    """The sentences of a text, white space made single spaces; none is over 40 words long."""
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
        words = sentence.split()
        for start in range(0, len(words), _LONGEST):
            found.append(" ".join(words[start : start + _LONGEST]))
    return found
