"""`KVSpec`: the only carrier of cache parameters. It parses and prints.

Grammar: `k=SIDE,v=SIDE[,sink=N][,window=N]`, or the name of a preset. A SIDE is the name of a
codec.
"""

from dataclasses import dataclass

from ..errors import UnsupportedError, UsageError
from .codecs import CODECS, TileCodec


@dataclass(frozen=True)
class KVSpec:
    """How keys and values are kept.

    `k`, `v`: codec of sealed pages; `sink`: first tokens kept exact for ever; `window`: the newest
    tokens, at least so many of which are exact.
    """

    k: TileCodec
    v: TileCodec
    sink: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.k.kernels != self.v.kernels:
            raise UnsupportedError(
                f"cache format k={self.k.name},v={self.v.name}: no kernels read this pair; "
                "keys and values must be of one family"
            )

    @classmethod
    def parse(cls, text: str) -> "KVSpec":
        """Read a preset's name or the grammar. Raises UsageError, naming what works."""
        cleaned = text.strip()
        if cleaned in PRESETS:
            return PRESETS[cleaned]
        if "=" not in cleaned:
            raise UsageError(
                f"unknown cache format {text!r}: expected one of {', '.join(PRESETS)}, "
                "or k=FORMAT,v=FORMAT[,sink=N][,window=N]"
            )
        fields: dict[str, str] = {}
        for part in cleaned.split(","):
            key, _, value = part.strip().partition("=")
            if key not in ("k", "v", "sink", "window"):
                raise UsageError(
                    f"cache format {text!r}: unknown key {key!r}, expected k, v, sink or window"
                )
            if key in fields:
                raise UsageError(f"cache format {text!r}: {key} is given twice")
            fields[key] = value
        for side in ("k", "v"):
            if side not in fields:
                raise UsageError(f"cache format {text!r}: {side}=FORMAT is missing")
        return cls(
            _codec(text, fields["k"]),
            _codec(text, fields["v"]),
            _count(text, fields, "sink"),
            _count(text, fields, "window"),
        )

    def __str__(self) -> str:
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        text = f"k={self.k.name},v={self.v.name}"
        if self.sink:
            text += f",sink={self.sink}"
        if self.window:
            text += f",window={self.window}"
        return text


def _codec(text: str, name: str) -> TileCodec:
    if name not in CODECS:
        raise UsageError(
            f"cache format {text!r}: unknown codec {name!r}, expected one of {', '.join(CODECS)}"
        )
    return CODECS[name]


def _count(text: str, fields: dict[str, str], key: str) -> int:
    value = fields.get(key, "0")
    if not (value.isascii() and value.isdigit()) or int(value) > 1 << 20:
        raise UsageError(f"cache format {text!r}: {key} must be 0 to 1048576 tokens, got {value!r}")
    return int(value)


PRESETS: dict[str, KVSpec] = {name: KVSpec(codec, codec) for name, codec in CODECS.items()}
