"""`kvrt eval`: what cache formats cost in quality, measured through the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UnsupportedError, UsageError
from .console import emit, emit_json, note, read_text_file
from .kv_options import KV_HELP, calibration_option, kv_side_options, resolve_kv
from .main import debug_option
from .options import ModelChoice, common_options, default_model, open_model

if TYPE_CHECKING:
    from ..evaluate import Quality
    from ..generate import Model
    from ..kvstore import KVSpec
    from ..progress import Progress

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_FORMATS = ("f16", "kvrt4")


@dataclass(frozen=True)
class Job:
    """What is to be measured: formats with the names they were given, texts with their files."""

    choice: ModelChoice
    formats: Sequence[tuple[str, KVSpec]]
    texts: Sequence[tuple[str, str]]
    as_json: bool

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.formats]

    @property
    def specs(self) -> list[KVSpec]:
        return [spec for _, spec in self.formats]


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
        as_json: bool,
        calibration: str | None,
        device: str,
        threads: int | None,
        verbose: bool,
        **rest: Any,
    ) -> Any:
        formats = _formats(kv, kv_k, kv_v)
        named = [(path, _read(path)) for path in texts]
        choice = ModelChoice(model or default_model(), "f32", None, device, threads, calibration)
        fitting = _check_formats(choice, formats, chosen=bool(kv or kv_k or kv_v))
        return function(job=Job(choice, fitting, named, as_json), **rest)

    wrapped: Any = common_options(call)
    wrapped = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, at the end."
    )(wrapped)
    wrapped = kv_side_options(calibration_option(wrapped))
    wrapped = click.option(
        "--kv",
        multiple=True,
        metavar="SPEC",
        help=f"{KV_HELP} May be repeated.  [default: {' and '.join(DEFAULT_FORMATS)}]",
    )(wrapped)
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
    _quality(job, context, max_tokens, _perplexity_table)


@command.command("kld")
@eval_options
@window_options
def kld(job: Job, context: int, max_tokens: int | None) -> None:
    """Kullback-Leibler divergence from the model with an exact cache, on the windows of `ppl`.

    Also the share of tokens whose likeliest successor stays the same.
    """
    _quality(job, context, max_tokens, _divergence_table)


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
@click.option("--details", is_flag=True, help="With --json: the errors of each head, too.")
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
    rows = []
    for name, error in zip(job.names, errors):
        row: dict[str, Any] = {"kv": name, **error.means(), "tokens": error.tokens}
        rows.append({**row, "bits_per_element": error.bits_per_element})
    if job.as_json:
        for row, error in zip(rows, errors):
            row["per_layer"] = error.per_layer(details)
        emit_json({"rows": rows})
        return
    head = ["cache", "bits", "keys %", "scores %", "values %", "output %"]
    lines = [
        [row["kv"], f"{row['bits_per_element']:.2f}", *_percents(error.means())]
        for row, error in zip(rows, errors)
    ]
    emit(f"{sequences.size:,} tokens, sinks and windows off\n" + _table(head, lines))


def _quality(
    job: Job,
    context: int,
    max_tokens: int | None,
    table: Callable[[Quality, Sequence[Quality]], str],
) -> None:
    from ..evaluate import cut_windows, measure_quality

    if max_tokens is not None and max_tokens < context:
        raise UsageError(
            f"--max-tokens: {max_tokens:,} tokens are less than one window of {context:,} "
            "(--context takes less)"
        )
    model, documents = _open(job, context, "--context")
    windows = cut_windows(documents, context, max_tokens)
    _note_unpacked(job, context)
    with _progress() as progress:
        exact, measured = measure_quality(model, job.specs, windows, progress)
    rows = [replace(row, kv=name) for name, row in zip(job.names, measured)]
    if job.as_json:
        emit_json({"rows": [asdict(row) for row in rows], "exact": asdict(exact)})
        return
    count = f"{len(windows):,} window{'s' * (len(windows) > 1)}"
    heading = f"{count} of {context:,} tokens, {exact.tokens:,} tokens scored\n"
    emit(heading + table(exact, rows))


# What the options name


def _formats(kv: tuple[str, ...], kv_k: str | None, kv_v: str | None) -> list[tuple[str, KVSpec]]:
    """The formats; a side that is named alone replaces that side of each of them."""
    from ..kvstore import KVSpec

    sides = kv_k is not None or kv_v is not None
    asked: Sequence[str | None] = kv or ((None,) if sides else DEFAULT_FORMATS)
    formats = []
    for text in asked:
        resolved = resolve_kv(text, kv_k, kv_v, "f16")
        # Scripts find their rows by what they wrote.
        name = resolved if sides or text is None else text.strip()
        formats.append((name, KVSpec.parse(resolved)))
    return formats


def _check_formats(
    choice: ModelChoice, formats: Sequence[tuple[str, KVSpec]], chosen: bool
) -> list[tuple[str, KVSpec]]:
    """The formats that fit the model. One that was asked for and does not is refused."""
    from ..config import ModelConfig
    from ..generate import cache_geometry
    from ..hub import resolve

    config = ModelConfig.from_dir(resolve(str(choice.model)))
    geometry = cache_geometry(config)
    fitting = []
    for name, spec in formats:
        try:
            spec.check(geometry)
        except UnsupportedError as error:
            if chosen:
                raise
            note(f"kvrt: the default cache format {name} does not fit this model ({error})")
        else:
            fitting.append((name, spec))
    return fitting


def _read(path: str) -> str:
    text = read_text_file(path, "--text")
    if not text.strip():
        raise UsageError(f"--text: {path} is empty")
    return text


def _open(job: Job, tokens: int, option: str) -> tuple[Model, list[list[int]]]:
    """The model and the texts' token ids. UsageError where a pass does not fit the context."""
    from ..config import ModelConfig
    from ..hub import resolve

    limit = ModelConfig.from_dir(resolve(str(job.choice.model))).max_context
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


