"""Where the codes of vector quantisation lie in a run.

Inside the kernels they are (books, 64 tokens) u16; book = stage * groups + group.

Codes of 8 bits of groups of eight channels are in the order in which a tensor-core kernel meets
them: each of 32 lanes has a stream of 2 * books bytes, byte k of lane l at (k / 16) * 512 + l * 16
+ k % 16, so that a lane reads 16 bytes at a time. In a stream come

- keys: of each eight tokens o, for step t = 0 ... books / 4 - 1, token 8 o + l / 4, of the book
  16 B + 4 * ((i + l / 4) % m) + l % 4, where B = t / 4, i = t % 4 and m = min(4, books / 4 - 4 B):
  the lanes of a row start with different books, so that they do not meet in a bank;
- values: of each eight tokens o, for each eight groups, twice, for each stage, token 8 o + l / 4,
  of the group 4 * ((i + l / 4) % 2) + l % 4 of the eight, i being 0 and then 1.

Codes of whole heads, of 8 to 12 bits, are the low bytes of all books, then what they have further,
f bits of a code each: of eight tokens 8 n ... 8 n + 7 of a book f bytes, token by token from the
lowest bit on.

- Keys: books come in blocks of 16 (four rows of four, m = 4), at last of 8 (m = 2), of 4 and of
  what is left (m = 1, rows of w = 4 or fewer). Book `first + w c + q` of a block has its low bytes
  of tokens 8 n ... at 64 first + 8 (w (8 i + n) + q), i being (c - n) mod m, and its further bytes
  at f (8 first + m (w n + q) + i) behind the low ones: lanes of a row start with different rows.
- Values: low bytes by 16 tokens, book and token; further ones by book and n.
"""

from __future__ import annotations

import numpy as np

from ...backends import jit
from ...backends.ops import PAGE_TOKENS
from ..fragment import LANES, UNIT_BYTES


@jit.inline
def _byte_at(address, k, lane):
    """The address of byte k of a lane's stream."""
    return address + (k >> 4) * UNIT_BYTES + lane * 16 + (k & 15)


@jit.inline
def _move(at, codes, book, token, packing):
    """Write one code to its byte, or read it from there."""
    byte = jit.array(at, (1,), np.uint8)
    if packing:
        byte[0] = codes[book, token]
    else:
        codes[book, token] = byte[0]


@jit.device
def _move_keys(address, codes, packing):
    books = codes.shape[0]
    steps = books >> 2
    k = 0
    for octet in range(8):
        for t in range(steps):
            first, i = t >> 2 << 2, t & 3
            mask = min(4, steps - first) - 1  # steps are even, so that this is 1 or 3
            for lane in range(LANES):
                n = lane >> 2
                book = 4 * (first + ((i + n) & mask)) + (lane & 3)
                _move(_byte_at(address, k, lane), codes, book, 8 * octet + n, packing)
            k += 1


@jit.device
def _move_values(address, codes, groups, packing):
    stages = codes.shape[0] // groups
    k = 0
    for octet in range(8):
        for first in range(0, groups, 8):
            for i in range(2):
                for stage in range(stages):
                    for lane in range(LANES):
                        n = lane >> 2
                        book = stage * groups + first + 4 * ((i + n) & 1) + (lane & 3)
                        _move(_byte_at(address, k, lane), codes, book, 8 * octet + n, packing)
                    k += 1


@jit.device
def pack_groups(codes, groups, is_value, address):
    """Write codes (books, 64) u16 below 256 in the order of lanes: 64 * books bytes."""
    if is_value:
        _move_values(address, codes, groups, True)
    else:
        _move_keys(address, codes, True)


@jit.device
def unpack_groups(address, groups, is_value, codes):
    """The opposite of `pack_groups`."""
    if is_value:
        _move_values(address, codes, groups, False)
    else:
        _move_keys(address, codes, False)


@jit.inline
def _block_of(books, book):
    """(first book, books of a row, rows) of the block of keys that a book is in."""
    first = book & ~15
    left = books - first
    if left >= 16:
        return first, 4, 4
    if left >= 8:
        if book - first < 8:
            return first, 4, 2
        first, left = first + 8, left - 8
    if left >= 4:
        if book - first < 4:
            return first, 4, 1
        first, left = first + 4, left - 4
    return first, left, 1


@jit.inline
def _head_places(books, further, is_value, book, n):
    """Where the low bytes, and the further ones, of the eight tokens 8 n ... of a book are."""
    behind = PAGE_TOKENS * books
    if is_value:
        low = 16 * (books * (n >> 1) + book) + 8 * (n & 1)
        return low, behind + further * (8 * book + n)
    first, width, rows = _block_of(books, book)
    c, q = (book - first) // width, (book - first) % width
    i = (c - n) & (rows - 1)
    low = 64 * first + 8 * (width * (8 * i + n) + q)
    return low, behind + further * (8 * first + rows * (width * n + q) + i)


@jit.device
def pack_heads(codes, bits, is_value, address):
    """Write codes (books, 64) u16 of 8 to 12 bits: 8 * books * bits bytes."""
    books = codes.shape[0]
    run = jit.array(address, (8 * books * bits,), np.uint8)
    for book in range(books):
        for n in range(8):
            low, high = _head_places(books, bits - 8, is_value, book, n)
            word = np.uint64(0)
            for t in range(8):
                code = np.uint64(codes[book, 8 * n + t])
                run[low + t] = code & np.uint64(0xFF)
                word |= code >> np.uint64(8) << np.uint64((bits - 8) * t)
            for k in range(bits - 8):
                run[high + k] = word >> np.uint64(8 * k) & np.uint64(0xFF)


@jit.device
def unpack_heads(address, bits, is_value, codes):
    """The opposite of `pack_heads`."""
    books = codes.shape[0]
    run = jit.array(address, (8 * books * bits,), np.uint8)
    mask = (np.uint64(1) << np.uint64(bits - 8)) - np.uint64(1)
    for book in range(books):
        for n in range(8):
            low, high = _head_places(books, bits - 8, is_value, book, n)
            word = np.uint64(0)
            for k in range(bits - 8):
                word |= np.uint64(run[high + k]) << np.uint64(8 * k)
            for t in range(8):
                further = word >> np.uint64((bits - 8) * t) & mask
                codes[book, 8 * n + t] = np.uint64(run[low + t]) | further << np.uint64(8)
