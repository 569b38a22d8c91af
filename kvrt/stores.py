"""The two kinds of caches: of pages, and of zones. Models and sessions use what they share."""

from __future__ import annotations

from .kvstore.store import KVStore
from .trizone.store import ZoneStore

Store = KVStore | ZoneStore
"""Keys and values of one sequence: a `KVStore`, or a `ZoneStore` where prompts are compressed."""
