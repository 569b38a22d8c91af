"""What all of `kvrt eval` is told: a model, formats, texts, and how to print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UnsupportedError, UsageError
from .console import read_text_file
from .device_options import common_options
from .kv_options import (
    DEFAULT_FORMATS,
    Format,
    calibration_option,
    fitting_formats,
    kv_list_options,
    resolve_formats,
)
from .options import ModelChoice, default_model
from .report import output_options

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..kvstore import KVSpec
    from ..progress import Progress

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Job:
    """What is to be measured: formats, texts with their files; and how it is to be printed."""

    choice: ModelChoice
    config: ModelConfig
    formats: Sequence[Format]
    texts: Sequence[tuple[str, str]]
    output: str

    @property
    def names(self) -> list[str]:
        return [measured.name for measured in self.formats]

    @property
    def specs(self) -> list[KVSpec]:
        return [measured.spec for measured in self.formats]


def text_option(required: bool, text: str) -> Callable[[Function], Function]:
    """--text as `texts`, paths."""
    return click.option(
        "--text", "texts", multiple=True, required=required, metavar="FILE", help=text
    )


def job_options(function: Function) -> Function:
    """-m, --kv and the like, and the texts where the command has such; it gets a `job`."""

    @wraps(function)
    def call(
        model: str | None,
        kv: tuple[str, ...],
        kv_k: str | None,
        kv_v: str | None,
        output: str,
        calibration: str | None,
        device: str | None,
        threads: int | None,
        verbose: bool,
        texts: tuple[str, ...] = (),
        **rest: Any,
    ) -> Any:
        from ..generate import cache_geometry

        formats = resolve_formats(kv, kv_k, kv_v, DEFAULT_FORMATS)
        named = [(path, _read(path)) for path in texts]
        name = default_model() if model is None else model
        config = _config(name)
        chosen, longest = bool(kv or kv_k or kv_v), config.max_context
        fitting = fitting_formats(formats, cache_geometry(config), longest, chosen)
        choice = ModelChoice(name, "f16", None, device, threads, calibration)
        return function(job=Job(choice, config, fitting, named, output), **rest)

    wrapped: Any = common_options(call)
    wrapped = output_options("table")(wrapped)
    wrapped = kv_list_options(DEFAULT_FORMATS)(calibration_option(wrapped))
    return click.option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A model folder or the name of a pulled model.  [default: smollm2]",
    )(wrapped)


def _config(name: str) -> ModelConfig:
    """The config of a model whose quality can be measured."""
    from ..source import find_source

    source = find_source(name)
    if source.synthetic:
        raise UnsupportedError(f"-m {name}: random weights have no quality to measure")
    return source.config


def _read(path: str) -> str:
    text = read_text_file(path, "--text")
    if not text.strip():
        raise UsageError(f"--text: {path} is empty")
    return text


@contextmanager
def token_progress() -> Iterator[Progress]:
    """A Progress in tokens, on stderr."""
    from .progress import console_progress, tokens

    with console_progress(tokens) as progress:
        yield progress
