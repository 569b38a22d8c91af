"""The pictures of a scan: what their axes say, the file, and the chart in a terminal."""

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrt.bench import axes
from kvrt.bench.canvas import Canvas
from kvrt.bench.fit import fit_line
from kvrt.bench.plot import Series, check_plot, measured, write_plot
from kvrt.bench.term_plot import draw
from kvrt.errors import StorageError, UsageError

LONG = "k=int4:channel:g64,v=int4:token:g64,sink=4,window=128,layers[0-1]=f16,$x_y$"


def series(name: str, per_token: float, contexts: list[int], fitted: bool = True) -> Series:
    """A format of so many bytes a token."""
    times: list[float | None] = [20_000.0 + per_token * context / 16_000 for context in contexts]
    line = fit_line(contexts, [time for time in times if time is not None]) if fitted else None
    return Series(
        name,
        contexts,
        [per_token * context for context in contexts],
        [3e8 + per_token * context for context in contexts],
        times,
        line,
    )


CONTEXTS = [512, 1024, 2048, 4096, 8192]
SIX = [
    series(name, size, CONTEXTS)
    for name, size in [
        ("f16", 23040), ("q8_0", 12240), ("q4_0", 6480), ("kivi2", 4400), ("kvrt4", 6100),
        ("kvrt2", 3300),
    ]
]  # fmt: skip
CASES = {
    "six": SIX,
    "none": [],
    "one point": [series("f16", 23040, [4096]), series("kvrt2", 3300, [4096])],
    "many": [series(f"kvrt{i}" * (1 + 9 * (i % 2)), 1000 * (i + 1), [1 << p for p in range(20)])
             for i in range(12)],
    "empty context": [series("f16", 23040, [0, 512, 1024], fitted=False)],
    "holes": [
        Series("f16", [512, 1024, 2048], [1e7, 2e7, 4e7], [None, 2e9, None], [None] * 3, None),
        Series("q8_0", [512, 1024], [0.0, 2e7], [None, None], [2e4, math.nan], None),
        Series("q4_0", [], [], [], [], None),
    ],
    "no time": [Series("f16", [512], [1e7], [None], [None], None)],
    "equal": [series("f16", 0, CONTEXTS), series("f16", 0, CONTEXTS)],
    "names": [series(LONG, 23040, CONTEXTS), series("日本\n\x1b[31m", 3300, CONTEXTS)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("context", "word"),
    [(0, "0"), (512, "512"), (1000, "1000"), (1024, "1k"), (1536, "1536"), (131072, "128k"),
     (1 << 20, "1M")],
)  # fmt: skip
def test_context_word(context: int, word: str) -> None:
    assert axes.context_word(context) == word


def test_context_ticks_are_powers_of_two_with_the_last_among_them() -> None:
    assert axes.context_ticks(CONTEXTS, 7) == CONTEXTS
    assert axes.context_ticks([512 << power for power in range(12)], 6) == [
        1024, 4096, 16384, 65536, 262144, 1048576,
    ]  # fmt: skip
    assert axes.context_ticks([1000, 3000], 7) == [1000, 3000]
    assert axes.context_ticks([0, 512, 2048], 7) == [0, 512, 1024, 2048]
    assert axes.context_ticks([1000, 5000, 9000], 7) == [1024, 2048, 4096, 8192]


def test_bytes_words_and_ticks() -> None:
    assert [axes.bytes_word(count) for count in (0, 999, 12.4e6, 999.6e6, 1.2369e12, 9.996e3)] == [
        "0 B", "999 B", "12.4 MB", "1.00 GB", "1.24 TB", "10.0 kB",
    ]  # fmt: skip
    decades = axes.bytes_ticks(3e6, 2e9, 9)
    assert [word for _, word in decades] == [
        "5 MB", "10 MB", "20 MB", "50 MB", "100 MB", "200 MB", "500 MB", "1 GB", "2 GB",
    ]  # fmt: skip
    assert decades[0][0] == 5e6
    assert [word for _, word in axes.bytes_ticks(3e6, 2e9, 8)] == ["10 MB", "100 MB", "1 GB"]
    narrow = axes.bytes_ticks(0.9e9, 1.5e9, 4)
    assert [word for _, word in narrow] == ["1 GB", "1.2 GB", "1.4 GB"]
    assert narrow[1][0] == pytest.approx(1.2e9)  # one product apart


def test_time_units() -> None:
    assert [axes.time_unit(longest)[1] for longest in (0, 1999, 2000, 1e6, 3e6)] == [
        "µs", "µs", "ms", "ms", "s",
    ]  # fmt: skip


@given(st.floats(0, 1e9), st.floats(1e-3, 1e9), st.integers(2, 12))
def test_round_ticks_lie_inside_and_are_few(low: float, width: float, most: int) -> None:
    ticks = axes.round_ticks(low, low + width, most)
    assert len(ticks) <= most
    # Ends that are round but for their rounding count as inside.
    slack = 1e-6 * width + 1e-9 * (low + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


@given(st.lists(st.floats(-0.5, 1.5), max_size=12))
def test_spread_keeps_order_distance_and_bounds(wanted: list[float]) -> None:
    places = axes.spread(wanted, 0.07, 0.0, 1.0)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    ranked = [places[index] for index in order]
    assert all(b - a >= 0.07 - 1e-9 for a, b in pairwise(ranked))  # rounding of a sum
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


def test_spread_moves_no_more_than_needed() -> None:
    assert axes.spread([0.2, 0.9, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.2, 0.9, 0.5])
    assert axes.spread([0.5, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55])
    assert axes.spread([1.0, 1.0], 0.1, 0.0, 1.0) == pytest.approx([0.9, 1.0])
    assert axes.spread([0.5] * 5, 0.5, 0.0, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_shorten() -> None:
    assert axes.shorten("kvrt2", 5) == "kvrt2"
    assert axes.shorten(LONG, 20) == LONG[:10] + "..." + LONG[-7:]
    assert axes.shorten("日\x1b[1m\n", 9) == "??[1m?"
    assert [len(axes.shorten(LONG, width)) for width in range(40)] == list(range(40))


def test_letters() -> None:
    assert [axes.letter(rank) for rank in (0, 25, 26, 27)] == ["A", "Z", "AA", "AB"]


def test_measured_leaves_out_what_is_not_a_number() -> None:
    assert measured([4, 1, 2, 3], [1.0, None, math.nan, 2.0]) == [(3, 2.0), (4, 1.0)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scan.pdf", "expected a name that ends in .png or .svg"),
        ("scan", "expected a name that ends in .png or .svg"),
        ("absent/scan.png", "there is no folder"),
        ("folder.png", "is a folder"),
        ("pipe.png", "no regular file"),
    ],
)
def test_check_plot_refuses_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=re.escape(reason)) as caught:
        check_plot(tmp_path / name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_check_plot_refuses_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UsageError, match="is not writable"):
        check_plot(tmp_path / "scan.png")


def test_check_plot_says_how_to_install_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"python -m pip install 'kvrt\[plot\]'"):
        check_plot(tmp_path / "scan.svg")
    with pytest.raises(UsageError, match=r"python -m pip install 'kvrt\[plot\]'"):
        write_plot(tmp_path / "scan.svg", SIX, "", "")
    assert not list(tmp_path.iterdir())


