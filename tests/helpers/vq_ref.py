"""Vector quantisation in NumPy, to the bit, from its definition, without code of `codecs.vq`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrt.kvstore.codecs import VqBooks

from .rvq_layer import RvqSide, pack_keys, pack_values


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f32, rounded once: float64 holds the product, and the sum is rounded to odd."""
    product = a.astype(np.float64) * b.astype(np.float64)
    added = c.astype(np.float64)
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)  # exact (Knuth's TwoSum)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def channels_of(books: VqBooks, group: int, head: int, dim: int) -> np.ndarray:
    """The channels (width,) of a group, in the order of its entries."""
    width = books.entries.shape[-1]
    if width == dim or books.order is None:
        return width * group + np.arange(width)
    return books.order[head, 8 * group : 8 * group + 8].astype(np.int64)


@dataclass(frozen=True)
class Coded:
    """codes (stages, groups, 64) of one head; what they mean (64, dim) f32."""

    codes: np.ndarray
    decoded: np.ndarray


def encode(tile: np.ndarray, books: VqBooks, head: int) -> Coded:
    """Code the numbers (64, dim) f32 of one head."""
    stages, _, size, width = books.entries.shape
    dim = tile.shape[1]
    groups = dim // width
    own = head * groups if books.entries.shape[1] > groups else 0  # the head's first group
    one = np.float32(1)
    centre = np.zeros(dim, np.float32) if books.centre is None else books.centre[head]
    scale = np.ones(dim, np.float32) if books.scale is None else books.scale[head]
    x = (tile - centre) * scale
    codes = np.zeros((stages, groups, 64), np.int64)
    decoded = np.zeros((64, dim), np.float32)
    for group in range(groups):
        where = channels_of(books, group, head, dim)
        left, total = x[:, where].copy(), np.zeros((64, width), np.float32)
        for stage in range(stages):
            entries = books.entries[stage, own + group].astype(np.float32)  # (E, width)
            norms = (np.square(entries.astype(np.float64)).sum(1) / 2).astype(np.float32)
            products = np.zeros((64, size), np.float32)
            for c in range(width):
                products = fma(left[:, c, None], entries[:, c], products)
            far = norms - products
            codes[stage, group] = np.where(np.isnan(far), np.inf, far).argmin(1)
            chosen = entries[codes[stage, group]]
            left -= chosen
            total += chosen
        decoded[:, where] = total
    inverse = one / scale
    return Coded(codes, centre + inverse * decoded)


def group_places(books: int, groups: int, is_value: bool) -> Iterator[tuple[int, int, int]]:
    """(byte, book, token) of every code of groups of eight channels."""
    for lane in range(32):
        stream = []
        n, q = divmod(lane, 4)
        if is_value:
            for octet in range(8):
                for row in range(groups // 8):
                    for i in range(2):
                        for stage in range(books // groups):
                            within = 4 * ((i + n) % 2) + q
                            stream.append((stage * groups + 8 * row + within, 8 * octet + n))
        else:
            for octet in range(8):
                for t in range(books // 4):
                    b, i = divmod(t, 4)
                    m = min(4, books // 4 - 4 * b)
                    stream.append((16 * b + 4 * ((i + n) % m) + q, 8 * octet + n))
        assert len(stream) == 2 * books
        for k, (book, token) in enumerate(stream):
            yield k // 16 * 512 + lane * 16 + k % 16, book, token


def pack(codes: np.ndarray, bits: int, width: int, is_value: bool) -> bytes:
    """The run's bytes of codes (stages, groups, 64)."""
    groups, flat = codes.shape[1], codes.reshape(-1, 64)  # by book
    books = len(flat)
    if width == 8:
        out = np.full(64 * books, -1)
        for byte, book, token in group_places(books, groups, is_value):
            assert out[byte] == -1
            out[byte] = flat[book, token]
        return out.astype(np.uint8).tobytes()
    side = RvqSide(books, bits)
    return (pack_values if is_value else pack_keys)(flat, side).tobytes()
