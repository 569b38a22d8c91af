"""`kvrt eval`: what cache formats cost in quality, measured through the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import UsageError
from .console import emit
from .eval_job import Job, job_options, text_option, token_progress
from .eval_retrieval import kvretrieval, needle
from .kv_options import note_unpacked
from .main import debug_option
from .options import open_model
from .report import OBJECT, Column, make_report

if TYPE_CHECKING:
    from ..generate import Model

Function = TypeVar("Function", bound=Callable[..., Any])

measured_text = text_option(True, "A UTF-8 text to measure on. May be repeated.")


@click.group("eval", invoke_without_command=True)
@debug_option
@click.pass_context
def command(context: click.Context) -> None:
    """Measure what cache formats cost in quality, on texts of your own."""
    if context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


command.add_command(needle)
command.add_command(kvretrieval)


def window_options(function: Function) -> Function:
    """--context, --max-tokens and --prompt."""
    for option in (
        click.option(
            "--prompt",
            type=click.IntRange(min=1),
            metavar="N",
            help="The first N tokens of a window are a prompt, computed as `chat` does; only what "
            "follows is scored.  [default: none]",
        ),
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
@job_options
@measured_text
@window_options
def ppl(job: Job, context: int, max_tokens: int | None, prompt: int | None) -> None:
    """Perplexity of texts, each token predicted from the cache as decode would read it.

    A text is cut into windows of --context tokens; the last partial one is dropped. A window
    begins with an empty cache, and every token of it but the first is scored. With --prompt the
    window begins with a prompt, which is packed where the format packs prompts as a whole.
    """
    _quality(job, context, max_tokens, prompt, PERPLEXITY, show_exact=True)


@command.command("kld")
@job_options
@measured_text
@window_options
def kld(job: Job, context: int, max_tokens: int | None, prompt: int | None) -> None:
    """Kullback-Leibler divergence from the model with an exact cache, on the windows of `ppl`.

    Also the share of tokens whose likeliest successor stays the same.
    """
    _quality(job, context, max_tokens, prompt, DIVERGENCE, show_exact=False)


@command.command("attn")
@job_options
@measured_text
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
    with token_progress() as progress:
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
    prompt: int | None,
    columns: Sequence[Column],
    show_exact: bool,
) -> None:
    from ..evaluate import cut_windows, measure_quality

    if max_tokens is not None and max_tokens < context:
        raise UsageError(
            f"--max-tokens: {max_tokens:,} tokens are less than one window of {context:,} "
            "(--context takes less)"
        )
    if prompt is not None and prompt >= context:
        raise UsageError(
            f"--prompt: a prompt of {prompt:,} tokens leaves none to score in a window of "
            f"{context:,} (--context takes more)"
        )
    model, documents = _open(job, context, "--context")
    windows = cut_windows(documents, context, max_tokens)
    note_unpacked(job.formats, context, prompt or 0)
    with token_progress() as progress:
        exact, measured = measure_quality(model, job.specs, windows, progress, prompt=prompt)
    count = f"{len(windows):,} window{'s' * (len(windows) > 1)}"
    behind = "" if prompt is None else f" behind prompts of {prompt:,}"
    extra = {} if prompt is None else {"prompt_tokens": prompt}
    with make_report(job.output, columns, emit) as report:
        device = model.ops.device_name
        report.heading(
            f"{count} of {context:,} tokens, {exact.tokens:,} tokens scored{behind}, on {device}"
        )
        report.attach(exact=asdict(exact) | extra, device=device)
        if show_exact and job.output != OBJECT:
            report.row(asdict(exact) | dict.fromkeys(BESIDE_EXACT) | extra)
        for name, row in zip(job.names, measured):
            report.row(asdict(replace(row, kv=name)) | extra)


# What the options name


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


def _digits(count: int) -> Callable[[float], str]:
    return f"{{:.{count}f}}".format


def _rise(dnll: float, error: float | None) -> str:
    """The rise of the negative log-likelihood, with its standard error where there is one."""
    beside = "" if error is None else f" ± {error:.4f}"
    return f"{round(dnll, 4) + 0.0:+.4f}{beside}"  # + 0.0: no negative zero


def _divergence(kld: float, error: float | None) -> str:
    return f"{kld:.5f}" + ("" if error is None else f" ± {error:.5f}")


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
    Column(("kld", "kld_se"), "KLD", _divergence),
    Column("top1", "top-1 %", _digits(1)),
    Column(("dnll", "dnll_se"), "dNLL", _rise),
    Column("seconds", "seconds", _digits(1)),
)
# What compares with the exact model, and so says nothing of it; its cache is not one to choose.
BESIDE_EXACT = ("bits_per_element", "kld", "kld_se", "top1", "dnll", "dnll_se")
