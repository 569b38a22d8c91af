"""`kvrt generate`: continue a text; the continuation alone goes to stdout."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from ..errors import UsageError
from .console import emit, emit_json, note, timing_lines
from .options import (
    ModelChoice,
    SamplingFlags,
    model_options,
    open_model,
    predict_option,
    prompt_options,
    read_prompt,
    sampling_options,
)


@click.command("generate")
@model_options
@prompt_options
@predict_option(default=128)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, at the end.")
def command(
    choice: ModelChoice,
    prompt: str | None,
    file: str | None,
    predict: int,
    sampling: SamplingFlags,
    as_json: bool,
    verbose: bool,
) -> None:
    """Continue a text, token by token.

    The prompt comes from -p, from -f, or from stdin; one last newline of a file or of stdin is not
    part of it. Only the continuation is written to stdout.
    """
    text = read_prompt(prompt, file)
    if text is None:
        raise UsageError("no prompt: give -p TEXT or -f FILE, or pipe text to stdin")
    if not text:
        raise UsageError("the prompt is empty: give -p TEXT or -f FILE, or pipe text to stdin")
    model = open_model(choice)
    run = model.start(text, None if predict == -1 else predict, sampling.over(model.sampling))
    for step in run:
        if step.text and not as_json:
            emit(step.text)
    generation = run.generation()
    if as_json:
        emit_json(asdict(generation))
    elif sys.stdout.isatty():
        emit("\n")
    if generation.finish_reason == "context":
        note(f"kvrt: the context of {model.max_context:,} tokens is full; the text stops here")
    if verbose:
        note(f"device: {generation.device}")
        timings = run.session.timings
        for line in timing_lines(timings, generation.cache_bytes, generation.peak_bytes):
            note(line)
