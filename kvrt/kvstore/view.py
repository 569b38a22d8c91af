"""What a backend may see of a store: addresses, sizes and the lengths of the moment."""

from dataclasses import dataclass

from .layout import PageLayout


@dataclass
class Extent:
    """How many tokens are where. One object serves all layers of a store.

    Positions 0 .. sinks - 1 are sinks, then `pages` whole pages, then `tail_tokens` in the tail.
    """

    sinks: int = 0
    pages: int = 0
    tail_tokens: int = 0
    table_address: int = 0


@dataclass(frozen=True)
class LayerView:
    """One layer of a store, as kernels see it (`kvrt.backends.ops.PageView`).

    Sinks (num_kv_heads, sink_rows, head_dim) and tail (num_kv_heads, tail_rows, head_dim) are
    stored floats of `key_kind`, `value_kind`; the tail slot of position p is (p - sinks) %
    tail_rows. A page's bytes are at table[page] + layer_offset + head * run_bytes.
    """

    layout: PageLayout
    extent: Extent
    kernels: str
    key_kind: int
    value_kind: int
    sink_rows: int
    tail_rows: int
    layer_offset: int
    settings_address: int
    sink_keys_address: int
    sink_values_address: int
    tail_keys_address: int
    tail_values_address: int

    @property
    def num_kv_heads(self) -> int:
        return self.layout.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def run_bytes(self) -> int:
        return self.layout.run_bytes

    @property
    def table_address(self) -> int:
        return self.extent.table_address

    @property
    def sinks(self) -> int:
        return self.extent.sinks

    @property
    def pages(self) -> int:
        return self.extent.pages

    @property
    def tail_tokens(self) -> int:
        return self.extent.tail_tokens
