"""Attention over the packed cache and the projections of a decode step, each alone, on a GPU.

    python tools/bench_kernels.py [--quick] [--kv f16,kvrt4] [--contexts 8k,128k] [--results FILE]

The kernels are those of the product: stores filled with random keys and values by the real encoder,
`Ops.attend` on them, `Ops.linear` and its kin on random weights. A CUDA graph holds calls over many
layers in turn, whose memory together is many times the second-level cache, so that each call finds
none of its bytes there; it is replayed, and a time is that of the graph divided by its calls. Calls
follow each other as in a decode step, where a kernel may begin while the one before it ends.

Bytes are those that a call must move: of attention the cache of one layer, query and result; of a
projection its weights, inputs and results. The share is that of the bandwidth at which this device
read memory in the same run. Where torch is installed its SDPA (flash, cuDNN) runs beside, on 16-bit
keys and values of the same shape, timed in the same way. Rows are appended to --results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from graph_timer import LEAST_CALLS, Timed, graph_timer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvrt.backends import get_ops  # noqa: E402
from kvrt.backends.ops import Linear, Ops, RandomMatrix  # noqa: E402
from kvrt.bench.environment import software  # noqa: E402
from kvrt.bench.fill import RandomTokens  # noqa: E402
from kvrt.bench.gpu import device_of, gpu_fields, gpu_versions  # noqa: E402
from kvrt.cli.kv_options import Format, resolve_formats  # noqa: E402
from kvrt.cli.ranges import parse_counts  # noqa: E402
from kvrt.errors import KernelError, KvrtError, UsageError  # noqa: E402
from kvrt.kvstore import Geometry, KVSpec, KVStore, Rotary, estimate  # noqa: E402
from kvrt.kvstore.stats import read_bytes  # noqa: E402
from kvrt.normal_tables import NormalTables  # noqa: E402
from kvrt.stores import Store  # noqa: E402
from kvrt.trizone.store import ZoneStore  # noqa: E402

RESULTS = ROOT / "tools" / "results" / "kernels.jsonl"
BF16 = np.dtype(ml_dtypes.bfloat16)

PRESETS = ("f16", "f8", "q8_0", "q4_0", "kivi4", "kivi2", "kvrt4", "kvrt3", "kvrt2")
FORMS = (  # what a form of the keys, or a fitted table, costs beside the plain one of the same bits
    "k=int4:channel:g64,v=int4:token:g64",
    "k=int4:channel:g64:page,v=int4:token:g64",
    "k=int4:channel:g64:pre,v=int4:token:g64",
    "k=int2:channel:g64,v=int2:token:g64",
    "k=nuq4,v=nuq4",
    "k=nuq2,v=nuq2",
    "kvquant2",
    "kvquant3:1%",
)
QUICK = ("f16", "f8", "kvrt4", "kvrt2")

COLD_BYTES = 512 << 20
"""Read before the same bytes are read again; the largest second-level caches hold 126 MB."""

MOST_LAYERS = 64


@dataclass(frozen=True)
class Shape:
    """What attention and the projections are measured for."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int


@dataclass(frozen=True)
class Work:
    """Calls of one kind, each on memory of its own, and what each of them moves."""

    calls: Sequence[Callable[[], None]]
    nbytes: int
    row: dict[str, Any]
    held: Any = field(default=None, repr=False)  # what must stay in memory


