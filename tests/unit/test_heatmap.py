"""Heat maps: the table of a terminal and the picture."""

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from kvrt.errors import StorageError
from kvrt.heatmap import Heatmap, draw, write_heatmaps

MAP = Heatmap("kvrt2", [1024, 3000], [0.0, 50.0, 100.0], [[100, 50], [0, 0], [66.7, 33.3]], "42 %")
LONG = Heatmap("k=int3:channel:g64,v=int2:token:g64,sink=4,$x_y$", [512], [50.0], [[12.5]])


def test_a_table_with_means() -> None:
    name, head, *rows = draw(MAP).splitlines()
    assert name == "kvrt2  42 %"
    assert head.split() == ["depth", "1k", "3000", "mean"]
    assert [row.split() for row in rows] == [
        ["0", "%", "100", "50", "75"],
        ["50", "%", "0", "0", "0"],
        ["100", "%", "67", "33", "50"],
        ["mean", "56", "28", "42"],
    ]
    assert len({len(line) for line in (head, *rows)}) == 1


def test_colours_follow_the_share_and_add_no_width() -> None:
    plain, coloured = draw(MAP).splitlines(), draw(MAP, colour=True).splitlines()
    assert "\x1b" not in "".join(plain)
    for before, after in zip(plain, coloured, strict=True):
        bare = re.sub(r"\x1b\[[0-9;]*m", "", after)
        assert bare.split() == before.split() and len(bare) == len(before)
    cells = re.findall(r"\x1b\[38;5;(\d+);48;5;(\d+)m +(\d+) \x1b\[0m", "\n".join(coloured))
    assert [int(share) for _, _, share in cells] == [100, 50, 0, 0, 67, 33, 56, 28]
    by_share = {int(share): (letters, ground) for letters, ground, share in cells}
    assert by_share[0] == ("231", "53") and by_share[100] == ("16", "227")
    assert len({ground for _, ground in by_share.values()}) == 6  # 50 and 56 have one colour
    assert by_share[50] == by_share[56]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_picture_has_a_panel_for_each(tmp_path: Path, count: int) -> None:
    path = tmp_path / "map.svg"
    maps = [Heatmap(f"format{i}", [512, 1024], [0, 100], [[i, 9], [90, 100]]) for i in range(count)]
    write_heatmaps(path, maps, "needle", "exact answers in %")
    tree = xml.etree.ElementTree.parse(path)
    assert tree.getroot().tag.endswith("svg")
    words = path.read_text()
    for i in range(count):
        assert f"format{i}" in words


def test_equal_input_gives_an_equal_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        write_heatmaps(tmp_path / name, [MAP, LONG], "title", "subtitle")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second and first.startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_a_picture_without_a_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        write_heatmaps(tmp_path / "file" / "map.png", [MAP], "title", "subtitle")
