"""The README's section on the GPU: last rows count, and a missed goal is said to be missed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_tables  # noqa: E402

Row = dict[str, Any]
FACTS = {
    "device": "NVIDIA X", "driver": "1.2", "commit": "abc", "device_read_GBps": 4000.0,
    "date": "2026-01-01", "versions": {},
}  # fmt: skip
GOALS = json.loads((ROOT / "tools" / "results" / "goals.json").read_text())


def attend(kv: str, context: int, us: float, **changes: Any) -> Row:
    row = {
        "kernel": "attention", "side": "kvrt", "kv": kv, "context": context, "us": us,
        "share": 0.5, "bits_per_element": 3.0, **gpu_tables.SHAPE, **FACTS,
    }  # fmt: skip
    return {**row, **changes}


def run(kv: str, **fields: Any) -> Row:
    row = {
        "kv": kv, "model": gpu_tables.MODEL, "weight_bytes": 16_000, "read_share": 0.6, **FACTS,
    }  # fmt: skip
    return {**row, **fields}


def test_of(kv: str, prompt: int, generated: int, depth: int, rate: float) -> Row:
    return run(
        kv, test="x", n_prompt=prompt, n_gen=generated, depth=depth, mean_tokens_per_s=rate,
        peak_bytes=20_000_000_000,
    )  # fmt: skip


test_of.__test__ = False  # type: ignore[attr-defined]


def scan(kv: str, context: int, peak: int, **changes: Any) -> Row:
    row = run(kv, context=context, peak_bytes=peak, estimated_bytes=0, decode_us=5000.0)
    return {**row, **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tools" / "results" / "goals.json", tmp_path)
    return tmp_path


def written(folder: Path, kernels: list[Row], runs: list[Row]) -> str:
    for name, rows in (("kernels", kernels), ("gpu", runs)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return gpu_tables.section(folder)


def lines_of(kernels: list[Row], runs: list[Row]) -> dict[str, gpu_tables.Line]:
    measured = gpu_tables.Measured(kernels, runs)
    return {line[0]: line for line in gpu_tables.goal_lines(measured, GOALS)}


def test_without_rows_there_is_no_section(folder: Path) -> None:
    assert gpu_tables.section(folder) == ""
    assert written(folder, [], []) == ""


def test_the_last_row_on_the_newest_device_counts(folder: Path) -> None:
    rows = [
        attend("f16", 8192, 99.0, device="NVIDIA Old", date="2025-01-01"),
        attend("f16", 8192, 88.0),
        attend("f16", 8192, 15.54),
        attend("f16", 8192, 77.0, kv_heads=32),  # another shape
        attend("torch flash f16", 8192, 23.0, side="torch", versions={"torch": "2.11"}),
    ]
    text = written(folder, rows, [])
    assert text.startswith("## On a GPU\n\nNVIDIA X, driver 1.2, memory read at 4,000 GB/s")
    assert "| `f16` | 3 | 15.5 (50%) |" in text
    assert "| torch flash f16 2.11 | 3 | 23.0 (50%) |" in text
    assert "| cuDNN f16 * |  | 15.7 |" in text
    assert not any(number in text for number in ("99.0", "88.0", "77.0"))
    assert "tokens/s (share" not in text and "against context" not in text


def test_tables_of_decoding_and_peaks(folder: Path) -> None:
    runs = [
        test_of("f16", 0, 128, 0, 240.0),
        test_of("f16", 0, 128, 131_072, 110.0),
        test_of("kvrt2", 0, 128, 131_072, 201.0),
        scan("kvrt2", 8192, 17_000_000_000),
        run("kvrt2", test="x", n_prompt=512, n_gen=128, depth=0, mean_tokens_per_s=1.0,
            peak_bytes=1),
    ]  # fmt: skip
    text = written(folder, [], runs)
    assert "| cache | behind 0 | behind 131,072 | peak at 131,072 |" in text
    assert "| `f16` | 240.0 (60%) | 110.0 (60%) | 20.00 GB |" in text
    assert "| `kvrt2` |  | 201.0 (60%) | 20.00 GB |" in text
    assert "| llama.cpp q8_0 * | 185 | 44.5 |  |" in text
    assert "| `kvrt2` | 5.00 ms, 17.00 GB |" in text
    assert "Attention of one layer" not in text


def test_a_missed_goal_is_said_to_be_missed(folder: Path) -> None:
    text = written(folder, [attend("f16", 8192, 16.1), attend("f8", 8192, 11.9)], [])
    assert "| attention, f16 at 8,192 | 16 us | 16.1 us | 50% | **missed** |" in text
    assert "| attention, f8 at 8,192 | 12 us | 11.9 us | 50% | reached |" in text
    assert "| attention, f8 at 32,768 | 23 us |  |  | not measured |" in text
    goals = json.loads((folder / "goals.json").read_text())
    goals["notes"]["attention, f16 at 8,192"] = "launches"
    (folder / "goals.json").write_text(json.dumps(goals))
    assert "| **missed** | launches |" in gpu_tables.section(folder)


@pytest.mark.parametrize("rate, reached", [(249.0, True), (244.0, False)])
def test_more_tokens_a_second_are_better(rate: float, reached: bool) -> None:
    line = lines_of([], [test_of("f16", 0, 128, 0, rate)])["decoding, f16 behind 0"]
    assert line == (line[0], "245 tokens/s", f"{rate:.1f} tokens/s", "60%", reached)


def test_prefills_have_goals_for_rates_and_for_times() -> None:
    runs = [
        test_of("f16", 2048, 0, 0, 21_000.0),
        test_of("kvrt2", 2048, 0, 0, 19_000.0),
        test_of("f16", 131_072, 0, 0, 131_072 / 17.5),
    ]
    lines = lines_of([], runs)
    assert lines["prefill of 2,048, f16"][2:] == ("21,000 tokens/s", "", True)
    assert lines["prefill of 2,048, kvrt2"][4] is False
    assert lines["prefill of 131,072, f16"][1:] == ("18 s", "17.50 s", "", True)


def slopes(**us_at_128k: float) -> list[Row]:
    return [
        attend(name, context, us if context > 8192 else 10.0)
        for name, us in us_at_128k.items()
        for context in (8192, 131_072)
    ]


def test_slopes_are_ordered_by_the_size_of_the_format() -> None:
    what = "us for 1,000 tokens more"
    good = lines_of(slopes(f16=130.0, f8=70.0, kvrt4=46.0, kvrt2=33.0), [])[what]
    assert good[4] is True and good[2].startswith("0.187, 0.293, ")
    assert lines_of(slopes(f16=130.0, f8=70.0, kvrt4=33.0, kvrt2=34.0), [])[what][4] is False
    assert lines_of(slopes(f16=130.0, f8=70.0), [])[what][4] is None


def test_a_packed_format_slower_than_f16_is_named() -> None:
    what = "packed formats beside f16"
    rows = [attend("f16", 8192, 10.0), attend("q4_0", 8192, 11.0), attend("kvrt2", 8192, 9.0)]
    rows += [attend("torch", 8192, 12.0, side="torch", versions={"torch": "2"})]
    assert lines_of(rows, [])[what][2:] == ("q4_0 at 8,192: 1.10", "", False)
    assert lines_of(rows[:1] + rows[2:], [])[what][2:] == ("all are", "", True)
    assert lines_of(rows[:1], [])[what][4] is None


def test_ratios_are_judged_by_the_worst_context() -> None:
    ratio = GOALS["ratios"][0]
    rows = [
        attend(ratio[key], context, us)
        for key, times in (("of", (10.0, 22.1)), ("to", (10.0, 20.0)))
        for context, us in zip((8192, 32_768), times)
    ]
    assert lines_of(rows, [])[ratio["what"]][2:] == ("1.000 to 1.105 times", "", False)
    assert lines_of([rows[0], rows[2]], [])[ratio["what"]][4] is True
    assert lines_of(rows[:2], [])[ratio["what"]][4] is None


def test_peaks_are_in_order_wherever_formats_meet() -> None:
    what = "peaks at every scanned context"
    rows = [scan("f16", 8192, 30), scan("f8", 8192, 20), scan("kvrt2", 8192, 10)]
    more = [scan("f8", 16_384, 20), scan("kvrt2", 16_384, 20)]
    assert lines_of([], rows)[what][2:] == ("at all 1", "", True)
    assert lines_of([], rows + more)[what][2:] == ("not at 16,384", "", False)
    assert lines_of([], rows[:1])[what][4] is None


@pytest.mark.parametrize("extra, held", [(0, True), (8192 * 8192, True), (8192 * 8193, False)])
def test_what_is_held_beside_grows_by_one_layer_at_most(extra: int, held: bool) -> None:
    """8 heads of 128 channels, K and V, f32: 8,192 bytes a token."""
    rows = [
        scan("f16", 8192, 16_000 + 500 + 40, estimated_bytes=500),
        scan("f16", 16_384, 16_000 + 900 + 40 + extra, estimated_bytes=900),
    ]
    assert lines_of([], rows)["peak less weights and cache"][4] is held


def test_a_million_tokens_inside_the_room() -> None:
    what = "llama-7b, kvquant2, 1,000,000"
    row = scan("kvquant2", 1_000_000, 79_900_000_000, model="synthetic:llama-7b")
    assert lines_of([], [row])[what][2:] == ("79.90 GB, 5.0 ms a token", "60%", True)
    assert lines_of([], [{**row, "peak_bytes": 80_000_000_001}])[what][4] is False
    assert lines_of([], [{**row, "context": 999_999}])[what][4] is None


@pytest.mark.parametrize("worst, reached", [(60.13, False), (60.11, True), (59.87, False)])
def test_perplexities_are_those_of_the_cpu(worst: float, reached: bool) -> None:
    about = {"model": "smollm2", "text_sha256": "ab", "context": 1024, "tokens": 8184}
    cpu = [{"kv": kv, "ppl": ppl, **about} for kv, ppl in (("f16", 54.0), ("kivi2", 60.0))]
    gpu = [{"kv": "f16", "ppl": 54.01, **about}, {"kv": "kivi2", "ppl": worst, **about}]
    gpu.append({"kv": "kvrt2", "ppl": 99.0, **about})  # of which the CPU has none
    other_text = {"kv": "f16", "ppl": 70.0, **about, "tokens": 1023}
    for more in ([], [other_text]):
        measured = gpu_tables.Measured([attend("f16", 8192, 1.0)], [], cpu, [*gpu, *more])
        *_, line = gpu_tables.goal_lines(measured, GOALS)
        change = 100 * (worst / 60 - 1)
        assert line[2] == f"{change:+.2f} % at most, of {2 - len(more)} (kivi2)"
        assert line[4] is reached