def test_check_plot_and_the_terminal_chart_import_no_matplotlib() -> None:
    program = (
        "import sys; from pathlib import Path; from kvrt.bench.plot import Series, check_plot\n"
        "from kvrt.bench.term_plot import draw\n"
        "draw([Series('f16', [512], [1.0], [None], [1.0], None)], 80, 16)\n"
        "try: check_plot(Path('scan.png'))\n"
        "except Exception: pass\n"  # where matplotlib is not installed
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("case", CASES)
def test_picture_of_every_case(tmp_path: Path, case: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scan.PNG"
    check_plot(path)
    write_plot(path, CASES[case], f"$title {case}", "sub_title")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") == 1610
    assert list(tmp_path.iterdir()) == [path]


def test_equal_series_make_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("scan.svg", "scan.png"):
        path = tmp_path / name
        write_plot(path, SIX[:2], "title", "")
        first = path.read_bytes()
        write_plot(path, SIX[:2], "title", "")
        assert path.read_bytes() == first
    tree = xml.etree.ElementTree.parse(tmp_path / "scan.svg")
    assert tree.getroot().tag.endswith("svg")


def test_picture_leaves_no_state_of_matplotlib_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 40)  # a user's own style
    before = matplotlib.rcParams.copy()  # dict() would choose a backend
    write_plot(tmp_path / "styled.png", SIX[:1], "title", "")
    assert matplotlib.rcParams.copy() == before
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 10)
    write_plot(tmp_path / "plain.png", SIX[:1], "title", "")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()
    assert "matplotlib.pyplot" not in sys.modules


