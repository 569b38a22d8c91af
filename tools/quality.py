"""What cache formats cost in quality, kept: `python tools/quality.py --text FILE --title WORDS`.

Runs what `kvrt eval kld` runs on the CPU, and appends one JSON line for each format to
tools/results/quality.jsonl. With --rows FILE it takes the rows from the output of `kvrt eval kld
--json` instead; with --device WORDS too, where that ran: those of a GPU go to quality_gpu.jsonl.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvrt.bench.environment import commit  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "quality.jsonl"
INT2 = "k=int2:channel:g32{},v=int2:token:g32{}"
HAD2 = "k=int2:channel:g{0}{1}:had,v=int2:token:g{0}:had,sink=4,window=128"
FORMATS = (
    "f16", "f8", "f8e5m2", "q8_0", "q4_0", "k=q4_0:had,v=q4_0:had",
    "kivi4", "kivi2", INT2.format(":pre", ",window=128"), INT2.format(":page", ",window=128"),
    INT2.format("", ""), INT2.format(":pre", ""), "k=int2:token:g32,v=int2:token:g32",
    "k=int2:channel:g32,v=int2:channel:g32", "k=int3:channel:g32:pre,v=int3:token:g32",
    "k=int3:token:g32,v=int3:token:g32", HAD2.format(32, ""), HAD2.format(32, ":page"),
    HAD2.format(64, ""), "kvrt4", "kvrt3", "kvrt2",
    "k=int3:channel:g64:page,v=int3:token:g64:had,sink=4,window=128",
    "k=int4:channel:g64,v=int4:token:g64,sink=4,window=128",
    "k=int4:channel:g64:page,v=int4:token:g64:had,sink=4,window=128",
    "innerq", "innerq-small", "innerq-hybrid", "k=nuq2:pre,v=nuq2,sink=1",
    "k=nuq2:1%:pre,v=nuq2:1%,sink=1", "kvquant2", "kvquant2:1%", "kvquant3", "kvquant3:1%",
    "kvquant4", "kvquant4:1%",
)  # fmt: skip


def evaluated(text: Path, formats: list[str], options: list[str]) -> dict:
    command = [sys.executable, "-m", "kvrt", "eval", "kld", "--text", str(text), "--json", *options]
    command += ["--device", "cpu"]
    for name in formats:
        command += ["--kv", name]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--title", required=True, help="what the text is, in a few words")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--kv", action="append")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--device", default="cpu", help="with --rows: a GPU's name and driver")
    parser.add_argument("--commit", help="with --rows: what ran, if not this")
    arguments = parser.parse_args()
    if arguments.rows is None and arguments.device != "cpu":
        parser.error("--device names where the rows of --rows come from")
    options = ["--context", str(arguments.context), "--max-tokens", str(arguments.max_tokens)]
    if arguments.rows is None:
        found = evaluated(arguments.text, arguments.kv or list(FORMATS), options)
    else:
        found = json.loads(arguments.rows.read_text())
    digest = hashlib.sha256(arguments.text.read_bytes()).hexdigest()
    results = RESULTS if arguments.device == "cpu" else RESULTS.with_name("quality_gpu.jsonl")
    with results.open("a") as out:
        for row in found["rows"]:
            about = {
                "model": "smollm2", "device": arguments.device,
                "commit": arguments.commit or commit(ROOT / "kvrt"),
                "text": arguments.title, "text_sha256": digest, "context": arguments.context,
                "windows": row["tokens"] // (arguments.context - 1),
                "exact_ppl": found["exact"]["ppl"],
            }  # fmt: skip
            out.write(json.dumps(row | about) + "\n")


if __name__ == "__main__":
    main()
