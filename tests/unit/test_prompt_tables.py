"""tools/prompt_tables.py: the README's table of what compressing prompts costs."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prompt_tables  # noqa: E402

ABOUT = {"device": "a device", "commit": "abc"}


def test_nothing_was_measured(tmp_path: Path) -> None:
    assert prompt_tables.section(tmp_path) == ""


def test_cells_are_means_over_lengths_of_the_last_commit(tmp_path: Path) -> None:
    def kld(kv: str, kld: float, commit: str = "abc") -> dict:
        row = {"task": "kld", "kv": kv, "kld": kld, "kld_se": kld / 3, "prompt_tokens": 2048}
        return {**row, **ABOUT, "commit": commit}

    def found(kv: str, length: int, samples: int, share: float) -> dict:
        row = {"task": "needle", "question": "after", "kv": kv, "length": length}
        return {**row, "samples": samples, "exact_match": share, **ABOUT}

    rows = [
        kld("rdkv:64", 9.0, "old"), kld("f16", 0.0), kld("rdkv:64", 0.0000186),
        kld("h2o:64", 0.12), found("f16", 1000, 10, 100.0), found("rdkv:128", 1000, 4, 75.0),
        found("rdkv:128", 2000, 12, 25.0),
    ]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    title, *lines = prompt_tables.section(tmp_path).splitlines()
    assert "(commit abc)" in title and "2,048 tokens" in title and "1,000, 2,000" in title
    assert lines[3:] == [
        "| answer KLD (f16: 0.00 ± 0.0) | 64 | 1.86e-05 ± 6.2e-06 |  |  |  | 0.120 ± 0.040 |",
        # 6 of 16: the root of 0.375 * 0.625 / 15.
        "| needle, after (f16: 100 ± 0) | 128 | 38 ± 12 |  |  |  |  |",
    ]
