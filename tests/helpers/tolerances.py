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
    ("attend", "f32"): Tolerance(1e-5, 1e-5, "float32 scores up to 30 give 2e-6 in exp"),
    ("attend", "f16"): Tolerance(8e-3, 0.0, "2^-11 of keys and values; scores up to 30 move 5e-3"),
    ("attend", "bf16"): Tolerance(6e-2, 0.0, "2^-8 of keys and values: 8 times float16"),
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
