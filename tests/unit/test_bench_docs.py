"""docs/bench.md lists the fields of the rows, all of them, and llama-bench's names of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvrt.backends import get_ops
from kvrt.cli.main import run
from tests.helpers.tiny_model import write_tiny_model

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")

# Of a row of `llama-bench -o json`; cpu_mask and the like have nothing beside them here.
LLAMA_BENCH = {
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
    "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k",
    "type_v", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ts", "stddev_ts", "samples_ns",
    "samples_ts",
}  # fmt: skip
TESTS_ALONE = {
    "test", "n_prompt", "n_gen", "depth", "mean_tokens_per_s", "std_tokens_per_s", "samples",
    "samples_s",
}  # fmt: skip


def table(name: str) -> list[list[str]]:
    """The cells of each row of a marked table."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", DOCS, re.DOTALL)
    assert found is not None
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64)
    get_ops("cpu")
    return str(folder)


def fields(model: str, capsys: Any, *args: str) -> set[str]:
    assert (
        run(["bench", "-m", model, "--kv", "f16", "-r", "1", "-t", "1", "-o", "json", *args]) == 0
    )
    row, *_ = json.loads(capsys.readouterr()[0])
    return set(row)


def test_every_field_of_a_test_is_described(model: str, capsys: Any) -> None:
    described = [names(row[0])[0] for row in table("columns")]
    assert len(described) == len(set(described))
    assert set(described) == fields(model, capsys, "-p", "4", "-n", "0")


def test_every_field_of_a_scan_is_described(model: str, capsys: Any) -> None:
    shared = {names(row[0])[0] for row in table("columns")} - TESTS_ALONE
    own = [names(row[0])[0] for row in table("scan")]
    assert shared | set(own) == fields(model, capsys, "--scan", "64", "-n", "2")


def test_the_other_names_are_llama_bench_s() -> None:
    theirs = [name for row in table("columns") for name in names(row[1])]
    assert set(theirs) - {"test"} == LLAMA_BENCH
