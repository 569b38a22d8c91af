"""Sealed pages of numbers that never change: `python -m tests.helpers.golden_pages` writes them.

The file holds a hash of each format's pages. A change of a page's bytes must raise FORMAT_VERSION,
or saved stores would be misread.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvrt.backends import get_ops
from kvrt.backends.ops import Ops
from kvrt.kvstore import Geometry
from kvrt.kvstore.layout import FORMAT_VERSION

from .stores import Tokens, digest, extend, new_store

PATH = Path(__file__).parent.parent / "golden" / "pages.json"
GEOMETRY = Geometry(num_layers=1, num_kv_heads=2, head_dim=80)
EVEN = Geometry(num_layers=1, num_kv_heads=2, head_dim=64)


def sides() -> Iterator[str]:
    """Every codec with every option, and the transform; keys and values alike."""
    yield from ("f32", "f16", "bf16", "q8_0", "q4_0", "e4m3", "e5m2", "q4_0:had", "e4m3:had")
    for bits in (2, 3, 4, 8):
        for axis, group in (("channel", 32), ("channel", 64), ("token", 32), ("token", 64)):
            yield f"int{bits}:{axis}:g{group}"
        yield f"int{bits}:channel:g64:sym"
        yield f"int{bits}:token:g32:hybrid"
        yield f"int{bits}:channel:g64:had"
    for bits in (2, 3, 4):
        yield from (f"nuq{bits}", f"nuq{bits}:1%:qnorm")
    yield from ("pq8x256:r1", "pq8x256:r2:had", "pq8x256:r3", "pq8x256:r3:perhead")
    yield from (
        "rvq2x256",
        "rvq3x512:had",
        "rvq1x1024",
        "rvq1x2048",
        "rvq1x4096",
        "rvq5x256:scaled",
        "rvq2x256:perhead",
    )


def specs() -> dict[str, Geometry]:
    """The formats of the file. Groups of channels do not fit every head_dim."""
    found = {}
    for side in sides():
        even = ":token:" in side or side.startswith(("q", "pq"))
        found[f"k={side},v={side}"] = EVEN if even else GEOMETRY
    return found | {"k=int4:token:g32:sym:norm,v=f16": EVEN, "k=int3:channel:g32:norm,v=f16": EVEN}


def tokens(geometry: Geometry) -> Tokens:
    """Two pages of numbers made by integer arithmetic, -4 ... 4, with awkward ones between."""
    count = 2 * 128 * geometry.num_kv_heads * geometry.head_dim
    scattered = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    numbers = (scattered.astype(np.float64) / 2**32 * 8 - 4).astype(np.float32)  # (count,)
    # Where rounding shows: ties to even, subnormal, smallest, largest, signed zero, infinity.
    awkward = [
        1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-24, 2**-25, -(2**-26),
        65504.0, 65519.0, -0.0, np.inf, -np.inf,
    ]  # fmt: skip
    for side in (0, count // 2):
        # In the second page: what the first measures should not be an outlier's.
        start = side + count // 4
        numbers[start : start + 12] = awkward
    shape = (2, 1, 128, geometry.num_kv_heads, geometry.head_dim)
    keys, values = numbers.reshape(shape)
    keys[0, 70], values[0, 70] = 0, 0.5  # tokens without a range
    keys[0, 10:, 1, 7], values[0, 10:, 1, 7] = 3, 0  # channels without one
    return Tokens(keys, values)


def pages(ops: Ops, spec: str, geometry: Geometry) -> list[bytes]:
    """The two pages of a format."""
    store = new_store(ops, spec, geometry)
    extend(store, tokens(geometry))
    return [ops.to_host(slab).tobytes() for slab in store._state.slabs]


def page_hash(parts: list[bytes]) -> str:
    return digest(np.frombuffer(part, np.uint8) for part in parts)[:32]


def write() -> None:
    ops = get_ops("cpu")
    found = {spec: page_hash(pages(ops, spec, geometry)) for spec, geometry in specs().items()}
    golden = {"format_version": FORMAT_VERSION, "sha256": found}
    PATH.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    write()
