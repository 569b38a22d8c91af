"""The memory that compressing a layer of a prompt takes, beside its keys and values."""

from __future__ import annotations

from ..kvstore.spec import KVSpec
from . import allocator
from .policies import POLICIES

_MEASURED_BYTES = 4 + 4 + 4 * 4
"""Of a token of a head: attention received, weight, errors at three widths beside the energy."""

_PLACE_BYTES = 80
"""Of a kept token of a head, while blocks are cut: ten numbers."""


def working_bytes(spec: KVSpec, tokens: int, kv_heads: int, head_dim: int) -> int:
    """The most bytes held at once for scores, errors, widths and the order of what is kept.

    For a format that compresses prompts, and a layer of `tokens` of them. What comes out is not
    counted, nor is the scratch of single kernels, which does not grow with the prompt.
    """
    assert spec.compression is not None
    policy, units = POLICIES[spec.compression.name], tokens * kv_heads
    widths = len(policy.widths)
    whole = (_MEASURED_BYTES + 4 * widths) * units
    at_once = units
    if not spec.compression.shared:
        groups = max(1, allocator.STEPS_AT_ONCE // (max(tokens, 1) * (widths - 1)))
        at_once = tokens * min(groups, kv_heads)
    # Distortions twice, slopes of all steps, six orders of the hulls' steps.
    pairs = widths * (widths - 1) // 2
    allocated = (8 * widths + 4 * pairs + 48 * (widths - 1)) * at_once
    budget = spec.compression.budget_bytes(tokens, head_dim)
    least = policy.widths[1] * head_dim // 8
    kept = min(tokens, budget // least) * kv_heads
    # Keys' errors of each block come beside.
    blocks = (_PLACE_BYTES + head_dim // 4) * kept + units
    distortions = 4 * widths * units  # before they are stacked
    return whole + max(allocated, blocks, distortions)
