"""What compressing prompts, or codebooks, cost: `python tools/prompts.py FILE... --device WORDS`.

Files are outputs of `kvrt eval kld --prompt N --json`, `kvrt eval needle --json` and `kvrt eval
kvretrieval --json`; what they found is appended to tools/results/prompts.jsonl with where it was
measured, needles and pairs as one row a format, question and length. README.md's table is made of
them (tools/prompt_tables.py). What codebooks cost is kept with --results codebook_quality.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvrt.bench.environment import commit  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "prompts.jsonl"


KEPT = ("kv", "task", "question", "length")


def by_length(rows: list[dict]) -> list[dict]:
    """Answers of all depths in one row; `by_depth` holds [depth, per cent] of each."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in KEPT), []).append(row)
    return [
        {
            **dict(zip(KEPT, key)),
            "samples": sum(row["samples"] for row in own),
            "exact_match": fmean(row["exact_match"] for row in own),
            "by_depth": [[row["depth"], row["exact_match"]] for row in own],
            "cache_bytes": round(fmean(row["cache_bytes"] for row in own)),
        }
        for key, own in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--device", required=True, help="its name and driver")
    parser.add_argument("--text", default="", help="what texts the prompts are of")
    parser.add_argument("--commit", help="what ran, if not this")
    parser.add_argument("--fitted", default="", help="options that codebooks were fitted with")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--results", default=RESULTS.name, help="a file of tools/results")
    arguments = parser.parse_args()
    about = {
        "model": "smollm2", "device": arguments.device, "text": arguments.text,
        "commit": arguments.commit or commit(ROOT / "kvrt"),
    }  # fmt: skip
    if arguments.fitted:
        about["fitted"] = arguments.fitted
    if arguments.seed:
        about["seed"] = arguments.seed
    with RESULTS.with_name(arguments.results).open("a") as out:
        for file in arguments.files:
            rows = json.loads(file.read_text())["rows"]
            if "task" in rows[0]:
                rows = by_length(rows)
            for row in rows:
                out.write(json.dumps({"task": "kld", **row, **about}) + "\n")


if __name__ == "__main__":
    main()
