"""Compare the tests' float64 reference, and kvrt itself, with transformers on every tiny model.

    python tools/crosscheck_transformers.py [--reference-only] [--tokens N] [NAME...]

Needs the `dev` extra (torch, transformers). Columns, each the largest absolute difference:
  rope      cos and sin of transformers (always float32) against the reference's float64
  ref64     logits of transformers in float64, its float32 islands (angles, norm, softmax) widened
  ref32     logits of transformers in float32, as shipped, against the reference
  kvrt      logits of kvrt (f32 cache) against transformers in float32
  kvrt-ref  logits of kvrt (f32 cache) against the reference
Exits with 1 when one is beyond its bound.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers.compare import max_error
from tests.helpers.refs import reference_logits, rope_tables
from tests.helpers.tiny_model import CASES, write_tiny_model

# float32 angles at position 200 are good to 200 * 2^-24 = 1.2e-5; float32 logits of spread 2.5
# through two layers to some 1e-5; float64 logits to rounding.
BOUNDS = {"rope": 1e-4, "ref64": 1e-11, "ref32": 5e-4, "kvrt": 5e-4, "kvrt-ref": 5e-4}


def transformers_logits(
    folder: Path, token_ids: Sequence[int], dtype: Any, tables: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, vocab_size) and cos, sin (2, n, head_dim // 2), all f64, by transformers.

    transformers keeps angles, norms and the eager softmax in float32 whatever the dtype. `tables`
    (cos and sin) replaces its own, and with it norms and softmax become torch's in `dtype`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    attention = "eager" if tables is None else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    ).eval()
    half = model.model.rotary_emb.inv_freq.numel()
    positions = torch.arange(len(token_ids))[None]
    with torch.no_grad():
        own = model.model.rotary_emb(torch.zeros(1, dtype=dtype), positions)
        if tables is not None:
            doubled = tuple(torch.from_numpy(np.concatenate([t, t], -1))[None] for t in tables)
            model.model.rotary_emb.forward = lambda *_, **__: doubled
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = _wide_norm(module)
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    return logits.double().numpy(), np.stack([t[0, :, :half].double().numpy() for t in own])


def _wide_norm(module: Any) -> Callable[[Any], Any]:
    """torch's own RMS norm with the module's weight and epsilon, in the dtype of its input."""
    from torch.nn.functional import rms_norm

    weight, eps = module.weight, module.variance_epsilon
    return lambda x: rms_norm(x, weight.shape, weight, eps)


def kvrt_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Logits (n, vocab_size) f32 by kvrt with a float32 cache."""
    import kvrt

    return kvrt.load(str(folder), "cpu", kv="f32").logits(list(token_ids))


def check(name: str, tokens: int, reference_only: bool) -> dict[str, float]:
    """All differences of one case."""
    import json

    import torch

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = write_tiny_model(folder, **{**CASES[name], "tokenizer": True})
        token_ids = np.random.default_rng(1).integers(0, config.vocab_size, tokens).tolist()
        expected = reference_logits(folder, token_ids)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tables = rope_tables(raw, config.head_dim, tokens)
        logits64, _ = transformers_logits(folder, token_ids, torch.float64, tables)
        logits32, own = transformers_logits(folder, token_ids, torch.float32)
        row = {
            "rope": max_error(own, np.stack(tables)),
            "ref64": max_error(logits64, expected),
            "ref32": max_error(logits32, expected),
        }
        if not reference_only:
            ours = kvrt_logits(folder, token_ids)
            row["kvrt"] = max_error(ours, logits32)
            row["kvrt-ref"] = max_error(ours, expected)
    return row


def main() -> int:
    """Print the table; 0 when every difference is within its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--tokens", type=int, default=200, help="length of the random text")
    parser.add_argument("--reference-only", action="store_true", help="leave kvrt itself out")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    try:
        import torch
        import transformers
    except ImportError as problem:
        parser.error(f"{problem}; install the dev extra")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")

    columns = list(BOUNDS)[: 3 if options.reference_only else None]
    print(f"{'case':30}" + "".join(f"{column:>11}" for column in columns))
    failed = False
    for name in options.names or CASES:
        row = check(name, options.tokens, options.reference_only)
        beyond = [column for column in columns if not row[column] <= BOUNDS[column]]
        failed = failed or bool(beyond)
        line = f"{name:30}" + "".join(f"{row[column]:11.1e}" for column in columns)
        print(line + (f"  beyond: {', '.join(beyond)}" if beyond else ""))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
