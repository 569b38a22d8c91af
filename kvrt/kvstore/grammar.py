"""The written form of cache formats: splits a text into its parts and reads each.

    SPEC     k=SIDE,v=SIDE[,sink=N][,window=N][,layers[A-B]=SPEC]..., or the name of a preset
             or POLICY:BUDGET[:OPTION]...[,sink=N][,window=N][,recompress=N] (see `compression`)
    SIDE     CODEC[:OPTION]..., the options in any order

The rules of what goes together are not here but in `spec`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from ..errors import UnsupportedError, UsageError
from .codecs import Block, Dense, Fp8, IntQ, Nuq, TileCodec, Vq

Rope = Literal["post", "page", "pre"]
Key = Literal["k", "v"]

MAX_TOKENS = 1 << 20
MAX_LAYERS = 4096

INT_BITS = (2, 3, 4, 8)
NUQ_BITS = (2, 3, 4)
DENSE = ("f32", "f16", "bf16")
FP8 = ("e4m3", "e5m2")
BLOCKS = ("q8_0", "q4_0")
PQ = "pq8x256"
RVQ_STAGES = 64
RVQ_ENTRIES = (256, 512, 1024, 2048, 4096)
CODEC_NAMES = (
    *DENSE,
    *FP8,
    *BLOCKS,
    *(f"int{bits}" for bits in INT_BITS),
    *(f"nuq{bits}" for bits in NUQ_BITS),
    PQ,
)
"""Of `rvq` there are too many to list."""
CODEC_LIST = ", ".join((*DENSE, *FP8, *BLOCKS, "int2|3|4|8", "nuq2|3|4", PQ, "rvqNxE"))

CHOICES: dict[str, tuple[str, ...]] = {
    "axis": ("channel", "token"),
    "group": ("g32", "g64", "g128"),
    "mode": ("asym", "sym", "hybrid"),
    "norm": ("norm",),
    "outliers": ("1%",),
    "qnorm": ("qnorm",),
    "stages": ("r1", "r2", "r3"),
    "scaled": ("scaled",),
    "perhead": ("perhead",),
    "rope": ("post", "page", "pre"),
    "had": ("had",),
}
"""The options by what they decide; of each line a side has one at most."""

_INT = ("axis", "group", "mode", "norm", "rope", "had")
_NUQ = ("outliers", "qnorm", "rope")
_PQ = ("stages", "perhead", "rope", "had")
_RVQ = ("scaled", "perhead", "rope", "had")
_BLOCK = ("rope", "had")
_DENSE = ("rope",)
_DECIDES = {option: what for what, options in CHOICES.items() for option in options}
_COUNTS = ("sink", "window")
_NUMBERED = re.compile(r"(int|nuq|pq|rvq)[0-9]*(?:x[0-9]*)?")
_RVQ_NAME = re.compile(r"rvq([1-9][0-9]{0,7})x([1-9][0-9]{0,7})")
_LAYERS = re.compile(r"layers\s*\[\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?\]\s*=(.*)", re.DOTALL)


@dataclass(frozen=True)
class SideFields:
    """What a SIDE says."""

    codec: TileCodec
    rope: Rope
    had: bool


@dataclass(frozen=True)
class SpecFields:
    """What a SPEC says: a preset's name or two sides, counts where given, overrides."""

    preset: str | None
    k: str
    v: str
    counts: dict[str, int]
    overrides: tuple[tuple[int, int, str], ...]


