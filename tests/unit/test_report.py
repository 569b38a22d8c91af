"""The reporter: the same rows in every form, whole after an error, exact to the last digit."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvrt.cli.report import OBJECT, OUTPUTS, Column, Report, make_report, output_options
from kvrt.errors import StorageError, UsageError

COLUMNS = (
    Column("test", "test", least=6),
    Column("kv", "cache", least=5, left=True),
    Column(("mean", "std"), "t/s", lambda mean, std: f"{mean:.1f} ± {std:.1f}", least=10),
    Column("peak", "peak", "{:,}".format),
)
ROWS: Sequence[Mapping[str, Any]] = (
    {"test": "pp512", "kv": "f16", "mean": 0.1 + 0.2, "std": 1e-17, "peak": 123456789012345678,
     "samples": [1.0, 1 / 3], "warm": True},
    {"test": "tg128 @ d4096", "kv": "k=q8_0,v=q4_0", "mean": 50.25, "std": 2.0, "peak": None,
     "samples": [], "warm": False},
)  # fmt: skip


def written(kind: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> str:
    pieces: list[str] = []
    with make_report(kind, COLUMNS, pieces.append) as report:
        for row in rows:
            report.row(row)
    report.close()  # once is enough
    return "".join(pieces)


def numbers(kind: str) -> list[dict[str, Any]]:
    """The rows as a script reads them."""
    text = written(kind)
    if kind == "csv":
        table = list(csv.reader(io.StringIO(text)))
        return [dict(zip(table[0], map(cell, line))) for line in table[1:]]
    if kind == "jsonl":
        return [json.loads(line) for line in text.splitlines()]
    data = json.loads(text)
    found: list[dict[str, Any]] = data["rows"] if kind == OBJECT else data
    return found


def cell(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", OBJECT])
def test_all_forms_hold_the_same_fields_and_numbers(kind: str) -> None:
    found = numbers(kind)
    assert found == list(ROWS)
    assert [list(row) for row in found] == [list(row) for row in ROWS]  # in the rows' order
    assert found[0]["warm"] is True  # and not 1


def test_a_table_is_aligned() -> None:
    assert written("table") == (
        "test           cache                 t/s                     peak\n"
        "pp512          f16             0.3 ± 0.0  123,456,789,012,345,678\n"
        "tg128 @ d4096  k=q8_0,v=q4_0  50.2 ± 2.0\n"
    )


def test_markdown_reads_well_raw() -> None:
    rows = [{**ROWS[0], "kv": "a|b\nc", "peak": 7}, {**ROWS[1], "test": "tg8"}]
    assert written("md", rows) == (
        "| test   | cache |        t/s | peak |\n"
        "| ------ | ----- | ---------: | ---: |\n"
        "| pp512  | a\\|b c |  0.3 ± 0.0 |    7 |\n"
        "| tg8    | k=q8_0,v=q4_0 | 50.2 ± 2.0 |      |\n"
    )


def test_a_column_of_several_fields_is_empty_without_the_first() -> None:
    column = Column(("mean", "std"), "t/s", lambda mean, std: f"{mean} ± {std}")
    assert column.cell({"mean": None, "std": 1}) == column.cell({"std": 1}) == ""
    assert column.cell({"mean": 1, "std": None}) == column.cell({"mean": 1}) == "1 ± None"
    assert column.cell({"mean": 0, "std": 0}) == "0 ± 0"


@pytest.mark.parametrize(
    ("kind", "after"),
    [("md", "3 rows\n\n"), ("table", "3 rows\n"), ("csv", ""), ("json", ""), ("jsonl", ""),
     (OBJECT, "")],
)  # fmt: skip
def test_headings_are_for_people(kind: str, after: str) -> None:
    pieces: list[str] = []
    make_report(kind, COLUMNS, pieces.append).heading("3 rows")
    assert "".join(pieces) == after


@pytest.mark.parametrize(
    ("kind", "first"), [("md", 3), ("csv", 2), ("json", 2), ("jsonl", 1), ("table", 0), (OBJECT, 0)]
)
def test_rows_stream(kind: str, first: int) -> None:
    """A row that is done is written at once, where the form allows it."""
    pieces: list[str] = []
    report = make_report(kind, COLUMNS, pieces.append)
    report.row(ROWS[0])
    assert "".join(pieces).count("\n") == first
    assert len(pieces) <= 1


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("kind", [*OUTPUTS, OBJECT])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_written_is_whole_after_an_interrupt(
    kind: str, count: int, error: type[BaseException]
) -> None:
    pieces: list[str] = []
    with pytest.raises(error), make_report(kind, COLUMNS, pieces.append) as report:
        for row in ROWS[:count]:
            report.row(row)
        raise error
    text = "".join(pieces)
    assert text == written(kind, ROWS[:count])
    if kind in ("json", OBJECT):
        data = json.loads(text)
        assert len(data["rows"] if kind == OBJECT else data) == count
    assert text == "" or text.endswith("\n")


@pytest.mark.parametrize("error", [BrokenPipeError(), StorageError("no space")])
def test_nothing_follows_what_could_not_be_written(error: Exception) -> None:
    calls = []

    def fail(text: str) -> None:
        calls.append(text)
        raise error

    with pytest.raises(type(error)) as caught, make_report("json", COLUMNS, fail) as report:
        report.row(ROWS[0])
    assert caught.value is error and len(calls) == 1


@pytest.mark.parametrize("kind", ["json", "jsonl", OBJECT, "csv"])
def test_no_number_that_json_lacks(kind: str) -> None:
    bad = {"a": math.nan, "b": [math.inf, 1.0, {"c": -math.inf}], "d": (math.nan,)}
    text = written(kind, [bad])
    assert "NaN" not in text and "nan" not in text and "inf" not in text.lower()
    if kind == "csv":
        assert text.splitlines()[1] == ',"[null, 1.0, {""c"": null}]",[null]'
    if kind == "jsonl":
        assert json.loads(text) == {"a": None, "b": [None, 1.0, {"c": None}], "d": [None]}


def test_csv_quotes() -> None:
    row = {"kv": "k=f16,v=f16", "say": 'a "b"', "lines": "a\nb", "empty": None, "text": ""}
    text = written("csv", [row, {"kv": "f16"}])
    assert text == 'kv,say,lines,empty,text\n"k=f16,v=f16","a ""b""","a\nb",,\nf16,,,,\n'
    with pytest.raises(KeyError, match="late"):
        written("csv", [{"a": 1}, {"a": 1, "late": 2}])


