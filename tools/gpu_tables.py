"""The README's section on the GPU: what was measured, beside other runtimes and beside the goals.

kernels.jsonl has the rows of tools/bench_kernels.py, gpu.jsonl those of `kvrt bench -o jsonl`, of
the same device; of rows that measure the same thing the last one counts. quality.jsonl and
quality_gpu.jsonl have perplexities by format (tools/quality.py). goals.json has what was
to be reached, what others reached, and in `notes` what limits a number that misses its goal.
Without rows there is no section.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MODEL = "synthetic:llama-3.1-8b"
SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128}
ORDER = ("kvrt2", "kvrt4", "f8", "f16")
"""Formats from the smallest on: the same order is asked of slopes and peaks."""


def section(results: Path) -> str:
    """The text for README.md from the files in a folder; empty where nothing was measured."""
    kernels = _rows(results / "kernels.jsonl")
    runs = _rows(results / "gpu.jsonl")
    if not kernels and not runs:
        return ""
    goals = json.loads((results / "goals.json").read_text())
    measured = Measured(kernels, runs, _rows(results / "quality.jsonl"),
                        _rows(results / "quality_gpu.jsonl"))  # fmt: skip
    parts = [measured.heading(), measured.attention(goals), measured.decoding(goals),
             measured.peaks(), goal_table(measured, goals)]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


class Measured:
    """The last row of each thing that was measured, on the device that was measured last."""

    def __init__(
        self,
        kernels: Sequence[Row],
        runs: Sequence[Row],
        on_cpu: Sequence[Row] = (),
        on_gpu: Sequence[Row] = (),
    ) -> None:
        self.facts = max([*kernels, *runs], key=lambda row: row["date"])
        kernels, runs = (
            [row for row in rows if row["device"] == self.facts["device"]]
            for rows in (kernels, runs)
        )
        self.attends = {
            (row["kv"], row["context"]): row
            for row in kernels
            if row["kernel"] == "attention" and SHAPE.items() <= row.items()
        }
        self.projections = {row["name"]: row for row in kernels if row["kernel"] == "projection"}
        own = [row for row in runs if row["model"] == MODEL]
        self.decodes = {
            (row["kv"], row["depth"]): row
            for row in own
            if "test" in row and row["n_gen"] and not row["n_prompt"]
        }
        self.prefills = {
            (row["kv"], row["n_prompt"]): row
            for row in own
            if "test" in row and row["n_prompt"] and not row["n_gen"] and not row["depth"]
        }
        self.scans = {(row["kv"], row["context"]): row for row in own if "context" in row}
        self.all_scans = [row for row in runs if "context" in row]
        cpu, gpu = ({row["kv"]: row for row in rows} for rows in (on_cpu, on_gpu))
        self.perplexities = {
            name: gpu[name]["ppl"] / cpu[name]["ppl"] - 1
            for name in gpu
            if name in cpu and _same_text(gpu[name], cpu[name])
        }

    def heading(self) -> str:
        facts = self.facts
        shown = (self.attends, self.projections, self.decodes, self.prefills, self.scans)
        commits = sorted({row["commit"] for rows in shown for row in rows.values()})
        several = "commits" if len(commits) > 1 else "commit"
        return (
            f"## On a GPU\n\n{facts['device']}, driver {facts['driver']}, memory read at "
            f"{facts['device_read_GBps']:,.0f} GB/s ({several} {', '.join(commits)}). Weights "
            "and caches are random numbers: `python tools/bench_kernels.py` and `kvrt bench` "
            "repeat it, `tools/results/` has all rows."
        )

    def attention(self, goals: Row) -> str:
        """Microseconds of one layer's attention by format and context."""
        if not self.attends:
            return ""
        contexts = sorted({context for _, context in self.attends})
        lines = []
        for name in dict.fromkeys(name for name, _ in self.attends):
            own = {context: self.attends.get((name, context)) for context in contexts}
            some = next(row for row in own.values() if row)
            lines.append(
                [f"`{name}`" if some["side"] == "kvrt" else f"{name} {some['versions']['torch']}",
                 f"{some['bits_per_element']:.4g}"]
                + [f"{row['us']:.1f} ({row['share']:.0%})" if row else "" for row in own.values()]
            )  # fmt: skip
        lines += _peer_lines(goals["peers"]["attention_us"], contexts, [""])
        text = (
            "Attention of one layer, one query of {heads} heads over {kv_heads} KV heads of "
            "{head_dim} channels, in microseconds (share of the bandwidth): nothing in the "
            "second-level cache, graph replays, medians. "
        ).format_map(SHAPE)
        heads = ["format", "bits", *(f"{context:,}" for context in contexts)]
        return f"{text}Rows with *: {goals['peers']['source']}.\n\n{table(heads, lines)}"

    def decoding(self, goals: Row) -> str:
        """Tokens a second by format and depth, and the peak at the largest depth."""
        if not self.decodes:
            return ""
        depths = sorted({depth for _, depth in self.decodes})
        lines = []
        for name in dict.fromkeys(name for name, _ in self.decodes):
            own = [self.decodes.get((name, depth)) for depth in depths]
            cells = [
                f"{row['mean_tokens_per_s']:.1f} ({row['read_share']:.0%})" if row else ""
                for row in own
            ]
            last = own[-1]
            lines.append([f"`{name}`", *cells, _gb(last["peak_bytes"]) if last else ""])
        lines += _peer_lines(goals["peers"]["tokens_per_s"], depths, [], [""])
        heads = ["cache", *(f"behind {depth:,}" for depth in depths), f"peak at {depths[-1]:,}"]
        return (
            f"Decoding with the shape of Llama-3.1-8B, 16-bit weights "
            f"({_gb(next(iter(self.decodes.values()))['weight_bytes'])}), tokens/s (share of the "
            f"bandwidth):\n\n{table(heads, lines)}"
        )

    def peaks(self) -> str:
        """Device memory at each context of the scans."""
        if not self.scans:
            return ""
        contexts = sorted({context for _, context in self.scans})
        shown = contexts[:: max(1, -(-len(contexts) // 5))]
        shown = [*shown, *(contexts[-1:] if contexts[-1] not in shown else [])]
        lines = []
        for name in dict.fromkeys(name for name, _ in self.scans):
            rows = [self.scans.get((name, context)) for context in shown]
            lines.append(
                [f"`{name}`"]
                + [
                    f"{row['decode_us'] / 1e3:.2f} ms, {_gb(row['peak_bytes'])}" if row else ""
                    for row in rows
                ]
            )
        heads = ["cache", *(f"{context:,}" for context in shown)]
        return (
            f"Time of a decoded token and peak of device memory against context:\n\n"
            f"{table(heads, lines)}"
        )

    def slope(self, name: str) -> float | None:
        """Microseconds that attention takes more for each 1,000 tokens, first to last context."""
        own = {context: row["us"] for (kv, context), row in self.attends.items() if kv == name}
        if len(own) < 2:
            return None
        first, last = min(own), max(own)
        return 1000 * (own[last] - own[first]) / (last - first)


def _same_text(one: Row, other: Row) -> bool:
    return all(one[key] == other[key] for key in ("model", "text_sha256", "context", "tokens"))


def _peer_lines(
    peers: Row, places: Sequence[int], before: Sequence[str], after: Sequence[str] = ()
) -> list[list[str]]:
    return [
        [f"{name} *", *before, *(_plain(own.get(str(place))) for place in places), *after]
        for name, own in peers.items()
    ]


def _plain(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


# Goals


Line = tuple[str, str, str, str, bool | None]
"""What, the goal, what was measured, share of the bandwidth, whether it was reached."""


def goal_table(measured: Measured, goals: Row) -> str:
    """Every goal with what was measured; a number that misses it says so."""
    lines = []
    for what, goal, found, share, reached in goal_lines(measured, goals):
        verdict = {None: "not measured", True: "reached", False: "**missed**"}[reached]
        lines.append([what, goal, found, share, verdict, goals["notes"].get(what, "")])
    heads = ["what", "goal", "measured", "of bandwidth", "result", "what limits it"]
    return f"Goals, on {goals['device']}:\n\n{table(heads, lines)}"


def goal_lines(measured: Measured, goals: Row) -> Iterator[Line]:
    for name, wanted in goals["attention_us"].items():
        for context, goal in wanted.items():
            row = measured.attends.get((name, int(context)))
            what = f"attention, {name} at {int(context):,}"
            yield _compared(what, row, "us", goal, ".1f", "us", "share", at_most=True)
    yield _slopes(measured)
    yield _beaten(measured)
    for ratio in goals["ratios"]:
        yield _ratio(measured, ratio)
    for name, wanted in goals["tokens_per_s"].items():
        for depth, goal in wanted.items():
            row = measured.decodes.get((name, int(depth)))
            what = f"decoding, {name} behind {int(depth):,}"
            yield _compared(
                what, row, "mean_tokens_per_s", goal, ".1f", "tokens/s", "read_share", at_most=False
            )
    for tokens, goal in goals["prefill_tokens_per_s"].items():
        yield from _prefills(measured, int(tokens), goal, "tokens/s")
    own = set(goals["encoding_percent"])  # they have a goal of their own
    for tokens, goal in goals["prefill_seconds"].items():
        for line in _prefills(measured, int(tokens), goal, "s"):
            if line[0].rpartition(", ")[2] not in own:
                yield line
    for name, wanted in goals["encoding_percent"].items():
        for tokens, goal in wanted.items():
            yield _encoding(measured, name, int(tokens), goal)
    yield _peak_order(measured)
    yield _beside(measured)
    for million in goals["million"]:
        yield _million(measured, million)
    yield _perplexities(measured, goals["perplexity_percent"])


def _compared(
    what: str,
    row: Row | None,
    key: str,
    goal: float,
    form: str,
    unit: str,
    share: str,
    *,
    at_most: bool,
) -> Line:
    wanted = f"{goal:,g} {unit}"
    if row is None:
        return what, wanted, "", "", None
    value = row[key]
    reached = value <= goal if at_most else value >= goal
    return what, wanted, f"{value:{form}} {unit}", f"{row[share]:.0%}", reached


def _slopes(measured: Measured) -> Line:
    found = [(name, measured.slope(name)) for name in ORDER]
    what, goal = "us for 1,000 tokens more", " < ".join(ORDER)
    slopes = [slope for _, slope in found if slope is not None]
    if len(slopes) < len(ORDER):
        return what, goal, "", "", None
    words = ", ".join(f"{slope:.3f}" for slope in slopes)
    return what, goal, words, "", slopes == sorted(slopes) and len(set(slopes)) == len(slopes)


def _beaten(measured: Measured) -> Line:
    """Whether every packed format takes less time than f16 at every context."""
    base = {context: row for (name, context), row in measured.attends.items() if name == "f16"}
    others = [
        (name, context, row["us"] / base[context]["us"])
        for (name, context), row in measured.attends.items()
        if row["side"] == "kvrt" and name != "f16" and context in base
    ]
    what, goal = "packed formats beside f16", "faster from 8,192 on"
    if not others:
        return what, goal, "", "", None
    slower = [f"{name} at {context:,}: {ratio:.2f}" for name, context, ratio in others if ratio > 1]
    return what, goal, "; ".join(slower) or "all are", "", not slower


def _ratio(measured: Measured, ratio: Row) -> Line:
    contexts = sorted({context for _, context in measured.attends})
    pairs = [
        (measured.attends.get((ratio["of"], context)), measured.attends.get((ratio["to"], context)))
        for context in contexts
    ]
    found = [mine["us"] / other["us"] for mine, other in pairs if mine and other]
    goal = f"{ratio['most']:g} times at most"
    if not found:
        return ratio["what"], goal, "", "", None
    words = " to ".join(dict.fromkeys(f"{x:.3f}" for x in (min(found), max(found)))) + " times"
    return ratio["what"], goal, words, "", max(found) <= ratio["most"]


def _prefills(measured: Measured, tokens: int, goal: float, unit: str) -> Iterator[Line]:
    rate = unit == "tokens/s"
    found = {name: row for (name, count), row in measured.prefills.items() if count == tokens}
    what = f"prefill of {tokens:,}"
    for name, row in found.items():
        value = row["mean_tokens_per_s"] if rate else tokens / row["mean_tokens_per_s"]
        reached = value >= goal if rate else value <= goal
        words = f"{value:,.0f} {unit}" if rate else f"{value:.2f} {unit}"
        yield f"{what}, {name}", f"{goal:,g} {unit}", words, "", reached
    if not found:
        yield what, f"{goal:,g} {unit}", "", "", None


def _encoding(measured: Measured, name: str, tokens: int, most: float) -> Line:
    """How much longer a prompt takes with a format than with f16, which copies keys and values."""
    what, goal = f"encoding {tokens:,} tokens, {name}", f"{most:g} % of prefill at most"
    mine, plain = (measured.prefills.get((kv, tokens)) for kv in (name, "f16"))
    if mine is None or plain is None:
        return what, goal, "", "", None
    percent = 100 * (plain["mean_tokens_per_s"] / mine["mean_tokens_per_s"] - 1)
    return what, goal, f"{percent:.1f} %", "", percent <= most


def _peak_order(measured: Measured) -> Line:
    """Whether the peaks of kvrt2, f8 and f16 are in this order wherever all of them fit."""
    names = [name for name in ORDER if name != "kvrt4"]
    what, goal = "peaks at every scanned context", " < ".join(names)
    wrong, seen = [], 0
    for context in sorted({context for _, context in measured.scans}):
        rows = [measured.scans.get((name, context)) for name in names]
        peaks = [row["peak_bytes"] for row in rows if row]
        if len(peaks) > 1:
            seen += 1
            if not all(a < b for a, b in pairwise(peaks)):
                wrong.append(f"not at {context:,}")
    if not seen:
        return what, goal, "", "", None
    return what, goal, "; ".join(wrong) or f"at all {seen}", "", not wrong


def _beside(measured: Measured) -> Line:
    """What is held beside weights and cache must not grow faster than one layer's K and V."""
    what, goal = "peak less weights and cache", "grows by one layer's K and V at most"
    by_format: dict[str, list[tuple[int, int]]] = {}
    for (name, context), row in measured.scans.items():
        rest = row["peak_bytes"] - row["weight_bytes"] - row["estimated_bytes"]
        by_format.setdefault(name, []).append((context, rest))
    growths = []
    for points in by_format.values():
        (first, least), (last, most) = min(points), max(points)
        if last > first:
            row_bytes = 2 * SHAPE["kv_heads"] * SHAPE["head_dim"] * 4
            growths.append((most - least <= row_bytes * (last - first), most))
    if not growths:
        return what, goal, "", "", None
    words = f"{max(most for _, most in growths) / 1e6:,.0f} MB at most"
    return what, goal, words, "", all(held for held, _ in growths)


def _million(measured: Measured, million: Row) -> Line:
    what = f"{million['model'].removeprefix('synthetic:')}, {million['kv']}, {million['tokens']:,}"
    goal = f"inside {million['room']}"
    rows = [
        row
        for row in measured.all_scans
        if (row["model"], row["kv"]) == (million["model"], million["kv"])
        and row["context"] >= million["tokens"]
    ]
    if not rows:
        return what, goal, "", "", None
    row = rows[-1]
    words = f"{_gb(row['peak_bytes'])}, {row['decode_us'] / 1e3:.1f} ms a token"
    return what, goal, words, f"{row['read_share']:.0%}", row["peak_bytes"] <= million["bytes"]


def _perplexities(measured: Measured, most: float) -> Line:
    what, goal = "perplexity beside the CPU's, every format", f"within {most:g} %"
    found = {name: 100 * change for name, change in measured.perplexities.items()}
    if not found:
        return what, goal, "", "", None
    name = max(found, key=lambda name: abs(found[name]))
    words = f"{found[name]:+.2f} % at most, of {len(found)} ({name})"
    return what, goal, words, "", abs(found[name]) <= most
