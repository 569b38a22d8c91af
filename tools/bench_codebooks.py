"""Errors of trained codebooks next to plain k-means, and the time that training takes.

    python tools/bench_codebooks.py [--device cpu|gpu] [--json FILE]

sqrt(|r|^2 / |x|^2) of 20,000 unseen vectors after stages 1 to 4 of 256 entries, d = 32: residual
k-means from sampled points (25 rounds, on the CPU), mode "simvq" (frozen c_j, W fitted) and mode
"free" (that start, then Lloyd's rounds). "white" and "gaussian" are normal, of even spread and of
spread (c + 1)^-0.75; "clusters" lie around 200 centres. Then times: 1,000,000 x 64 with 2 stages,
200,000 x 8 with 3. Each row is also a line of JSON, on standard output or in FILE.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvrt.backends.cpu import available_threads
from kvrt.backends.native import processor_name
from kvrt.bench.environment import software
from kvrt.codebooks import Books, train_books
from tests.helpers.rvq import kmeans_rvq, relative_errors, vectors

DIM, ENTRIES, STAGES, UNSEEN = 32, 256, 4, 20_000
TIMED = {"1M x 64": (1_000_000, 64, 2), "200k x 8": (200_000, 8, 3)}


def trained(samples: np.ndarray, stages: int, mode: Any, xp: Any) -> tuple[Books, float]:
    start = time.perf_counter()
    books = train_books(samples, None, stages, ENTRIES, seed=0, xp=xp, mode=mode)
    return books, time.perf_counter() - start


def errors_of(kind: str, count: int, xp: Any) -> list[dict[str, Any]]:
    """A row for each way of training on `count` vectors."""
    samples, unseen = vectors(kind, count, DIM, 0), vectors(kind, UNSEEN, DIM, 1)
    start = time.perf_counter()
    plain = kmeans_rvq(samples, STAGES, ENTRIES)
    made: dict[str, tuple[np.ndarray, float, list[float] | None]] = {}
    made["k-means"] = (plain, time.perf_counter() - start, None)
    for mode in ("simvq", "free"):
        books, seconds = trained(samples, STAGES, mode, xp)
        made[mode] = (books.entries, seconds, [stage.used for stage in books.stages])
    return [
        {
            "data": kind,
            "samples": count,
            "trainer": name,
            "errors": [round(float(error), 5) for error in relative_errors(entries, unseen)],
            "used": used,
            "seconds": round(seconds, 3),
        }
        for name, (entries, seconds, used) in made.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--json", type=Path, help="append the rows here")
    options = parser.parse_args()
    xp: Any = np
    device = f"{processor_name()}, {available_threads()} cores"
    if options.device == "gpu":
        import cupy

        xp = cupy
        device = xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        trained(vectors("white", 20_000, DIM, 0), 1, "free", xp)  # CuPy compiles its kernels
    common = {"device": device, **software()}
    rows: list[dict[str, Any]] = []
    print(f"{device}\ndata, samples    trainer  errors after stages 1-4     least use  seconds")
    for kind in ("white", "gaussian", "clusters"):
        for count in (10_000, 100_000):
            for row in errors_of(kind, count, xp):
                rows.append(row)
                errors = " ".join(f"{error:.4f}" for error in row["errors"])
                used = f"{min(row['used']):.3f}" if row["used"] else "-"
                print(
                    f"{kind:9}{count:7,} {row['trainer']:>7}  {errors}  {used:>8} "
                    f"{row['seconds']:8.2f}",
                    flush=True,
                )
    for task, (count, dim, stages) in TIMED.items():
        books, seconds = trained(vectors("white", count, dim, 0), stages, "free", xp)
        uses = [stage.used for stage in books.stages]
        rows.append({"timed": task, "stages": stages, "seconds": round(seconds, 2), "used": uses})
        print(f"{task}, {stages} stages of {ENTRIES}: {seconds:.1f} s", flush=True)
    lines = "".join(json.dumps({**common, **row}) + "\n" for row in rows)
    if options.json:
        with options.json.open("a") as log:
            log.write(lines)
    else:
        print(lines, end="")


if __name__ == "__main__":
    main()
