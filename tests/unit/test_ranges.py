"""Lists, ranges and bytes: what they mean, and one line for everything that they cannot be."""

import re

import pytest

from kvrt.cli.ranges import parse_bytes, parse_counts, parse_scan
from kvrt.errors import UsageError

HUGE = "9" * 5000  # more digits than int() takes


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512]),
        ("0", [0]),
        ("0,4096", [0, 4096]),
        ("4096,0", [4096, 0]),  # as written
        (" 1 , 2 ", [1, 2]),
        ("1-4", [1, 2, 3, 4]),
        ("0-2", [0, 1, 2]),
        ("5-5", [5]),
        ("0-8192+1024", list(range(0, 8193, 1024))),
        ("0-10+4", [0, 4, 8]),  # the end only where a step meets it
        ("512-8192*2", [512, 1024, 2048, 4096, 8192]),
        ("1-100*3", [1, 3, 9, 27, 81]),
        ("1k,128k,1M", [1024, 131072, 1 << 20]),
        ("0-4K+1k", [0, 1024, 2048, 3072, 4096]),
        ("1k-8k*2,1m", [1024, 2048, 4096, 8192, 1 << 20]),
        ("512,512,0-1024+512", [512, 0, 1024]),  # each once
        ("0" * 40 + "512", [512]),
        ("0-999", list(range(1000))),
        ("1024M", [1 << 30]),
    ],
)
def test_counts(text: str, values: list[int]) -> None:
    assert parse_counts(text, "-p") == values


WRONG = [
    ("", "neither a whole number nor a range"),
    (" ", "neither"),
    (",", "neither"),
    ("512,", "neither"),
    ("-1", "neither"),
    ("0--1", "neither"),
    ("-", "neither"),
    ("512-", "neither"),
    ("+5", "neither"),
    ("1.5", "neither"),
    ("1.5k", "neither"),
    ("1e3", "neither"),
    ("k", "neither"),
    ("5g", "neither"),
    ("0x10", "neither"),
    ("1_000", "neither"),
    ("1 000", "neither"),
    ("inf", "neither"),
    ("nan", "neither"),
    ("٣", "neither"),
    ("５１２", "neither"),
    ("²", "neither"),
    ("1-4+", "neither"),
    ("1-4/2", "neither"),
    ("1-4-8", "neither"),
    ("1-4+1*2", "neither"),
    ("512\n", None),
    ("1\x00", "neither"),
    ("512-8192*1", "never ends"),
    ("512-8192*0", "never ends"),
    ("512-8192+0", "never ends"),
    ("5-5*1", "never ends"),
    ("0-8192*2", "never ends: 0 stays 0"),
    ("8192-512", "backwards"),
    ("8192-512*2", "backwards"),
    ("0-1000", "more than 1,000 values"),
    ("0-1M", "more than 1,000 values"),
    ("0-999,2000", "more than 1,000 values"),
    ("0-1024M", "more than 1,000 values"),
    ("1025M", "expected 0 to 1,073,741,824"),
    ("1-1025M*2", "expected 0 to 1,073,741,824"),
    (HUGE, "expected 0 to 1,073,741,824"),
    (f"1-{HUGE}*2", "expected 0 to"),
    (f"{HUGE}-1", "expected 0 to"),
    (f"{HUGE}M", "expected 0 to"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=lambda value: str(value)[:20])
def test_counts_that_cannot_be(text: str, said: str | None) -> None:
    if said is None:  # blanks around a number are none of its own
        assert parse_counts(text, "-p") == parse_scan(text) == [512]
        return
    for parse in (parse_counts, lambda text, option: parse_scan(text, option, low=0)):
        with pytest.raises(UsageError) as caught:
            parse(text, "-p")
        message = str(caught.value)
        assert message.startswith("-p: ") and said in message
        assert "\n" not in message and len(message) < 300


def test_a_huge_step_is_a_step() -> None:
    assert parse_counts(f"1-4+{HUGE}", "-p") == [1]
    assert parse_counts(f"1-4*{HUGE}", "-p") == [1]


def test_limits() -> None:
    assert parse_counts("1-5", "-r", low=1, high=5) == [1, 2, 3, 4, 5]
    for text in ("0", "6", "1-6", "0-3", "2,6"):
        with pytest.raises(UsageError, match=re.escape("-r: expected 1 to 5, got")):
            parse_counts(text, "-r", low=1, high=5)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1k:1M", [1 << power for power in range(10, 21)]),
        ("512:8k", [512, 1024, 2048, 4096, 8192]),
        ("1:5", [1, 2, 4, 5]),  # the last one always
        ("1k:5000", [1024, 2048, 4096, 5000]),
        ("7:7", [7]),
        ("8k,1k", [1024, 8192]),  # ascending
        ("0-2k+1k,1k:4k", None),
        ("1k-3k+1k,1k:4k", [1024, 2048, 3072, 4096]),
        ("512", [512]),
    ],
)
def test_scans(text: str, values: list[int] | None) -> None:
    if values is None:
        with pytest.raises(UsageError, match="--scan: expected 1 to"):
            parse_scan(text)
        return
    assert parse_scan(text) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (":", "neither"),
        ("1k:", "neither"),
        (":1M", "neither"),
        ("1k:2k:4k", "neither"),
        ("1k:1.5k", "neither"),
        ("-1:8", "neither"),
        ("1k:8k*2", "or A:B, which doubles"),
        ("8k:1k", "backwards"),
        ("0:8k", "expected 1 to"),
        ("1k:2048M", "expected 1 to"),
        (f"1:{HUGE}", "expected 1 to"),
    ],
    ids=lambda value: value[:20],
)
def test_scans_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_scan(text)
    assert str(caught.value).startswith("--scan: ") and said in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_scan_from_0_never_ends() -> None:
    with pytest.raises(UsageError, match="--scan: '0:8k' never ends"):
        parse_scan("0:8k", low=0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("123456", 123456),
        ("123B", 123),
        ("500M", 500_000_000),
        ("48GB", 48_000_000_000),
        ("48G", 48_000_000_000),
        ("48 gb", 48_000_000_000),
        ("48GiB", 48 << 30),
        ("2KiB", 2048),
        ("2kB", 2000),
        ("1.5GiB", 3 << 29),
        ("0.1GB", 100_000_000),
        ("23.687 GiB", 25433722585),
        ("1TiB", 1 << 40),
        ("2T", 2_000_000_000_000),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text, "--limit") == count


@pytest.mark.parametrize(
    "text",
    ["", " ", "GB", "-1", "-1GB", "+1", "1.5", "1.5B", ".5GB", "1.GB", "1e9", "nan", "inf", "0",
     "0GB", "0.0000000001GB", "0.0001k", "48Gi", "48iB", "48XB", "48GBB", "1,5GB", "４８GB",
     "1 2GB", "48 G B", HUGE, f"{HUGE}GB", f"{HUGE}.5GB",
     f"0.{HUGE}GB", "1000000000T"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_bytes_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, "--limit")
    message = str(caught.value)
    assert message.startswith("--limit: expected ") and "\n" not in message and len(message) < 200
