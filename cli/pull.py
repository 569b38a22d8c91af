"""`kvrt pull NAME`: fetch a model into the cache."""

from __future__ import annotations

import click

from .console import check_unicode, emit, emit_json, note
from .device_options import common_options


@click.command("pull")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(
    name: str, as_json: bool, device: str | None, threads: int | None, verbose: bool
) -> None:
    """Fetch a model once and print its folder.

    NAME is smollm2, or ORG/NAME[@REVISION] on Hugging Face. A model that is here already is left
    as it is; an interrupted pull goes on where it stopped.
    """
    from ..hub import pull
    from .progress import console_progress

    with console_progress() as progress:
        folder = pull(check_unicode(name, "NAME"), progress)
    if as_json:
        emit_json({"name": name, "path": str(folder)})
    else:
        emit(f"{folder}\n")
    if verbose:
        note(f"kvrt: {name} is ready: `kvrt chat -m {name}`")
