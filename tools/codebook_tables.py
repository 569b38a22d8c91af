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
    """Perplexity, needles and pairs of each format and way to fit, through the packed cache."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    rows = _rows(results / "codebook_quality.jsonl")
    for row in rows:
        own = found.setdefault((row["kv"], row.get("fitted", "")), {})
        own[row["task"], row.get("question", "")] = row
    lines = [
        "| format | fitted with | bits | rise | KL divergence | needle | pairs | prompts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, fitted), own in found.items():
        kld = own["kld", ""]
        rise = f"{kld['dnll']:+.4f} ± {kld['dnll_se']:.4f}"
        cells = [f"{kld['bits_per_element']:.4g}", rise, f"{kld['kld']:.4f}"]
        for task in ("needle", "kvretrieval"):
            answers = [own[task, question] for question in ("inside", "after")]
            cells.append(" / ".join(f"{row['exact_match']:.0f}" for row in answers))
        cells.append(str(answers[0]["samples"]))
        lines.append(f"| `{name}` | {fitted and f'`{fitted}`'} | {' | '.join(cells)} |")
    first = {row["task"]: row for row in reversed(rows)}
    needle = first["needle"]
    share = needle["exact_match"] / 100
    errors = " and ".join(
        f"{100 * sqrt(share * (1 - share) / count):.0f} points of {count}"
        for count in sorted({row["samples"] for row in rows if row["task"] == "needle"})
    )
    devices = sorted({f"{row['device']}, commit {row['commit']}" for row in rows})
    words = (
        f"{first['kld']['text']}; needles found in prompts of {needle['length']:,} tokens "
        f"({needle['text']}) and pairs in {first['kvretrieval']['length']:,}, in %, asked inside "
        f"the prompt / after it; one standard error is {errors} prompts "
        f"({'; '.join(devices)})."
    )
    return "\n".join([*lines, "", words])
