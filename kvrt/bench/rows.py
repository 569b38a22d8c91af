"""Measurements as rows: mappings that become JSON, CSV and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..kvstore import Geometry, KVSpec, bits_per_element, bytes_per_token, estimate
from .check import Agreement
from .fit import Line, break_even, fit_line, slopes_differ
from .gpu import gpu_fields, gpu_versions
from .result import Measured

if TYPE_CHECKING:
    from ..generate import Model
    from ..shapes import Shape

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What all rows of one loaded model share; `read_bandwidth` is the device's, in bytes/s.

    `limit`: the bytes that were granted for weights and cache, None where it is all that is free.
    `fitted`: whether nuq formats have tables that were fitted to this model.
    """

    model: Model
    fill: str
    batch: int | None
    read_bandwidth: float
    software: Mapping[str, Any]
    limit: int | None = None
    fitted: bool = True

    def fields(self) -> Row:
        """How the rows say it: what was effective, not what was asked for."""
        model = self.model
        return {
            "model": model.name,
            "model_type": model.config.model_type,
            "parameters": model.config.parameters(),
            "weight_bytes": model.weight_bytes,
            "device": model.ops.hardware,
            **gpu_fields(model.ops),
            "backend": model.ops.name,
            "kernels": model.ops.build,
            "threads": model.ops.threads,
            "n_batch": self.batch,
            "n_ubatch": model.decoder.chunk_tokens,
            "fill": self.fill,
            "device_read_GBps": self.read_bandwidth / 1e9,
            "limit_bytes": self.limit,
            **self.software,
            "versions": {**self.software.get("versions", {}), **gpu_versions(model.ops)},
        }


def case_row(name: str, found: Measured, setup: Setup, agreement: Agreement | None) -> Row:
    """The row of one test, in the format that was called `name`."""
    rates, case = found.tokens_per_s, found.case
    return {
        "test": case.name,
        "kv": name,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "depth": case.depth,
        "mean_tokens_per_s": statistics.fmean(rates),
        "std_tokens_per_s": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples": rates,
        "samples_s": list(found.seconds),
        **_effective(found, setup, agreement),
    }


def scan_row(name: str, found: Measured, setup: Setup, agreement: Agreement | None) -> Row:
    """The row of one context; `trend_fields` completes it when the format is done."""
    steps = [seconds / found.case.n_gen * 1e6 for seconds in found.seconds]  # us a token
    return {
        "context": found.case.context,
        "kv": name,
        "decode_us": statistics.fmean(steps),
        "std_us": statistics.stdev(steps) if len(steps) > 1 else 0.0,
        "samples_us": steps,
        **_effective(found, setup, agreement),
    }


def _effective(found: Measured, setup: Setup, agreement: Agreement | None) -> Row:
    read = found.read_bandwidth
    checked = asdict(agreement) if agreement else dict.fromkeys(("kld", "top1", "tokens"))
    return {
        "effective_kv": str(found.effective),
        "bits_per_element": found.stats.bits_per_element,
        "cache_bytes": found.stats.bytes,
        "estimated_bytes": found.expected_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_is_own": found.peak_is_own,
        "device_used_bytes": found.used_bytes,
        "read_GBps": None if read is None else read / 1e9,
        "read_share": None if read is None else read / setup.read_bandwidth,
        "warmup": found.warmed_up,
        "repetitions": len(found.seconds),
        **{f"check_{key}": value for key, value in checked.items()},
        "remarks": found.remarks + _of_tables(found, setup),
        **setup.fields(),
    }


def _of_tables(found: Measured, setup: Setup) -> list[str]:
    if setup.fitted or not found.asked.calibrated:
        return []
    return ["tables for normally distributed numbers, fitted to no model"]


def trend_line(rows: Sequence[Row], spec: KVSpec) -> Line | None:
    """Decode time in us over the context in tokens, through the rows of one format.

    Of a format that compresses prompts, through those where it does: shorter ones are as of f16.
    """
    rows = _trend_rows(rows, spec)
    return fit_line([row["context"] for row in rows], [row["decode_us"] for row in rows])


def trend_start(rows: Sequence[Row], spec: KVSpec) -> int:
    """The least context of which `trend_line` tells."""
    if spec.compression is None:
        return 0
    return min((row["context"] for row in _trend_rows(rows, spec)), default=0)


def _trend_rows(rows: Sequence[Row], spec: KVSpec) -> list[Row]:
    return [row for row in rows if spec.compression is None or row["bits_per_element"] < 16]


def trend_fields(line: Line | None, base: Line | None, fits: int | None, start: int = 0) -> Row:
    """What the rows of a format say of all its lengths; `base` is the line of f16.

    `fits`: tokens whose cache fits into memory beside the weights, None where that is unknown;
    `start`: the least context of which the line tells.
    """
    error = None if line is None else line.error
    even = break_even(line, base)
    even = None if even is None else max(even, start)
    return {
        "slope_us_per_1k": None if line is None else line.slope * 1000,
        "slope_error_us_per_1k": None if error is None else error * 1000,
        "intercept_us": None if line is None else line.intercept,
        "break_even_tokens": None if line is base else even,
        "slopes_differ": None if line is base or base is None else slopes_differ(line, base),
        "fits_tokens": fits,
    }


def memory_row(name: str, shape: Shape, spec: KVSpec, context: int, sequences: int) -> Row:
    """The arithmetic of caches of `sequences` sequences beside the weights of a model.

    `token_bytes` is what the tokens take in the long run, `cache_bytes` what a store holds: sinks,
    tail and tables too. In a format that compresses prompts the context is one prompt.
    """
    geometry, weights = shape.geometry, shape.weight_bytes
    cache = estimate(geometry, spec, context) * sequences
    return {
        "kv": name,
        "context": context,
        "batch": sequences,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "token_bytes": _token_bytes(geometry, spec, context) * sequences,
        "total_bytes": weights + cache,
        "weight_share": weights / (weights + cache),
        "cache_share": cache / (weights + cache),
        "bits_per_element": bits_per_element(geometry, spec, context),
        "bytes_per_token": bytes_per_token(geometry, spec) * sequences,
        "model": shape.name,
        "model_type": shape.model_type,
        "parameters": shape.parameters,
    }


def _token_bytes(geometry: Geometry, spec: KVSpec, tokens: int) -> int:
    if spec.compression is None:
        return round(bytes_per_token(geometry, spec) * tokens)
    heads = geometry.num_layers * geometry.num_kv_heads
    return spec.compression.budget_bytes(tokens, geometry.head_dim) * heads
