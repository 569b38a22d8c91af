"""Rotary position embeddings: how a config describes them and the frequencies they stand for."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ConfigError, UnsupportedError
from .fields import Fields, shown

KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0  # of all four families when config.json has none
_MAX_POSITION = 1 << 30


@dataclass(frozen=True)
class RopeConfig:
    """The RoPE of a model. A pair (i, i + head_dim/2) turns by position * inverse_frequency[i]."""

    kind: str  # one of KINDS
    theta: float
    factor: float = 1.0  # linear, llama3, yarn: how many times longer the context became
    original_max_position: int = 0  # llama3, yarn: tokens of context before the stretch
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations over the original context above which nothing changes
    beta_slow: float = 1.0  # yarn: ... below which a frequency is divided by factor
    truncate: bool = True  # yarn: the ramp begins and ends at whole channels
    attention_factor: float | None = None  # yarn: given outright; None = from factor and mscale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn

    @classmethod
    def from_fields(cls, config: Fields, max_position: int) -> "RopeConfig":
        """Read `rope_parameters` or `rope_scaling` and `rope_theta` of a config.json.

        Raises UnsupportedError for a kind outside KINDS or a partial rotation, ConfigError for
        missing or impossible numbers and for two spellings that contradict each other.
        """
        rope = _parameters(config)
        theta = _agreed_theta(config, rope)
        _check_full_rotation(config, rope)
        kind = _kind(rope)
        if kind == "default":
            return cls("default", theta)

        # Some models keep the original context beside the table; transformers prefers that one.
        home = config if "original_max_position_embeddings" in config else rope
        original = home.integer(
            "original_max_position_embeddings", max_position, high=_MAX_POSITION
        )
        if kind == "yarn" and "factor" not in rope and original < max_position:
            factor = max_position / original
        else:
            factor = rope.number("factor", low=1.0, high=1e6)
        if kind == "linear":
            return cls("linear", theta, factor)
        if kind == "llama3":
            low = rope.number("low_freq_factor", low=1e-6, high=1e6)
            high = rope.number("high_freq_factor", low=1e-6, high=1e6)
            if not low < high:
                raise rope.fail("low_freq_factor", f"less than high_freq_factor ({high:g})")
            return cls(
                "llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high
            )
        fast = rope.number("beta_fast", 32.0, low=1e-6, high=1e6)
        slow = rope.number("beta_slow", 1.0, low=1e-6, high=1e6)
        if not slow < fast:
            raise ConfigError(
                f"{rope.where}: got beta_fast {fast:g} and beta_slow {slow:g}, "
                "expected beta_slow to be the smaller"
            )
        return cls(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=rope.flag("truncate", True),
            attention_factor=rope.number("attention_factor", None, low=1e-6, high=1e6),
            mscale=rope.number("mscale", None, low=0.0, high=1e6),
            mscale_all_dim=rope.number("mscale_all_dim", None, low=0.0, high=1e6),
        )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair, radians: (head_dim // 2,) f64."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim  # (head_dim // 2,) f64
        plain = self.theta**-exponent  # (head_dim // 2,) f64
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        keep = self._kept_share(plain, head_dim)  # (head_dim // 2,) f64, 1 = as trained
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _kept_share(self, plain: np.ndarray, head_dim: int) -> np.ndarray:
        if self.kind == "llama3":
            turns = plain * self.original_max_position / (2.0 * math.pi)  # (head_dim // 2,) f64
            width = self.high_freq_factor - self.low_freq_factor
            return np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        low, high = self._channel(self.beta_fast, head_dim), self._channel(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a division by zero
        ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low)
        return 1.0 - np.clip(ramp, 0.0, 1.0)

    def _channel(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair that turns `turns` times over the original context."""
        ratio = self.original_max_position / (turns * 2.0 * math.pi)
        return head_dim * math.log(ratio) / (2.0 * math.log(self.theta))

    def attention_scaling(self) -> float:
        """What yarn multiplies cos and sin with; 1.0 for every other kind."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


def _parameters(config: Fields) -> Fields:
    """The RoPE table under either of its names; an empty one when there is none."""
    new, old = config.raw("rope_parameters"), config.raw("rope_scaling")
    if new and old and new != old:
        raise ConfigError(
            f"{config.where}: 'rope_parameters' and 'rope_scaling' differ: "
            f"{shown(new)} and {shown(old)}"
        )
    key = "rope_parameters" if new else "rope_scaling"
    rope = Fields(new or old or {}, f"{config.where}: {key}")
    nested: list[Any] = [name for name, value in rope.data.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedError(
            f"{rope.where}: one RoPE per layer type ({shown(nested[0])}) is not supported, "
            "one for all layers is"
        )
    return rope


def _kind(rope: Fields) -> str:
    names = {rope.text(key) for key in ("rope_type", "type") if key in rope}
    if len(names) > 1:
        raise ConfigError(f"{rope.where}: 'rope_type' and 'type' differ: {shown(sorted(names))}")
    if not names and "factor" in rope:
        raise ConfigError(f"{rope.where}: 'factor' without 'rope_type'")
    kind = names.pop() if names else "default"
    if kind not in KINDS:
        raise UnsupportedError(
            f"{rope.where}: RoPE type {shown(kind)} is not supported, {', '.join(KINDS)} are"
        )
    return kind


def _agreed_theta(config: Fields, rope: Fields) -> float:
    # theta 1 would turn all pairs alike, and yarn divides by its logarithm.
    bounds = {"low": 1.0 + 1e-6, "high": 1e15}
    inner: float | None = rope.number("rope_theta", None, **bounds)
    outer: float | None = config.number("rope_theta", None, **bounds)
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(
            f"{config.where}: key 'rope_theta': got {outer:g} and, in {rope.where}, {inner:g}"
        )
    given = inner if inner is not None else outer
    return _DEFAULT_THETA if given is None else given


def _check_full_rotation(config: Fields, rope: Fields) -> None:
    for home in (config, rope):
        share = home.number("partial_rotary_factor", 1.0, low=0.0, high=1e6)
        if share != 1.0:
            raise UnsupportedError(
                f"{home.where}: partial_rotary_factor {share:g} is not supported, 1 is"
            )
