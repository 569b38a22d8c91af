"""Decode and prefill speed of kvrt on the CPU, next to llama.cpp on the same weights.

    python tools/bench_cpu.py --model smollm2 --gguf FILE.gguf --peer-python PYTHON

Each side runs in a process of its own, in turn, `--rounds` times; medians are printed and every
round is appended to tools/results/cpu.jsonl. The peer reads an F16 GGUF that holds the same numbers
as the model folder (FILE.gguf dequantised; the tool writes it once beside FILE.gguf).
PYTHON is an interpreter that has llama-cpp-python; leave both options out to measure kvrt alone.
Loading, tokenising and sampling are outside the timed part; token ids are random, seeded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "results" / "cpu.jsonl"
PROMPT, DEPTH, STEPS = 1024, 512, 128


def tokens(count: int) -> list[int]:
    return np.random.default_rng(0).integers(100, 40000, count).tolist()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure_kvrt(model_name: str, threads: int) -> dict[str, Any]:
    import kvrt

    model = kvrt.load(model_name, "cpu", threads=threads)
    decoder = model.decoder
    decoder.prefill(tokens(32), model.new_store())
    start = time.perf_counter()
    decoder.prefill(tokens(PROMPT), model.new_store())
    prefill = time.perf_counter() - start
    store = model.new_store()
    logits = decoder.prefill(tokens(DEPTH), store)
    start = time.perf_counter()
    for _ in range(STEPS):
        logits = decoder.decode(int(logits.argmax()), store)
    decode = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": PROMPT / prefill,
        "decode_tokens_per_s": STEPS / decode,
        "decode_read_GBps": model.weight_bytes * STEPS / decode / 1e9,
        "peak_bytes": peak_bytes(),
        "weight_bytes": model.weight_bytes,
        "version": kvrt.__version__,
    }


def measure_llama_cpp(path: str, threads: int) -> dict[str, Any]:
    import llama_cpp

    model = llama_cpp.Llama(
        path, n_ctx=2048, n_batch=1024, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    model.eval(tokens(32))
    model.reset()
    start = time.perf_counter()
    model.eval(tokens(PROMPT))
    prefill = time.perf_counter() - start
    model.reset()
    model.eval(tokens(DEPTH))
    start = time.perf_counter()
    for token in tokens(STEPS):
        model.eval([token])
    decode = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": PROMPT / prefill,
        "decode_tokens_per_s": STEPS / decode,
        "peak_bytes": peak_bytes(),
        "weight_bytes": Path(path).stat().st_size,
        "version": llama_cpp.__version__,
    }


def write_f16(source: Path) -> Path:
    """Write source's tensors as float16 (vectors as float32) and the same metadata."""
    import gguf

    target = source.with_name(source.stem + ".F16.gguf")
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target.with_suffix(".tmp"), architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype(np.float16 if data.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".tmp").rename(target)
    return target


def worker(python: str, side: str, model: str, threads: int) -> dict[str, Any]:
    command = [python, __file__, "--worker", side, "--model", model, "--threads", str(threads)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{side} failed: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def first_token_seconds(model: str, threads: int) -> float:
    """Wall time of the command from start to the end of a one-token answer."""
    command = [
        sys.executable, "-m", "kvrt", "generate", "-m", model, "--device", "cpu",
        "-t", str(threads), "-p", "The capital of France is", "-n", "1",
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    return time.perf_counter() - start


def machine() -> dict[str, Any]:
    from kvrt.backends.native import processor_name
    from kvrt.bench.environment import commit

    return {
        "device": f"{processor_name()}, {os.cpu_count()} cores",
        "commit": commit(ROOT / "kvrt"),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gguf", type=Path, help="the GGUF that the model folder was made from")
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=["kvrt", "llama.cpp"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run = measure_kvrt if options.worker == "kvrt" else measure_llama_cpp
        print(json.dumps(run(options.model, options.threads)))
        return
    sides = {"kvrt": (sys.executable, options.model)}
    if options.gguf and options.peer_python:
        sides["llama.cpp"] = (options.peer_python, str(write_f16(options.gguf)))
    common = {**machine(), "threads": options.threads, "model": options.model}
    common |= {"prompt": PROMPT, "depth": DEPTH, "steps": STEPS}
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as log:
        for _ in range(options.rounds):
            for side, (python, model) in sides.items():
                row = worker(python, side, model, options.threads)
                if side == "kvrt":
                    row["first_token_s"] = first_token_seconds(model, options.threads)
                rows[side].append(row)
                log.write(json.dumps({"side": side, **common, **row}) + "\n")
                log.flush()
    print(f"{common['device']}, {options.threads} threads, medians of {options.rounds} rounds")
    for side, results in rows.items():
        middle = {
            key: statistics.median(row[key] for row in results)
            for key, value in results[0].items()
            if not isinstance(value, str)
        }
        print(f"{side}: " + ", ".join(f"{key} {value:.4g}" for key, value in middle.items()))
    if len(rows) == 2:
        for key in ("decode_tokens_per_s", "prefill_tokens_per_s"):
            ratios = [a[key] / b[key] for a, b in zip(rows["kvrt"], rows["llama.cpp"], strict=True)]
            print(f"{key}, kvrt / llama.cpp: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
