"""All tolerances of the tests, each with its reason: (operation, stored type) -> Tolerance.

The stored type is that of the weights for a linear map and of the cache for attention and logits;
sums are always taken in float32, so a 16-bit weight, widened exactly, costs nothing more.
Inputs are of unit spread unless a test says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected|, and why these numbers."""

    atol: float
    rtol: float
    why: str


EXACT = Tolerance(0.0, 0.0, "the same numbers")

_ONE_SUM = "float32 rounding, 2^-24, of a sum of up to 2,048 products, each of about 1"
_FEW_OPS = "a handful of float32 operations"

TOLERANCES: Mapping[tuple[str, str], Tolerance] = {
    ("frequencies", "f64"): Tolerance(0.0, 1e-14, "two float64 formulas of one number"),
    ("linear", "f32"): Tolerance(2e-4, 1e-5, _ONE_SUM),
    ("linear", "f16"): Tolerance(2e-4, 1e-5, _ONE_SUM),
    ("linear", "bf16"): Tolerance(2e-4, 1e-5, _ONE_SUM),
    ("rmsnorm", "f32"): Tolerance(1e-6, 5e-6, _FEW_OPS + " and a mean of up to 2,048 squares"),
    ("silu_mul", "f32"): Tolerance(1e-6, 2e-6, _FEW_OPS),
    ("rope", "f32"): Tolerance(2e-6, 2e-6, _FEW_OPS + "; angles are made in float64"),
    ("basis", "f32"): Tolerance(2e-5, 2e-6, "eight float32 sums of numbers up to 40"),
    ("attend", "f32"): Tolerance(1e-5, 1e-5, "float32 scores up to 30 give 2e-6 in exp"),
    ("attend", "f16"): Tolerance(8e-3, 0.0, "2^-11 of keys and values; scores up to 30 move 5e-3"),
    ("attend", "bf16"): Tolerance(6e-2, 0.0, "2^-8 of keys and values: 8 times float16"),
    ("attend", "packed"): Tolerance(
        5e-5, 1e-5, "as f32; the oracle's keys went through a rotation or transform more"
    ),
    ("attend", "large"): Tolerance(
        0.05, 0.0, "float32 scores of 1e5 are off by 0.01, which moves weights by 1 %"
    ),
    ("attend", "int8"): Tolerance(
        0.04, 0.0, "1.5 times what half a step of 1/60 of keys and values does, 0.027 at most"
    ),
    ("unpack", "f32"): Tolerance(1e-6, 2e-7, "a code's number with one rounding or with two"),
    ("received", "f32"): Tolerance(1e-5, 1e-5, "float32 scores up to 30 give 2e-6 in exp"),
    ("received", "sum"): Tolerance(1e-3, 1e-5, "sums of up to 500 float32 numbers above 1"),
    ("tail", "f16"): Tolerance(
        0.0, 5e-4, "2^-11, of a number's size at most, when it goes from a page to the tail"
    ),
    # Measured on CASES with 100 to 200 tokens: transformers in float32 is off by up to 7.5e-5,
    # rounding every key and value to f16 moves a logit by up to 0.028, to bf16 by up to 0.17.
    ("split", "f32"): Tolerance(1e-4, 0.0, "float32 sums in another order, up to 2.4e-5 on CASES"),
    ("logits", "f32"): Tolerance(5e-4, 0.0, "7 times what transformers' own float32 is off"),
    ("logits", "f16"): Tolerance(0.1, 0.0, "4 times the effect of f16 keys and values"),
    ("logits", "bf16"): Tolerance(0.6, 0.0, "4 times the effect of bf16 keys and values"),
}


def tolerance(operation: str, stored: str) -> Tolerance:
    """The table's entry; KeyError when there is none, so that a test cannot invent one."""
    return TOLERANCES[operation, stored]


# Relative root mean square errors of sealed tiles (`tiles`): gaussian, outlier channels, constant.
# 2 to 4 % above what the fixed tiles give. In theory: step / sqrt(12), where the step is the range
# of a group of normal numbers (4.1 for 32 of them, 4.7 for 64) over the number of steps; 3 and 2
# bits of mantissa give about 2^-5.2 and 2^-4.3.
CODEC_ERRORS: Mapping[str, tuple[float, float, float]] = {
    "f16": (0.0, 0.0, 0.0),
    "bf16": (0.0018, 0.0018, 0.002),
    "q8_0": (0.0055, 0.0115, 0.0002),
    "q4_0": (0.088, 0.116, 0.0002),
    "q4_0:had": (0.088, 0.060, 0.0002),
    "e4m3": (0.0275, 0.026, 0.032),
    "e4m3:had": (0.0275, 0.027, 0.032),
    "e5m2": (0.053, 0.053, 0.063),
    "int2:channel:g32": (0.40, 0.42, 0.0),
    "int2:channel:g64": (0.46, 0.48, 0.0),
    "int2:token:g32": (0.40, 0.52, 0.0),
    "int2:channel:g64:had": (0.47, 0.46, 0.0),
    "int2:token:g32:hybrid": (0.68, 0.30, 0.0),
    "int2:channel:g64:sym": (0.75, 0.77, 0.0002),
    "int3:channel:g32": (0.17, 0.18, 0.0),
    "int3:channel:g64": (0.195, 0.203, 0.0),
    "int3:token:g32": (0.173, 0.26, 0.0),
    "int3:channel:g64:had": (0.20, 0.191, 0.0),
    "int3:token:g32:hybrid": (0.23, 0.155, 0.0002),
    "int3:channel:g64:sym": (0.26, 0.275, 0.0002),
    "int4:channel:g32": (0.080, 0.085, 0.0),
    "int4:channel:g64": (0.091, 0.095, 0.0),
    "int4:token:g32": (0.080, 0.121, 0.0),
    "int4:channel:g64:had": (0.093, 0.089, 0.0),
    "int4:token:g32:hybrid": (0.099, 0.121, 0.0002),
    "int4:channel:g64:sym": (0.111, 0.114, 0.0002),
    "int8:channel:g32": (0.0047, 0.0049, 0.0),
    "int8:channel:g64": (0.0054, 0.0056, 0.0),
    "int8:token:g32": (0.0048, 0.0072, 0.0),
    "int8:channel:g64:had": (0.0055, 0.0053, 0.0),
    "int8:token:g32:hybrid": (0.0055, 0.0115, 0.0002),
    "int8:channel:g64:sym": (0.0061, 0.0063, 0.0002),
    # Levels and thresholds of `FittedTables`, which no outlier channel or constant had a part in.
    "nuq2": (0.49, 1.0, 6.0),
    "nuq3": (0.205, 1.0, 2.0),
    "nuq4": (0.104, 1.0, 1.0),
    "nuq2:1%:qnorm": (0.47, 0.60, 6.0),
    "nuq3:1%": (0.20, 0.60, 2.0),
    "nuq4:1%": (0.10, 0.60, 1.0),
    # Codebooks of `FittedTables`, scattered numbers of unit spread.
    "pq8x256:r1": (0.70, 0.99, 1.85),
    "pq8x256:r2": (0.52, 0.98, 1.30),
    "pq8x256:r3": (0.425, 0.97, 0.75),
    "rvq4x256": (0.83, 0.98, 3.4),
    "rvq14x1024:had": (0.39, 0.90, 1.8),
}