def quoted(text: str, limit: int = 48) -> str:
    """A text of unknown origin for a message: on one line, cut to `limit` characters."""
    shown = repr(text[:limit])
    return shown if len(text) <= limit and len(shown) <= limit + 2 else f"{shown[:limit]}...'"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean X?`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1) if len(word) <= 24 else []
    return f", did you mean {near[0]}?" if near else ""


def is_codec(name: str) -> bool:
    """Whether a SIDE can begin so."""
    return name in CODEC_NAMES or _RVQ_NAME.fullmatch(name) is not None


def read_side(text: str, key: Key) -> SideFields:
    """Read a SIDE. Raises UsageError; UnsupportedError for what only the other side can have."""
    where = f"cache format {quoted(f'{key}={text}')}"
    name, *options = (part.strip() for part in text.split(":"))
    kinds = _kinds(name, where)
    given: dict[str, str] = {}
    for option in options:
        kind = _DECIDES.get(option)
        # `had` is known to all codecs here: `spec` says why some cannot have it.
        if kind is None or kind not in (*kinds, "had"):
            raise UsageError(f"{where}: {_not_an_option(option, name, kinds)}")
        if given.get(kind) == option:
            raise UsageError(f"{where}: {option} is given twice")
        if kind in given:
            raise UsageError(f"{where}: {given[kind]} and {option} exclude each other")
        if kind == "rope" and key == "v":
            raise UnsupportedError(f"{where}: {option} is for keys; values do not go through RoPE")
        given[kind] = option
    rope = cast(Rope, given.get("rope", "post"))
    return SideFields(_codec(name, given, where), rope, "had" in given)


def _kinds(name: str, where: str) -> tuple[str, ...]:
    """What can be decided of the codec of this name."""
    if name in DENSE:
        return _DENSE
    if name in BLOCKS or name in FP8:
        return _BLOCK
    if name in CODEC_NAMES:
        return _PQ if name == PQ else _INT if name.startswith("int") else _NUQ
    if (match := _RVQ_NAME.fullmatch(name)) is not None:
        if int(match[1]) > RVQ_STAGES:
            raise UsageError(
                f"{where}: {name[:12]} has too many stages, expected 1 to {RVQ_STAGES}"
            )
        if int(match[2]) not in RVQ_ENTRIES:
            sizes = ", ".join(map(str, RVQ_ENTRIES))
            raise UsageError(
                f"{where}: no codebooks of {match[2]} entries, expected one of {sizes}"
            )
        return _RVQ
    if (match := _NUMBERED.fullmatch(name)) is not None:
        names = {
            "int": "one of " + ", ".join(f"int{bits}" for bits in INT_BITS),
            "nuq": "one of " + ", ".join(f"nuq{bits}" for bits in NUQ_BITS),
            "pq": f"{PQ}:r2",
            "rvq": "rvqNxE, such as rvq28x1024: N stages of E entries",
        }[match[1]]
        raise UsageError(f"{where}: there is no {name[:12]}, expected {names}")
    raise UsageError(
        f"{where}: unknown codec {quoted(name, 24)}{did_you_mean(name, CODEC_NAMES)} "
        f"(expected one of {CODEC_LIST})"
    )


def _not_an_option(option: str, name: str, kinds: Sequence[str]) -> str:
    takes = ", ".join("|".join(CHOICES[kind]) for kind in kinds)
    if re.fullmatch(r"g[0-9]+", option) and "group" in kinds:
        return f"no groups of {option[1:9]}, expected g32, g64 or g128"
    if re.fullmatch(r"r[0-9]+", option) and "stages" in kinds:
        return f"no {option[1:9]} stages, expected r1, r2 or r3"
    if option in _DECIDES:
        return f"{name} does not take {option}; its options are {takes}"
    known = [word for kind in kinds for word in CHOICES[kind]]
    return (
        f"unknown option {quoted(option, 24)}{did_you_mean(option, known)} ({name} takes {takes})"
    )


def _codec(name: str, given: dict[str, str], where: str) -> TileCodec:
    if name in DENSE:
        return Dense(cast(Literal["f32", "f16", "bf16"], name))
    if name in FP8:
        return Fp8(cast(Literal["e4m3", "e5m2"], name))
    if name in BLOCKS:
        return Block(cast(Literal["q8_0", "q4_0"], name))
    if name == PQ:
        if "stages" not in given:
            stages = "|".join(CHOICES["stages"])
            raise UsageError(f"{where}: {name} needs its stages ({stages}), such as {name}:r2")
        return Vq(int(given["stages"][1:]), 256, grouped=True, perhead="perhead" in given)
    if (match := _RVQ_NAME.fullmatch(name)) is not None:
        own = "perhead" in given
        return Vq(int(match[1]), int(match[2]), False, "scaled" in given, own)
    bits = int(name[3:])
    if name.startswith("nuq"):
        return Nuq(bits, "outliers" in given, "qnorm" in given)
    missing = [
        f"{what} ({'|'.join(CHOICES[what])})" for what in ("axis", "group") if what not in given
    ]
    if missing:
        raise UsageError(
            f"{where}: {name} needs its {' and '.join(missing)}, such as {name}:channel:g64"
        )
    return IntQ(
        bits,
        cast(Literal["channel", "token"], given["axis"]),
        int(given["group"][1:]),
        cast(Literal["asym", "sym", "hybrid"], given.get("mode", "asym")),
        "norm" in given,
    )


def read_spec(
    text: str, presets: Iterable[str], policies: Sequence[str] = (), *, inner: bool = False
) -> SpecFields:
    """Split a SPEC; its sides are left as texts. `inner`: it is that of an override.

    `policies` are names that more may follow, behind a colon.
    """
    where = f"cache format {quoted(text)}"
    base, *overrides = re.split(r",(?=\s*layers\s*\[)", text)
    named = base.partition(",")[0].partition(":")[0].strip() in policies
    counts: tuple[str, ...] = (*_COUNTS, "recompress") if named else _COUNTS
    fields = dict(_pairs(base, where, counts, inner, named))
    presets = tuple(presets)
    preset = fields.pop("", None)
    if preset is not None and preset not in presets and not named:
        raise UsageError(f"unknown cache format {quoted(preset)}{_hint(preset, presets, policies)}")
    for key in ("k", "v"):
        if preset is None and key not in fields:
            raise UsageError(f"{where}: {key}=SIDE is missing, expected k=SIDE,v=SIDE")
        if preset is not None and key in fields:
            raise UsageError(f"{where}: {preset} has its own {key}, give k=SIDE,v=SIDE instead")
    return SpecFields(
        preset,
        fields.get("k", ""),
        fields.get("v", ""),
        {key: _count(fields[key], key, where) for key in counts if key in fields},
        tuple(_override(part.strip()) for part in overrides),
    )


def _pairs(
    base: str, where: str, counts: Sequence[str], inner: bool, named: bool
) -> Iterator[tuple[str, str]]:
    """The `key=value` parts; a first part without `=` comes with an empty key.

    `named`: it is a policy, which has neither sides nor layers of their own.
    """
    seen: set[str] = set()
    for place, part in enumerate(base.split(",")):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign and place == 0:
            yield "", key
            continue
        if inner and key in counts:
            raise UsageError(
                f"{where}: {key} is common to all layers, it goes before the first layers[...]"
            )
        if key.startswith("layers"):
            raise UsageError(f"{where}: expected layers[A-B]=SPEC after k=SIDE,v=SIDE")
        if key in ("k", "v", *counts) and not sign:
            raise UsageError(f"{where}: {key} has no value, expected {key}=...")
        if key not in ("k", "v", *counts):
            known = counts if named else ("k", "v", *counts, "layers[A-B]")
            raise UsageError(
                f"{where}: unknown key {quoted(key, 24)}"
                f"{did_you_mean(key, counts if named else (*counts, 'layers'))}"
                f" (expected {'=, '.join(known[:-1])}= or {known[-1]}=)"
            )
        if key in seen:
            raise UsageError(f"{where}: {key} is given twice")
        seen.add(key)
        yield key, value


def _hint(name: str, presets: Sequence[str], policies: Sequence[str]) -> str:
    if is_codec(name.partition(":")[0].strip()):
        return f": this is one side, expected k={quoted(name, 24)[1:-1]},v=SIDE"
    near = did_you_mean(name, (*presets, *policies))
    near = near or did_you_mean(name.partition(":")[0], policies)
    budgets = "".join(f" {policy}:BUDGET," for policy in policies)
    return (
        f"{near} (expected one of {', '.join(presets)},{budgets} "
        "or k=SIDE,v=SIDE[,sink=N][,window=N])"
    )


def _count(value: str, key: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", value) or int(value) > MAX_TOKENS:
        raise UsageError(
            f"{where}: {key} must be 0 to {MAX_TOKENS} tokens, got {quoted(value, 24)}"
        )
    return int(value)


def _override(text: str) -> tuple[int, int, str]:
    match = _LAYERS.fullmatch(text)
    where = f"cache format {quoted(text)}"
    if match is None:
        raise UsageError(f"{where}: expected layers[A-B]=SPEC or layers[A]=SPEC")
    if any(len(number) > 8 for number in match.groups("")[:2]):
        raise UsageError(f"{where}: layers are 0 to {MAX_LAYERS - 1}")
    first = int(match[1])
    return first, first if match[2] is None else int(match[2]), match[3].strip()
