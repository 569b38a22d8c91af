"""README.md's tables of codebooks: how trainers compare, and what vector-quantised caches cost.

codebooks.jsonl is what tools/bench_codebooks.py appends; of rows that measure the same thing the
last one counts. codebook_quality.jsonl has the rows of `kvrt eval kld`, `needle` and `kvretrieval`
(tools/prompts.py).
"""

import json
from math import sqrt
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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
    """Perplexity, needles and pairs of each format, through the packed cache."""
    by_format: dict[str, dict[str, Row]] = {}
    rows = _rows(results / "codebook_quality.jsonl")
    for row in rows:
        by_format.setdefault(row["kv"], {})[row["task"]] = row
    lines = [
        "| format | bits | rise | KL divergence | needle | pairs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in by_format.items():
        kld = own.get("kld")
        cells = ["16", "", ""]
        if kld is not None:
            rise = f"{kld['dnll']:+.4f} ± {kld['dnll_se']:.4f}"
            cells = [f"{kld['bits_per_element']:.4g}", rise, f"{kld['kld']:.4f}"]
        cells += [f"{own[task]['exact_match']:.0f} %" for task in ("needle", "kvretrieval")]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    first = next(row for row in rows if row["task"] == "needle")
    share, count = first["exact_match"] / 100, first["samples"]
    error = 100 * sqrt(share * (1 - share) / count)
    length = next(row["length"] for row in rows if row["task"] == "kvretrieval")
    return "\n".join(
        [
            *lines,
            "",
            f"{next(row['text'] for row in rows if row['task'] == 'kld')}; needles in "
            f"{first['length']:,} tokens and key-value pairs in {length:,}, {count} prompts each, "
            f"one standard error {error:.0f} points ({first['device']}, commit "
            f"{first['commit']}).",
        ]
    )
