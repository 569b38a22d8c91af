"""What compressing prompts costs, kept: `python tools/prompts.py FILE... --device WORDS`.

Files are outputs of `kvrt eval kld --prompt N --json`, `kvrt eval needle --json` and `kvrt eval
kvretrieval --json`; each row is appended to tools/results/prompts.jsonl with where and when it was
measured. README.md's table is made of them (tools/prompt_tables.py).
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvrt.bench.environment import commit  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "prompts.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--device", required=True, help="its name and driver")
    parser.add_argument("--text", default="", help="what texts the prompts are of")
    parser.add_argument("--commit", help="what ran, if not this")
    arguments = parser.parse_args()
    about = {
        "model": "smollm2", "device": arguments.device, "text": arguments.text,
        "commit": arguments.commit or commit(ROOT / "kvrt"),
    }  # fmt: skip
    with RESULTS.open("a") as out:
        for file in arguments.files:
            for row in json.loads(file.read_text())["rows"]:
                task = row.get("task", "kld")
                out.write(json.dumps({"task": task, **row, **about}) + "\n")


if __name__ == "__main__":
    main()
