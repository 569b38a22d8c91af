"""`KVSpec`: the only carrier of cache parameters. It parses and prints.

`grammar` splits texts; here are the objects, the rules of what goes together, and the presets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..backends.ops import PAGE_TOKENS
from ..errors import UnsupportedError, UsageError
from . import compression as prompts
from .codecs import Dense, IntQ, Nuq, TileCodec, Vq
from .compression import Compression
from .grammar import (
    MAX_LAYERS,
    MAX_TOKENS,
    Key,
    Rope,
    SpecFields,
    is_codec,
    read_side,
    read_spec,
)

if TYPE_CHECKING:
    from .layout import Geometry


@dataclass(frozen=True)
class Side:
    """How keys, or values, are kept.

    `rope` is the form of keys: after RoPE, rotated inside their page alone, or before RoPE. `had`:
    a Hadamard transform along head_dim comes before the codec.
    """

    codec: TileCodec
    rope: Rope = "post"
    had: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UnsupportedError(f"cache format {self}: {problem}")

    def _problem(self) -> str:
        """Why these options do not go together, or nothing."""
        codec = self.codec
        if self.had and isinstance(codec, Dense):
            return "had is useless with floats, they have no groups whose range it could level"
        if self.had and isinstance(codec, Nuq):
            return "nuq has tables fitted to each channel, and had would mix the channels"
        if self.had and self.rope == "pre":
            return (
                "with pre, had would have to be undone for every cached token; page and post work"
            )
        if isinstance(codec, IntQ) and codec.norm and self.rope == "pre":
            return "with pre, norm could not be folded into the query; page and post work"
        if isinstance(codec, IntQ) and codec.axis == "channel" and PAGE_TOKENS % codec.group:
            return (
                f"groups of {codec.group} do not divide the {PAGE_TOKENS} tokens of a page; "
                "channel takes g32 and g64"
            )
        return ""

    def __str__(self) -> str:
        rope = "" if self.rope == "post" else f":{self.rope}"
        return f"{self.codec.name}{rope}{':had' * self.had}"

    @classmethod
    def parse(cls, text: str, key: Key) -> Side:
        """Read the SIDE of keys ("k") or values ("v"). Raises UsageError, UnsupportedError."""
        cleaned = text.strip()
        if cleaned in PRESET_TEXTS and not is_codec(cleaned):
            preset = PRESETS[cleaned]
            raise UsageError(
                f"{cleaned} is a format of keys and values, expected one side, "
                f"such as {preset.k if key == 'k' else preset.v}"
            )
        fields = read_side(cleaned, key)
        side = cls(fields.codec, fields.rope, fields.had)
        if key == "v":
            check_values(side)
        return side


@dataclass(frozen=True)
class Override:
    """Other sides for the layers `first` to `last`, both included."""

    first: int
    last: int
    k: Side
    v: Side

    def __post_init__(self) -> None:
        check_values(self.v)
        if not 0 <= self.first <= self.last < MAX_LAYERS:
            raise UsageError(
                f"cache format: layers[{self.layers}] cannot be, "
                f"expected A-B with A <= B and B below {MAX_LAYERS}"
            )

    @property
    def layers(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    def __str__(self) -> str:
        return f"layers[{self.layers}]={_sides_text(self.k, self.v)}"


@dataclass(frozen=True)
class KVSpec:
    """How keys and values are kept.

    `k`, `v`: the form of sealed pages, of all layers that no override names; `sink`: first tokens
    kept exact for ever; `window`: the newest tokens, at least so many of which are exact.
    `overrides` are sorted by layer. With `compression` both sides are f16, and pages are not
    sealed: tokens stay exact until a prompt's end, where `compression` says what is kept of them.
    """

    k: Side
    v: Side
    sink: int = 0
    window: int = 0
    overrides: tuple[Override, ...] = ()
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_values(self.v)
        if self.compression is not None:
            self._check_compression()
        for key, count in (("sink", self.sink), ("window", self.window)):
            if not 0 <= count <= MAX_TOKENS:
                raise UsageError(f"cache format: {key} must be 0 to {MAX_TOKENS}, got {count}")
        ordered = tuple(sorted(self.overrides, key=lambda override: override.first))
        for before, after in pairwise(ordered):
            if after.first <= before.last:
                raise UsageError(
                    f"cache format: layer {after.first} is in layers[{before.layers}] "
                    f"and in layers[{after.layers}]"
                )
        object.__setattr__(self, "overrides", ordered)

    @classmethod
    def parse(cls, text: str) -> KVSpec:
        """Read a preset's name or the grammar.

        Raises UsageError, UnsupportedError for what cannot go together; both name what works.
        """
        fields = read_spec(text.strip(), PRESET_TEXTS, prompts.POLICIES)
        if fields.preset is not None and prompts.is_compression(fields.preset):
            return cls._compressing(fields)
        if fields.preset is None:
            k, v, counts = Side.parse(fields.k, "k"), Side.parse(fields.v, "v"), fields.counts
        else:
            base = PRESETS[fields.preset]
            k, v = base.k, base.v
            counts = {"sink": base.sink, "window": base.window} | fields.counts
        overrides = tuple(
            Override(first, last, *_sides(inner)) for first, last, inner in fields.overrides
        )
        return cls(k, v, counts.get("sink", 0), counts.get("window", 0), overrides)

    @classmethod
    def _compressing(cls, fields: SpecFields) -> KVSpec:
        """A format that compresses prompts."""
        compression = Compression.parse(fields.preset or "")
        if fields.overrides:
            first, last, _ = fields.overrides[0]
            raise UnsupportedError(
                f"cache format {compression}: it compresses all layers, so layers[{first}-{last}] "
                "cannot have a format of its own"
            )
        counts = dict(fields.counts)
        compression = replace(compression, recompress=counts.get("recompress"))
        exact = Side(Dense("f16"))
        sink, window = counts.get("sink", prompts.SINK), counts.get("window", prompts.WINDOW)
        return cls(exact, exact, sink, window, compression=compression)

    def _check_compression(self) -> None:
        recompress = None if self.compression is None else self.compression.recompress
        if self.overrides or {self.k, self.v} != {Side(Dense("f16"))}:
            raise UsageError(
                f"cache format {self.compression}: it says how keys and values are kept, so "
                "k=SIDE, v=SIDE and layers[...] cannot go with it"
            )
        least = self.sink + self.window + PAGE_TOKENS
        if recompress is not None and recompress < least:
            raise UsageError(
                f"cache format {self.compression}: recompress must be at least sink + window + "
                f"{PAGE_TOKENS} = {least} tokens, got {recompress}"
            )

    def __str__(self) -> str:
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        if self.compression is not None:
            parts = [str(self.compression)]
            parts += [f"sink={self.sink}"] * (self.sink != prompts.SINK)
            parts += [f"window={self.window}"] * (self.window != prompts.WINDOW)
            recompress = self.compression.recompress
            parts += [] if recompress is None else [f"recompress={recompress}"]
            return ",".join(parts)
        text = f"k={self.k},v={self.v}"
        if self.sink:
            text += f",sink={self.sink}"
        if self.window:
            text += f",window={self.window}"
        return ",".join((text, *map(str, self.overrides)))

    def sides(self, layer: int) -> tuple[Side, Side]:
        """The sides of keys and values in a layer."""
        for override in self.overrides:
            if override.first <= layer <= override.last:
                return override.k, override.v
        return self.k, self.v

    @property
    def calibrated(self) -> bool:
        """Whether some side needs tables from a calibration file."""
        return any(side.codec.calibrated for pair in self._pairs() for side in pair)

    @property
    def has_codebooks(self) -> bool:
        """Whether some side is vector-quantised."""
        return any(isinstance(side.codec, Vq) for pair in self._pairs() for side in pair)

    @property
    def shifts(self) -> bool:
        """Whether cached keys can move to other positions exactly: all are `pre` or `page`."""
        return all(k.rope != "post" for k, _ in self._pairs())

    def check(self, geometry: Geometry, context: int | None = None) -> None:
        """Raise UnsupportedError where the format does not fit a cache of this geometry.

        Nor may its sinks and window be more than `context` tokens, the longest context there is.
        """
        if context is not None and self.sink + self.window > context:
            raise UnsupportedError(
                f"cache format {self}: sink + window are {self.sink + self.window:,} tokens, more "
                f"than this model's context of {context:,}"
            )
        if self.compression is not None:
            self.compression.check(geometry)
        covered = 0
        for override in self.overrides:
            if override.last >= geometry.num_layers:
                raise UnsupportedError(
                    f"cache format: layers[{override.layers}] goes beyond this model, "
                    f"whose layers are 0 to {geometry.num_layers - 1}"
                )
            covered += override.last - override.first + 1
            _check_fit(f"layers[{override.layers}]: ", override.k, override.v, geometry)
        if covered < geometry.num_layers:
            _check_fit("", self.k, self.v, geometry)

    def _pairs(self) -> tuple[tuple[Side, Side], ...]:
        return ((self.k, self.v), *((override.k, override.v) for override in self.overrides))


def check_values(side: Side) -> None:
    """Raise UnsupportedError for what only keys can have."""
    if side.rope != "post":
        raise UnsupportedError(
            f"cache format v={side}: {side.rope} is for keys; values do not go through RoPE"
        )
    if isinstance(side.codec, IntQ) and side.codec.norm:
        raise UnsupportedError(
            f"cache format v={side}: norm is folded into the query, so it is for keys only"
        )


def _check_fit(layers: str, k: Side, v: Side, geometry: Geometry) -> None:
    for key, side in (("k", k), ("v", v)):
        try:
            side.codec.check(key == "v", geometry.num_kv_heads, geometry.head_dim)
        except UnsupportedError as error:
            raise UnsupportedError(f"cache format {layers}{key}={side}: {error}") from None


def _sides(text: str) -> tuple[Side, Side]:
    """The sides of an override's SPEC; a preset's sinks and window are left out."""
    fields = read_spec(text, PRESET_TEXTS, inner=True)
    if fields.preset is None:
        return Side.parse(fields.k, "k"), Side.parse(fields.v, "v")
    return PRESETS[fields.preset].k, PRESETS[fields.preset].v


def _sides_text(k: Side, v: Side) -> str:
    for name, preset in PRESETS.items():
        if (preset.k, preset.v) == (k, v):
            return name
    return f"k={k},v={v}"


PRESET_TEXTS = {
    "f32": "k=f32,v=f32",
    "f16": "k=f16,v=f16",
    "bf16": "k=bf16,v=bf16",
    "f8": "k=e4m3,v=e4m3",
    "f8e5m2": "k=e5m2,v=e5m2",
    "q8_0": "k=q8_0,v=q8_0",
    "q4_0": "k=q4_0,v=q4_0",
    "kivi2": "k=int2:channel:g32,v=int2:token:g32,window=128",
    "kivi4": "k=int4:channel:g32,v=int4:token:g32,window=128",
    "kvquant2": "k=nuq2:qnorm:pre,v=nuq2:qnorm,sink=1",
    "kvquant3": "k=nuq3:pre,v=nuq3,sink=1",
    "kvquant4": "k=nuq4:pre,v=nuq4,sink=1",
    "kvquant2:1%": "k=nuq2:1%:qnorm:pre,v=nuq2:1%:qnorm,sink=1",
    "kvquant3:1%": "k=nuq3:1%:pre,v=nuq3:1%,sink=1",
    "kvquant4:1%": "k=nuq4:1%:pre,v=nuq4:1%,sink=1",
    "innerq": "k=int3:token:g32:sym:norm,v=int3:channel:g32:sym,sink=32,window=96",
    "innerq-small": "k=int3:token:g32:sym:norm,v=int2:channel:g32:sym,sink=32,window=96",
    "innerq-hybrid": "k=int3:token:g32:sym:norm,v=int2:channel:g32:hybrid,sink=32,window=96",
    "kvrt4": "k=int4:channel:g64:had,v=int4:token:g64:had,sink=4,window=128",
    "kvrt3": "k=int3:channel:g64:had,v=int3:token:g64:had,sink=4,window=128",
    "kvrt2": "k=int3:channel:g64:had,v=int2:token:g64:had,sink=4,window=128",
    "vq2": "k=pq8x256:r3:perhead,v=pq8x256:r1:perhead,sink=4,window=128",
    "vq1.5": "k=pq8x256:r2:perhead,v=pq8x256:r1:perhead,sink=4,window=128",
    "vq1": "k=pq8x256:r1:perhead,v=pq8x256:r1:perhead,sink=4,window=128",
    "vqkv": "k=rvq56x1024:scaled,v=rvq16x512:scaled,sink=4,window=1024",
}

PRESETS: dict[str, KVSpec] = {name: KVSpec.parse(text) for name, text in PRESET_TEXTS.items()}
