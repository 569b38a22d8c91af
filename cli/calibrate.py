"""`kvrt calibrate`: fit the tables that non-uniform cache formats need, from texts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from ..errors import UsageError
from .console import emit, emit_json, format_bytes, read_text_file, user_path
from .device_options import common_options
from .options import ModelChoice, open_model

CODECS = ("nuq",)


@click.command("calibrate")
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("-m", "--model", metavar="MODEL", help="The same as the argument.")
@click.option(
    "--text", "texts", multiple=True, required=True, metavar="FILE",
    help="A UTF-8 text like those the model will read. May be repeated.",
)  # fmt: skip
@click.option("--codec", default="nuq", show_default=True, metavar="NAME", help="What to fit: nuq.")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="The safetensors file to write."
)
@click.option(
    "--tokens", type=click.IntRange(min=64), default=16_384, show_default=True, metavar="N",
    help="Read at most so many tokens.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(min=64), default=2048, show_default=True, metavar="N",
    help="In windows of so many tokens.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(
    name: str | None,
    model: str | None,
    texts: tuple[str, ...],
    codec: str,
    output: str,
    tokens: int,
    context: int,
    as_json: bool,
    device: str | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Fit thresholds and levels of the nuq formats to MODEL (default: smollm2).

    --calibration uses the file; as calibration.safetensors in the model's folder it is found by
    itself.
    """
    if name is not None and model is not None:
        raise UsageError(
            f"MODEL is given twice: {name!r} and with -m; each further text takes a --text"
        )
    if codec not in CODECS:
        raise UsageError(f"--codec: {codec!r} needs no calibration that kvrt can make; nuq does")
    target = Path(user_path(output, "-o"))
    if not target.resolve().parent.is_dir():
        raise UsageError(f"-o: the folder of {target} does not exist")
    if target.is_dir():
        raise UsageError(f"-o: {target} is a folder, expected the name of a file")
    if tokens < context:
        raise UsageError(f"--tokens: {tokens:,} are less than one window of {context:,} tokens")
    from ..source import find_source

    chosen = name or model
    if chosen is not None and find_source(chosen).synthetic:
        raise UsageError(f"{chosen} has random weights, which no calibration fits")
    contents = [read_text_file(path, "--text") for path in texts]
    loaded = open_model(ModelChoice(chosen, "f16", None, device, threads))
    if context > loaded.max_context:
        raise UsageError(
            f"--context: {context:,} tokens are beyond this model's context of "
            f"{loaded.max_context:,}"
        )
    documents = [loaded.tokenizer.encode(text) for text in contents]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in contents]

    from ..calibrate import calibrate
    from .progress import console_progress

    def amount(count: int) -> str:
        return f"{count:,}"

    with console_progress(amount) as progress:
        made = calibrate(
            loaded, documents, digests, tokens=tokens, context=context, progress=progress
        )
    made.save(target)
    size = target.stat().st_size
    if as_json:
        facts = {"path": str(target), "tokens": made.origin.tokens}
        emit_json({**facts, "fingerprint": made.fingerprint, "bytes": size})
    else:
        emit(
            f"{target}: {made.origin.tokens:,} tokens, codebooks {made.fingerprint[:12]}, "
            f"{format_bytes(size)}\n"
        )
