"""The cache: formats, pages and the store. It knows no model."""

from .layout import Geometry, PageLayout
from .rotary import Rotary
from .serialize import Loaded, load_store, save_store
from .spec import PRESETS, KVSpec, Side
from .stats import (
    StoreStats,
    bits_per_element,
    bytes_per_token,
    estimate,
    fixed_bytes,
    smaller_from,
)
from .store import KVStore

__all__ = [
    "PRESETS",
    "Geometry",
    "KVSpec",
    "KVStore",
    "Loaded",
    "PageLayout",
    "Rotary",
    "Side",
    "StoreStats",
    "bits_per_element",
    "bytes_per_token",
    "estimate",
    "fixed_bytes",
    "load_store",
    "save_store",
    "smaller_from",
]
