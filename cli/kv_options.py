"""The options that name a cache format, or several, and what they make together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UnsupportedError, UsageError
from .console import note, user_path

if TYPE_CHECKING:
    from ..kvstore import Geometry, KVSpec

Function = TypeVar("Function", bound=Callable[..., Any])

KV_HELP = (
    "Cache format: f16, q8_0, kvrt4, ... or k=SIDE,v=SIDE[,sink=N][,window=N]; or rdkv, adakv, "
    "snapkv or h2o with what to keep of a prompt, in tokens or per cent: rdkv:1024, rdkv:2.5%."
)
DEFAULT_FORMATS = ("f16", "kvrt4")
"""What commands that measure formats take where none is named."""

_KEYS = ("k", "v", "sink", "window")


@dataclass(frozen=True)
class Format:
    """A cache format, and the name under which scripts find its rows: as it was written."""

    name: str
    spec: KVSpec


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


def kv_list_options(default: Sequence[str]) -> Callable[[Function], Function]:
    """--kv, --kv-k and --kv-v as `kv`, `kv_k`, `kv_v`, for `resolve_formats`."""

    def decorate(function: Function) -> Function:
        return click.option(
            "--kv",
            multiple=True,
            metavar="SPEC[,SPEC]...",
            help=f"{KV_HELP} Several by repeating it or in a list, where a name or a second k= or "
            "v= begins the next one; the options for one side take lists too, for every pair.  "
            f"[default: {','.join(default)}]",
        )(kv_side_options(function))

    return decorate


def calibration_option(function: Function) -> Function:
    """--calibration as `calibration`, a path or None."""
    return click.option(
        "--calibration",
        metavar="FILE",
        callback=_path,
        help="Tables and codebooks for nuq and vq formats, from `kvrt calibrate`.",
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


def resolve_formats(
    kv: Sequence[str], kv_k: str | None, kv_v: str | None, default: Sequence[str]
) -> list[Format]:
    """The cache formats that all --kv, --kv-k and --kv-v name together, each once.

    Every text may be a list (`split_formats`). Each side that is named alone replaces that side of
    each format, or of f16 without --kv. A format that is named twice, under whatever names, is
    kept under the first, and a note says so. Raises UsageError with the option's name.
    """
    from ..kvstore import KVSpec

    sides = kv_k is not None or kv_v is not None
    asked: Sequence[str | None] = [part for text in kv for part in split_formats(text)]
    if not asked:
        asked = [None] if sides else default
    keys = [None] if kv_k is None else kv_k.split(",")
    values = [None] if kv_v is None else kv_v.split(",")
    names: dict[KVSpec, str] = {}
    for text, key, value in product(asked, keys, values):
        resolved = resolve_kv(text, key, value, "f16")
        name = resolved if sides or text is None else text
        spec = KVSpec.parse(resolved)
        if spec in names:
            same = "" if name == names[spec] else f" ({name} is {names[spec]})"
            note(f"kvrt: cache format {names[spec]} is named twice{same}; it is measured once")
        names.setdefault(spec, name)
    return [Format(name, spec) for spec, name in names.items()]


def split_formats(text: str) -> list[str]:
    """The formats of a list with commas, though a format has commas of its own.

    The next one begins with a part without `=`, which can only be a name, and with k= or v= where
    the format before it has that side already, by itself or by its name. What stands behind
    layers[A-B]= is a format by itself in this. So `kvrt2,window=256` is one, `f16,kvrt2` are two,
    and so are `k=q8_0,v=q4_0,sink=4,f16` and `k=f16,v=f16,layers[0]=f8,k=q8_0,v=q8_0`.
    """
    formats: list[str] = []
    taken: set[str] = set()  # the sides of what is read that are settled
    for part in text.split(","):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        named = not sign and key not in _KEYS and not key.startswith("layers")
        if not formats or named or key in taken:
            formats.append(part)
            taken = set()
        else:
            formats[-1] += f",{part}"
        if key.startswith("layers"):
            taken = set()
            key, sign, _ = (piece.strip() for piece in value.partition("="))
        taken |= {key} & {"k", "v"} if sign else {"k", "v"}
    return [written.strip() for written in formats]


def fitting_formats(
    formats: Sequence[Format], geometry: Geometry, context: int, chosen: bool
) -> list[Format]:
    """The formats that fit a model's cache: of default ones some may be left out, with a note.

    `context` is the longest that the model can have. Raises UnsupportedError for one that was
    `chosen` and does not fit.
    """
    fitting = []
    for asked in formats:
        try:
            asked.spec.check(geometry, context)
        except UnsupportedError as error:
            if chosen:
                raise
            note(f"kvrt: the default cache format {asked.name} does not fit this model ({error})")
        else:
            fitting.append(asked)
    return fitting


def note_unpacked(formats: Sequence[Format], context: int, prompt: int = 0) -> None:
    """Say which formats pack nothing of so many tokens: they are as good as exact there.

    The first `prompt` of them are a prompt, which some formats compress at its end.
    """
    from ..backends.ops import PAGE_TOKENS
    from ..kvstore.stats import sealed_pages

    for chosen in formats:
        spec = chosen.spec
        if spec.compression is not None:
            _note_uncompressed(chosen, spec, prompt)
        elif not sealed_pages(spec, context - 2):  # what the last prediction sees
            note(
                f"kvrt: {chosen.name} packs nothing in windows of {context:,} tokens, it takes "
                f"{spec.sink + spec.window + PAGE_TOKENS + 2:,}"
            )


def _note_uncompressed(chosen: Format, spec: KVSpec, prompt: int) -> None:
    from ..kvstore.stats import compresses

    if not prompt:
        note(
            f"kvrt: {chosen.name} packs nothing in windows without a prompt: --prompt N makes one "
            "of their first N tokens, which is compressed at its end"
        )
    elif not compresses(spec, prompt):
        note(f"kvrt: {chosen.name} packs nothing of a prompt of {prompt:,} tokens: it keeps all")


@contextmanager
def _option(name: str) -> Iterator[None]:
    """Put the option's name before the message of an error."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{name}: {error}") from None


def _path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return None if value is None else str(user_path(value, parameter.opts[0]))
