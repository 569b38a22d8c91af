"""What a cache format does to attention, layer by layer and head by head: relative errors.

Each layer of the exact model gives queries, keys and values; keys and values go through packed
pages and come back, and the two attentions are compared. Errors do not add up over layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from .backends.ops import PAGE_TOKENS
from .errors import CodecError, UsageError
from .progress import Progress, silent
from .trizone.store import ZoneStore

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore import KVSpec, KVStore

ERRORS = ("key_error", "score_error", "value_error", "output_error")
_QUERY_ROWS = 256


@dataclass(frozen=True)
class AttentionErrors:
    """Relative Frobenius errors of one format: |changed - exact| / |exact|.

    `heads` (4, num_layers, num_heads) f64 holds, for each query head, those of its keys, of its
    softmax rows, of its values and of its attention output, in the order of ERRORS.
    """

    kv: str
    heads: np.ndarray
    tokens: int
    bits_per_element: float

    def means(self) -> dict[str, float]:
        """Averages over layers and heads."""
        return dict(zip(ERRORS, self.heads.mean(axis=(1, 2)).tolist()))

    def per_layer(self, details: bool = False) -> list[dict[str, Any]]:
        """Averages over the heads of each layer; with details, each head's errors too."""
        rows = []
        for layer, heads in enumerate(self.heads.swapaxes(0, 1)):  # heads (4, num_heads)
            row = {"layer": layer, **dict(zip(ERRORS, heads.mean(axis=1).tolist()))}
            if details:
                row["heads"] = [
                    {"head": head, **dict(zip(ERRORS, errors))}
                    for head, errors in enumerate(heads.T.tolist())
                ]
            rows.append(row)
        return rows


