"""`kvrt info`: a model's shape and what cache formats cost, or what a saved conversation holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .console import emit, emit_json, format_bytes
from .device_options import common_options
from .kv_options import kv_list_options, resolve_formats
from .widths import width_fields, width_lines

if TYPE_CHECKING:
    from ..kvstore import Geometry, KVSpec
    from ..saved_conversation import SavedConversation

DEFAULT_FORMATS = ("f16",)
COMPARED = ("f16", "kivi2")


@click.command("info")
@click.argument("model", metavar="MODEL|FILE")
@kv_list_options(DEFAULT_FORMATS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(
    model: str,
    kv: tuple[str, ...],
    kv_k: str | None,
    kv_v: str | None,
    as_json: bool,
    device: str | None,
    threads: int | None,
    verbose: bool,
) -> None:
    """Show the geometry, the parameters and the cost of the KV cache of MODEL.

    MODEL is a folder, the name of a pulled model, or synthetic:NAME, a published shape. Weights are
    not read, only their headers. FILE is a conversation saved with its cache: its format, tokens
    and bytes are shown, and in how many bits a compressed one keeps what.
    """
    from ..saved_conversation import is_saved, read_saved

    if is_saved(Path(model)):
        if kv or kv_k is not None or kv_v is not None:
            raise UsageError(f"--kv is for a model: {model} is a saved cache, in one format")
        saved = read_saved(Path(model))
        if as_json:
            emit_json(asdict(saved) | {"widths": width_fields(saved.widths)})
        else:
            emit("\n".join(_saved_lines(saved)) + "\n")
        return
    formats = resolve_formats(kv, kv_k, kv_v, DEFAULT_FORMATS)
    specs = [chosen.spec for chosen in formats]
    facts, full_bytes = model_facts(model, specs)
    if as_json:
        emit_json(facts)
    else:
        lines = _lines(facts, full_bytes) + _about_codebooks(facts["kv"])
        if any(spec.compression is not None for spec in specs):
            lines += _about_budgets(facts["max_context"])
        emit("\n".join(lines) + "\n")


def model_facts(model: str, specs: Sequence[KVSpec]) -> tuple[dict[str, Any], list[int]]:
    """What `kvrt info --json` prints, and the bytes of each cache at the full context.

    Bytes are of one sequence; `fixed_bytes` do not grow with it. Where prompts are compressed the
    sequence is one prompt, and bits are those of one that fills the context.
    """
    from ..kvstore import bits_per_element, bytes_per_token, estimate, fixed_bytes
    from ..source import find_shape

    shape = find_shape(model)
    geometry = shape.geometry
    for spec in specs:
        spec.check(geometry)
    facts = {
        "model_type": shape.model_type,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "parameters": shape.parameters,
        "weight_bytes": shape.weight_bytes,
        "max_context": shape.max_context,
        "kv": [
            {
                "spec": str(spec),
                "bits_per_element": bits_per_element(geometry, spec, shape.max_context),
                "bytes_per_token": bytes_per_token(geometry, spec),
                "fixed_bytes": fixed_bytes(geometry, spec),
                **_smaller(geometry, spec),
            }
            for spec in specs
        ],
    }
    return facts, [estimate(geometry, spec, shape.max_context) for spec in specs]


def _lines(facts: dict[str, Any], full_bytes: list[int]) -> list[str]:
    context = facts["max_context"]
    width = max(16, *(len(row["spec"]) + 1 for row in facts["kv"]))
    lines = [
        f"model type   {facts['model_type']}",
        f"layers       {facts['num_layers']}",
        f"heads        {facts['num_heads']} query, {facts['num_kv_heads']} key-value, "
        f"head_dim {facts['head_dim']}",
        f"parameters   {facts['parameters']:,}",
        f"weights      {format_bytes(facts['weight_bytes'])}",
        f"max context  {context:,} tokens",
        "",
        f"{'cache':<{width}}{'bits/element':>14}{'bytes/token':>14}{'fixed':>12}"
        f"{f'at {context:,}':>16}",
    ]
    for row, full in zip(facts["kv"], full_bytes):
        lines.append(
            f"{row['spec']:<{width}}{row['bits_per_element']:>14.2f}{row['bytes_per_token']:>14,.0f}"
            f"{format_bytes(row['fixed_bytes']):>12}{format_bytes(full):>16}"
        )
    return lines


def _smaller(geometry: Geometry, spec: KVSpec) -> dict[str, Any]:
    """From how many tokens on a format with codebooks takes less than others; None: never."""
    from ..kvstore import KVSpec, smaller_from

    if not spec.has_codebooks:
        return {}
    others = {name: smaller_from(geometry, spec, KVSpec.parse(name)) for name in COMPARED}
    return {"smaller_from": others}


def _about_codebooks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where formats begin to pay whose codebooks are part of what is fixed."""
    lines = []
    for row in rows:
        if "smaller_from" not in row:
            continue
        where = [
            f"never smaller than {name}"
            if tokens is None
            else f"smaller than {name} from {tokens:,} tokens on"
            for name, tokens in row["smaller_from"].items()
        ]
        lines.append(f"{row['spec']}, codebooks counted: {', '.join(where)}")
    return ["", *lines] if lines else []


def _about_budgets(context: int) -> list[str]:
    """What the numbers mean of formats that compress prompts."""
    return [
        "",
        f"Formats with a budget compress a prompt at its end: bits are those of {context:,} tokens "
        "in one,",
        "forgotten tokens counted too; a budget in tokens is fixed, a share grows with the prompt.",
        "What is generated after it stays in 16 bits, but for what recompress=N packs.",
    ]


def _saved_lines(saved: SavedConversation) -> list[str]:
    lines = [
        f"cache        {saved.kv}",
        f"model        {_printable(saved.model) or 'unknown'}",
        f"tokens       {saved.tokens:,}",
        f"geometry     {saved.num_layers} layers, {saved.num_kv_heads} key-value heads, "
        f"head_dim {saved.head_dim}",
        f"file         {format_bytes(saved.file_bytes)}",
    ]
    if saved.messages is not None:
        lines.insert(3, f"messages     {saved.messages:,}")
    if not saved.widths:
        lines.append("compressed   no prompt")
    widths = width_lines(saved.widths)
    return [*lines, *([""] if widths else []), *widths]


def _printable(text: str) -> str:
    """A text from a file, without what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
