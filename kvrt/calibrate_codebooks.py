"""Fitting codebooks to a model: which vectors, in which units, and how much each one counts.

An error d of a key moves the score of a query q by q . d. Its channels are therefore scaled by
sqrt(E[q_c^2]), summed over the query heads of a KV head: the squared distance of scaled keys is the
expected squared error of scores, but for correlations of channels. Before RoPE an error of a
channel reaches either channel of its pair, so the pair shares the mean. What attention looks at
counts for more: a key by the attention a that its token receives, a value by a^2, half and half
with an equal share for all, since other texts look at other tokens. Groups of key channels are made
of strong and weak pairs together, head by head: all groups have as many bits, and what queries look
for is in the strong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from .calibrate_sample import LayerSample, hadamard, in_form
from .calibration_parts import Books, needed_books
from .generate import cache_geometry
from .progress import Progress, silent

if TYPE_CHECKING:
    from .codebooks import Books as TrainedBooks
    from .generate import Model
    from .kvstore import KVSpec, Side
    from .kvstore.grammar import Rope

BOOK_SAMPLE_BYTES = 4 << 30
"""Keys and values that are kept for codebooks: f16. Thousands of entries need many vectors."""

_LEAST_SCALE = 2.0**-6
"""Of a channel that no query asks for, beside the layer's mean: its errors stay bounded."""


@dataclass(frozen=True)
class BookOptions:
    """What to fit: all codebooks that `spec` needs.

    seed: of all random choices; simvq: keep projections of frozen random entries, not entries
    (SimVQ, arXiv 2411.02038); weighted: count vectors by attention; centred: take the mean of each
    channel off keys.
    """

    spec: KVSpec
    seed: int = 0
    simvq: bool = False
    weighted: bool = True
    centred: bool = False


@dataclass(frozen=True)
class BookReport:
    """How the codebooks of a name came out: means over layers and groups, by stage.

    errors: what is left of the squared norm of vectors held out; used: the share of entries that
    some vector uses.
    """

    name: str
    errors: tuple[float, ...]
    used: tuple[float, ...]


Report = Callable[[BookReport], None]


def ignored(report: BookReport) -> None:
    """A Report for callers that want none."""


