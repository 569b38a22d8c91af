"""`kvrt eval`: what cache formats cost in quality, measured through the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UnsupportedError, UsageError
from .console import emit, read_text_file
from .device_options import common_options
from .kv_options import (
    DEFAULT_FORMATS,
    Format,
    calibration_option,
    fitting_formats,
    kv_list_options,
    note_unpacked,
    resolve_formats,
)
from .main import debug_option
from .options import ModelChoice, default_model, open_model
from .report import OBJECT, Column, make_report, output_options

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..generate import Model
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


@click.group("eval", invoke_without_command=True)
@debug_option
@click.pass_context
def command(context: click.Context) -> None:
    """Measure what cache formats cost in quality, on texts of your own."""
    if context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


def eval_options(function: Function) -> Function:
    """-m, --text, --kv and the like; the command gets a `job`."""

    @wraps(function)
    def call(
        model: str | None,
        texts: tuple[str, ...],
        kv: tuple[str, ...],
        kv_k: str | None,
        kv_v: str | None,
        output: str,
        calibration: str | None,
        device: str | None,
        threads: int | None,
        verbose: bool,
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
    wrapped = click.option(
        "--text",
        "texts",
        multiple=True,
        required=True,
        metavar="FILE",
        help="A UTF-8 text to measure on. May be repeated.",
    )(wrapped)
    return click.option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A model folder or the name of a pulled model.  [default: smollm2]",
    )(wrapped)


def window_options(function: Function) -> Function:
    """--context and --max-tokens."""
    for option in (
        click.option(
            "--max-tokens",
            type=click.IntRange(min=2),
            metavar="N",
            help="Take N tokens at most, in whole windows.  [default: all]",
        ),
        click.option(
            "--context",
            type=click.IntRange(min=2),
            default=1024,
            show_default=True,
            metavar="N",
            help="Tokens of a window.",
        ),
    ):
        function = option(function)
    return function


@command.command("ppl")
@eval_options
@window_options
def ppl(job: Job, context: int, max_tokens: int | None) -> None:
    """Perplexity of texts, each token predicted from the cache as decode would read it.

    A text is cut into windows of --context tokens; the last partial one is dropped. A window
    begins with an empty cache, and every token of it but the first is scored.
    """
    _quality(job, context, max_tokens, PERPLEXITY, show_exact=True)


@command.command("kld")
@eval_options
@window_options
def kld(job: Job, context: int, max_tokens: int | None) -> None:
    """Kullback-Leibler divergence from the model with an exact cache, on the windows of `ppl`.

    Also the share of tokens whose likeliest successor stays the same.
    """
    _quality(job, context, max_tokens, DIVERGENCE, show_exact=False)


@command.command("attn")
@eval_options
@click.option(
    "--tokens",
    type=click.IntRange(min=64),
    default=1500,
    show_default=True,
    metavar="N",
    help="First tokens of each text, less what fills no page of 64.",
)
@click.option(
    "--details", is_flag=True, help="In json, jsonl and csv: the errors of each head, too."
)
def attn(job: Job, tokens: int, details: bool) -> None:
    """Relative errors of keys, attention scores, values and attention output.

    Every token is packed: sinks and windows of the formats are left out. The errors are those of
    each layer by itself, averaged over layers and heads.
    """
    from ..evaluate import cut_windows
    from ..evaluate_attention import attention_errors, whole_pages

    tokens = whole_pages(tokens)
    model, documents = _open(job, tokens, "--tokens")
    sequences = cut_windows([ids[:tokens] for ids in documents], tokens)
    with _progress() as progress:
        errors = attention_errors(model, job.specs, sequences, progress)
    columns = [
        Column("kv", "cache"),
        Column("bits_per_element", "bits", _digits(2)),
        *(
            Column(field, head, lambda error: f"{100 * error:.2f}")
            for field, head in (
                ("key_error", "keys %"),
                ("score_error", "scores %"),
                ("value_error", "values %"),
                ("output_error", "output %"),
            )
        ),
    ]
    with make_report(job.output, columns, emit) as report:
        report.heading(
            f"{sequences.size:,} tokens, sinks and windows off, on {model.ops.device_name}"
        )
        for name, error in zip(job.names, errors):
            row: dict[str, Any] = {"kv": name, **error.means(), "tokens": error.tokens}
            row["bits_per_element"] = error.bits_per_element
            report.row({**row, "per_layer": error.per_layer(details)})


def _quality(
    job: Job,
    context: int,
    max_tokens: int | None,
    columns: Sequence[Column],
    show_exact: bool,
) -> None:
    from ..evaluate import cut_windows, measure_quality

    if max_tokens is not None and max_tokens < context:
        raise UsageError(
            f"--max-tokens: {max_tokens:,} tokens are less than one window of {context:,} "
            "(--context takes less)"
        )
    model, documents = _open(job, context, "--context")
    windows = cut_windows(documents, context, max_tokens)
    note_unpacked(job.formats, context)
    with _progress() as progress:
        exact, measured = measure_quality(model, job.specs, windows, progress)
    count = f"{len(windows):,} window{'s' * (len(windows) > 1)}"
    with make_report(job.output, columns, emit) as report:
        device = model.ops.device_name
        report.heading(
            f"{count} of {context:,} tokens, {exact.tokens:,} tokens scored, on {device}"
        )
        report.attach(exact=asdict(exact), device=device)
        if show_exact and job.output != OBJECT:
            report.row(asdict(exact) | dict.fromkeys(BESIDE_EXACT))
        for name, row in zip(job.names, measured):
            report.row(asdict(replace(row, kv=name)))


# What the options name


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


def _open(job: Job, tokens: int, option: str) -> tuple[Model, list[list[int]]]:
    """The model and the texts' token ids. UsageError where a pass does not fit the context."""
    limit = job.config.max_context
    if tokens > limit:
        raise UsageError(
            f"{option}: {tokens:,} tokens are beyond this model's context of {limit:,}"
        )
    model = open_model(job.choice)
    documents = [model.tokenizer.encode(text) for _, text in job.texts]
    for (path, _), ids in zip(job.texts, documents):
        if len(ids) < tokens:
            raise UsageError(
                f"--text: {path} is shorter than one window: {len(ids):,} of {tokens:,} tokens "
                f"({option} takes less)"
            )
    return model, documents


