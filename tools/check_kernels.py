"""Compile every variant of the CUDA kernels, without a GPU, and show what each kernel takes.

Exits with 1 where a variant does not compile, or where a kernel of attention does not fit into
registers. `--only WORD` keeps variants whose name and options contain the word.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvrt.backends import get_ops
from kvrt.backends.attend_variant import chosen
from kvrt.backends.nvrtc import Cubin, find_compiler
from kvrt.backends.variants import ARCHITECTURES, NO_SPILLS, Variant, variants
from kvrt.errors import CodecError, KernelError, UnsupportedError
from kvrt.kvstore import Geometry, KVSpec, KVStore, Rotary
from kvrt.kvstore.spec import PRESETS
from kvrt.normal_tables import NormalTables

HEADINGS = ("source", "options", "arch", "kernel", "registers", "shared", "stack", "spills")
HEAD_DIMS_OF_ATTENTION = (64, 128, 256)
LARGE_HEADS = ("f16", "bf16", "f8", "kivi2", "kivi4", "kvrt4", "kvrt2")
FURTHER_FORMATS = (
    "k=int4:channel:g64:had:page,v=int4:token:g64:had",
    "k=int3:token:g32:sym,v=int3:channel:g32:hybrid",
    "k=int3:channel:g32:hybrid:page,v=int3:token:g32:sym",
    "k=int8:token:g64,v=int8:channel:g64",
    "k=int8:channel:g64,v=int8:token:g64",
    "k=int4:channel:g32:pre,v=int4:token:g32",
    "k=int3:channel:g32:hybrid:pre,v=int2:token:g64",
    "k=int4:token:g32:pre,v=int4:token:g64",
    "k=e4m3:pre,v=e4m3",
    "k=f16:pre,v=f16",
    "k=nuq4:1%,v=nuq4:1%",
    "k=pq8x256:r3:had,v=pq8x256:r1:had",
)
WITH_BIAS = ("f8", "kivi2", "kivi4", "kvrt4", "kvrt3", "kvrt2", "innerq-small", "kvquant4:1%")
TEXTS = 4  # the first columns; numbers follow

GROUPS = (4, 8)
"""Query heads of a KV head: what few of them are has variants of its own."""

_KV_HEADS = 8


def rows_of(variant: Variant, arch: str, cubin: Cubin) -> list[tuple[str, ...]]:
    """One line of the table for each kernel."""
    options = " ".join(f"{key}={value}" for key, value in variant.defines.items())
    return [
        (
            variant.source,
            variant.label or options,
            arch,
            name,
            *(str(n) for n in (used.registers, used.shared, used.stack, used.spills)),
        )
        for name, used in sorted(cubin.kernels.items())
    ]


def attention_variants() -> Iterator[Variant]:
    """What decode attention is compiled with for the presets that a GPU reads."""
    ops, seen = get_ops("cpu"), set()
    for dim in HEAD_DIMS_OF_ATTENTION:
        # At 256, keys whose scales go with tokens spill, and three bits on sm_80: right, but slow.
        names = (*PRESETS, *FURTHER_FORMATS) if dim < 256 else LARGE_HEADS
        biased = WITH_BIAS if dim < 256 else ()
        for name, bias in (*((name, False) for name in names), *((name, True) for name in biased)):
            geometry = Geometry(1, _KV_HEADS, dim, key_bias=bias)
            left_out = [ops.empty((_KV_HEADS, dim))] if bias else None
            rotary = Rotary(np.ones(dim // 2))
            fitted = NormalTables(geometry)
            spec = KVSpec.parse(name)
            try:
                store = KVStore(
                    geometry, spec, ops, 1, rotary=rotary, key_bias=left_out, calibration=fitted
                )
                settings = store.view(0).settings.tolist()
                found = [(group, *chosen(settings, group=group)) for group in GROUPS]
            except (UnsupportedError, CodecError):
                continue  # not for this size, or not for a GPU
            for group, source, defines, _ in found:
                key = (source, *defines.items())
                if key not in seen:
                    seen.add(key)
                    label = f"{name}{' bias' * bias}, head_dim {dim}, group {group}"
                    yield Variant(source, defines, label)


def print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    for row in rows:
        cells = [
            cell.ljust(width) if i < TEXTS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", help="sm_XY; may be repeated")
    parser.add_argument("--only", default="", help="a part of a variant's name and options")
    arguments = parser.parse_args()

    compiler = find_compiler()
    major, minor = compiler.version
    print(f"NVRTC {major}.{minor}")
    jobs = [
        (variant, arch)
        for variant in (*variants(), *attention_variants())
        if arguments.only in str(variant)
        for arch in arguments.arch or ARCHITECTURES
    ]
    if not jobs:
        parser.error(f"no variant contains {arguments.only!r}")

    def compile_one(job: tuple[Variant, str]) -> Cubin | KernelError:
        variant, arch = job
        try:
            return compiler.compile(variant.source, variant.defines, arch)
        except KernelError as error:
            return error

    rows: list[tuple[str, ...]] = [HEADINGS]
    failures = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (variant, arch), result in zip(jobs, pool.map(compile_one, jobs), strict=True):
            if isinstance(result, KernelError):
                failures.append(str(result))
                continue
            rows += rows_of(variant, arch, result)
            if not result.kernels:
                # A compiler that had it in a cache of its own tells nothing.
                failures.append(f"{variant} for {arch}: the compiler did not say what it takes")
            for name, used in sorted(result.kernels.items()):
                if used.spills and variant.source in NO_SPILLS:
                    failures.append(f"{variant} for {arch}: {name} spills {used.spills} bytes")
    print_table(rows)
    for failure in dict.fromkeys(failures):
        print(f"FAILED: {failure}")
    print(f"{len(jobs)} compilations, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KernelError as error:
        sys.exit(f"Error: {error}")