def test_the_object_takes_facts_beside_its_rows() -> None:
    pieces: list[str] = []
    with make_report(OBJECT, (), pieces.append) as report:
        report.attach(exact={"ppl": 2.5})
        report.row({"a": 1})
        assert not pieces
    assert "".join(pieces) == '{"rows": [{"a": 1}], "exact": {"ppl": 2.5}}\n'


def test_a_value_that_json_lacks_is_a_programmers_error() -> None:
    for kind in ("csv", "json", "jsonl"):
        with pytest.raises(TypeError):
            written(kind, [{"a": object()}])


def test_an_unknown_kind() -> None:
    with pytest.raises(KeyError):
        make_report("xml", COLUMNS, print)
    with pytest.raises(TypeError):
        Report(COLUMNS, print)  # type: ignore[abstract]


@pytest.fixture
def command() -> Callable[..., Any]:
    @click.command()
    @output_options("md")
    def show(output: str) -> None:
        click.echo(output)

    return lambda *args: CliRunner().invoke(show, args)


def test_the_options(command: Callable[..., Any]) -> None:
    assert command().output == "md\n"
    for output in OUTPUTS:
        assert command("-o", output).output == f"{output}\n"
        assert command(f"--output={output}").output == f"{output}\n"
    assert command("--json").output == f"{OBJECT}\n"
    assert "[default: md]" in " ".join(command("--help").output.split())


@pytest.mark.parametrize("output", ["csv", "json"])
def test_two_forms_exclude_each_other(command: Callable[..., Any], output: str) -> None:
    error = command("--json", "-o", output).exception
    assert isinstance(error, UsageError) and "--json and -o" in str(error)


def test_an_unknown_form_is_refused(command: Callable[..., Any]) -> None:
    for output in ("xml", "", OBJECT):
        assert command("-o", output).exit_code == 2
