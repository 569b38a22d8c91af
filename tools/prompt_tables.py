"""README.md's table of what compressing prompts costs, from tools/results/prompts.jsonl."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

POLICIES = ("rdkv", "rdkv:paper", "adakv", "snapkv", "h2o")
BUDGETS = (64, 128, 256, 512, 1024)


def section(results: Path) -> str:
    """The table, or nothing without measurements."""
    path = results / "prompts.jsonl"
    if not path.exists():
        return ""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    measures = [
        ("answer KLD", [row for row in rows if row["task"] == "kld"], _divergence),
        *(
            (f"{name}, {question}", _asked(rows, task, question), _found)
            for task, name in (("needle", "needle"), ("kvretrieval", "pairs"))
            for question in ("inside", "after")
        ),
    ]
    lines = [_title(rows), "", "| | budget | " + " | ".join(f"`{p}`" for p in POLICIES) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(POLICIES))
    for name, own, show in measures:
        exact = show(row for row in own if row["kv"] == "f16")
        label = f"{name} (f16: {exact})" if exact else name
        for budget in BUDGETS:
            cells = [show(row for row in own if row["kv"] == f"{p}:{budget}") for p in POLICIES]
            if any(cells):
                lines.append(f"| {label} | {budget:,} | {' | '.join(cells)} |")
                label = ""
    return "\n".join(lines)


def _title(rows: list[Row]) -> str:
    lengths = sorted({row["length"] for row in rows if "length" in row})
    prompt = next((row["prompt_tokens"] for row in rows if row["task"] == "kld"), None)
    first = rows[0]
    return (
        f"SmolLM2-135M-Instruct on {first['device']} (commit {first['commit']}). Budgets in tokens "
        f"of 16 bits for each head; KLD of what follows a prompt of {prompt:,} tokens, in nats; "
        f"needles and pairs found, in %, in prompts of {', '.join(f'{n:,}' for n in lengths)} "
        "tokens, with the question inside the prompt or after it, ± one standard error:"
    )


def _asked(rows: list[Row], task: str, question: str) -> list[Row]:
    return [row for row in rows if row["task"] == task and row["question"] == question]


def _divergence(rows: Iterable[Row]) -> str:
    return " ".join(f"{row['kld']:#.3g} ± {row['kld_se']:#.2g}" for row in list(rows)[-1:])


def _found(rows: Iterable[Row]) -> str:
    """The share of right answers over all lengths and depths."""
    rows = list(rows)
    count = sum(row["samples"] for row in rows)
    if count < 2:
        return ""
    share = sum(row["exact_match"] * row["samples"] for row in rows) / count / 100
    return f"{100 * share:.0f} ± {100 * math.sqrt(share * (1 - share) / (count - 1)):.0f}"