# What is printed


@contextmanager
def _progress() -> Iterator[Progress]:
    from .progress import console_progress, tokens

    with console_progress(tokens) as progress:
        yield progress


def _digits(count: int) -> Callable[[float], str]:
    return f"{{:.{count}f}}".format


def _rise(dnll: float, error: float | None) -> str:
    """The rise of the negative log-likelihood, with its standard error where there is one."""
    beside = "" if error is None else f" ± {error:.4f}"
    return f"{round(dnll, 4) + 0.0:+.4f}{beside}"  # + 0.0: no negative zero


PERPLEXITY = (
    Column("kv", "cache"),
    Column("bits_per_element", "bits", _digits(2)),
    Column("ppl", "ppl", _digits(3)),
    Column(("dnll", "dnll_se"), "dNLL", _rise),
    Column("kld", "KLD", _digits(4)),
    Column("seconds", "seconds", _digits(1)),
)
DIVERGENCE = (
    Column("kv", "cache"),
    Column("bits_per_element", "bits", _digits(2)),
    Column("kld", "KLD", _digits(5)),
    Column("top1", "top-1 %", _digits(1)),
    Column(("dnll", "dnll_se"), "dNLL", _rise),
    Column("seconds", "seconds", _digits(1)),
)
# What compares with the exact model, and so says nothing of it; its cache is not one to choose.
BESIDE_EXACT = ("bits_per_element", "kld", "top1", "dnll", "dnll_se")
