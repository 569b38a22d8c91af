"""What a backend may see of a store: addresses, sizes and the lengths of the moment.

What does not change while tokens are decoded is a row of integers for each layer, i64, which
kernels read: a structure of LAYER_SETTINGS, so to say, whose members are named below, and with
zones where each head's blocks begin. What changes is the `Extent`.
"""

from dataclasses import dataclass, field
from typing import Any

PAGE_TOKENS = 64
"""Tokens of a page."""

LAYER_SETTINGS = 64


def zone_settings(kv_heads: int) -> int:
    """Integers of a layer with zones: behind LAYER_SETTINGS is where each head's blocks begin.

    Of a multiple of 32 heads, and one more: those that there are not begin where all blocks end.
    """
    return LAYER_SETTINGS + -(-kv_heads // 32) * 32 + 1


(
    HEADS,  # KV heads
    DIM,  # head_dim
    KEY_KIND,  # kind of float of the keys in sinks and tail
    VALUE_KIND,
    SINK_ROWS,
    TAIL_ROWS,
    SINK_KEYS,  # address of (HEADS, SINK_ROWS, DIM)
    SINK_VALUES,
    TAIL_KEYS,  # address of (HEADS, TAIL_ROWS, DIM), a ring
    TAIL_VALUES,
    LAYER_OFFSET,  # where the layer begins in a page
    RUN_BYTES,  # of one head
    SHARED_OFFSET,  # of what all heads share, from where the layer begins
    FORM,  # of keys: POST, PAGE or PRE
    KEY_HADAMARD,  # block size of the transform, 0 for none
    VALUE_HADAMARD,
    KEY_BIAS,  # address of (HEADS, DIM) f32 that is left out of the keys, or 0
    TURNS,  # address of (64, 2, DIM / 2) f32, cos and sin of the offsets in a block of 64, or 0
    KEY_NORM,  # address of (HEADS, DIM) f32 to multiply into queries of packed keys, or 0
    QUICK,  # of the DIM / 2 pairs of channels, the first so many turn much within a page
    ZONE_UNITS,  # address of (blocks, 4) i64, the blocks of the zones, sorted by head; 0: none
    ZONE_BLOCKS,  # how many there are
    ZONE_LARGEST,  # bytes of the largest
    QUERIES,  # address of (QUERY_ROWS, query heads, DIM) f32, the newest tokens' queries; 0: none
) = range(24)
QUERY_ROWS = 32
"""Queries that are kept: a token's lies in row `slot` modulo this."""

KEY_SIDE, VALUE_SIDE = 32, 48
SIDE_SETTINGS = 16
"""Integers that describe the codec of one side, from KEY_SIDE and VALUE_SIDE on."""

CODEC, CODES, META, SHARED, OWN, STATE, TABLE, WORK = 0, 1, 2, 3, 4, 10, 11, 12
"""Their order: the codec's number; offsets of codes and meta in a head's run, of the shared part in
what all heads share; six settings of the codec's own; addresses of the layer's measured state and
of its fitted tables; bytes of scratch that a CPU needs to encode one head, beside its tile and
codes."""

POST, PAGE, PRE = 0, 1, 2
"""Keys after RoPE; rotated by their offset in the page only; before RoPE."""

LENGTHS = 16
"""Integers with which a device's copy of an `Extent` begins; angles (4, 2, DIM / 2) f32 follow."""

TOKEN_ID, TOKEN_SLOT, TOKEN_IS_SINK = 6, 7, 8
"""Where they are among those, behind the `numbers`."""

FORWARDS, BACKWARDS, BASE, OFFSET = range(4)
"""Angles of a token: that of its position, to rotate with and to rotate back with (which differ
where the rotation has an amplitude); that of where its block of 64 begins, and of its offset in
that."""


def set_blocks(settings: Any, units: int, starts: Any, largest: int) -> None:
    """Say in a layer's settings (zone_settings(heads),) i64 which blocks its zones have.

    units: address of the directory; starts (heads + 1,) i64: where each head's begin in it, and
    where all end; largest: bytes of the largest.
    """
    settings[ZONE_UNITS], settings[ZONE_BLOCKS], settings[ZONE_LARGEST] = units, starts[-1], largest
    behind = settings[LAYER_SETTINGS:]
    behind[:] = starts[-1]
    behind[: len(starts)] = starts


@dataclass(frozen=True)
class Token:
    """What a decode step adds, and where: row `slot` of the sinks, or slot of the tail's ring.

    angles: cos and sin (4, 2, head_dim / 2) f32; those that no side of the store needs are zeros.
    """

    token_id: int
    slot: int
    is_sink: bool
    angles: Any


@dataclass
class Extent:
    """How many tokens are where. One object serves all layers of a store.

    Positions 0 .. sinks - 1 are sinks, then `pages` whole pages, then `tail_tokens` in the tail,
    the first of them in ring slot `tail_slot`. `table_address` is that of the page table (pages,)
    i64; `bases_address` that of cos and sin (blocks, 2, head_dim / 2) f32 of the positions where
    blocks of 64 begin (of the sinks, the pages, the tail), 0 where no kernel needs them.
    """

    sinks: int = 0
    pages: int = 0
    tail_tokens: int = 0
    tail_slot: int = 0
    table_address: int = 0
    bases_address: int = 0
    token: Token | None = field(default=None, compare=False)
    """That of the decode step under way, or of the last one."""
    mirror: Any = field(default=None, compare=False, repr=False)
    """Where a backend keeps what it made of the numbers for its device."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """All six, in order."""
        return (
            self.sinks,
            self.pages,
            self.tail_tokens,
            self.tail_slot,
            self.table_address,
            self.bases_address,
        )


@dataclass(frozen=True)
class PageView:
    """One layer of a store, as kernels see it. `address` is that of `settings` on the device."""

    extent: Extent
    settings: Any  # (LAYER_SETTINGS,) i64, or more of them (`zone_settings`), on the host
    address: int
    surveys: tuple[str, str]  # of K and V: "never", "first" or "every" page
    zones: bool = False  # whether packed tokens lie in zones, beside a tail that is no ring

    @property
    def num_kv_heads(self) -> int:
        return int(self.settings[HEADS])

    @property
    def head_dim(self) -> int:
        return int(self.settings[DIM])
