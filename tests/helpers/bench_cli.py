"""The command line of `kvrt bench`, run inside a test, and its output taken apart."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvrt.cli.main import run
from kvrt.kvstore import KVStore
from kvrt.models.decoder import Decoder

FORMS = ("md", "csv", "json", "jsonl", "table", "object")
"""Of -o, and --json."""

TESTS = ("-p", "64", "-n", "4", "-pg", "32,2", "-d", "0,100", "-r", "3", "--kv", "f16,kvrt2")
SCAN = (
    "--scan", "64:512", "-n", "4", "-r", "2", "--kv", "kvrt2,f16,q8_0",
    "--limit", "1GB",  # what is free differs between runs
)  # fmt: skip


def form(output: str) -> list[str]:
    """The options for one of FORMS."""
    return ["--json"] if output == "object" else ["-o", output]


def printed(capsys: Any, args: Sequence[str], output: str, code: int = 0) -> str:
    """What a run prints on stdout in one of FORMS."""
    got = run(["bench", *args, *form(output)])
    out, err = capsys.readouterr()
    assert got == code, f"exit code {got}: {err}"
    return str(out)


def rows_of(capsys: Any, args: Sequence[str], code: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(printed(capsys, args, "json", code))
    return rows


def parsed(output: str, text: str) -> list[dict[str, Any]]:
    """The rows of a form for scripts; the cells of CSV stay texts."""
    if output == "csv":
        return list(csv.DictReader(io.StringIO(text)))
    if output == "jsonl":
        return [json.loads(line) for line in text.splitlines()]
    data = json.loads(text)
    return list(data["rows"] if output == "object" else data)


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """The markdown tables of a text: their rows, by the heads of the columns."""
    tables = []
    for part in text.removesuffix("\n").split("\n\n"):
        if part.startswith("|"):
            lines = part.splitlines()
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            assert set(lines[1]) == set("|-: ")
            tables.append([dict(zip(cells[0], row, strict=True)) for row in cells[2:]])
    return tables


def table_of(text: str) -> list[dict[str, str]]:
    """The rows of the first table."""
    return tables_of(text)[0]


def without_notes(text: str) -> str:
    """What `-oe` wrote among the lines for people."""
    return re.sub(r"kvrt: .*\n", "", text)


def error_of(capsys: Any, args: Sequence[str]) -> str:
    """The one line of a refused request."""
    code = run(["bench", *args])
    out, err = capsys.readouterr()
    assert code == 2, f"exit code {code}: {err}"
    assert out == "" and err.startswith("kvrt: error: ") and err.count("\n") == 1, err
    return str(err)


def on_decode(monkeypatch: pytest.MonkeyPatch, hook: Callable[[KVStore], None]) -> None:
    """Call something after each decoded token, which is in the store then."""
    decode = Decoder.decode

    def hooked(self: Decoder, token_id: int, store: Any) -> Any:
        out = decode(self, token_id, store)
        hook(store)
        return out

    monkeypatch.setattr(Decoder, "decode", hooked)
