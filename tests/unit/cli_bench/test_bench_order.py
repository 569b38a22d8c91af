"""`kvrt bench`: in which order formats run, and what of them is in memory together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import Any
from weakref import WeakSet

import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.bench.budget import needed_bytes
from kvrt.bench.case import Case
from kvrt.bench.measure import Bench, Job
from kvrt.generate import Model
from kvrt.kvstore import KVSpec, KVStore
from kvrt.models.decoder import Decoder
from kvrt.source import find_shape
from tests.helpers.bench_cli import SCAN, on_decode, printed, rows_of, table_of

FORMATS = ("f16", "kvrt2", "q8_0")  # f16 first, the others as they are written
CONTEXTS = (64, 128, 256, 512)
SPECS = {KVSpec.parse(name): name for name in FORMATS}
pytestmark = pytest.mark.usefixtures("clock")

TWO_DEPTHS = ("-p", "0", "-n", "4", "-r", "2", "-d", "0,100", "--kv", "kvrt2,f16,q8_0")


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of each case that runs from now on, the format and the tokens cached at its end."""
    seen: list[tuple[str, int]] = []

    def note(store: KVStore) -> None:
        if len(store) in (4, 104, *CONTEXTS):
            seen.append((SPECS[store.spec], len(store)))

    on_decode(monkeypatch, note)
    return seen


class Living:
    """The caches that live from now on; `seen`: their formats at each prefill and decoded token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stores: WeakSet[KVStore] = WeakSet()
        self.seen: list[list[str]] = []
        new_store, prefill = Model.new_store, Decoder.prefill

        def noted(model: Model, spec: KVSpec | None = None) -> KVStore:
            store = new_store(model, spec)
            self._stores.add(store)
            return store

        def filled(decoder: Decoder, token_ids: Any, store: Any, **rest: Any) -> Any:
            self.seen.append(self.names())
            return prefill(decoder, token_ids, store, **rest)

        monkeypatch.setattr(Model, "new_store", noted)
        monkeypatch.setattr(Decoder, "prefill", filled)
        on_decode(monkeypatch, lambda store: self.seen.append(self.names()))

    def names(self) -> list[str]:
        """Their formats now."""
        return sorted(SPECS[store.spec] for store in self._stores)


def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The formats of each group that is run from now on."""
    seen: list[list[str]] = []
    run = Bench.run

    def noted(self: Bench, jobs: Sequence[Job]) -> Iterator[Any]:
        seen.append([SPECS[job.spec] for job in jobs])
        return run(self, jobs)

    monkeypatch.setattr(Bench, "run", noted)
    return seen


def room(model: str, case: Case, fill: Any, *names: str) -> int:
    """Bytes for the weights and the caches of formats together."""
    shape = find_shape(model)
    assert shape.config is not None
    return shape.weight_bytes + sum(
        needed_bytes(shape.config, shape.geometry, KVSpec.parse(name), case, fill) for name in names
    )


# --- order ---


def test_tests_come_depth_by_depth(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = decoded(monkeypatch)
    args = [*TWO_DEPTHS, "-m", model, "-t", "1"]
    rows = rows_of(capsys, args)
    assert [(row["depth"], row["kv"]) for row in rows] == [*product([0, 100], FORMATS)]
    alone = [*product(FORMATS, [4, 104])]
    timed = [(kv, context) for context in (4, 104) for _ in range(2) for kv in FORMATS]
    assert seen == alone + timed
    table = table_of(printed(capsys, args, "md"))
    names = [*product(["tg4", "tg4 @ d100"], FORMATS)]
    assert [(cells["test"], cells["kv"]) for cells in table] == names


@pytest.mark.parametrize(
    ("command", "contexts"), [(TWO_DEPTHS, (4, 104)), (SCAN, CONTEXTS)], ids=["tests", "scan"]
)
def test_without_a_warm_up_formats_run_one_after_the_other(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...], contexts: tuple[int, ...],
) -> None:  # fmt: skip
    seen, living = decoded(monkeypatch), Living(monkeypatch)
    args = [*command, "-m", model, "-t", "1", "--no-warmup"]
    rows = table_of(printed(capsys, args, "md"))
    assert [row["kv"] for row in rows] == [kv for kv in FORMATS for _ in contexts]
    # Each context timed twice (in a scan once, and once a little earlier), then all for the peak.
    rounds = 1 if command is SCAN else 2
    times = [*(context for context in contexts for _ in range(rounds)), *contexts]
    assert seen == [*product(FORMATS, times)]
    assert {len(set(names)) for names in living.seen} == {1}


# --- what is in memory together ---


