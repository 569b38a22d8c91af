"""What each cache format costs in time on the CPU: a decode step at a long context, and sealing.

`python tools/bench_cache.py [--context 4096] [--rounds 7] [--kv SPEC]...` appends one JSON line for
each format to tools/results/cache.jsonl. Stores are filled with random keys and values through the
real encoder; formats take turns, so that a busy machine hurts all of them alike, and ratios are
medians of the rounds' paired ratios to f16. `seal_share` is the time inside `extend`, beyond f16's,
over the time of a real prefill of 1,024 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kvrt  # noqa: E402
from kvrt.bench.environment import commit  # noqa: E402
from kvrt.bench.fill import Synthetic  # noqa: E402
from kvrt.kvstore import KVSpec, KVStore  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "cache.jsonl"
FORMATS = (
    "f16", "kivi4", "q8_0", "kvrt4", "kvrt3", "kvrt2", "kivi2", "q4_0", "f8", "innerq",
    "kvquant3:1%", "k=int4:channel:g64:page:had,v=int4:token:g64:had,sink=4,window=128",
)  # fmt: skip
STEPS = 8
PROMPT = 1024


def step_seconds(model: Any, store: KVStore, tokens: int) -> float:
    """Seconds of a decode step, over a few of them."""
    started = time.perf_counter()
    for _ in range(STEPS):
        model.decoder.decode(1000, store)
    seconds = (time.perf_counter() - started) / STEPS
    store.truncate(tokens)
    return seconds


def prefill_seconds(model: Any, spec: KVSpec, ids: list[int]) -> tuple[float, float]:
    """Seconds of a prefill, and of those the ones inside `extend`."""
    store = model.new_store(spec)
    inside = 0.0
    extend = store.extend

    def timed(*arguments: Any) -> None:
        nonlocal inside
        begun = time.perf_counter()
        extend(*arguments)
        inside += time.perf_counter() - begun

    store.extend = timed
    started = time.perf_counter()
    model.decoder.prefill(ids, store)
    return time.perf_counter() - started, inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv", action="append")
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int)
    arguments = parser.parse_args()
    names = ["f16", *(name for name in arguments.kv or FORMATS if name != "f16")]
    model = kvrt.load(arguments.model, "cpu", threads=arguments.threads)
    specs = {name: KVSpec.parse(name) for name in names}
    synthetic = Synthetic(model, seed=0)
    stores = {name: synthetic.filled(spec, arguments.context) for name, spec in specs.items()}
    steps: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(arguments.rounds + 1):
        for name, store in stores.items():
            seconds = step_seconds(model, store, arguments.context)
            if round_number:  # the first warms up
                steps[name].append(seconds)
    ids = np.random.default_rng(1).integers(100, 40_000, PROMPT).tolist()
    prefills: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(3):
        for name, spec in specs.items():
            prefills[name].append(prefill_seconds(model, spec, ids))
    plain = statistics.median(inside for _, inside in prefills["f16"])
    with RESULTS.open("a") as out:
        for name, spec in specs.items():
            whole = statistics.median(total for total, _ in prefills[name])
            inside = statistics.median(seconds for _, seconds in prefills[name])
            stats = stores[name].stats()
            row = {
                "kv": name, "spec": str(spec), "context": arguments.context,
                "device": model.ops.hardware, "threads": model.ops.threads,
                "commit": commit(ROOT / "kvrt"),
                "version": kvrt.__version__, "model": arguments.model, "fill": "synthetic",
                "step_ms": statistics.median(steps[name]) * 1e3,
                "samples_ms": [seconds * 1e3 for seconds in steps[name]],
                "ratio_to_f16": statistics.median(
                    a / b for a, b in zip(steps[name], steps["f16"])
                ),
                "cache_bytes": stats.bytes, "bits_per_element": stats.bits_per_element,
                "weight_bytes": model.weight_bytes,
                "prefill_s": whole, "seal_share": (inside - plain) / whole,
            }  # fmt: skip
            out.write(json.dumps(row) + "\n")
            print(
                f"{name:<12} {row['step_ms']:7.2f} ms  x{row['ratio_to_f16']:.3f}  "
                f"{stats.bytes / 1e6:7.1f} MB  seal {row['seal_share']:.1%}"
            )


if __name__ == "__main__":
    main()
