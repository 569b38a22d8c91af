"""Write the README's tables from what they describe: `python tools/readme_tables.py [--check]`.

formats: from `PageLayout`, for SmolLM2-135M's geometry. quality: the newest row of each format in
tools/results/quality.jsonl (tools/quality.py). attention: attention.json, which is what `kvrt eval
attn --json` printed, less the layers. cache-speed: the newest run in cache.jsonl
(tools/bench_cache.py). scan: scan.jsonl, which is what `kvrt bench --scan -o jsonl` printed. speed:
medians of the newest run of each side in cpu.jsonl (tools/bench_cpu.py). gpu: see gpu_tables.py,
prompts: see prompt_tables.py; trainers and books: see codebook_tables.py.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import codebook_tables  # noqa: E402
import gpu_tables  # noqa: E402
import prompt_tables  # noqa: E402

from kvrt.kvstore import PRESETS, Geometry, PageLayout, estimate  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "tools" / "results" / "cpu.jsonl"
QUALITY = RESULTS.with_name("quality.jsonl")
CACHE = RESULTS.with_name("cache.jsonl")
SCAN = RESULTS.with_name("scan.jsonl")
ATTENTION = RESULTS.with_name("attention.json")
SMOLLM2 = Geometry(num_layers=30, num_kv_heads=3, head_dim=64)


def formats() -> str:
    lines = [
        "| format | K bits | V bits | bits per element | sinks, window | at 8,192 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, spec in PRESETS.items():
        layout = PageLayout.of(SMOLLM2, spec)
        sides = [8 * size / (64 * SMOLLM2.head_dim) for size in side_bytes(layout)]
        whole = estimate(SMOLLM2, spec, 8192) / 1e6
        lines.append(
            f"| `{name}` | {sides[0]:.4g} | {sides[1]:.4g} | {layout.bits_per_element:.4g} "
            f"| {spec.sink}, {spec.window} | {whole:.1f} MB |"
        )
    return "\n".join(lines)


def side_bytes(layout: PageLayout) -> list[float]:
    """Bytes of K and of V in one head's part of a page."""
    heads = layout.num_kv_heads
    own = [region.nbytes for region in layout.regions]
    shared = [region.nbytes / heads for region in layout.shared_regions]
    return [own[0] + own[1] + shared[0], own[2] + own[3] + shared[1]]


def quality() -> str:
    rows = [json.loads(line) for line in QUALITY.read_text().splitlines()]
    last = {row["kv"]: row for row in rows}
    first = next(iter(last.values()))
    lines = [
        f"SmolLM2-135M-Instruct on {first['text']}, {first['windows']} windows of "
        f"{first['context']:,} tokens; exact: perplexity {first['exact_ppl']:.3f}. Rise of the "
        "negative log-likelihood and divergence in nats for a token.",
        "",
        "| format | bits | perplexity | rise | KL divergence | same top token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in sorted(last.items(), key=lambda item: item[1]["kld"]):
        lines.append(
            f"| `{name}` | {row['bits_per_element']:.4g} | {row['ppl']:.3f} "
            f"| {row['dnll']:+.4f} ± {row['dnll_se']:.4f} | {row['kld']:.4f} "
            f"| {row['top1']:.1f} % |"
        )
    return "\n".join(lines)


def attention() -> str:
    found = json.loads(ATTENTION.read_text())
    lines = ["| format | keys | scores | values | output |", "| --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        errors = [row[f"{part}_error"] for part in ("key", "score", "value", "output")]
        cells = " | ".join(f"{100 * error:.1f}" for error in errors)
        lines.append(f"| `{row['kv']}` | {cells} |")
    lines += ["", f"{found['rows'][0]['tokens']:,} tokens of {found['text']}."]
    return "\n".join(lines)


def cache_speed() -> str:
    rows = [json.loads(line) for line in CACHE.read_text().splitlines()]
    last = {row["kv"]: row for row in rows if row["commit"] == rows[-1]["commit"]}
    first = next(iter(last.values()))
    lines = [
        f"A decode step of SmolLM2-135M with {first['context']:,} tokens cached, "
        f"{first['device']}, {first['threads']} threads, medians of "
        f"{len(first['samples_ms'])} rounds in turn (commit {first['commit']}); "
        "sealing is its share of the prefill of 1,024 tokens:",
        "",
        "| format | bits | cache, MB | ms | beside f16 | sealing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in last.items():
        lines.append(
            f"| `{name}` | {row['bits_per_element']:.4g} | {row['cache_bytes'] / 1e6:.1f} "
            f"| {row['step_ms']:.1f} | {row['ratio_to_f16']:.2f} | {row['seal_share']:.1%} |"
        )
    return "\n".join(lines)


def scan() -> str:
    rows = [json.loads(line) for line in SCAN.read_text().splitlines()]
    first, last = rows[0], max(row["context"] for row in rows)
    contexts = sorted({row["context"] for row in rows})
    shown = [contexts[0], contexts[len(contexts) // 2], last]
    lines = [
        f"{first['model']}, {first['device']}, {first['threads']} threads, memory read at "
        f"{first['device_read_GBps']:.1f} GB/s, caches filled with random keys and values, means "
        f"of {first['repetitions']} repetitions (commit {first['commit']}):",
        "",
        f"| format | bits | cache at {last:,} | peak at {last:,} | "
        + " | ".join(f"ms at {context:,}" for context in shown)
        + f" | us per 1k tokens | GB/s at {last:,} | of device | faster than f16 |",
        "| --- " * (8 + len(shown)) + "|",
    ]
    for name in dict.fromkeys(row["kv"] for row in rows):
        own = {row["context"]: row for row in rows if row["kv"] == name}
        end = own[last]
        times = " | ".join(f"{own[context]['decode_us'] / 1e3:.1f}" for context in shown)
        even = end["break_even_tokens"]
        when = "never" if even is None else f"from {even:,}" if even else "everywhere"
        when += "" if end["slopes_differ"] else ", within noise"
        lines.append(
            f"| `{name}` | {end['bits_per_element']:.4g} | {end['cache_bytes'] / 1e6:.1f} MB "
            f"| {end['peak_bytes'] / 1e6:.0f} MB | {times} | {end['slope_us_per_1k']:,.0f} "
            f"± {end['slope_error_us_per_1k']:,.0f} "
            f"| {end['read_GBps']:.1f} | {end['read_share']:.0%} "
            f"| {'' if name == 'f16' else when} |"
        )
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
    tables = {
        "formats": formats(), "quality": quality(), "attention": attention(),
        "cache-speed": cache_speed(), "scan": scan(), "speed": speed(),
        "trainers": codebook_tables.trainers(RESULTS.parent),
        "books": codebook_tables.quality(RESULTS.parent), "gpu": gpu_tables.section(RESULTS.parent),
        "prompts": prompt_tables.section(RESULTS.parent),
    }  # fmt: skip
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- {name} -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
        if not mark.search(new):
            sys.exit(f"README.md has no <!-- {name} --> ... <!-- end --> to fill")
        filling = f"{table}\n" if table else ""
        new = mark.sub(lambda match, filling=filling: match[1] + filling + match[2], new)
    if "--check" in sys.argv[1:]:
        if new != text:
            sys.exit("README.md is out of date: run python tools/readme_tables.py")
    else:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
