"""What a backend may see of a store: addresses, sizes and the lengths of the moment."""

from dataclasses import dataclass


@dataclass
class Extent:
    """How many tokens are where. One object serves all layers of a store.

    Positions 0 .. sinks - 1 are sinks, then `pages` whole pages, then `tail_tokens` in the tail.
    `table_address` is that of the page table (pages,) i64.
    """

    sinks: int = 0
    pages: int = 0
    tail_tokens: int = 0
    table_address: int = 0


@dataclass(frozen=True)
class PageView:
    """One layer of a store, as kernels see it.

    Sinks (num_kv_heads, sink_rows, head_dim) and tail (num_kv_heads, tail_rows, head_dim) are
    stored floats of `key_kind`, `value_kind`; the tail slot of position p is (p - sinks) %
    tail_rows. A page's bytes are at table[page] + layer_offset + head * run_bytes. `kernels` is
    the suffix of the codec's kernels, `settings_address` that of its (16,) i64 settings.
    """

    extent: Extent
    kernels: str
    num_kv_heads: int
    head_dim: int
    key_kind: int
    value_kind: int
    sink_rows: int
    tail_rows: int
    layer_offset: int
    run_bytes: int
    settings_address: int
    sink_keys_address: int
    sink_values_address: int
    tail_keys_address: int
    tail_values_address: int