class BookTrainer:
    """Fits the codebooks of one layer after the other; `transformed`: see `collect`.

    `progress` is told of codebooks, in all layers together.
    """

    def __init__(self, model: Model, options: BookOptions, progress: Progress = silent):
        self._model = model
        self._options = options
        geometry = cache_geometry(model.config)
        self._shape = geometry.num_kv_heads, geometry.head_dim
        self._needed = needed_books(options.spec, geometry)
        of_a_layer = [
            books.stages * books.codec.shape(*self._shape)[1] for books, _ in self._needed.values()
        ]
        self._progress, self._done = progress, 0
        self._total = geometry.num_layers * sum(of_a_layer)
        self._stages: dict[str, list[list[tuple[float, float]]]] = {}  # error, used: of each book
        self.transformed: set[Rope] = {
            side.rope for books, side in self._needed.values() if side.had and not books.is_value
        }

    @property
    def seeds(self) -> dict[str, int]:
        """Of SimVQ's codebooks, by name."""
        return dict.fromkeys(self._needed, self._options.seed) if self._options.simvq else {}

    def fit(self, layer: LayerSample, positions: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of one layer, by name; see `calibration_parts`."""
        for books, side in self._needed.values():
            if books.is_value:
                rows = np.concatenate(layer.values).astype(np.float32)  # (n, kv_heads, head_dim)
                rows = hadamard(rows) if side.had else rows
            else:
                rows = np.concatenate(layer.keys).astype(np.float32)
                rows = in_form(rows, side.rope, self._model.decoder.rotary, positions)
                rows = hadamard(rows) if side.had else rows
                centre = rows.mean(0) if self._options.centred else np.zeros(self._shape)
                centre = centre.astype(np.float32)
                scale = self._scale(layer, side)
                rows = (rows - centre) * scale
                yield f"{books.name}.centre", centre
                yield f"{books.name}.scale", scale
            if books.codec.grouped and not books.is_value:
                order = np.stack([balanced_order(of_head) for of_head in rows.var(0)])
                yield f"{books.name}.order", order
                rows = np.take_along_axis(rows, order[None], axis=2)  # group by group
            kind = "w" if self._options.simvq else "entries"
            yield f"{books.name}.{kind}", self._train(books, rows, self._weights(layer, books))

    def reports(self) -> Iterator[BookReport]:
        """Of all layers that were fitted."""
        for name, found in self._stages.items():
            errors, used = np.array(found).mean(0).T  # (stages,) each
            yield BookReport(name, tuple(errors.tolist()), tuple(used.tolist()))

    def _scale(self, layer: LayerSample, side: Side) -> np.ndarray:
        """(kv_heads, head_dim) f32 of mean square 1."""
        heads, dim = self._shape
        of = layer.transformed[side.rope] if side.had else layer.queries
        squares = np.mean(of, axis=0).reshape(heads, -1, dim).sum(1)
        if side.rope != "post" and not side.had:
            squares = (squares + np.roll(squares, dim // 2, -1)) / 2
        mean = squares.mean()
        scale = np.sqrt(squares / mean) if mean > 0 else np.ones(self._shape)
        scale = np.maximum(scale, _LEAST_SCALE)
        return (scale / np.sqrt(np.square(scale).mean())).astype(np.float32)

    def _weights(self, layer: LayerSample, books: Books) -> np.ndarray | None:
        """Of each vector (n, kv_heads) f32, of mean 1."""
        if not self._options.weighted:
            return None
        if books.is_value:
            squared = np.concatenate(layer.squared)  # (n, heads)
            attention = squared.reshape(len(squared), self._shape[0], -1).sum(-1)
        else:
            attention = np.concatenate(layer.received)  # (n, kv_heads)
        mean = attention.mean(dtype=np.float64)
        share = attention / mean if mean > 0 else np.ones_like(attention)
        return ((1 + share) / 2).astype(np.float32)

    def _train(self, books: Books, rows: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Entries (stages, sets * groups, E, d) f16, or W of SimVQ.

        rows (n, kv_heads, head_dim), whose channels are group by group.
        """
        from threadpoolctl import threadpool_limits

        from .codebooks import train_books

        options, (heads, dim) = self._options, self._shape
        sets, groups = books.codec.sets(heads), books.codec.groups(dim)
        width, xp = dim // groups, self._arrays()

        def train(place: tuple[int, int]) -> TrainedBooks:
            own, group = place
            part = slice(own, own + 1) if sets > 1 else slice(None)
            samples = rows[:, part, group * width : (group + 1) * width].reshape(-1, width)
            return train_books(
                np.ascontiguousarray(samples),
                None if weights is None else np.ascontiguousarray(weights[:, part]).ravel(),
                books.stages, books.codec.entries, seed=options.seed, xp=xp,
                mode="simvq" if options.simvq else "free",
                progress=self._told if workers == 1 else silent,
            )  # fmt: skip

        # Most books are small: several at a time keep all cores at work, where one would not.
        workers = min(self._model.ops.threads, sets * groups) if xp is np else 1
        made = []
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
            for found in pool.map(train, product(range(sets), range(groups))):
                self._done += books.stages
                self._told("", 0, None)
                kept = found.projections if options.simvq else found.entries
                made.append(np.asarray(kept, np.float16))
                stages = [(stage.error, stage.used) for stage in found.stages]
                self._stages.setdefault(books.name, []).append(stages)
        return np.stack(made, axis=1)

    def _told(self, stage: str, done: int, total: int | None) -> None:
        """Progress within the books of a group."""
        self._progress("codebooks", self._done + done, self._total)

    def _arrays(self) -> Any:
        """NumPy, or what stands for it on the model's device."""
        if self._model.ops.name != "cuda":
            return np
        import cupy

        return cupy


def balanced_order(variances: np.ndarray) -> np.ndarray:
    """Channels (head_dim,) i32 of a head in groups of 8, from their variances (head_dim,).

    A group is four RoPE pairs: the first channels of each, then their partners. Pairs are dealt out
    from the strongest on, each to the group that has the fewest, and of these the weakest, pairs.
    """
    half = len(variances) // 2
    strength = np.log(np.maximum(variances, 1e-12).reshape(2, half)).sum(0)  # (half,)
    groups: list[list[int]] = [[] for _ in range(half // 4)]
    sums = [0.0] * len(groups)
    for pair in np.argsort(-strength, kind="stable"):
        weakest = min(range(len(groups)), key=lambda g: (len(groups[g]), sums[g]))
        groups[weakest].append(int(pair))
        sums[weakest] += float(strength[pair])
    fours = np.array(groups, np.int32)[:, None]  # (groups, 1, 4)
    return np.concatenate([fours, fours + half], axis=1).ravel()
