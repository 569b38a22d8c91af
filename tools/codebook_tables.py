"""README.md's tables of codebooks: how trainers compare, and what vector-quantised caches cost.

codebooks.jsonl is what tools/bench_codebooks.py appends; of rows that measure the same thing the
last one counts. codebook_quality.jsonl has the rows of `kvrt eval kld`, `needle` and `kvretrieval`
(tools/prompts.py).
"""

import json
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

Row = dict[str, Any]

EXACT = ",sink=4,window=128"
"""What all these formats keep exact, the named ones too."""


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trainers(results: Path) -> str:
    """Relative errors after each stage, by data and samples."""
    rows = _rows(results / "codebooks.jsonl")
    errors: dict[tuple[str, int], Row] = {}
    for row in rows:
        if "errors" in row:
            errors.setdefault((row["data"], row["samples"]), {})[row["trainer"]] = row
    lines = [
        "| data, samples | k-means | SimVQ, frozen | SimVQ, then free |",
        "| --- | --- | --- | --- |",
    ]
    for (data, samples), of in errors.items():
        cells = (of[trainer]["errors"] for trainer in ("k-means", "simvq", "free"))
        words = " | ".join(" ".join(f"{error:.3f}" for error in own) for own in cells)
        lines.append(f"| {data}, {samples:,} | {words} |")
    least = min(min(of["free"]["used"]) for of in errors.values())
    timed = {row["timed"]: row for row in rows if "timed" in row}
    words = "; ".join(
        f"{name}, {row['stages']} stages: {row['seconds']} s" for name, row in timed.items()
    )
    device = next(iter(timed.values()))["device"]
    return "\n".join([*lines, "", f"Entries in use: {least:.1%} at least. {device}: {words}."])


def quality(results: Path) -> str:
    """Perplexity, needles and pairs of each format and way to fit, through the packed cache."""
    found: dict[tuple[str, str], dict[tuple[str, str, int], Row]] = {}
    rows = _rows(results / "codebook_quality.jsonl")
    for row in rows:
        own = found.setdefault((row["kv"], row.get("fitted", "")), {})
        own[row["task"], row.get("question", ""), row.get("seed", 0)] = row
    lines = [
        "| format | fitted with | bits | MB | rise | KL divergence | needle | pairs |"
        " other needles | other pairs |",
        f"|{' --- |' * 10}",
    ]
    for (name, fitted), own in found.items():
        kld, needle = own["kld", "", 0], own["needle", "inside", 0]
        cells = [
            f"`{name.removesuffix(EXACT)}`",
            fitted and f"`{fitted}`",
            f"{kld['bits_per_element']:.4g}",
            f"{needle['cache_bytes'] / 1e6:.1f}",
            f"{kld['dnll']:+.4f} ± {kld['dnll_se']:.4f}",
            f"{kld['kld']:.4f}",
        ]
        for seed, task in product((0, 1), ("needle", "kvretrieval")):
            answers = [own.get((task, question, seed)) for question in ("inside", "after")]
            cells.append(" / ".join(f"{row['exact_match']:.0f}" for row in answers if row))
        lines.append(f"| {' | '.join(cells)} |")
    first = {row["task"]: row for row in reversed(rows)}
    needle, pairs = first["needle"], first["kvretrieval"]
    assert {row["samples"] for row in rows if "samples" in row} == {needle["samples"]}
    ran: dict[str, set[str]] = {}
    for row in rows:
        ran.setdefault(row["device"], set()).add(row["commit"])
    samples = needle["samples"]
    where = "; ".join(f"{device}, commit {', '.join(sorted(ran[device]))}" for device in ran)
    words = (
        "4 sinks and a window of 128 tokens are exact, but for f16. MB: the cache of "
        f"{needle['length']:,} tokens, codebooks counted. Rise and divergence: "
        f"{first['kld']['text']}. Needles found in prompts of {needle['length']:,} tokens "
        f"({needle['text']}) and pairs in {pairs['length']:,}, in %, asked inside the prompt / "
        f"after it: {samples} prompts, of some formats {samples} others too; one standard error is "
        f"at most {50 / sqrt(samples):.0f} points ({where})."
    )
    return "\n".join([*lines, "", words])
