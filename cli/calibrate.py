"""`kvrt calibrate`: fit the tables and codebooks that some cache formats need, from texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..lookup_text import lookup_text
from ..paths import NOT_REPLACEABLE, is_replaceable, storage_error
from .console import emit, emit_json, format_bytes, note, read_text_file, user_path
from .device_options import common_options
from .options import ModelChoice, open_model

_CHARACTERS = 2
"""Of made-up text, for each token to read: half of these are of it, and one has less than four."""

if TYPE_CHECKING:
    from ..calibrate_codebooks import BookOptions, BookReport
    from ..kvstore import KVSpec


@click.command("calibrate")
@click.argument("name", metavar="[MODEL]", required=False)
@click.option("-m", "--model", metavar="MODEL", help="The same as the argument.")
@click.option(
    "--text", "texts", multiple=True, required=True, metavar="FILE",
    help="A UTF-8 text like those the model will read. May be repeated.",
)  # fmt: skip
@click.option(
    "--codec", default="nuq", show_default=True, metavar="NAME",
    help="What to fit: nuq, or what a cache format needs, such as vq2.",
)  # fmt: skip
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
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, metavar="N",
    help="Of codebooks, which begin at random.",
)  # fmt: skip
@click.option(
    "--simvq", is_flag=True,
    help="Keep projections instead of codebooks: a smaller file, less exact.",
)  # fmt: skip
@click.option("--even", is_flag=True, help="Codebooks: all tokens count alike, not by attention.")
@click.option(
    "--prose", is_flag=True,
    help="Codebooks: of the texts alone, not half of made-up lists of keys and numbers.",
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
    seed: int,
    simvq: bool,
    even: bool,
    prose: bool,
    as_json: bool,
    device: str | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Fit tables of nuq formats, or codebooks of vq formats, to MODEL (default: smollm2).

    --calibration uses the file; as calibration.safetensors, or calibration-ANYTHING.safetensors,
    in the model's folder it is found by itself.
    """
    if name is not None and model is not None:
        raise UsageError(
            f"MODEL is given twice: {name!r} and with -m; each further text takes a --text"
        )
    spec = _spec(codec)
    books = _books(spec, codec, seed, simvq, even, prose)
    target = _target(output, texts)
    if tokens < context:
        raise UsageError(f"--tokens: {tokens:,} are less than one window of {context:,} tokens")
    from ..generate import cache_geometry
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
    if spec is not None:
        spec.check(cache_geometry(loaded.config))
    documents = [loaded.tokenizer.encode(text) for text in contents]
    lookup: list[int] = []
    if books is not None and not prose and tokens < 2 * context:
        note("kvrt: one window is read, and it is of the texts: made-up text takes a second one")
    elif books is not None and not prose:
        made_up = lookup_text("\n".join(contents), _CHARACTERS * tokens, seed)
        lookup = loaded.tokenizer.encode(made_up)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in contents]

    from ..calibrate import calibrate
    from .progress import console_progress

    def amount(count: int) -> str:
        return f"{count:,}"

    reports: list[BookReport] = []
    with console_progress(amount) as progress:
        made = calibrate(
            loaded, documents, digests, tokens=tokens, context=context, lookup=lookup, books=books,
            report=reports.append, progress=progress,
        )  # fmt: skip
    made.save(target)
    size = target.stat().st_size
    for report in reports:
        note(f"kvrt: {_told(report)}")
    if as_json:
        facts: dict[str, Any] = {"path": str(target), "tokens": made.origin.tokens}
        facts |= {"fingerprint": made.fingerprint, "bytes": size}
        emit_json(facts | ({"codebooks": [asdict(report) for report in reports]} if books else {}))
    else:
        emit(
            f"{target}: {made.origin.tokens:,} tokens, codebooks {made.fingerprint[:12]}, "
            f"{format_bytes(size)}\n"
        )


def _target(output: str, texts: Sequence[str]) -> Path:
    """The file to write; what cannot be written is said before a fit that takes long.

    Raises UsageError, StorageError.
    """
    target = Path(user_path(output, "-o"))
    own = os.path.realpath(target)
    folder = Path(own).parent
    if not folder.is_dir():
        raise UsageError(f"-o: the folder of {target} does not exist")
    if target.is_dir():
        raise UsageError(f"-o: {target} is a folder, expected the name of a file")
    if not is_replaceable(target):
        raise UsageError(f"-o: {target} is {NOT_REPLACEABLE}")
    if any(os.path.realpath(user_path(text, "--text")) == own for text in texts):
        raise UsageError(f"-o: {target} is a --text, expected another name")
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise storage_error(target, OSError(error.errno, error.strerror)) from error
    return target


def _spec(codec: str) -> KVSpec | None:
    """The format that --codec names; None of nuq, all tables of which are fitted. UsageError."""
    from ..kvstore import KVSpec

    if codec == "nuq":
        return None
    try:
        spec = KVSpec.parse(codec)
    except UsageError as error:
        raise UsageError(f"--codec: expected nuq or a cache format: {error}") from None
    if not spec.calibrated:
        raise UsageError(
            f"--codec: {codec!r} needs no calibration; nuq does, and formats such as vq2"
        )
    return spec


def _books(
    spec: KVSpec | None, codec: str, seed: int, simvq: bool, even: bool, prose: bool
) -> BookOptions | None:
    """What to fit besides, or instead of, the tables of nuq. Raises UsageError."""
    from ..calibrate_codebooks import BookOptions

    if spec is not None and spec.has_codebooks:
        return BookOptions(spec, seed, simvq, weighted=not even)
    for flag, given in (("--simvq", simvq), ("--even", even), ("--prose", prose)):
        if given:
            raise UsageError(f"{flag} is for codebooks, and --codec {codec} has none")
    return None


def _told(report: BookReport) -> str:
    """How codebooks came out, in a line."""
    last = len(report.errors) - 1
    shown = sorted({stage for stage in (0, 1, 3, 7, 15, 31) if stage < last} | {last})
    errors = ", ".join(f"{report.errors[stage]:.4f} after {stage + 1}" for stage in shown)
    return (
        f"{report.name}: error {errors} stage{'s' * (last > 0)}; "
        f"{min(report.used):.0%} to {max(report.used):.0%} of the entries used"
    )
