"""The one list of cache formats that runs through unit, property and store tests, easy to hard.

A new codec joins by one line of MATRIX. Formats that need fitted tables get synthetic ones here,
for numbers of unit spread.
"""

from collections.abc import Iterable

import numpy as np

from kvrt.calibration import NuqTables
from kvrt.errors import UnsupportedError
from kvrt.kvstore import Geometry, KVSpec, Rotary
from kvrt.kvstore.codecs import Dense, Nuq

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
)

DENSE = tuple(
    text
    for text in MATRIX
    if all(isinstance(s.codec, Dense) for layer in (0, 1) for s in KVSpec.parse(text).sides(layer))
)
PACKED = tuple(text for text in MATRIX if text not in DENSE)

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


class FittedTables:
    """What a calibration on keys and values of unit spread would have learnt, about.

    Basic arithmetic alone: golden bytes depend on these numbers.
    """

    def __init__(self, geometry: Geometry):
        self._shape = (geometry.num_kv_heads, geometry.head_dim)

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