def in_turn(nbytes: int, most: int = MOST_LAYERS) -> int:
    """How many buffers of a size are used in turn, so that none is cached when its turn comes."""
    return min(max(-(-COLD_BYTES // nbytes), 2), most)


# What is measured


def attention(ops: Ops, shape: Shape, chosen: Format, context: int) -> Work:
    """One query over `context` tokens, in one layer after the other of one store."""
    spec = chosen.spec
    single = geometry_of(shape, 1)
    if spec.compression is None:
        (size,) = read_bytes(single, spec, [context], [None])
    else:
        size = estimate(single, spec, context)
    layers = in_turn(size)
    geometry = geometry_of(shape, layers)
    store = _empty_store(ops, geometry, spec, context)
    RandomTokens(ops, geometry, 0, shape.heads).grow(store, context)
    (read,) = store.read_bytes([context], [None] * layers)
    nbytes = int(read) // layers
    query = np.random.default_rng(0).standard_normal((shape.heads, shape.head_dim), np.float32)
    q, out = ops.to_device(query), ops.empty(query.shape)
    scale = 1.0 / math.sqrt(shape.head_dim)
    calls = [partial(ops.attend, q, store.view(layer), scale, None, out) for layer in range(layers)]
    row = {
        "kernel": "attention",
        "side": "kvrt",
        "kv": chosen.name,
        "effective_kv": str(store.spec),
        "bits_per_element": store.stats().bits_per_element,
        **attention_shape(shape, context),
        "in_turn": layers,
    }
    return Work(calls, nbytes + 2 * query.nbytes, row, (store, q, out))


def _empty_store(ops: Ops, geometry: Geometry, spec: KVSpec, context: int) -> Store:
    if spec.compression is not None:
        return ZoneStore(geometry, spec, ops, context)
    return KVStore(
        geometry, spec, ops, context, rotary=rotary_of(geometry.head_dim),
        calibration=NormalTables(geometry) if spec.calibrated else None,
    )  # fmt: skip


def check(ops: Ops, work: Work) -> None:
    """Raise KernelError unless the last replay left what the last call gives by itself."""
    out = work.held[2]  # (heads, head_dim) f32
    replayed = ops.to_host(out).copy()
    work.calls[-1]()
    alone = ops.to_host(out)
    difference = float(np.linalg.norm(replayed - alone) / np.linalg.norm(alone))
    if not difference < 1e-3:
        raise KernelError(f"a replay differs from a call by {difference:.1e}")


def attention_shape(shape: Shape, context: int) -> dict[str, Any]:
    return {
        "context": context,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }


def geometry_of(shape: Shape, layers: int) -> Geometry:
    return Geometry(layers, shape.kv_heads, shape.head_dim)


def rotary_of(head_dim: int) -> Rotary:
    return Rotary(500_000.0 ** -(np.arange(0, head_dim, 2) / head_dim))


def projections(ops: Ops, shape: Shape) -> Iterator[Work]:
    """The projections of a decode step, as the decoder asks for them, with bf16 weights."""
    width, rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    yield _linear(ops, "qkv", (width, rows, rows), hidden, normed=True)
    yield _linear_add(ops, "o", hidden, width)
    yield _swiglu(ops, "gate_up", inner, hidden)
    yield _linear_add(ops, "down", hidden, inner)
    yield _linear(ops, "head", (shape.vocab,), hidden, normed=True)


def _weight(ops: Ops, rows: int, cols: int, seed: int) -> Linear:
    return Linear(ops.matrix(RandomMatrix((rows, cols), BF16, seed, (3.0 / cols) ** 0.5)))


def _vector(ops: Ops, size: int) -> Any:
    return ops.to_device(np.random.default_rng(size).standard_normal((1, size), np.float32))


def _work(name: str, rows: int, cols: int, moved: int, calls: Sequence[Any], held: Any) -> Work:
    row = {
        "kernel": "projection",
        "side": "kvrt",
        "name": name,
        "rows": rows,
        "cols": cols,
        "dtype": "bfloat16",
        "in_turn": len(calls),
    }
    return Work(calls, moved, row, held)


def _linear(ops: Ops, name: str, rows: tuple[int, ...], cols: int, normed: bool) -> Work:
    total = sum(rows)
    copies = in_turn(total * cols * 2)
    x, outs = _vector(ops, cols), [ops.empty((1, count)) for count in rows]
    norm = (ops.to_device(np.ones(cols, np.float32)), 1e-5) if normed else None
    calls = []
    for copy in range(copies):
        layers = [_weight(ops, count, cols, copy * 8 + i) for i, count in enumerate(rows)]
        calls.append(partial(ops.linear, x, layers, outs, norm=norm))
    moved = total * cols * 2 + 4 * (cols * (1 + normed) + total)
    return _work(name, total, cols, moved, calls, (x, outs, norm))


def _linear_add(ops: Ops, name: str, rows: int, cols: int) -> Work:
    x, out = _vector(ops, cols), _vector(ops, rows)
    calls = [
        partial(ops.linear_add, x, _weight(ops, rows, cols, copy), out)
        for copy in range(in_turn(rows * cols * 2))
    ]
    return _work(name, rows, cols, rows * cols * 2 + 4 * (cols + 2 * rows), calls, (x, out))


def _swiglu(ops: Ops, name: str, rows: int, cols: int) -> Work:
    x, out = _vector(ops, cols), ops.empty((1, rows))
    norm = (ops.to_device(np.ones(cols, np.float32)), 1e-5)
    calls = []
    for copy in range(in_turn(2 * rows * cols * 2)):
        gate, up = (_weight(ops, rows, cols, 2 * copy + i) for i in range(2))
        calls.append(partial(ops.swiglu, x, gate, up, out, norm=norm))
    moved = 2 * rows * cols * 2 + 4 * (2 * cols + rows)
    return _work(name, 2 * rows, cols, moved, calls, (x, out, norm))


# Rows


def finished_row(
    row: dict[str, Any], nbytes: int, samples: Sequence[float], bandwidth: float
) -> dict[str, Any]:
    """A row with its numbers; `bandwidth` of the device in bytes/s, samples in microseconds."""
    middle = statistics.median(samples)
    rate = nbytes / middle * 1e6
    return {
        **row,
        "us": middle,
        "samples_us": list(samples),
        "bytes": nbytes,
        "GBps": rate / 1e9,
        "share": rate / bandwidth,
    }


def facts_of(ops: Ops, bandwidth: float) -> dict[str, Any]:
    """Where it ran: what all rows of a run share."""
    known = software()
    return {
        "device": ops.hardware,
        **gpu_fields(ops),
        "kernels": ops.build,
        "device_read_GBps": bandwidth / 1e9,
        **known,
        "versions": {**known["versions"], **gpu_versions(ops)},
    }


class Report:
    """Prints a line for each row, and appends the row to a file."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self._facts = facts
        path.parent.mkdir(parents=True, exist_ok=True)
        print(
            "{device}, driver {driver}, {kernels}, reads {device_read_GBps:,.0f} GB/s".format_map(
                facts
            ),
            flush=True,
        )
        print(f"{'what':44} {'at':>9} {'bits':>6} {'MB':>8} {'us':>9} {'GB/s':>6} {'share':>6}")

    def add(self, row: dict[str, Any]) -> None:
        whole = {**row, **self._facts}
        if "versions" in row:
            whole["versions"] = {**self._facts["versions"], **row["versions"]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
        what = row.get("kv") or row.get("name") or ""
        bits = row.get("bits_per_element")
        print(
            f"{row['side'] + ' ' + what:44.44} {row.get('context', ''):>9} "
            f"{'' if bits is None else format(bits, '.3g'):>6} {row['bytes'] / 1e6:8.2f} "
            f"{row['us']:9.2f} {row['GBps']:6.0f} {row['share']:6.1%}",
            flush=True,
        )


def measure(
    ops: Ops,
    shape: Shape,
    formats: Sequence[Format],
    contexts: Sequence[int],
    timed: Timed,
    bandwidth: float,
    add: Callable[[dict[str, Any]], None],
    peer: Callable[[int], Iterator[dict[str, Any]]] | None,
) -> None:
    """Attention at each context in each format, and in the peer's; then the projections."""
    unsupported: set[str] = set()
    for context in contexts:
        for chosen in formats:
            if chosen.name in unsupported:
                continue
            try:
                work = attention(ops, shape, chosen, context)
                samples = timed(work.calls)
                check(ops, work)
            except KvrtError as error:
                unsupported.add(chosen.name)
                print(f"not measured: {chosen.name}: {error}", flush=True)
                continue
            add(finished_row(work.row, work.nbytes, samples, bandwidth))
            del work
            ops.reset_peak()  # gives memory back
        for row in peer(context) if peer else ():
            add(row)
    for work in projections(ops, shape):
        add(finished_row(work.row, work.nbytes, timed(work.calls), bandwidth))
        del work
        ops.reset_peak()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--device", default="cuda")
    found.add_argument("--kv", help="formats, as `kvrt bench` takes them")
    found.add_argument("--contexts", default="", help="such as 8k,32k,128k,512k")
    found.add_argument("--repetitions", type=int, default=15, help="at least 11")
    found.add_argument("--quick", action="store_true", help="few formats at 8k and 128k")
    found.add_argument("--no-torch", action="store_true", help="leave torch's SDPA out")
    found.add_argument("--results", type=Path, default=RESULTS)
    for name, default in (("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("hidden", 4096),
                          ("inner", 14_336), ("vocab", 128_256)):  # fmt: skip
        found.add_argument(f"--{name}", type=int, default=default)
    return found


def main() -> None:
    options = parser().parse_args()
    shape = Shape(
        options.heads, options.kv_heads, options.head_dim, options.hidden, options.inner,
        options.vocab,
    )  # fmt: skip
    asked = [options.kv] if options.kv else []
    texts = options.contexts or ("8k,128k" if options.quick else "8k,32k,128k,512k")
    repetitions = max(options.repetitions, 11)
    try:
        formats = resolve_formats(asked, None, None, QUICK if options.quick else (*PRESETS, *FORMS))
        contexts = parse_counts(texts, "--contexts", low=1)
        ops = get_ops(options.device)
    except KvrtError as error:
        print(f"bench_kernels: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    device = device_of(ops)
    if device is None:
        sys.exit(
            f"--device {options.device}: these timings are for a GPU; bench_cache.py is for CPUs"
        )
    bandwidth = ops.read_bandwidth()
    peer = None
    if not options.no_torch:
        from torch_attention import TorchAttention

        peer = TorchAttention.found(shape, COLD_BYTES, LEAST_CALLS, repetitions)
    report = Report(options.results, facts_of(ops, bandwidth))

    def peer_rows(context: int) -> Iterator[dict[str, Any]]:
        assert peer is not None
        for row, nbytes, samples in peer.measured(context):
            whole = {**row, **attention_shape(shape, context)}
            yield finished_row(whole, nbytes, samples, bandwidth)

    measure(
        ops, shape, formats, contexts, graph_timer(device.xp, repetitions), bandwidth, report.add,
        peer_rows if peer else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
