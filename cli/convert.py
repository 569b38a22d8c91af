"""`kvrt convert FILE.gguf DIR`: turn a GGUF file into a model folder."""

from __future__ import annotations

import click

from ..errors import UsageError
from .console import check_unicode, emit, emit_json, user_path
from .device_options import common_options


@click.command("convert")
@click.argument("file")
@click.argument("folder", metavar="DIR")
@click.option("--force", is_flag=True, help="Replace DIR if it is there and not empty.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(
    file: str,
    folder: str,
    force: bool,
    as_json: bool,
    device: str | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Turn the Llama, Mistral, Qwen2 or Qwen3 GGUF in FILE into the model folder DIR.

    The weights are stored as float16. DIR appears only when it is complete.
    """
    from ..convert import convert_gguf
    from ..paths import storage_errors
    from .progress import console_progress

    source = user_path(check_unicode(file, "FILE"), "FILE")
    target = user_path(check_unicode(folder, "DIR"), "DIR")
    with storage_errors(target):
        occupied = target.is_dir() and any(target.iterdir())
    if occupied and not force:
        raise UsageError(f"{target} is there and not empty; --force replaces it")
    with console_progress() as progress:
        convert_gguf(source, target, progress)
    if as_json:
        emit_json({"path": str(target), "bytes": (target / "model.safetensors").stat().st_size})
    else:
        emit(f"{target}\n")
