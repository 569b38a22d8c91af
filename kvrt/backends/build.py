"""Compile every CPU kernel once, with Numba, into one shared library. Runs in its own process.

`python -m kvrt.backends.build TARGET.so` writes the library and, beside it, TARGET.json with the
parameters of each kernel. The Numba IR is lowered again as position-independent code and linked by
the system's C compiler, so that later processes load it without Numba or LLVM.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from .. import paths
from . import intrinsics, jit
from .native import HEADER_SLOTS, KERNEL_MODULES, UNWRITABLE, Manifest, built_digest, linker

# Vectorised sums need reordering; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
# No reference counts: kernels allocate nothing, and the library must not need Numba's run-time.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
_MODES: dict[str, dict[str, Any]] = {
    "fast": {"fastmath": _FAST},
    "inline": {"fastmath": _FAST, "forceinline": True},
    "exact": {"fastmath": False},
}


def parameters(function: Callable[..., Any]) -> list[str]:
    """The kinds of a kernel's parameters after (thread, begin, end): "address", "int" or "real"."""
    kinds = {jit.Address: "address", jit.Int: "int", jit.Real: "real"}
    return [
        kinds[parameter.annotation]
        for parameter in list(inspect.signature(function).parameters.values())[3:]
    ]


def _entry(name: str, function: Any, kinds: list[str]) -> Callable[[int], None]:
    """The function that every thread runs: take chunks of items from a shared counter."""
    arguments = [
        f"jit.bits_to_double(slots[{HEADER_SLOTS + i}])"
        if kind == "real"
        else f"slots[{HEADER_SLOTS + i}]"
        for i, kind in enumerate(kinds)
    ]
    lines = [
        "def entry(address):",
        f"    slots = jit.array(address, ({HEADER_SLOTS + len(kinds)},), int64)",
        "    thread = jit.atomic_add(address + 8, 1)",
        "    items = slots[2]",
        "    grain = slots[3]",
        "    begin = jit.atomic_add(address, grain)",
        "    while begin < items:",
        f"        kernel(thread, begin, min(begin + grain, items), {', '.join(arguments)})",
        "        begin = jit.atomic_add(address, grain)",
    ]
    scope: dict[str, Any] = {"jit": jit, "kernel": function, "int64": numba.int64}
    exec("\n".join(lines), scope)
    entry = scope["entry"]
    entry.__name__ = entry.__qualname__ = f"entry_{name}"
    return entry


def _one_of_a_kind(dispatcher: Any) -> Any:
    """Keep Numba from compiling a function once more for each constant that it is called with."""
    choose = dispatcher.get_call_template

    def unliteral(args: Any, kws: Any) -> Any:
        return choose(tuple(numba.types.unliteral(kind) for kind in args), kws)

    dispatcher.get_call_template = unliteral
    return dispatcher


def compile_kernels() -> dict[str, tuple[Any, list[str]]]:
    """Compile all kernels: name -> (Numba cfunc taking the address of the slots, parameter kinds).

    Binds the names of the kernel modules to compiled code: call it in a process of its own, or
    where Numba is to stay loaded.
    """
    intrinsics.bind()
    for module in KERNEL_MODULES:
        __import__(module)
    for function, mode in jit.DEVICE_FUNCTIONS:
        compiled = _one_of_a_kind(numba.njit(function, **_MODES[mode], **_OPTIONS))
        function.__globals__[function.__name__] = compiled
    result = {}
    for name, function in jit.KERNELS.items():
        kinds = parameters(function)
        kernel = numba.njit(function, fastmath=_FAST, **_OPTIONS)
        make = numba.cfunc("void(int64)", **_OPTIONS)
        result[name] = (make(_entry(name, kernel, kinds)), kinds)
    return result


def _exported(name: str, ir: str) -> Any:
    """The LLVM module of one kernel, exporting `kvrt_<name>` alone."""
    module = llvm.parse_assembly(ir)
    for function in module.functions:
        if function.is_declaration:
            continue
        if function.name.startswith("cfunc."):
            function.name = f"kvrt_{name}"
            function.linkage = "external"
        else:
            function.linkage = "internal"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    return module


def _object_code(modules: list[Any]) -> bytes:
    """Position-independent object code of all kernels for this processor."""
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    whole = modules[0]
    for module in modules[1:]:
        whole.link_in(module)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, tuning)
    passes = llvm.create_new_module_pass_manager()
    # Kernels cannot fail, which shows once their status is propagated out of the inner functions.
    passes.add_sroa_pass()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(whole, builder)
    builder.getModulePassManager().run(whole, builder)
    return machine.emit_object(whole)


def _forget_old(target: Path) -> None:
    """Remove libraries of other versions that are a month old."""
    for path in target.parent.glob("cpu-*.*"):
        with suppress(OSError):
            if path.stem != target.stem and path.stat().st_mtime < time.time() - 30 * 24 * 3600:
                path.unlink()


def _link(command: list[str], source: Path, target: Path) -> bool:
    """Link a shared library; whether that worked."""
    link = [*command, "-shared", "-o", str(target), str(source), "-lm"]
    done = subprocess.run(link, capture_output=True)
    return done.returncode == 0 and target.is_file()


def build(target: Path) -> None:
    """Write TARGET.so (TARGET.o where no C compiler works), and the manifest TARGET.json."""
    compiled = compile_kernels()
    manifest: Manifest = {name: kinds for name, (_, kinds) in compiled.items()}
    code = _object_code([_exported(n, f.inspect_llvm()) for n, (f, _) in compiled.items()])
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        library = Path(folder) / "kernels.o"
        library.write_bytes(code)
        command = linker()
        # A compiler that does not work is as good as none: LLVM will link the object code.
        if command is not None and _link(command, library, library.with_suffix(".so")):
            library = library.with_suffix(".so")
        listing = Path(folder) / "kernels.json"
        digest = built_digest(library.read_bytes(), manifest)
        listing.write_text(json.dumps({"sha256": digest, "kernels": manifest}))
        # The manifest last: with its digest it says that the library beside it is whole.
        os.replace(library, target.with_suffix(library.suffix))
        os.replace(listing, target.with_suffix(".json"))
    _forget_old(target)


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]))
    except OSError as error:
        if not paths.is_storage_failure(error):
            raise
        sys.stderr.write(f"{paths.storage_error(sys.argv[1], error)}\n")
        sys.exit(UNWRITABLE)
