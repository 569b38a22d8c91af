"""`kvrt info`: a model's shape, and what each cache format costs, from headers alone."""

from __future__ import annotations

from typing import Any

import click

from ..errors import UsageError
from .console import emit, emit_json, format_bytes
from .kv_options import KV_HELP, resolve_kv
from .options import common_options


@click.command("info")
@click.argument("model")
@click.option(
    "--kv",
    "specs",
    multiple=True,
    default=("f16",),
    show_default=True,
    metavar="SPEC",
    help=f"{KV_HELP} May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def command(
    model: str,
    specs: tuple[str, ...],
    as_json: bool,
    device: str,
    threads: int | None,
    verbose: bool,
) -> None:
    """Show the geometry, the parameters and the cost of the KV cache of MODEL.

    MODEL is a folder, the name of a pulled model, or synthetic:NAME, a published shape. Weights are
    not read, only their headers.
    """
    from ..backends import check_device

    check_device(device)
    facts, full_bytes = model_facts(model, specs)
    if as_json:
        emit_json(facts)
    else:
        emit("\n".join(_lines(facts, full_bytes)) + "\n")


def model_facts(model: str, specs: tuple[str, ...]) -> tuple[dict[str, Any], list[int]]:
    """What `kvrt info --json` prints, and the bytes of each cache at the full context.

    Bytes are of one sequence; `fixed_bytes` do not grow with it.
    """
    from ..kvstore import KVSpec, bits_per_element, bytes_per_token, estimate, fixed_bytes
    from ..source import find_shape

    if not specs:
        raise UsageError("no cache format to price")
    parsed = [KVSpec.parse(resolve_kv(text, None, None, "f16")) for text in specs]
    shape = find_shape(model)
    geometry = shape.geometry
    for spec in parsed:
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
            for spec in parsed
        ],
    }
    return facts, [estimate(geometry, spec, shape.max_context) for spec in parsed]


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
