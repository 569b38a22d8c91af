"""The dialect in which CPU kernels are written: Python that Numba compiles, imported without Numba.

`@kernel` and `@device` only register functions here. `kvrt.backends.build` compiles them once
(Numba, LLVM) into one shared library under the cache; every later process loads that library and
needs neither, which saves it about 130 MB of resident memory and a second of start-up.

Rules of the dialect:

- A kernel is `def name(thread, begin, end, ...)`: it does work items `begin..end-1` as worker
  `thread`. The remaining parameters are annotated `Address` (of an array), `Int` or `Real`.
- Arrays are made from addresses with `jit.array(address, shape, dtype)`. Nothing is allocated.
- Loops that should vectorise run over 1-D arrays (or rows and slices of arrays) from 0: an index
  that might be negative would wrap around and forbid it.
- A step of `range` is a constant, since Python raises an error for 0, and kernels cannot raise.
- Functions of other files are called through their module (`jit.exp(x)`, `dense.decode(...)`),
  because names are bound to compiled code only when the compiler runs.
"""

from collections.abc import Callable
from typing import Any, NewType, TypeVar

Address = NewType("Address", int)
Int = int
Real = float

F = TypeVar("F", bound=Callable[..., Any])

KERNELS: dict[str, Callable[..., None]] = {}
DEVICE_FUNCTIONS: list[tuple[Callable[..., Any], str]] = []


def kernel(function: F) -> F:
    """Register an entry point: launched over a range of work items on all threads."""
    if function.__name__ in KERNELS:
        raise ValueError(f"two kernels are named {function.__name__}")
    KERNELS[function.__name__] = function
    return function


def device(function: F) -> F:
    """Register a function that kernels call; its sums may be reordered to vectorise."""
    DEVICE_FUNCTIONS.append((function, "fast"))
    return function


def inline(function: F) -> F:
    """Register a device function that is copied into its callers, constants and all."""
    DEVICE_FUNCTIONS.append((function, "inline"))
    return function


def exact(function: F) -> F:
    """Register a function whose arithmetic is done as written, without reordering."""
    DEVICE_FUNCTIONS.append((function, "exact"))
    return function


def _compiled_only(*_: Any) -> Any:
    raise NotImplementedError("this function exists in compiled kernels only")


# Bound to compiler intrinsics by kvrt.backends.intrinsics.
array: Any = _compiled_only
"""array(address, shape tuple, dtype): the array at an address, C order, not owned."""
half_to_float: Any = _compiled_only
"""half_to_float(u16): the float32 of IEEE half bits."""
float_to_half: Any = _compiled_only
"""float_to_half(f32): IEEE half bits, round to nearest even."""
bits_to_float: Any = _compiled_only
"""bits_to_float(u32): the float32 with these bits."""
float_to_bits: Any = _compiled_only
"""float_to_bits(f32): the bits of a float32, as u32."""
fma: Any = _compiled_only
"""fma(a, b, c): a * b + c of float32, rounded once; loops over it vectorise."""
atomic_add: Any = _compiled_only
"""atomic_add(address, n): add to the int64 there, give its old value."""
address_of: Any = _compiled_only
"""address_of(array): the address of its first element."""
affine8x8: Any = _compiled_only
"""affine8x8(out, stride, codes, right, mask, scale, shift): eight rows of eight f32, `stride` bytes
apart: out[r, i] = ((codes[r, i] >> right) & mask) * scale[i] + shift[i], rounded once. codes are
u16, eight rows that follow each other; scale and shift f32. All are addresses or integers."""
affine8x8_columns: Any = _compiled_only
"""affine8x8_columns(...): the same with scale[r] and shift[r]."""
minifloat8x8: Any = _compiled_only
"""minifloat8x8(out, stride, codes, right, left, scale): out[r, i] = scale (a f32) * the half whose
sign is bit 7 of codes[r, i] >> right and whose other bits are bits 0 to 6, shifted by `left`."""
bits_to_double: Any = _compiled_only
"""bits_to_double(i64): the float64 with these bits."""
