"""What random weights get in place of a calibration: tables for normally distributed numbers.

Of the right size and fitted to nothing, for memory and speed alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from .calibrate import normal_calibration
from .kvstore.codecs import Vq, VqBooks

if TYPE_CHECKING:
    from .calibration import Calibration, NuqTables
    from .kvstore import Geometry
    from .kvstore.codecs import Nuq
    from .kvstore.grammar import Rope


class NormalTables:
    """Tables of all formats (see `calibration.Fitted`), each made when it is first asked for."""

    def __init__(self, geometry: Geometry, model_fingerprint: str = ""):
        self._geometry = geometry
        self._fingerprint = model_fingerprint
        self._books: dict[tuple[Vq, bool], VqBooks] = {}

    @cached_property
    def _nuq(self) -> Calibration:
        return normal_calibration("random weights", self._fingerprint, self._geometry)

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: Rope = "post") -> NuqTables:
        return self._nuq.tables(layer, is_value, codec, rope)

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: Rope = "post", had: bool = False
    ) -> VqBooks:
        """One object for all layers and forms."""
        found = self._books.get((codec, is_value))
        if found is None:
            found = self._books[codec, is_value] = self._draw(codec, is_value)
        return found

    def _draw(self, codec: Vq, is_value: bool) -> VqBooks:
        heads, dim = self._geometry.num_kv_heads, self._geometry.head_dim
        shape = codec.shape(heads, dim)
        entries = normal_entries(shape, crc32(codec.book.encode()) + is_value)
        if is_value:
            return VqBooks(entries)
        even = np.ones((heads, dim), np.float32)
        return VqBooks(entries, np.zeros_like(even), even, codec.plain_order(heads, dim))


def normal_entries(shape: tuple[int, int, int, int], seed: int) -> np.ndarray:
    """Codebooks (stages, groups, E, d) f16 for numbers of spread 1: the same for a seed.

    The rate-distortion bound of a normal distribution says by how much each stage shrinks what is
    left over; an entry has the spread of what it takes away. A stage has its own stream, so that
    fewer stages are the first of more.
    """
    stages, groups, size, dim = shape
    shrink = size ** (-1.0 / dim)
    entries = np.empty(shape, np.float16)
    for stage in range(stages):
        generator = np.random.Generator(np.random.Philox(key=(seed << 8) + stage))
        spread = shrink**stage * np.sqrt(1 - shrink**2)
        drawn = generator.standard_normal((groups, size, dim), np.float32)
        entries[stage] = drawn * np.float32(spread)
    return entries
