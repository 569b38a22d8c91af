"""Attention in float64, and how far off 16-bit queries, keys, values and weights leave it."""

from typing import NamedTuple

import numpy as np

from tests.helpers.refs import attention


class Attended(NamedTuple):
    """Outputs (heads, head_dim) f64, and the expected norm of what 11 bits of everything lose."""

    out: np.ndarray
    loss: float


def attended(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    window: int | None = None,
    roundings: int = 1,
) -> Attended:
    """One query (heads, head_dim) over keys, values (n, kv_heads, head_dim) after RoPE.

    The loss is that of independent relative errors of 2^-12 of each number of the query, of each
    key, value and weight: to first order, from the derivatives of softmax(q k scale) v. Keys are
    rounded so many times on their way, of which scale and minimum are a whole channel's.
    """
    q, keys, values = (array.astype(np.float64) for array in (q, keys, values))
    (outs,), weights = attention(q[None], keys, values, window)
    group, squares = len(q) // keys.shape[1], 0.0
    for head, query in enumerate(q * q.shape[1] ** -0.5):
        k, v, p = keys[:, head // group], values[:, head // group], weights[head, 0]
        moved = p[:, None] * (v - outs[head])  # (n, head_dim): d out / d score
        squares += min(roundings, 3) * (query**2) @ ((k.T @ moved) ** 2).sum(1)
        squares += roundings * ((k * query) ** 2).sum(1) @ (moved**2).sum(1)
        squares += (moved**2).sum() + p**2 @ (v**2).sum(1)
    return Attended(outs, 2.0**-12 * float(np.sqrt(squares)))
