"""`kvrt eval needle` and `kvretrieval`: rows, tables, pictures, and every error before a load."""

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrt import generate
from kvrt.backends import get_ops
from kvrt.cli.main import run
from kvrt.evaluate_retrieval import Recall
from tests.helpers.tiny_model import write_tiny_model

KEYS = list(Recall.__dataclass_fields__)
LOSSY = "k=f16,v=bf16,sink=4,window=20"
GRID = ["--lengths", "320,384", "--depths", "2", "--samples", "2", "-t", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, num_layers=2, max_context=512)
    get_ops("cpu")  # compiles the kernels where that was not done yet, and says so on stderr
    return str(folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The sea was calm. Nobody spoke of it. " * 30, encoding="utf-8")
    return str(path)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong is said before the model is loaded."""
    monkeypatch.setattr(generate, "load", lambda *_, **__: pytest.fail("loaded"))


def printed(capsys: Any, args: Sequence[str]) -> str:
    assert run(["eval", *args]) == 0
    out: str = capsys.readouterr().out
    return out


@pytest.mark.parametrize(
    "what",
    [
        ["needle"],
        ["needle", "--text", "TEXT"],
        ["kvretrieval"],
        ["kvretrieval", "--ask", "several"],
    ],
)
def test_rows(model: str, text: str, capsys: Any, what: list[str]) -> None:
    what = [text if word == "TEXT" else word for word in what]
    args = [*what, "-m", model, *GRID, "--kv", f"f32,{LOSSY}", "--question", "both", "--json"]
    data = json.loads(printed(capsys, args))
    rows = data["rows"]
    assert data["device"].startswith("CPU, ") and data["seed"] == 0
    assert [
        (row["kv"], row["question"], row["length"], row["depth"]) for row in rows
    ] == [
        (kv, question, length, depth)
        for kv in ("f32", LOSSY) for question in ("inside", "after")
        for length in (320, 384) for depth in (0, 100)
    ]  # fmt: skip
    for row in rows:
        assert list(row) == KEYS
        assert (row["task"], row["samples"]) == (what[0], 2)
        assert 0 <= row["exact_match"] <= 100 and row["exact_match_se"] >= 0
        assert row["seconds"] > 0
        assert row["bits_per_element"] == (32 if row["kv"] == "f32" else 16)
    # Where nothing is packed, both forms of a question leave the same cache behind.
    inside, after = rows[:4], rows[4:8]
    for one, two in zip(inside, after, strict=True):
        assert one["prompt_tokens"] == two["prompt_tokens"]
        assert one["cache_bytes"] == two["cache_bytes"]


def test_one_key_and_several_fill_the_same_rows(model: str, capsys: Any) -> None:
    args = ["kvretrieval", "-m", model, *GRID, "--kv", "f16", "-o", "json", "--ask"]
    one, several = (json.loads(printed(capsys, [*args, ask])) for ask in ("one", "several"))
    assert [row["depth"] for row in one] == [row["depth"] for row in several]
    assert {row["question"] for row in one} == {"inside"}


def test_every_form_holds_the_same_rows(model: str, capsys: Any) -> None:
    args = ["needle", "-m", model, *GRID, "--kv", f"f16,{LOSSY}", "-s", "3", "-o"]
    rows = json.loads(printed(capsys, [*args, "json"]))
    lines = [json.loads(line) for line in printed(capsys, [*args, "jsonl"]).splitlines()]
    cells = list(csv.DictReader(io.StringIO(printed(capsys, [*args, "csv"]))))
    for row, line, line_cells in zip(rows, lines, cells, strict=True):
        for key in row.keys() - {"seconds"}:
            assert line[key] == row[key]
            assert line_cells[key] in (row[key], json.dumps(row[key]))
    heading, _, head, rule, *shown = printed(capsys, [*args, "md"]).splitlines()
    assert heading.startswith("needle with ") and "2 at each length and depth, seed 3" in heading
    assert set(rule) == set("|-: ") and "exact %" in head and len(shown) == len(rows) == 8
    for row, line_text in zip(rows, shown, strict=True):
        values = [cell.strip() for cell in line_text.strip("|").split("|")]
        assert values[:4] == [row["kv"], "inside", str(row["length"]), f"{row['depth']:.0f}"]
        assert values[4] == f"{row['exact_match']:.0f} ± {row['exact_match_se']:.0f}"


def test_tables_are_for_people(model: str, capsys: Any) -> None:
    args = ["kvretrieval", "-m", model, *GRID, "--kv", f"f32,{LOSSY}", "--question"]
    heading, empty, *tables = printed(capsys, [*args, "both"]).splitlines()
    assert heading.startswith("kvretrieval with ") and " on CPU, " in heading and empty == ""
    names = [line for line in tables if "question" in line]
    assert [re.sub(r"  \d+ ± \d+ %, ", " ", name) for name in names] == [
        f"{kv} question {form}" for kv in ("f32", LOSSY) for form in ("inside", "after")
    ]
    assert tables[1].split() == ["depth", "320", "384", "mean"]
    assert [row.split()[0] for row in tables[2:5]] == ["0", "100", "mean"]
    assert printed(capsys, [*args, "after"]).count("question after\n") == 2


def test_a_picture(model: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "map.svg"
    args = ["needle", "-m", model, *GRID, "--kv", "f32", "--plot", str(path), "-o", "json"]
    assert run(["eval", *args]) == 0
    out, err = capsys.readouterr()
    assert f"kvrt: drawn into {path}\n" in err and len(json.loads(out)) == 4
    assert "exact answers in %" in path.read_text()


def test_help(capsys: Any) -> None:
    out = printed(capsys, [])
    assert all(f"\n  {name} " in out for name in ("needle", "kvretrieval"))
    for name in ("needle", "kvretrieval"):
        out = " ".join(printed(capsys, [name, "--help"]).split())
        for word in ("--lengths", "--depths", "--samples", "--question [inside|after|both]",
                     "--plot FILE", "--kv SPEC", "--json", "-s, --seed"):  # fmt: skip
            assert word in out
        assert ("--text FILE" in out) == (name == "needle")
        assert ("--ask [one|several]" in out) == (name == "kvretrieval")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("what", ["needle", "kvretrieval"])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lengths", "1k"], "--lengths: 1,024 tokens are beyond this model's context of 512"),
        (["--lengths", "100"], "--lengths: expected 128 to "),
        (["--lengths", "x"], "--lengths: 'x' is neither"),
        (["--depths", "0"], "'--depths'"),
        (["--samples", "0"], "'--samples'"),
        (["--seed", "-1"], "'--seed'"),
        (["--question", "before"], "'--question'"),
        (["--plot", "map.gif"], "--plot map.gif: expected a name that ends in .png or .svg"),
        (["--plot", "/nowhere/map.png"], "there is no folder /nowhere"),
        (["--kv", "f17"], "--kv: unknown cache format 'f17'"),
        (["-m", "synthetic:smollm2-135m"], "random weights have no quality to measure"),
        (["-o", "csv", "--json"], "--json and -o exclude each other"),
    ],
)
def test_wrong_requests(model: str, capsys: Any, what: str, args: list[str], said: str) -> None:
    args = ["eval", what, "-m", model, *args]
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvrt: error: ") and err.count("\n") == 1, err
    assert said in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["needle", "--text", "TEXT", "--lengths", "512"], "the text has about 18 tokens, too few"),
        (["needle", "--lengths", "128"], "a length of 128 tokens is too short"),
    ],
)
def test_what_only_the_tokenizer_tells(
    model: str, tmp_path: Path, capsys: Any, args: list[str], said: str
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("The sea was calm.")
    args = [str(short) if word == "TEXT" else word for word in args]
    assert run(["eval", *args, "-m", model]) == 2
    assert said in capsys.readouterr().err
