"""The one list of cache formats that runs through unit, property and store tests, easy to hard.

A new codec joins by one line of MATRIX. Formats that need fitted tables get synthetic ones here,
for numbers of unit spread.
"""

from collections.abc import Iterable

import numpy as np

from kvrt.calibration import NuqTables
from kvrt.errors import UnsupportedError
from kvrt.kvstore import Geometry, KVSpec, Rotary
from kvrt.kvstore.codecs import Dense, Nuq, Vq, VqBooks

MATRIX: tuple[str, ...] = (
    "f32",
    "f16",
    "bf16",
    "k=f16:page,v=f32,sink=3,window=5",
    "k=f32:pre,v=bf16,sink=70",
    "q8_0",
    "q4_0",
    "f8",
    "f8e5m2",
    "k=int8:token:g32,v=int8:channel:g32,window=1",
    "kivi4",
    "kivi2",
    "k=int8:channel:g64:page,v=int8:token:g64,sink=1",
    "k=int4:channel:g32:pre,v=int3:token:g32,sink=5,window=64",
    "innerq",
    "innerq-small",
    "innerq-hybrid",
    "k=int2:token:g64:hybrid:pre,v=int4:channel:g64:hybrid,window=70",
    "k=q4_0:page:had,v=q8_0:had,sink=70,window=100",
    "k=e4m3:page:had,v=e5m2:had,sink=4",
    "kvrt4",
    "kvrt3",
    "kvrt2",
    "k=int4:token:g32:norm:page:had,v=int3:channel:g32:had,sink=4,window=60",
    "kvrt4,layers[1]=k=int2:channel:g32:pre,v=f16",
    "kvquant4",
    "kvquant3",
    "kvquant2",
    "kvquant4:1%",
    "kvquant2:1%",
    "k=pq8x256:r2,v=pq8x256:r1,window=100",
    "vq2",
    "k=rvq2x256:perhead,v=rvq3x512:perhead,sink=2",
    "k=pq8x256:r1:page:had,v=pq8x256:r3:had,sink=4",
    "k=pq8x256:r3:pre,v=int4:token:g32",
    "k=rvq7x512,v=rvq3x256,sink=4,window=64",
    "k=rvq2x4096:pre,v=rvq1x1024:had",
    "k=rvq14x1024:scaled,v=rvq6x512:scaled,sink=4,window=100",
)

DENSE = tuple(
    text
    for text in MATRIX
    if all(isinstance(s.codec, Dense) for layer in (0, 1) for s in KVSpec.parse(text).sides(layer))
)
PACKED = tuple(text for text in MATRIX if text not in DENSE)
ON_GPU = MATRIX
"""Those that a GPU's kernels write, and give back."""

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=64)
"""One that every format fits."""


def fitting(geometry: Geometry, specs: Iterable[str] = MATRIX) -> list[str]:
    """The formats that fit a geometry."""
    return [text for text in specs if fits(text, geometry)]


def fits(text: str, geometry: Geometry) -> bool:
    try:
        KVSpec.parse(text).check(geometry)
    except UnsupportedError:
        return False
    return True


def rotary_for(geometry: Geometry, theta: float = 10000.0, amplitude: float = 1.0) -> Rotary:
    """RoPE as most models have it."""
    half = geometry.head_dim // 2
    return Rotary(theta ** (-np.arange(half, dtype=np.float64) / half), amplitude)


def scattered_order(dim: int, head: int = 0) -> np.ndarray:
    """Channels (dim,) i32 of a head in groups of 8: four that are far apart, and their partners."""
    half = dim // 2
    pairs = (np.arange(half) * 11 + 3 * head) % half  # half is 32 times a number up to 10
    fours = pairs.reshape(-1, 1, 4)
    return np.concatenate([fours, fours + half], axis=1).ravel().astype(np.int32)


class FittedTables:
    """What a calibration on keys and values of unit spread would have learnt, about.

    Basic arithmetic alone: golden bytes depend on these numbers.
    """

    def __init__(self, geometry: Geometry):
        self._shape = (geometry.num_kv_heads, geometry.head_dim)

    def books(
        self, layer: int, is_value: bool, codec: Vq, rope: str = "post", had: bool = False
    ) -> VqBooks:
        """Scattered entries, of each stage smaller ones; of keys a centre and a scale."""
        heads, dim = self._shape
        stages, groups, size, width = shape = codec.shape(heads, dim)
        count = stages * groups * size * width
        # As in `golden_pages`: integers, scattered. Sums of four are nearly normal.
        numbers = np.zeros(count)
        for turn in range(4):
            start = np.uint64(1 + turn * 40503 + 977 * layer + 13 * is_value)
            scattered = (np.arange(count, dtype=np.uint64) + start) * np.uint64(2654435761)
            scattered ^= scattered >> np.uint64(15)
            scattered = scattered * np.uint64(2246822519) % np.uint64(2**32)
            numbers += scattered.astype(np.float64) / 2**32 - 0.5
        shrink = 1 - 0.5 * (size.bit_length() - 1) / width  # no power: it differs by machine
        entries = numbers.reshape(shape) * 1.75
        for stage in range(stages):
            entries[stage] *= max(1 - shrink, 0.3)
            entries[stage + 1 :] *= shrink
        if is_value:
            return VqBooks(entries.astype(np.float16))
        channel = np.arange(heads * dim).reshape(self._shape)
        centre = ((channel * 37 + layer) % 61 / 640).astype(np.float32)  # (heads, dim)
        scale = (0.75 + channel % 23 / 32).astype(np.float32)  # (heads, dim)
        order = codec.plain_order(heads, dim)
        if codec.grouped:  # each head has other groups
            order = np.stack([scattered_order(dim, head) for head in range(heads)])
        return VqBooks(entries.astype(np.float16), centre, scale, order)

    def tables(self, layer: int, is_value: bool, codec: Nuq, rope: str = "post") -> NuqTables:
        even = np.linspace(-1, 1, 2**codec.bits)  # (2^bits,) f64
        levels = (even * (np.abs(even) + 1) / 2).astype(np.float32)  # denser in the middle
        read_levels = levels * np.float32(0.97) + np.float32(0.01) if codec.qnorm else levels
        if is_value:
            return NuqTables(levels, read_levels)
        channel = np.arange(self._shape[0] * self._shape[1]).reshape(self._shape)
        centre = ((channel * 37 + layer) % 64 / 640).astype(np.float32)  # (heads, dim)
        half = (2.5 + channel % 8 / 64).astype(np.float32)  # (heads, dim)
        return NuqTables(levels, read_levels, centre, half)
