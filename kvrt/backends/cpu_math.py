"""Scalar and vector arithmetic that the CPU kernels share."""

import ml_dtypes
import numpy as np

from . import jit

F32, F16, BF16 = 0, 1, 2
"""How 16- and 32-bit floats are told apart inside kernels (`kind` arguments)."""

KINDS = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(ml_dtypes.bfloat16): BF16}


@jit.device
def row_bytes(kind, dim):
    return dim * (4 if kind == F32 else 2)


@jit.exact
def exp(x):
    """e**x of a float32, right but for its last rounding (float64 inside); x is held to -87 .. 88.

    2^n * e^r with |r| <= ln(2) / 2, and the Taylor series of e^r to r^8 (3e-10).
    """
    # Written so that a NaN passes.
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    wide = np.float64(x)
    n = np.floor(wide * 1.4426950408889634 + 0.5)
    r = wide - n * 0.6931471805599453
    p = 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return np.float32(p * jit.bits_to_double((np.int64(np.int32(n)) + 1023) << 52))


@jit.exact
def bfloat_to_float(bits):
    return jit.bits_to_float(np.uint32(bits) << np.uint32(16))


@jit.exact
def float_to_bfloat(x):
    """bfloat16 bits, round to nearest even; NaN stays NaN."""
    bits = jit.float_to_bits(x)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(rounded >> np.uint32(16))


@jit.exact
def float_to_half(x):
    """IEEE half bits, round to nearest even; what is too large becomes the largest, 65,504."""
    # Written so that a NaN passes.
    x = np.float32(65504.0) if x > np.float32(65504.0) else x
    x = np.float32(-65504.0) if x < np.float32(-65504.0) else x
    return jit.float_to_half(x)


@jit.inline
def load_rows(address, kind, rows, cols, out):
    """Widen `rows * cols` stored floats at `address` into out[:rows, :cols] (float32)."""
    if kind == F32:
        full = jit.array(address, (rows, cols), np.float32)
        for i in range(rows):
            for j in range(cols):
                out[i, j] = full[i, j]
    elif kind == F16:
        half = jit.array(address, (rows, cols), np.uint16)
        for i in range(rows):
            for j in range(cols):
                out[i, j] = jit.half_to_float(half[i, j])
    else:
        brain = jit.array(address, (rows, cols), np.uint16)
        for i in range(rows):
            for j in range(cols):
                out[i, j] = bfloat_to_float(brain[i, j])


@jit.device
def store_row(row, kind, address):
    """Narrow one float32 row to stored floats at `address`, round to nearest even."""
    cols = row.shape[0]
    if kind == F32:
        full = jit.array(address, (cols,), np.float32)
        for j in range(cols):
            full[j] = row[j]
    elif kind == F16:
        half = jit.array(address, (cols,), np.uint16)
        for j in range(cols):
            half[j] = float_to_half(row[j])
    else:
        brain = jit.array(address, (cols,), np.uint16)
        for j in range(cols):
            brain[j] = float_to_bfloat(row[j])


@jit.device
def dot(address, kind, x):
    """The dot product of a stored row at `address` and a float32 vector."""
    n = x.shape[0]
    total = np.float32(0.0)
    if kind == F32:
        full = jit.array(address, (n,), np.float32)
        for j in range(n):
            total += full[j] * x[j]
    elif kind == F16:
        half = jit.array(address, (n,), np.uint16)
        for j in range(n):
            total += jit.half_to_float(half[j]) * x[j]
    else:
        brain = jit.array(address, (n,), np.uint16)
        for j in range(n):
            total += bfloat_to_float(brain[j]) * x[j]
    return total


@jit.exact
def maximum(x):
    """The largest number of a vector, -1e30 at least; a NaN counts as larger than infinity."""
    # Compared as integers in the order of floats: LLVM does not vectorise a float maximum.
    peak = np.int32(-1900671691)  # -1e30
    for j in range(x.shape[0]):
        bits = np.int32(jit.float_to_bits(x[j]))
        key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        peak = key if key > peak else peak
    bits = np.int32(peak ^ np.int32(np.int32(peak >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return jit.bits_to_float(np.uint32(bits))


@jit.device
def exp_minus(x, shift, scale):
    """x = exp(scale * (x - shift)) in place; gives the sum."""
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        value = exp((x[j] - shift) * scale)
        x[j] = value
        total += value
    return total


@jit.inline
def inner(x, y):
    """The dot product of two float32 vectors."""
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@jit.inline
def inner4(x, rows, t):
    """The dot products of a vector with rows t .. t + 3 of a matrix."""
    a, b, c, d = rows[t], rows[t + 1], rows[t + 2], rows[t + 3]
    sum_a, sum_b = np.float32(0.0), np.float32(0.0)
    sum_c, sum_d = np.float32(0.0), np.float32(0.0)
    for j in range(x.shape[0]):
        sum_a += x[j] * a[j]
        sum_b += x[j] * b[j]
        sum_c += x[j] * c[j]
        sum_d += x[j] * d[j]
    return sum_a, sum_b, sum_c, sum_d


@jit.inline
def add_scaled4(rows, factors, t, out):
    """out += the rows t .. t + 3 of a matrix, each times its factor."""
    a, b, c, d = rows[t], rows[t + 1], rows[t + 2], rows[t + 3]
    fa, fb, fc, fd = factors[t], factors[t + 1], factors[t + 2], factors[t + 3]
    for j in range(out.shape[0]):
        out[j] += (fa * a[j] + fb * b[j]) + (fc * c[j] + fd * d[j])


@jit.inline
def add_scaled(x, factor, out):
    """out += factor * x."""
    for j in range(out.shape[0]):
        out[j] += factor * x[j]


@jit.inline
def scale(x, factor):
    """x *= factor."""
    for j in range(x.shape[0]):
        x[j] *= factor


@jit.device
def fill(x, value):
    """x = value."""
    for j in range(x.shape[0]):
        x[j] = value


@jit.exact
def hadamard(x, block):
    """The Walsh-Hadamard transform of each `block` (a power of two) of x, / sqrt(block), in place.

    It is its own inverse.
    """
    half = 1
    while half < block:
        for pair in range(x.shape[0] // (2 * half)):
            start = pair * 2 * half
            low, high = x[start : start + half], x[start + half : start + 2 * half]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a + b
                high[i] = a - b
        half *= 2
    factor = np.float32(1.0) / np.sqrt(np.float32(block))
    for i in range(x.shape[0]):
        x[i] *= factor


@jit.exact
def turn(x, cos, sin, way):
    """Rotate the pairs (i, i + half) of x in place; way is 1, or -1 for backwards."""
    half = cos.shape[0]
    low, high = x[:half], x[half : 2 * half]
    sign = np.float32(way)
    for i in range(half):
        a, b, s = low[i], high[i], sign * sin[i]
        low[i] = a * cos[i] - b * s
        high[i] = b * cos[i] + a * s
