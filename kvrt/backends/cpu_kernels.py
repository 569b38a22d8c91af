"""CPU kernels of the decoder outside attention. Accumulation is float32 throughout.

Parameters: `m` rows (tokens), `kind` of stored floats (`cpu_math.F32 | F16 | BF16`).
"""

import numpy as np

from . import cpu_math, jit
from .jit import Address, Int, Real


@jit.device
def _linear_row(x_at, m, k, w_at, kind, n, bias_at, out_at, row, accumulate):
    x = jit.array(x_at, (m, k), np.float32)
    out = jit.array(out_at, (m, n), np.float32)
    row_bytes = k * (4 if kind == cpu_math.F32 else 2)
    for i in range(m):
        total = cpu_math.dot(w_at + row * row_bytes, kind, x[i])
        if bias_at != 0:
            total += jit.array(bias_at, (n,), np.float32)[row]
        if accumulate != 0:
            total += out[i, row]
        out[i, row] = total


@jit.kernel
def linear(
    thread, begin, end,
    x: Address, m: Int, k: Int, kind: Int, accumulate: Int,
    w0: Address, n0: Int, bias0: Address, out0: Address,
    w1: Address, n1: Int, bias1: Address, out1: Address,
    w2: Address, n2: Int, bias2: Address, out2: Address,
):  # fmt: skip
    """out_i (m, n_i) = x (m, k) @ w_i (n_i, k).T + bias_i; one item is one row of w0, w1 or w2."""
    for item in range(begin, end):
        if item < n0:
            _linear_row(x, m, k, w0, kind, n0, bias0, out0, item, accumulate)
        elif item < n0 + n1:
            _linear_row(x, m, k, w1, kind, n1, bias1, out1, item - n0, accumulate)
        else:
            _linear_row(x, m, k, w2, kind, n2, bias2, out2, item - n0 - n1, accumulate)


@jit.kernel
def widen(thread, begin, end, source: Address, kind: Int, k: Int, out: Address):
    """out (n, k) f32 = stored floats; one item is one row."""
    row_bytes = k * (4 if kind == cpu_math.F32 else 2)
    rows = jit.array(out + begin * k * 4, (end - begin, k), np.float32)
    cpu_math.load_rows(source + begin * row_bytes, kind, end - begin, k, rows)


@jit.kernel
def embed(thread, begin, end, ids: Address, table: Address, kind: Int, k: Int, out: Address):
    """out (m, k) f32 = table rows of ids (m,) i64; one item is one token."""
    row_bytes = k * (4 if kind == cpu_math.F32 else 2)
    tokens = jit.array(ids, (end,), np.int64)
    for i in range(begin, end):
        row = jit.array(out + i * k * 4, (1, k), np.float32)
        cpu_math.load_rows(table + tokens[i] * row_bytes, kind, 1, k, row)


@jit.kernel
def rmsnorm(thread, begin, end, x: Address, weight: Address, k: Int, eps: Real, out: Address):
    """out (m, k) = x / sqrt(mean(x^2) + eps) * weight; one item is one row; may be in place."""
    source = jit.array(x, (end, k), np.float32)
    target = jit.array(out, (end, k), np.float32)
    gain = jit.array(weight, (k,), np.float32)
    for i in range(begin, end):
        total = np.float32(0.0)
        for j in range(k):
            total += source[i, j] * source[i, j]
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / k + eps))
        for j in range(k):
            target[i, j] = source[i, j] * scale * gain[j]


@jit.kernel
def rope(thread, begin, end, x: Address, heads: Int, dim: Int, cos: Address, sin: Address):
    """Rotate pairs (i, i + dim/2) of x (m, heads, dim) in place; cos, sin (m, dim/2)."""
    half = dim // 2
    vectors = jit.array(x, (end, heads, dim), np.float32)
    cosine = jit.array(cos, (end, half), np.float32)
    sine = jit.array(sin, (end, half), np.float32)
    for i in range(begin, end):
        for h in range(heads):
            for j in range(half):
                low = vectors[i, h, j]
                high = vectors[i, h, j + half]
                vectors[i, h, j] = low * cosine[i, j] - high * sine[i, j]
                vectors[i, h, j + half] = high * cosine[i, j] + low * sine[i, j]


@jit.kernel
def silu_mul(thread, begin, end, gate: Address, up: Address, k: Int):
    """gate (m, k) = gate * sigmoid(gate) * up, in place; one item is one row."""
    gates = jit.array(gate, (end, k), np.float32)
    ups = jit.array(up, (end, k), np.float32)
    for i in range(begin, end):
        for j in range(k):
            x = gates[i, j]
            gates[i, j] = x / (np.float32(1.0) + cpu_math.exp(-x)) * ups[i, j]


@jit.kernel
def swiglu(
    thread, begin, end,
    x: Address, m: Int, k: Int, kind: Int, n: Int,
    gate: Address, gate_bias: Address, up: Address, up_bias: Address, out: Address,
):  # fmt: skip
    """out (m, n) = silu(x @ gate.T) * (x @ up.T); one item is one row of gate and up (n, k)."""
    row_bytes = k * (4 if kind == cpu_math.F32 else 2)
    inputs = jit.array(x, (m, k), np.float32)
    result = jit.array(out, (m, n), np.float32)
    for row in range(begin, end):
        for i in range(m):
            g = cpu_math.dot(gate + row * row_bytes, kind, inputs[i])
            u = cpu_math.dot(up + row * row_bytes, kind, inputs[i])
            if gate_bias != 0:
                g += jit.array(gate_bias, (n,), np.float32)[row]
            if up_bias != 0:
                u += jit.array(up_bias, (n,), np.float32)[row]
            result[i, row] = g / (np.float32(1.0) + cpu_math.exp(-g)) * u
