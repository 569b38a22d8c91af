"""The options that name a cache format, and what they make together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import click

from ..errors import UsageError
from .console import user_path

Function = TypeVar("Function", bound=Callable[..., Any])

KV_HELP = "Cache format: f16, q8_0, kvrt4, ... or k=SIDE,v=SIDE[,sink=N][,window=N]."


def kv_side_options(function: Function) -> Function:
    """--kv-k and --kv-v, also in llama.cpp's words; `resolve_kv` joins them with --kv."""
    for side, what in (("v", "values"), ("k", "keys")):
        function = click.option(
            f"--kv-{side}",
            f"-ct{side}",
            f"--cache-type-{side}",
            f"kv_{side}",
            metavar="SIDE",
            help=f"Cache format of the {what} alone, such as q8_0.",
        )(function)
    return function


def calibration_option(function: Function) -> Function:
    """--calibration as `calibration`, a path or None."""
    return click.option(
        "--calibration",
        metavar="FILE",
        callback=_path,
        help="Tables for nuq formats, written by `kvrt calibrate`.",
    )(function)


def resolve_kv(kv: str | None, kv_k: str | None, kv_v: str | None, default: str) -> str:
    """The cache format that --kv, --kv-k and --kv-v name together, as `KVSpec` prints it.

    A side replaces that of --kv, or of f16 without it; sinks, window and single layers stay. With
    none of the three it is `default`. Raises UsageError with the option's name.
    """
    from ..kvstore.spec import KVSpec, Side

    if kv_k is None and kv_v is None:
        kv = default if kv is None else kv
    with _option("--kv"):
        spec = KVSpec.parse("f16" if kv is None else kv)
    if kv_k is not None:
        with _option("--kv-k"):
            spec = replace(spec, k=Side.parse(kv_k, "k"))
    if kv_v is not None:
        with _option("--kv-v"):
            spec = replace(spec, v=Side.parse(kv_v, "v"))
    return str(spec)


@contextmanager
def _option(name: str) -> Iterator[None]:
    """Put the option's name before the message of an error."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None


def _path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return None if value is None else str(user_path(value, parameter.opts[0]))