def test_picture_labels_each_format_and_writes_long_names_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    extent = pytest.importorskip("matplotlib.text").Text.get_window_extent
    made = []
    save = figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *a, **k: (made.append(self), save(self, *a, **k))[1]
    )
    write_plot(tmp_path / "scan.png", [*SIX, series(LONG, 2000, CONTEXTS)], "title", "")
    (drawn,) = made
    for panel in drawn.axes:
        labels = [text for text in panel.texts if text.get_text()]
        assert [text.get_text() for text in labels] == [one.name for one in SIX] + ["A"]
        # An annotation's own extent would hold its leader too.
        boxes = sorted(map(extent, labels), key=lambda box: box.y0)
        # Letters of a font reach a pixel or so into the space between lines.
        assert all(low.y1 <= high.y0 + 2 for low, high in pairwise(boxes))
        assert all(box.x1 <= drawn.bbox.width for box in boxes)
    words = [text.get_text() for text in drawn.texts]
    assert "A" in words and any(word.startswith(LONG[:30]) for word in words)


def test_picture_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scan.png"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(StorageError, match="no space left"):
        write_plot(path, SIX, "title", "")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
@pytest.mark.parametrize("unicode", [True, False])
def test_terminal_chart_fits_its_width(case: str, unicode: bool) -> None:
    for width in (60, 80, 109, 110, 200):
        lines = draw(CASES[case], width, 16, unicode).split("\n")
        assert max(map(len, lines)) == width
        assert all(line == line.rstrip() for line in lines)
        assert unicode or all(line.isascii() for line in lines)
        assert not any("\x1b" in line for line in lines)


def test_terminal_chart_of_nothing_is_empty() -> None:
    assert draw([], 80, 16) == ""


def test_terminal_chart_shows_ends_axis_and_bars() -> None:
    text = draw(SIX, 80, 18, unicode=False)
    chart, bars = text.split("\n\n")
    lines = chart.split("\n")
    assert len(lines) == 18 and lines[0].startswith("decode time per token, ms")
    ends = "".join(line[77:] for line in lines[1:-2]).replace(" ", "")
    assert next(letter for letter in ends if letter.islower()) == "a"  # f16 is the slowest
    assert lines[-1].split() == ["512", "1k", "2k", "4k", "8k"]
    rows = bars.split("\n")
    assert rows[0] == "KV cache at 8k tokens"
    assert [row.split()[:2] for row in rows[1:]] == [
        [letter, one.name] for letter, one in zip("abcdef", SIX)
    ]
    lengths = [row.count("#") for row in rows[1:]]
    assert lengths[0] == max(lengths)
    assert abs(lengths[1] - lengths[0] * 12240 / 23040) <= 0.5
    assert rows[1].endswith("189 MB")


def test_terminal_chart_marks_points_where_formats_meet() -> None:
    text = draw(CASES["equal"], 80, 12, unicode=False)
    assert "* is several" in text.split("\n")[0] and " ab" in text


def test_terminal_chart_stands_beside_the_bars_where_there_is_room() -> None:
    assert len(draw(SIX, 109, 16).split("\n")) == 16 + 1 + 7
    assert len(draw(SIX, 110, 16).split("\n")) == 16


def test_terminal_colours_change_nothing_but_colours() -> None:
    plain, painted = draw(SIX, 120, 16), draw(SIX, 120, 16, colour=True)
    assert painted != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


def test_terminal_bars_say_where_a_format_ended_early() -> None:
    short = series("q8_0", 12240, CONTEXTS[:3])
    assert "25.1 MB at 2k" in draw([SIX[0], short], 80, 16)


def test_canvas_draws_braille_and_dots() -> None:
    corners = [(0.0, 0.0), (1.0, 1.0)]
    braille, dots = Canvas(2, 1, True), Canvas(2, 2, False)
    for canvas in (braille, dots):
        canvas.line(3, [*corners, (0.5, 1.5)])
    assert braille.lines() == [[("⡀", 3), ("⠈", 3)]]
    assert dots.lines() == [[(" ", None), (".", 3)], [(".", 3), (" ", None)]]
    dots.mark(1, 0.0, 0.0, "b")
    dots.mark(2, 1.0, 1.0, "c")
    dots.mark(1, 1.0, 1.0, "b")
    assert dots.lines() == [[(" ", None), ("*", None)], [("b", 1), (" ", None)]]
