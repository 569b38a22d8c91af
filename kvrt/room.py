"""Whether a device has memory for a model and its cache: asked before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig
from .errors import UsageError
from .kvstore import Geometry, KVSpec, estimate
from .trizone.work import working_bytes

_SMALL_CONTEXT = 256
"""Tokens without which there is no use of a model."""

_LIBRARIES = 64 << 20
"""Bytes that the multiplication of matrices keeps for itself on a GPU, and the kernels' scratch."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes of a GPU with so many tokens of context."""

    weights: int
    cache: int
    work: int

    @classmethod
    def of(
        cls, config: ModelConfig, geometry: Geometry, spec: KVSpec, weights: int, tokens: int
    ) -> Need:
        """What cannot be done without: a conversation that grows little by little.

        A long prompt at once takes its activations beside; their memory is asked for when it comes.
        """
        # One layer's exact keys and values, f32, and as halves for attention.
        work = _LIBRARIES + 2 * config.num_kv_heads * config.head_dim * tokens * (4 + 2)
        if spec.compression is not None:
            work += working_bytes(spec, tokens, config.num_kv_heads, config.head_dim)
        return cls(weights, estimate(geometry, spec, tokens), work)

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.work


def check_weights(name: str, weights: int, free: int) -> None:
    """Raise UsageError where the weights alone are more than what is free; 0 is unknown."""
    if 0 < free < weights:
        raise UsageError(
            f"the weights of {name} take {_gib(weights)}, more than the {_gib(free)} of memory "
            "that are free"
        )


def check_room(
    name: str,
    config: ModelConfig,
    geometry: Geometry,
    spec: KVSpec,
    weights: int,
    asked: int | None,
    limit: int,
    free: int,
) -> None:
    """Raise UsageError where a GPU has no memory for a context; 0 bytes free are unknown.

    `asked` is the context that the user named. Where none was named, that of the model (`limit`) is
    no request for memory, so that only a small one has to fit.
    """
    check_weights(name, weights, free)
    need = Need.of(config, geometry, spec, weights, asked or min(limit, _SMALL_CONTEXT))
    if not 0 < free < need.bytes:
        return
    fitting = fitting_context(config, geometry, spec, weights, asked or limit, free)
    what = "no context" if not fitting else f"{fitting:,} tokens"
    raise UsageError(
        f"{name} with {asked or min(limit, _SMALL_CONTEXT):,} tokens in {spec} takes "
        f"{_gib(need.bytes)} ({_gib(need.weights)} weights, {_gib(need.cache)} cache, "
        f"{_gib(need.work)} to compute with), more than the {_gib(free)} of memory that are free; "
        f"{what} would fit"
    )


def fitting_context(
    config: ModelConfig, geometry: Geometry, spec: KVSpec, weights: int, limit: int, free: int
) -> int:
    """The most tokens of context, up to the limit, that so many free bytes are enough for."""

    def fits(tokens: int) -> bool:
        return Need.of(config, geometry, spec, weights, tokens).bytes <= free

    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
