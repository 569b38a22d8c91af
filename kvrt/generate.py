"""Load a model and let it speak: `load`, `Model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from .errors import ContextFullError, OutOfMemoryError, UnsupportedError, UsageError
from .generation import Generation, Run
from .progress import Progress, Watched, silent
from .sampler import Sampler, SamplingParams
from .session import Cancel, FinishReason, PrefillProgress, Session, Step, Timings, growing

if TYPE_CHECKING:
    from .backends import Ops
    from .calibrations import Calibrations
    from .chat import Chat
    from .config import ModelConfig
    from .kvstore import Geometry, KVSpec
    from .models.decoder import Decoder
    from .stores import Store
    from .tokenizer import Tokenizer

__all__ = ["FinishReason", "Generation", "Model", "Session", "Step", "Timings", "load"]


class Model:
    """A model ready to run: weights, tokenizer, device and cache format.

    It holds no cache of its own: every `generate` starts an empty one, a `Chat` or a `Session`
    keeps one. Make it with `kvrt.load`. `sampling` is how tokens are drawn where the caller does
    not say: the model's own recommendation; `dataclasses.replace` changes parts of it.
    """

    def __init__(
        self,
        *,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        decoder: Decoder,
        ops: Ops,
        spec: KVSpec,
        max_context: int,
        weight_bytes: int,
        new_store: Callable[[KVSpec], Store],
        sampling: SamplingParams,
        fingerprint: Callable[[], str],
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.device = device
        self.config = config
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.ops = ops
        self.spec = spec
        self.max_context = max_context
        self.weight_bytes = weight_bytes
        self.sampling = sampling
        self._new_store = new_store
        self._make_fingerprint = fingerprint

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, device={self.device!r}, kv={str(self.spec)!r}, "
            f"max_context={self.max_context})"
        )

    def room(self) -> int | None:
        """Tokens of a new cache that a GPU has memory for now, at most the context limit.

        None on a CPU, whose system gives and takes memory as it likes.
        """
        from .backends import available_memory
        from .room import fitting_context

        if self.device == "cpu":
            return None
        geometry, free = cache_geometry(self.config), available_memory(self.device)
        return fitting_context(self.config, geometry, self.spec, 0, self.max_context, free)

    @cached_property
    def fingerprint(self) -> str:
        """What tells this model from others: the hash that saved caches and calibrations carry."""
        return self._make_fingerprint()

    def new_store(self, spec: KVSpec | None = None) -> Store:
        """An empty cache of this model's geometry and context limit; None is its own format."""
        with growing((), 0):
            return self._new_store(spec or self.spec)

    def new_session(self) -> Session:
        """A session with an empty cache, for callers that feed tokens themselves."""
        return Session(self.decoder, self.tokenizer, self.new_store(), lambda: self.fingerprint)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Next-token logits after each of `token_ids`: (n, vocab_size) f32, from an empty cache.

        Raises UsageError for no ids or ids outside the vocabulary, ContextFullError for more ids
        than the context limit, OutOfMemoryError where the device has no memory for them.
        """
        ids = self._checked_ids(token_ids)
        if len(ids) > self.max_context:
            raise ContextFullError(
                f"got {len(ids):,} tokens, more than the context limit of {self.max_context:,}"
            )
        store = self.new_store()
        with growing(store, len(ids)):
            return self.decoder.prefill(ids, store, all_logits=True)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Continue `prompt` (text, or token ids) by up to `max_tokens` tokens.

        None means until a stop or the context limit. The text follows the prompt's as it is, its
        leading space kept, and ends before the first of the `stop` strings. Without `sampling` it
        is the model's own. Raises UsageError for an empty prompt, ContextFullError for one that
        does not fit, OutOfMemoryError where the device has no memory left.
        """
        run = self.start(prompt, max_tokens, sampling, stop)
        for _ in run:
            pass
        return run.generation()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Like `generate`, piece by piece: whole characters only, never an empty piece."""
        run = self.start(prompt, max_tokens, sampling, stop)
        return (step.text for step in run if step.text)

    def start(
        self,
        prompt: str | Sequence[int],
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        *,
        cancel: Cancel | None = None,
        progress: PrefillProgress | None = None,
    ) -> Run:
        """Like `generate`, but step by step; the prompt is checked now, computed on iteration."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_prompt(prompt)
        else:
            ids = self._checked_ids(prompt)
        sampler = self.new_sampler(sampling)
        session = self.new_session()
        # After a prompt of control tokens alone (a bare bos) the text begins, it does not go on.
        continued = isinstance(prompt, str) or self.tokenizer.decode(ids, continued=True) != ""
        steps = session.run(
            ids, max_tokens, sampler, stop, continued=continued, cancel=cancel, progress=progress
        )
        return Run(session, steps, self.spec, self.ops)

    def new_sampler(self, sampling: SamplingParams | None = None) -> Sampler:
        """A sampler whose token ids are checked against this model's vocabulary.

        None is the model's own `sampling`, here and everywhere.
        """
        sampling = sampling or self.sampling
        for token_id, _ in sampling.logit_bias:
            self._check_id(token_id, "the logit bias")
        return Sampler(sampling)

    def chat(self, system: str | None = None, sampling: SamplingParams | None = None) -> Chat:
        """A conversation that keeps its cache from turn to turn.

        Raises UnsupportedError if the model has no chat template.
        """
        from .chat import Chat

        return Chat(self, system=system, sampling=sampling)

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        try:
            ids = [index(token_id) for token_id in token_ids]
        except TypeError:
            raise UsageError("a prompt must be text or a sequence of token ids") from None
        if not ids:
            raise UsageError("the prompt is empty")
        for token_id in ids:
            self._check_id(token_id, "the prompt")
        return ids

    def _check_id(self, token_id: int, where: str) -> None:
        size = self.config.vocab_size
        if not 0 <= token_id < size:
            raise UsageError(f"{where} holds token id {token_id}; this model has 0 to {size - 1}")