def _note_unpacked(job: Job, context: int) -> None:
    """Say which formats pack nothing in so short a window: they are as good as exact."""
    from ..backends.ops import PAGE_TOKENS
    from ..kvstore.stats import sealed_pages

    for name, spec in job.formats:
        if not sealed_pages(spec, context - 2):  # what the last prediction sees
            note(
                f"kvrt: {name} packs nothing in windows of {context:,} tokens, it takes "
                f"{spec.sink + spec.window + PAGE_TOKENS + 2:,}"
            )


# What is printed


@contextmanager
def _progress() -> Iterator[Progress]:
    from .progress import console_progress, tokens

    with console_progress(tokens) as progress:
        yield progress


def _perplexity_table(exact: Quality, rows: Sequence[Quality]) -> str:
    head = ["cache", "bits", "ppl", "dNLL", "KLD", "seconds"]
    lines = [["exact", "", f"{exact.ppl:.3f}", "", "", f"{exact.seconds:.1f}"]]
    for row in rows:
        numbers = [f"{row.bits_per_element:.2f}", f"{row.ppl:.3f}", _rise(row), f"{row.kld:.4f}"]
        lines.append([row.kv, *numbers, f"{row.seconds:.1f}"])
    return _table(head, lines)


def _divergence_table(exact: Quality, rows: Sequence[Quality]) -> str:
    head = ["cache", "bits", "KLD", "top-1 %", "dNLL", "seconds"]
    lines = []
    for row in rows:
        numbers = [f"{row.bits_per_element:.2f}", f"{row.kld:.5f}", f"{row.top1:.1f}", _rise(row)]
        lines.append([row.kv, *numbers, f"{row.seconds:.1f}"])
    return _table(head, lines)


def _rise(row: Quality) -> str:
    """The rise of the negative log-likelihood, with its standard error where there is one."""
    error = "" if row.dnll_se is None else f" ± {row.dnll_se:.4f}"
    return f"{round(row.dnll, 4) + 0.0:+.4f}{error}"  # + 0.0: no negative zero


def _percents(errors: Mapping[str, float]) -> list[str]:
    return [f"{100 * error:.2f}" for error in errors.values()]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns under their heads: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    text = []
    for line in (head, *lines):
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        text.append("  ".join((line[0].ljust(widths[0]), *cells)).rstrip() + "\n")
    return "".join(text)
