"""`kvrt eval`: rows and tables, options, and every error before a weight is read."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrt import generate
from kvrt.backends import get_ops
from kvrt.cli import progress
from kvrt.cli.main import run
from tests.helpers.tiny_model import write_tiny_model

QUALITY_KEYS = {
    "kv", "ppl", "nll", "kld", "tokens", "bits_per_element", "seconds",
    "top1", "dnll", "nll_se", "dnll_se", "kld_se",
}  # fmt: skip
ATTENTION_KEYS = {
    "kv", "key_error", "score_error", "value_error", "output_error", "tokens",
    "bits_per_element", "per_layer",
}  # fmt: skip
LONG = "k=f16,v=bf16,sink=4,window=20"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, num_layers=2)
    get_ops("cpu")  # compiles the kernels where that was not done yet, and says so on stderr
    return str(folder)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """300 tokens, since this tokenizer's are bytes."""
    path = tmp_path / "text.txt"
    path.write_text("Call me Ishmael. " * 17 + "Some years.", encoding="utf-8")
    return str(path)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong is said before the model is loaded."""
    monkeypatch.setattr(generate, "load", lambda *_, **__: pytest.fail("loaded"))


def rows_of(capsys: Any, args: Sequence[str]) -> list[dict[str, Any]]:
    assert run(["eval", *args, "--json"]) == 0
    out, _ = capsys.readouterr()
    assert out.endswith("}\n") and out.count("\n") == 1
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    return rows


def error_of(capsys: Any, args: Sequence[str]) -> str:
    """The one line of a refused request."""
    assert run(["eval", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvrt: error: ") and err.count("\n") == 1, err
    return err


# --- what is measured ---


@pytest.mark.parametrize("what", ["ppl", "kld"])
def test_rows_of_quality(model: str, text: str, capsys: Any, what: str) -> None:
    args = [what, "-m", model, "--text", text, "--context", "100", "-t", "1"]
    rows = rows_of(capsys, [*args, "--kv", f"f32,{LONG}", "--kv", "k=f32,v=f16"])
    assert [row["kv"] for row in rows] == ["f32", LONG, "k=f32,v=f16"]  # as asked for
    for row in rows:
        assert set(row) == QUALITY_KEYS
        assert row["tokens"] == 3 * 99
        assert row["ppl"] > 1 and row["seconds"] > 0
    assert rows[0]["kld"] < 1e-7 and rows[1]["kld"] > 1e-7
    assert [row["bits_per_element"] for row in rows] == [32, 16, 24]


def test_a_format_named_twice_is_measured_once(model: str, text: str, capsys: Any) -> None:
    args = ["kld", "-m", model, "--text", text, "--context", "100", "--json", "--kv"]
    assert run(["eval", *args, "f16,f32,k=f16,v=f16", "--kv", "f32"]) == 0
    out, err = capsys.readouterr()
    assert [row["kv"] for row in json.loads(out)["rows"]] == ["f16", "f32"]
    assert "kvrt: cache format f16 is named twice (k=f16,v=f16 is f16); it is measured" in err
    assert "kvrt: cache format f32 is named twice; it is measured once\n" in err


@pytest.mark.parametrize(
    ("command", "others", "pairs"),
    [
        (["ppl", "--context", "100"], ["exact"], [("ppl", "ppl", 3), ("kld", "KLD", 4)]),
        (["kld", "--context", "100"], [], [("kld", "KLD", 5), ("top1", "top-1 %", 1)]),
        (["attn", "--tokens", "130"], [], [("bits_per_element", "bits", 2)]),
    ],
)
def test_every_form_holds_the_same_numbers(
    model: str,
    text: str,
    capsys: Any,
    command: list[str],
    others: list[str],
    pairs: list[tuple[str, str, int]],
) -> None:
    def printed(output: str) -> str:
        args = ["-m", model, "--text", text, "--kv", f"f32,{LONG}", "-t", "1", "-o", output]
        assert run(["eval", *command, *args]) == 0
        out: str = capsys.readouterr().out
        return out

    rows = json.loads(printed("json"))
    assert [row["kv"] for row in rows] == [*others, "f32", LONG]
    lines = [json.loads(line) for line in printed("jsonl").splitlines()]
    cells = list(csv.DictReader(io.StringIO(printed("csv"))))
    for row, line, line_cells in zip(rows, lines, cells, strict=True):
        assert list(row) == list(line) == list(line_cells)
        for key in row.keys() - {"seconds"}:
            assert line[key] == row[key]
            text_of = "" if row[key] is None else row[key]
            if not isinstance(text_of, str):
                text_of = json.dumps(text_of)
            assert line_cells[key] == text_of
    heading, empty, head, rule, *shown = printed("md").splitlines()
    assert " tokens" in heading and empty == "" and set(rule) == set("|-: ")
    heads = [name.strip() for name in head.strip("|").split("|")]
    for row, line_text in zip(rows, shown, strict=True):
        by_head = dict(zip(heads, (cell.strip() for cell in line_text.strip("|").split("|"))))
        for key, name, digits in pairs:
            shown_number = by_head[name].partition(" ± ")[0]
            assert shown_number == ("" if row[key] is None else f"{row[key]:.{digits}f}")


def test_the_exact_model_is_beside_the_rows(model: str, text: str, capsys: Any) -> None:
    args = ["ppl", "-m", model, "--text", text, "--context", "100", "--kv", "f32", "--json"]
    assert run(["eval", *args]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["exact"]["kv"] == "exact" and set(data["exact"]) == QUALITY_KEYS
    assert data["device"].startswith("CPU, ")
    assert data["exact"]["nll"] == pytest.approx(data["rows"][0]["nll"], abs=1e-5)


@pytest.mark.parametrize(("limit", "tokens"), [("100", 99), ("299", 198), ("9999", 297)])
def test_max_tokens(model: str, text: str, capsys: Any, limit: str, tokens: int) -> None:
    args = ["ppl", "-m", model, "--text", text, "--context", "100", "--max-tokens", limit]
    (row,) = rows_of(capsys, [*args, "--kv", "f16"])
    assert row["tokens"] == tokens


@pytest.mark.parametrize("what", ["ppl", "kld"])
def test_rows_behind_a_prompt(model: str, text: str, capsys: Any, what: str) -> None:
    args = [what, "-m", model, "--text", text, "--context", "100", "--prompt", "60", "-t", "1"]
    rows = rows_of(capsys, [*args, "--kv", f"f32,{LONG}"])
    for row in rows:
        assert set(row) == {*QUALITY_KEYS, "prompt_tokens"}
        assert (row["tokens"], row["prompt_tokens"]) == (3 * 40, 60)
    assert rows[0]["kld"] < 1e-7 < rows[1]["kld"]
    assert run(["eval", *args, "-o", "csv"]) == 0
    cells = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["prompt_tokens"] for row in cells} == {"60"}
    assert run(["eval", *args]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.startswith("3 windows of 100 tokens, 120 tokens scored behind prompts of 60, on")


def test_several_texts_are_cut_each_by_itself(
    model: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The sea. " * 20)  # 180 tokens
    args = ["ppl", "-m", model, "--kv", "f16", "--context", "100"]
    both = rows_of(capsys, [*args, "--text", text, "--text", str(other)])[0]
    alone = [rows_of(capsys, [*args, "--text", path])[0] for path in (text, str(other))]
    assert [row["tokens"] for row in (both, *alone)] == [4 * 99, 3 * 99, 99]
    mean = (3 * alone[0]["nll"] + alone[1]["nll"]) / 4
    assert both["nll"] == pytest.approx(mean, abs=1e-6)
    twice = rows_of(capsys, [*args, "--text", str(other), "--text", str(other)])[0]
    assert twice["tokens"] == 2 * 99 and twice["nll"] == pytest.approx(alone[1]["nll"], abs=1e-6)


def test_rows_of_attention(model: str, text: str, capsys: Any) -> None:
    args = ["attn", "-m", model, "--text", text, "--tokens", "200", "--kv", "f32", "--kv", LONG]
    exact, row = rows_of(capsys, args)
    assert set(row) == ATTENTION_KEYS
    assert (row["kv"], row["tokens"], row["bits_per_element"]) == (LONG, 192, 16)
    for name in ("key_error", "score_error", "value_error", "output_error"):
        assert exact[name] == 0 < row[name] < 0.02
        layers = [layer[name] for layer in row["per_layer"]]
        assert len(layers) == 2 and row[name] == pytest.approx(sum(layers) / 2)
    assert "heads" not in row["per_layer"][0]
    _, row = rows_of(capsys, [*args, "--details"])
    for layer in row["per_layer"]:
        assert [head["head"] for head in layer["heads"]] == [0, 1, 2, 3]
        keys = [head["key_error"] for head in layer["heads"]]
        assert layer["key_error"] == pytest.approx(sum(keys) / 4)


def test_tables_are_for_people(model: str, text: str, capsys: Any) -> None:
    common = ["-m", model, "--text", text, "--kv", "f32", "--kv", LONG]
    assert run(["eval", "ppl", *common, "--context", "100"]) == 0
    out, err = capsys.readouterr()
    heading, head, exact, *rows = out.splitlines()
    assert heading.startswith("3 windows of 100 tokens, 297 tokens scored, on CPU, ")
    assert head.split() == ["cache", "bits", "ppl", "dNLL", "KLD", "seconds"]
    assert exact.split()[0] == "exact"
    assert [row.split()[0] for row in rows] == ["f32", LONG]
    assert rows[0].split()[1] == "32.00" and " ± " in rows[1]
    assert len({len(line) for line in (head, *rows)}) == 1  # columns end together
    assert err == "kvrt: measure (900 tokens)\n"

    assert run(["eval", "kld", *common, "--context", "200"]) == 0
    out, _ = capsys.readouterr()
    heading, head, *rows = out.splitlines()
    assert heading.startswith("1 window of 200 tokens, 199 tokens scored, on CPU, ")
    assert head.split() == ["cache", "bits", "KLD", "top-1", "%", "dNLL", "seconds"]
    assert rows[0].split()[2:4] == ["0.00000", "100.0"]

    assert run(["eval", "attn", *common, "--tokens", "130"]) == 0
    out, _ = capsys.readouterr()
    heading, head, *rows = out.splitlines()
    assert heading.startswith("128 tokens, sinks and windows off, on CPU, ")
    assert " ".join(head.split()) == "cache bits keys % scores % values % output %"
    assert rows[0].split() == ["f32", "32.00", "0.00", "0.00", "0.00", "0.00"]


def test_a_window_in_which_nothing_is_packed_is_said(model: str, text: str, capsys: Any) -> None:
    args = ["ppl", "-m", model, "--text", text, "--kv", "f16", "--kv", LONG, "--json"]
    assert run(["eval", *args, "--context", "89"]) == 0
    out, err = capsys.readouterr()
    assert f"kvrt: {LONG} packs nothing in windows of 89 tokens, it takes 90\n" in err
    assert "kvrt: f16 packs" not in err and len(json.loads(out)["rows"]) == 2
    assert run(["eval", *args, "--context", "90"]) == 0
    assert "packs nothing" not in capsys.readouterr().err


def test_progress_is_shown_in_tokens(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.console_progress(progress.tokens) as show:
        show("measure", 0, 12_288)
    assert capsys.readouterr().err == "kvrt: measure (12,288 tokens)\n"


def test_help(capsys: Any) -> None:
    for args in (["eval"], ["eval", "--help"], ["eval", "-h"]):
        assert run(args) == 0
        out, err = capsys.readouterr()
        assert err == "" and all(f"\n  {name} " in out for name in ("ppl", "kld", "attn"))
    for name in ("ppl", "kld", "attn"):
        assert run(["eval", name, "--help"]) == 0
        out = capsys.readouterr().out
        for word in ("--text FILE", "--kv SPEC", "--json", "--device", "-t, --threads", "--debug"):
            assert word in out
        assert "[default: f16,kvrt4]" in " ".join(out.split())
        assert "-o, --output [table|md|csv|json|jsonl]" in out


# --- what is refused ---


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("what", ["ppl", "kld", "attn"])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Missing option '--text'"),
        (["--text", "/nowhere/text"], "--text: cannot read /nowhere/text"),
        (["--text", ""], "--text: the path is empty"),
        (["--text", "EMPTY"], "EMPTY is empty"),
        (["--text", "BLANK"], "BLANK is empty"),
        (["--text", "TEXT", "--text", "EMPTY"], "EMPTY is empty"),
        (["--text", "TEXT", "--kv", "f16", "--kv", "f17"], "'f17'"),
        (["--text", "TEXT", "--kv", "k=f16"], "--kv: "),
        (["--text", "TEXT", "--kv", "f16,f17"], "--kv: unknown cache format 'f17'"),
        (["--text", "TEXT", "--kv", "f16,"], "--kv: unknown cache format ''"),
        (["--text", "TEXT", "-ctk", "q8_0,q5_0"], "--kv-k: cache format 'k=q5_0'"),
        (["--text", "TEXT", "--kv", "f16,layers[2]=f8"], "layers[2] goes beyond this model"),
        (["--text", "TEXT", "-o", "xml"], "'--output'"),
        (["--text", "TEXT", "-o", "csv", "--json"], "--json and -o exclude each other"),
        (["--text", "TEXT", "-m", "/nowhere/model"], "/nowhere/model"),
        (
            ["--text", "TEXT", "-m", "synthetic:smollm2-135m"],
            "-m synthetic:smollm2-135m: random weights have no quality to measure",
        ),
        (["--text", "TEXT", "-m", "synthetic:smollm3"], "smollm3"),
        (["--text", "TEXT", "-m", "synthetic:opt-175b"], "opt-175b"),
        (["--text", "TEXT", "-t", "0"], "'--threads'"),
        (["--text", "TEXT", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_requests(
    model: str, text: str, capsys: Any, what: str, args: list[str], said: str
) -> None:
    folder = Path(text).parent
    files = {"EMPTY": "", "BLANK": " \n\n"}
    for name, content in files.items():
        (folder / name).write_text(content)
    args = [str(folder / arg) if arg in files else text if arg == "TEXT" else arg for arg in args]
    assert said in error_of(capsys, [what, "-m", model, *args])


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ppl", "--context", "1"], "'--context'"),
        (["kld", "--context", "x"], "'--context'"),
        (
            ["ppl", "--context", "257"],
            "--context: 257 tokens are beyond this model's context of 256",
        ),
        (["ppl", "--max-tokens", "1"], "'--max-tokens'"),
        (["ppl", "--context", "100", "--max-tokens", "99"], "--max-tokens: 99 tokens are less"),
        (["ppl", "--prompt", "0"], "'--prompt'"),
        (
            ["kld", "--context", "100", "--prompt", "100"],
            "--prompt: a prompt of 100 tokens leaves none to score in a window of 100",
        ),
        (["attn", "--prompt", "10"], "--prompt"),
        (["attn", "--tokens", "63"], "'--tokens'"),
        (
            ["attn", "--tokens", "330"],
            "--tokens: 320 tokens are beyond this model's context of 256",
        ),
        (["attn", "--context", "100"], "--context"),
        (["ppl", "--tokens", "100"], "--tokens"),
        (["ppl", "--details"], "--details"),
    ],
)
def test_wrong_counts(model: str, text: str, capsys: Any, args: list[str], said: str) -> None:
    assert said in error_of(capsys, [*args, "-m", model, "--text", text])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ppl", "--context", "100"], "99 of 100 tokens (--context takes less)"),
        (["kld", "--context", "200"], "99 of 200 tokens (--context takes less)"),
        (["attn", "--tokens", "150"], "99 of 128 tokens (--tokens takes less)"),
    ],
)
def test_a_text_shorter_than_a_window_is_refused_by_name(
    model: str, text: str, tmp_path: Path, capsys: Any, args: list[str], said: str
) -> None:
    """Any of the texts: one that is left out without a word would be missed in the numbers."""
    short = tmp_path / "short.txt"
    short.write_text("x" * 99)
    error = error_of(capsys, [*args, "-m", model, "--text", text, "--text", str(short)])
    assert "short.txt is shorter than one window" in error and said in error


def test_a_text_that_is_not_utf8_fails(model: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1") * 100)
    assert run(["eval", "ppl", "-m", model, "--text", str(path)]) == 1
    assert "not valid UTF-8: byte 0xe9 at position 3" in capsys.readouterr().err


def test_control_tokens_in_a_text_are_text(model: str, tmp_path: Path, capsys: Any) -> None:
    """11 bytes are 11 tokens of this tokenizer, one control token is one."""
    path = tmp_path / "control.txt"
    path.write_text("<|im_end|>\n" * 10)  # 109 bytes without the last newline
    args = ["ppl", "-m", model, "--text", str(path), "--kv", "f16", "--context"]
    assert rows_of(capsys, [*args, "109"])[0]["tokens"] == 108
    assert "109 of 110 tokens" in error_of(capsys, [*args, "110"])