def load(
    path_or_name: str,
    device: str | None = None,
    kv: str = "f16",
    max_context: int | None = None,
    threads: int | None = None,
    calibration: str | None = None,
    debug: bool = False,
    *,
    progress: Progress = silent,
    check_memory: bool = True,
) -> Model:
    """Load a model folder, a pulled model by name, or "synthetic:NAME": random weights.

    `device` is "cpu", "cuda" or "cuda:N" (default: "cuda" where it can be used, else "cpu"); `kv`
    names the cache format; `calibration` a file that nuq and vector-quantised formats need, where
    the model has none of its own; `max_context` limits the cached tokens (default: the model's own
    limit; memory is taken as the cache grows); `threads` are the CPU's and default to all cores;
    `debug` has the cache refuse keys and values that are not finite; `progress` is told how many
    bytes of weights are loaded. Everything that can be refused is refused before a weight is read,
    also a context that was asked for and has no room in a GPU's memory, unless `check_memory` is
    off. Raises ModelNotFoundError, UsageError or UnsupportedError for a request that cannot be met,
    ConfigError, WeightError or TokenizerError for a broken folder, OutOfMemoryError where memory
    ends all the same.
    """
    from .backends import (
        available_memory,
        check_device,
        check_threads,
        default_device,
        get_ops,
        shared_memory,
    )
    from .backends.memory import release_freed
    from .calibrations import Calibrations
    from .kvstore import KVSpec
    from .models.decoder import Decoder
    from .room import check_room, check_weights
    from .source import find_source

    spec = KVSpec.parse(kv)
    if device is not None:
        check_device(device)
    source = find_source(path_or_name)
    config = source.config
    limit = config.max_context
    if max_context is not None:
        limit = _checked_context(max_context, source.context_limit)
    geometry = cache_geometry(config)
    spec.check(geometry, source.context_limit)
    device = default_device() if device is None else device
    shared = 0 if device == "cpu" else shared_memory(device)
    if device != "cpu":
        check_gpu_format(geometry, spec, shared)
    check_threads(device, threads)
    sampling = source.sampling()
    tokenizer = source.tokenizer()
    release_freed()  # what parsing the vocabulary left behind
    weights = source.weights()

    def fingerprint() -> str:
        return source.fingerprint(weights)

    calibrations = Calibrations(source.folder, calibration, config, fingerprint)
    if spec.calibrated:
        calibrations.get(spec)  # what is missing is missed now
    if device != "cpu":
        if check_memory:
            check_room(
                path_or_name, config, geometry, spec, weights.nbytes,
                max_context, limit, available_memory(device),
            )  # fmt: skip
    elif source.synthetic:
        # Those of a folder can stay in their file. For these the system would end the process.
        check_weights(path_or_name, weights.nbytes, available_memory(device))
    ops = get_ops(device, threads)  # last, since it may compile kernels
    try:
        decoder = Decoder(config, Watched(weights, "load", weights.nbytes, progress), ops)
    except MemoryError as error:
        raise OutOfMemoryError(f"no memory for the weights of {path_or_name}: {error}") from error
    finally:
        ops.trim()
    progress("load", weights.nbytes, weights.nbytes)
    return Model(
        name=path_or_name,
        config=config,
        tokenizer=tokenizer,
        decoder=decoder,
        ops=ops,
        spec=spec,
        max_context=limit,
        weight_bytes=weights.nbytes,
        new_store=_store_maker(decoder, limit, calibrations, debug, shared),
        sampling=sampling,
        fingerprint=fingerprint,
        device=device,
    )


