"""The one decoder of the Llama family: embed, attention, MLP, norm, head. Weights only, no cache.

Prefill is layer-major: one layer over all tokens, with that layer's exact K and V in one scratch
buffer, then the layer goes into the store. Decode is step-major: one token through all layers,
reading the store's pages where they lie.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from ..backends.ops import Linear, Ops
from ..backends.view import PageView
from ..config import ModelConfig
from ..errors import CodecError, UsageError
from ..kvstore.rotary import Rotary
from ..trizone.store import ZoneStore
from .history import segments_of
from .layer import Layer, Update

if TYPE_CHECKING:
    from ..stores import Store

History = Literal["exact", "packed"]
"""What queries of a prefill see of its own tokens: all of them exactly, or as `decode` would."""

TokenIds = Sequence[int] | np.ndarray
Progress = Callable[[int, int], None]
Visit = Callable[[int, Any, Any, Any], None]
Attend = Callable[[int, Any, Any, Update], None]

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Queries and MLP of a prefill run over so many tokens at a time, by the backend's name: enough to
keep it busy, and a bound of activations; `Decoder.chunk_tokens` changes it."""


class Decoder:
    """Token ids in, logits out; keys and values go to the store that is passed in."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], ops: Ops):
        """`weights` has arrays as stored, or a RandomMatrix where the backend is to make one."""
        self.config = config
        self.ops = ops
        self.chunk_tokens = CHUNK_TOKENS[ops.name]
        self._lock = threading.Lock()
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self.rotary = Rotary(
            config.rope.inverse_frequencies(config.head_dim), config.rope.attention_scaling()
        )
        self._embedding = ops.matrix(weights["model.embed_tokens.weight"])
        self._layers = [self._load_layer(weights, index) for index in range(config.num_layers)]
        self._norm = self._vector(weights["model.norm.weight"])
        head = None if config.tie_embeddings else ops.matrix(weights["lm_head.weight"])
        self._head = Linear(head or self._embedding)
        self._step = _StepBuffers(config, ops)
        self._programs: WeakKeyDictionary[Store, Callable[[], None]] = WeakKeyDictionary()

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all but an embedding that is no head."""
        matrices = [self._head.weight]
        for layer in self._layers:
            linears = (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
            matrices += [linear.weight for linear in linears]
        return sum(int(matrix.array.nbytes) for matrix in matrices)

    @property
    def key_biases(self) -> list[Any] | None:
        """The bias of each layer's key projection (num_kv_heads, head_dim) f32; None without."""
        if not self.config.qkv_bias:
            return None
        shape = (self.config.num_kv_heads, self.config.head_dim)
        return [layer.k.bias.reshape(shape) for layer in self._layers]  # type: ignore[union-attr]

    def output_gains(self, layer: int) -> np.ndarray:
        """How strongly a layer's output projection passes each attention channel on.

        (num_heads, head_dim) f32: the norms of its columns.
        """
        weight = self._layers[layer].o.weight
        columns = self.ops.to_host(weight.array).astype(np.float32)  # (hidden_size, heads * dim)
        return np.linalg.norm(columns, axis=0).reshape(self.config.num_heads, -1)

    def _vector(self, array: np.ndarray) -> Any:
        return self.ops.to_device(array.astype(np.float32))

    def _load_layer(self, weights: Mapping[str, Any], index: int) -> Layer:
        prefix = f"model.layers.{index}"

        def linear(name: str) -> Linear:
            bias = weights.get(f"{prefix}.{name}.bias")
            matrix = self.ops.matrix(weights[f"{prefix}.{name}.weight"])
            return Linear(matrix, None if bias is None else self._vector(bias))

        def norm(name: str) -> Any:
            return self._vector(weights[f"{prefix}.{name}.weight"])

        qk_norm = self.config.qk_norm
        return Layer(
            input_norm=norm("input_layernorm"),
            q=linear("self_attn.q_proj"),
            k=linear("self_attn.k_proj"),
            v=linear("self_attn.v_proj"),
            q_norm=norm("self_attn.q_norm") if qk_norm else None,
            k_norm=norm("self_attn.k_norm") if qk_norm else None,
            o=linear("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate=linear("mlp.gate_proj"),
            up=linear("mlp.up_proj"),
            down=linear("mlp.down_proj"),
            window=self.config.windows[index],
        )

    def _rotation(self, start: int, count: int) -> tuple[Any, Any]:
        """cos and sin (count, head_dim / 2) f32 of positions start, start + 1, ..."""
        table = self.rotary.table(np.arange(start, start + count), self.rotary.amplitude)
        return self.ops.to_device(table[:, 0]), self.ops.to_device(table[:, 1])

    def _checked(self, token_ids: TokenIds, store: Store | None) -> np.ndarray:
        """The tokens as an array (n,) i64, refused if they or the store do not fit the model."""
        config, ids = self.config, np.asarray(token_ids, np.int64)  # (n,)
        if store is not None:
            cache, shape = store.geometry, (config.num_layers, config.num_kv_heads, config.head_dim)
            if (cache.num_layers, cache.num_kv_heads, cache.head_dim) != shape:
                raise CodecError(f"the store is for {cache}, the model has {shape}")
        if not len(ids):
            raise UsageError("no tokens to decode, expected at least one")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise UsageError(
                f"token id {bad} is outside the vocabulary of {config.vocab_size} tokens"
            )
        return ids

    def logits(self, hidden: Any) -> np.ndarray:
        """Logits (n, vocab_size) f32 of rows (n, hidden_size) that `hidden` or `trace` gave."""
        with self._lock:
            return self._logits(hidden)

    def _logits(self, hidden: Any) -> np.ndarray:
        out = self.ops.empty((len(hidden), self.config.vocab_size))
        self.ops.linear(hidden, (self._head,), (out,))
        return self.ops.to_host(out)

    # Many tokens

    def prefill(
        self,
        token_ids: TokenIds,
        store: Store,
        *,
        all_logits: bool = False,
        history: History = "exact",
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Append tokens to the store; give the logits after the last of them.

        Returns (vocab_size,) f32, or (n, vocab_size) f32 with `all_logits`. With a packed history
        each token sees the ones before it as `decode` would have: for measuring a format's
        quality. `progress(done, total)` is called after each layer. Raises ContextFullError,
        before any work, where the tokens do not fit. On any exception the store is as it was;
        with recompress and a packed history, as it was when it last packed tokens.
        """
        ids = self._checked(token_ids, store)
        with self._lock:
            parts = self._extend(
                ids, store, history, progress,
                lambda rows: self._logits(rows if all_logits else rows[-1:]),
            )  # fmt: skip
            return np.concatenate(parts) if all_logits else parts[-1][0]

    def hidden(
        self,
        token_ids: TokenIds,
        store: Store,
        *,
        history: History = "exact",
        progress: Progress | None = None,
    ) -> Any:
        """Like `prefill`, but gives the rows (n, hidden_size) f32 that `logits` takes."""
        ids = self._checked(token_ids, store)
        with self._lock:
            parts = self._extend(ids, store, history, progress, lambda rows: rows)
            return parts[0] if len(parts) == 1 else self.ops.xp.concatenate(parts)

    def trace(
        self,
        token_ids: TokenIds,
        visit: Visit | None = None,
        *,
        progress: Progress | None = None,
    ) -> Any:
        """An exact pass without a store: the rows (n, hidden_size) f32 that `logits` takes.

        `visit(layer, q, k, v)` gets q (n, heads, head_dim) and k, v (n, kv_heads, head_dim), all
        f32 and after RoPE, before the layer's attention. They are the decoder's own: to be read
        during the call, not changed. The decoder cannot be used inside of it.
        """

        def attend(index: int, keys: Any, values: Any, update: Update) -> None:
            if visit is not None:
                visit(index, update.queries(slice(0, len(ids))), keys, values)
            update(0, len(ids), keys, values)

        ids = self._checked(token_ids, None)
        with self._lock:
            return self._forward(ids, 0, 0, attend, progress)

    def _extend(
        self,
        ids: np.ndarray,
        store: Store,
        history: History,
        progress: Progress | None,
        finish: Callable[[Any], Any],
    ) -> list[Any]:
        """Add tokens to a store; what `finish` makes of their hidden rows (n, hidden_size) f32.

        At once, but for a store that packs tokens while it decodes: with a packed history it must
        do so in between.
        """
        store.check_room(len(ids))
        found = []
        while len(ids):
            until = None
            if isinstance(store, ZoneStore) and history == "packed":
                until = store.until_packing()
            part, ids = ids[:until], ids[len(ids) if until is None else until :]
            with store.extending(len(part)):
                found.append(finish(self._fill(part, store, history, progress)))
        return found

    def _fill(
        self, ids: np.ndarray, store: Store, history: History, progress: Progress | None
    ) -> Any:
        """Hidden rows (n, hidden_size) f32 of tokens that go into an extending store."""
        if isinstance(store, ZoneStore):
            return self._fill_zones(ids, store, history, progress)
        start = len(store)
        segments = segments_of(store.spec, start, start + len(ids))

        def exact(index: int, keys: Any, values: Any, update: Update) -> None:
            if start:
                store.read(index, keys[:start], values[:start])
            update(0, len(ids), keys, values)
            store.extend(index, keys[start:], values[start:])

        def packed(index: int, keys: Any, values: Any, update: Update) -> None:
            if start:
                store.read(index, keys[:start], values[:start])
            store.extend(index, keys[start:], values[start:])
            store.read_exact(index, keys[start:], values[start:], start)
            for segment in segments:
                for page, rows in segment.new_pages:
                    store.read_page(index, page, keys[rows], values[rows])
                update(segment.first - start, segment.end - start, keys, values)

        attend = {"exact": exact, "packed": packed}[history]
        return self._forward(ids, start, start, attend, progress)

    def _fill_zones(
        self, ids: np.ndarray, store: ZoneStore, history: History, progress: Progress | None
    ) -> Any:
        """`_fill` where prompts are compressed: at their end, if the history is exact.

        With a packed history tokens see each other as they would if decoded one by one: exactly,
        rounded to what the store keeps.
        """
        past = store.held

        def exact(index: int, keys: Any, values: Any, update: Update) -> None:
            update = replace(update, firsts=store.read(index, keys[:past], values[:past]))
            # Before the update, which leaves no rows of x that queries could be made of.
            store.compress(index, keys[past:], values[past:], update.queries)
            update(0, len(ids), keys, values)

        def packed(index: int, keys: Any, values: Any, update: Update) -> None:
            update = replace(update, firsts=store.read(index, keys[:past], values[:past]))
            store.extend(index, keys[past:], values[past:], update.queries)
            store.read_exact(index, keys[past:], values[past:], len(store))
            update(0, len(ids), keys, values)

        attend = {"exact": exact, "packed": packed}[history]
        return self._forward(ids, len(store), past, attend, progress)

    def _forward(
        self, ids: np.ndarray, start: int, past: int, attend: Attend, progress: Progress | None
    ) -> Any:
        """All layers over tokens at positions start, start + 1, ...; the final norm's rows.

        `attend(layer, keys, values, update)` gets keys, values (past + n, kv_heads, head_dim) f32,
        whose first `past` rows are undefined, and calls `update` on all rows.
        """
        ops, config = self.ops, self.config
        x = ops.embed(self._embedding, ids)  # (n, hidden_size) f32
        shape = (past + len(ids), config.num_kv_heads, config.head_dim)
        keys, values = ops.empty(shape), ops.empty(shape)
        chunk = min(self.chunk_tokens, len(ids))
        q = ops.empty((chunk, config.num_heads, config.head_dim))
        inner = ops.empty((chunk, config.intermediate_size))
        rotation = self._rotation(start, len(ids))
        try:
            for index, layer in enumerate(self._layers):
                update = Update(ops, config, self._scale, layer, x, past, rotation, q, inner)
                update.project(keys[past:], values[past:])
                attend(index, keys, values, update)
                if progress is not None:
                    progress(index + 1, config.num_layers)
        finally:
            ops.trim()
        ops.rmsnorm(x, self._norm, config.norm_eps, x)
        return x

    # One token

    def decode(self, token_id: int, store: Store) -> np.ndarray:
        """Append one token to the store; give the logits (vocab_size,) f32 after it.

        Raises ContextFullError where it does not fit. Interrupted, the store is as it was before.
        """
        with self._lock, self._stepping(token_id, store):
            return self.ops.to_host(self._step.logits[0], copy=True)

    def decode_best(self, token_id: int, store: Store) -> tuple[int, float]:
        """Like `decode`, but gives the likeliest token, the first of equals, and its logit.

        A NaN counts as the largest.
        """
        with self._lock, self._stepping(token_id, store):
            return self.ops.best(self._step.logits[0])

    @contextmanager
    def _stepping(self, token_id: int, store: Store) -> Iterator[None]:
        """Compute a token's logits; on leaving it counts as cached."""
        (checked,) = self._checked([token_id], store)
        angles = self.rotary.table(np.array([len(store)]), self.rotary.amplitude)[0]
        with store.stepping(int(checked), angles):
            self._program(store)()
            yield

    def _program(self, store: Store) -> Callable[[], None]:
        """What computes the token that a store has published."""
        if store.debug:
            views = [store.view(index) for index in range(self.config.num_layers)]
            return lambda: self._compute(views, store.check_finite)
        program = self._programs.get(store)
        if program is None:
            # Not the store itself, which would never be forgotten then.
            views = [store.view(index) for index in range(self.config.num_layers)]
            program = self.ops.program(lambda: self._compute(views))
            self._programs[store] = program
        return program

    def _compute(
        self, views: Sequence[PageView], inspect: Callable[[int, Any, Any], None] | None = None
    ) -> None:
        """Logits of the token that was published; `inspect(layer, k, v)` sees them before RoPE."""
        ops, step, eps = self.ops, self._step, self.config.norm_eps
        ops.embed_token(self._embedding, views[0].extent, step.x)
        for index, (layer, view) in enumerate(zip(self._layers, views, strict=True)):
            ops.linear(step.x, (layer.q, layer.k, layer.v), step.rows, norm=(layer.input_norm, eps))
            if inspect is not None:
                inspect(index, step.k, step.v)
            ops.enter(view, step.qkv, layer.qk_norms(eps))
            ops.attend(step.q, view, self._scale, layer.window, step.attention)
            ops.linear_add(step.attention_row, layer.o, step.x)
            ops.swiglu(step.x, layer.gate, layer.up, step.inner, norm=(layer.mlp_norm, eps))
            ops.linear_add(step.inner, layer.down, step.x)
        ops.linear(step.x, (self._head,), (step.logits,), norm=(self._norm, eps))


class _StepBuffers:
    """Activations of one decode step, allocated once."""

    def __init__(self, config: ModelConfig, ops: Ops):
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.x = ops.empty((1, config.hidden_size))
        self.inner = ops.empty((1, config.intermediate_size))
        self.logits = ops.empty((1, config.vocab_size))
        self.qkv = ops.empty((heads + 2 * kv_heads, dim))
        self.q = self.qkv[:heads]
        self.k = self.qkv[heads : heads + kv_heads]
        self.v = self.qkv[heads + kv_heads :]
        self.rows = [part.reshape(1, -1) for part in (self.q, self.k, self.v)]
        self.attention = ops.empty((heads, dim))
        self.attention_row = self.attention.reshape(1, -1)  # (1, heads * head_dim)