@pytest.mark.parametrize(
    "fill",
    [
        "synthetic",
        "prefill",
    ],
)
def test_no_more_caches_live_than_formats(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, fill: str
) -> None:
    living = Living(monkeypatch)
    rows_of(capsys, [*SCAN, "-m", model, "-t", "1", "--fill", fill])
    assert sorted(FORMATS) in living.seen
    assert all(len(names) == len(set(names)) for names in living.seen)


@pytest.mark.parametrize("fill", ["synthetic", "prefill"])
def test_a_peak_is_read_while_no_other_cache_lives(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, fill: str
) -> None:
    living = Living(monkeypatch)
    at_peak: list[list[str]] = []
    peak_bytes, reset_peak = CpuOps.peak_bytes, CpuOps.reset_peak

    def read(self: CpuOps) -> int:
        at_peak.append(living.names())
        return peak_bytes(self)

    def begun(self: CpuOps) -> bool:
        at_peak.append(living.names())
        return reset_peak(self)

    monkeypatch.setattr(CpuOps, "peak_bytes", read)
    monkeypatch.setattr(CpuOps, "reset_peak", begun)
    rows = rows_of(capsys, [*SCAN, "-m", model, "-t", "1", "--fill", fill])
    assert len(at_peak) >= 4 * len(rows)
    assert [names for names, _ in groupby(filter(None, at_peak))] == [[kv] for kv in FORMATS]


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize(
    ("together", "wanted"),
    [
        (FORMATS, ([[*FORMATS]], [["f16", "kvrt2"], ["q8_0"]])),
        (("f16", "kvrt2"), ([["f16", "kvrt2"], ["q8_0"]], [["f16"], ["kvrt2", "q8_0"]])),
        (("kvrt2", "q8_0"), ([["f16"], ["kvrt2", "q8_0"]], [["f16"], ["kvrt2"], ["q8_0"]])),
    ],
    ids=["all", "first-two", "last-two"],
)
@pytest.mark.parametrize(
    ("command", "case", "fill"),
    [(SCAN, Case(0, 4, 508), "synthetic"), (TWO_DEPTHS, Case(0, 4, 100), "prefill")],
    ids=["scan", "tests"],
)
def test_formats_that_have_room_together_run_together(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
    case: Case, fill: str, together: tuple[str, ...], wanted: Sequence[Any], less: int,
) -> None:  # fmt: skip
    """To the byte."""
    ran = groups(monkeypatch)
    limit = room(model, case, fill, *together) - less
    rows_of(capsys, [*command, "-m", model, "-t", "1", "--limit", str(limit)])
    assert ran == wanted[less]


@pytest.mark.parametrize("output", ["json", "md"])
@pytest.mark.parametrize(
    ("command", "case", "fill"),
    [(SCAN, Case(0, 4, 508), "synthetic"), (TWO_DEPTHS, Case(0, 4, 100), "prefill")],
    ids=["scan", "tests"],
)
def test_groups_give_the_rows_that_all_formats_give_together(
    model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
    case: Case, fill: str, output: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(CpuOps, "peak_bytes", lambda self: 123_456_789)  # of the process
    ran, living = groups(monkeypatch), Living(monkeypatch)
    limits = room(model, case, fill, *FORMATS), room(model, case, fill, "f16", "kvrt2")
    found = []
    for limit in limits:
        living.seen.clear()
        args = [*command, "-m", model, "-t", "1", "--limit", str(limit)]
        found.append(
            rows_of(capsys, args) if output == "json" else table_of(printed(capsys, args, "md"))
        )
    assert ran == [[*FORMATS], ["f16", "kvrt2"], ["q8_0"]]
    assert not [names for names in living.seen if "q8_0" in names and len(set(names)) > 1]
    together, apart = found
    lengths = "context" if command == SCAN else "test"
    by_format = output == "json" and command == SCAN  # which the rows of scripts always are
    if not by_format:  # those of a group come first
        assert [row["kv"] == "q8_0" for row in apart] == sorted(
            row["kv"] == "q8_0" for row in apart
        )
        together = sorted(together, key=lambda row: row["kv"] == "q8_0")
    for row, other in zip(together, apart, strict=True):
        assert (row["kv"], row[lengths]) == (other["kv"], other[lengths])
        for key in row.keys() - {"date", "fits_tokens", "limit_bytes"}:
            if isinstance(row[key], (str, type(None))) or key in ("remarks", "versions"):
                assert other[key] == row[key], key
            else:  # differences of a growing clock are rounded
                assert other[key] == pytest.approx(row[key], rel=1e-6, abs=1e-3), key
