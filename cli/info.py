"""`kvrt info`: a model's shape, and what each cache format costs, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .console import emit, emit_json, format_bytes
from .device_options import common_options
from .kv_options import kv_list_options, resolve_formats

if TYPE_CHECKING:
    from ..kvstore import KVSpec

DEFAULT_FORMATS = ("f16",)


@click.command("info")
@click.argument("model")
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
    not read, only their headers.
    """
    formats = resolve_formats(kv, kv_k, kv_v, DEFAULT_FORMATS)
    facts, full_bytes = model_facts(model, [chosen.spec for chosen in formats])
    if as_json:
        emit_json(facts)
    else:
        emit("\n".join(_lines(facts, full_bytes)) + "\n")


def model_facts(model: str, specs: Sequence[KVSpec]) -> tuple[dict[str, Any], list[int]]:
    """What `kvrt info --json` prints, and the bytes of each cache at the full context.

    Bytes are of one sequence; `fixed_bytes` do not grow with it.
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
                "bits_per_element": bits_per_element(geometry, spec),
                "bytes_per_token": bytes_per_token(geometry, spec),
                "fixed_bytes": fixed_bytes(geometry, spec),
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
