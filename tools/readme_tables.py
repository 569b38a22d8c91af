"""Write the README's tables from what they describe: `python tools/readme_tables.py [--check]`.

formats: from `PageLayout`, for SmolLM2-135M's geometry. speed: medians of the newest run of each
side in tools/results/cpu.jsonl (written by tools/bench_cpu.py).
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvrt.kvstore import PRESETS, Geometry, bits_per_element, bytes_per_token  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "tools" / "results" / "cpu.jsonl"
SMOLLM2 = Geometry(num_layers=30, num_kv_heads=3, head_dim=64)


def formats() -> str:
    lines = ["| format | bits per element | SmolLM2-135M, bytes per token |", "| --- | --- | --- |"]
    for name, spec in PRESETS.items():
        bits, size = bits_per_element(SMOLLM2, spec), bytes_per_token(SMOLLM2, spec)
        lines.append(f"| `{name}` | {bits:g} | {size:,.0f} |")
    return "\n".join(lines)


def speed() -> str:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    sides = {side: [r for r in rows if r["side"] == side] for side in ("kvrt", "llama.cpp")}
    first = rows[0]
    measured = [
        ("decode at context {depth}, tokens/s", "decode_tokens_per_s", ".1f", 1.0),
        ("prefill of {prompt:,} tokens, tokens/s", "prefill_tokens_per_s", ".0f", 1.0),
        ("peak resident memory, MB", "peak_bytes", ".0f", 1e6),
        ("weights, MB", "weight_bytes", ".0f", 1e6),
        ("command to first token, s", "first_token_s", ".2f", 1.0),
    ]

    def median(side: list[dict[str, Any]], key: str, form: str, unit: float) -> str:
        values = [row[key] for row in side if key in row]
        return format(statistics.median(values) / unit, form) if values else ""

    versions = [sides[side][0]["version"] for side in sides]
    lines = [
        f"SmolLM2-135M, float16 weights and cache, {first['device']}, {first['threads']} threads, "
        f"medians of {len(sides['kvrt'])} rounds in turn (commit {first['commit']}):",
        "",
        f"| | kvrt {versions[0]} | llama.cpp (llama-cpp-python {versions[1]}) |",
        "| --- | --- | --- |",
    ]
    for name, key, form, unit in measured:
        cells = " | ".join(median(side, key, form, unit) for side in sides.values())
        lines.append(f"| {name.format(**first)} | {cells} |")
    read = statistics.median(row["decode_read_GBps"] for row in sides["kvrt"])
    lines += ["", f"Decode reads {read:.1f} GB of weights a second."]
    return "\n".join(lines)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    new = text
    for name, table in (("formats", formats()), ("speed", speed())):
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not mark.search(new):
            sys.exit(f"README.md has no <!-- {name} --> ... <!-- end --> to fill")
        new = mark.sub(lambda match, table=table: match[1] + table + match[2], new)
    if "--check" in sys.argv[1:]:
        if new != text:
            sys.exit("README.md is out of date: run python tools/readme_tables.py")
    else:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