def cache_geometry(config: ModelConfig) -> Geometry:
    """What a cache must know of a model's shape."""
    from .kvstore import Geometry

    return Geometry(
        config.num_layers, config.num_kv_heads, config.head_dim, config.has_constant_key_bias,
        config.has_windows,
    )  # fmt: skip


def check_gpu_format(geometry: Geometry, spec: KVSpec, shared: int) -> None:
    """Raise UnsupportedError for a cache format that only a CPU reads.

    `shared`: bytes of shared memory that a block may have on the GPU.
    """
    from .backends.cpu_math import KINDS
    from .backends.gpu_formats import LayerFormat, check_readable
    from .kvstore.basis import FORMS

    heads, dim = geometry.num_kv_heads, geometry.head_dim
    for keys, values in {spec.sides(layer) for layer in range(geometry.num_layers)}:
        k, v = keys.codec, values.codec
        kinds = KINDS[k.exact_dtype], KINDS[v.exact_dtype]
        own = k.settings(False, heads, dim), v.settings(True, heads, dim)
        layer = LayerFormat(
            dim, (k.number, v.number), kinds, own, FORMS[keys.rope], geometry.key_bias
        )
        try:
            check_readable(layer, shared)
        except UnsupportedError as error:
            raise UnsupportedError(f"cache format {spec}: {error}") from None


def _store_maker(
    decoder: Decoder, limit: int, calibrations: Calibrations, debug: bool, shared: int
) -> Callable[[KVSpec], Store]:
    """A function that makes empty caches for a decoder, in any format.

    `shared`: bytes of shared memory that a block may have, on a GPU.
    """
    from .kvstore import KVStore
    from .trizone.store import ZoneStore

    config = decoder.config
    biases = decoder.key_biases if config.has_constant_key_bias else None

    def new_store(spec: KVSpec) -> Store:
        if spec.compression is not None:
            return ZoneStore(
                cache_geometry(config), spec, decoder.ops, limit,
                rotary=decoder.rotary, query_heads=config.num_heads, debug=debug,
            )  # fmt: skip
        if decoder.ops.name == "cuda":
            check_gpu_format(cache_geometry(config), spec, shared)
        return KVStore(
            cache_geometry(config), spec, decoder.ops, limit,
            rotary=decoder.rotary, key_bias=biases,
            calibration=calibrations.get(spec) if spec.calibrated else None, debug=debug,
        )  # fmt: skip

    return new_store


def _checked_context(asked: int, model_limit: int) -> int:
    if not 1 <= asked <= model_limit:
        raise UsageError(
            f"the context limit must be 1 to {model_limit} tokens for this model, got {asked}"
        )
    return asked