def whole_pages(tokens: int) -> int:
    """The most tokens up to `tokens` that fill pages. Raises UsageError below one page."""
    if tokens < PAGE_TOKENS:
        raise UsageError(
            f"attention errors need at least one page of {PAGE_TOKENS} tokens, got {tokens}"
        )
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def attention_errors(
    model: Model, specs: Sequence[KVSpec], sequences: np.ndarray, progress: Progress = silent
) -> list[AttentionErrors]:
    """Errors of each format, averaged over sequences (count, tokens) of token ids.

    Sinks and windows of the formats are left out: every token is packed, so tokens must be whole
    pages. `progress` counts tokens. Raises CodecError for a format that gives numbers that are not
    finite.
    """
    count, tokens = sequences.shape
    if tokens != whole_pages(tokens):
        raise UsageError(f"expected whole pages of {PAGE_TOKENS} tokens, got {tokens} tokens")
    config, host = model.config, model.ops.to_host
    packed = [replace(spec, sink=0, window=0) for spec in specs]
    for spec in packed:
        _page_store(model, spec)  # refuses what the model cannot have, before any work
    sums = np.zeros((len(specs), len(ERRORS), config.num_layers, config.num_heads))
    bits = [0.0] * len(specs)
    for number, ids in enumerate(sequences):

        def layers(layer: int, layers: int, before: int = number * tokens) -> None:
            progress("measure", before + tokens * layer // layers, count * tokens)

        with ExitStack() as stack:
            stores = [_page_store(model, spec) for spec in packed]
            for store in stores:
                stack.enter_context(store.extending(tokens))

            def visit(layer: int, q: Any, k: Any, v: Any, stores: Any = stores) -> None:
                sides = [(host(k), host(v))]
                sides += [_through(store, layer, k, v) for store in stores]
                window = config.windows[layer]
                sums[:, :, layer] += _layer_errors(host(q), sides, window, model.ops.threads)

            model.decoder.trace(ids, visit, progress=layers)
        bits = [store.stats().bits_per_element for store in stores]
    for spec, errors in zip(specs, sums):
        if not np.isfinite(errors).all():
            layer = int(np.argwhere(~np.isfinite(errors))[0][1])
            raise CodecError(
                f"cache format {spec} gives numbers that are not finite, layer {layer}"
            )
    return [
        AttentionErrors(str(spec), errors / count, count * tokens, width)
        for spec, errors, width in zip(specs, sums, bits)
    ]


def _page_store(model: Model, spec: KVSpec) -> KVStore:
    store = model.new_store(spec)
    if isinstance(store, ZoneStore):
        raise UsageError(
            f"attention errors compare keys token by token, and cache format {store.compression} "
            "forgets some; `kvrt eval kld --prompt N` measures it"
        )
    return store


def _through(store: KVStore, layer: int, k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
    """A layer's keys and values (n, kv_heads, head_dim) f32 as its packed pages hold them."""
    store.extend(layer, k, v)
    keys, values = store.ops.empty(k.shape), store.ops.empty(v.shape)
    for page in range(len(k) // PAGE_TOKENS):
        rows = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        store.read_page(layer, page, keys[rows], values[rows])
    return store.ops.to_host(keys), store.ops.to_host(values)


def _layer_errors(
    q: np.ndarray, sides: Sequence[tuple[np.ndarray, np.ndarray]], window: int | None, threads: int
) -> np.ndarray:
    """Errors (formats, 4, heads) of q (n, heads, head_dim) over sides, the exact one first."""
    heads = q.shape[1]
    group = heads // sides[0][0].shape[1]

    def one_head(head: int) -> np.ndarray:
        own = [(k[:, head // group], v[:, head // group]) for k, v in sides]  # (n, head_dim) each
        with np.errstate(all="ignore"):  # what is not finite is refused by the caller
            return _head_errors(q[:, head], own, window)

    # One BLAS thread for each head's: more would fight over the cores.
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        return np.stack(list(pool.map(one_head, range(heads))), axis=-1)


def _head_errors(
    q: np.ndarray, sides: Sequence[tuple[np.ndarray, np.ndarray]], window: int | None
) -> np.ndarray:
    """Errors (formats, 4) of one head: q, and keys and values of each side, (n, head_dim) f32."""
    squares = np.zeros((len(sides), len(ERRORS)))  # of the exact numbers, then of the differences
    for side, (k, v) in enumerate(sides):
        squares[side, 0] = _square(k, sides[0][0] if side else None)
        squares[side, 2] = _square(v, sides[0][1] if side else None)
    for start in range(0, len(q), _QUERY_ROWS):
        end = min(start + _QUERY_ROWS, len(q))
        ahead = np.arange(end) - np.arange(start, end)[:, None]  # (m, end) i64: of the query
        unseen = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        exact: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        for side, (k, v) in enumerate(sides):
            scores = _softmax_rows(q[start:end] @ k[:end].T, q.shape[1], unseen)  # (m, end) f32
            output = scores @ v[:end]  # (m, head_dim) f32
            squares[side, 1] += _square(scores, exact[0])
            squares[side, 3] += _square(output, exact[1])
            if side == 0:
                exact = (scores, output)
    # A head of zeros that stays one is not wrong.
    reference = np.where(squares[0] > 0, squares[0], np.where(squares[1:] > 0, 0.0, 1.0))
    return np.sqrt(squares[1:] / reference)


def _softmax_rows(products: np.ndarray, head_dim: int, unseen: np.ndarray) -> np.ndarray:
    """Softmax of products / sqrt(head_dim) (m, keys) over the keys that are seen, in place."""
    products *= np.float32(head_dim**-0.5)
    products[unseen] = -np.inf
    products -= products.max(axis=1, keepdims=True)
    np.exp(products, out=products)
    products /= products.sum(axis=1, keepdims=True)
    return products


def _square(numbers: np.ndarray, exact: np.ndarray | None) -> float:
    """The sum of squares, of the differences from `exact` where it is given."""
    change = numbers if exact is None else numbers - exact
    return float(np.square(change).sum(dtype=np.float64))
