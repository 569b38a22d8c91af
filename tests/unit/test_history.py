"""Where a prefill with a packed history is cut, against the rule of the store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrt.kvstore import KVSpec
from kvrt.kvstore.stats import sealed_pages
from kvrt.models.history import segments_of


@given(
    sink=st.integers(0, 70),
    window=st.integers(0, 200),
    start=st.integers(0, 400),
    count=st.integers(1, 300),
)
def test_every_query_sees_the_pages_that_were_sealed_before_it(
    sink: int, window: int, start: int, count: int
) -> None:
    spec = KVSpec.parse(f"k=f16,v=f16,sink={sink},window={window}")
    seen, position = sealed_pages(spec, start), start
    for segment in segments_of(spec, start, start + count):
        assert segment.first == position < segment.end
        for page, rows in segment.new_pages:
            assert page == seen
            assert (rows.start, rows.stop) == (sink + 64 * page, sink + 64 * page + 64)
            seen += 1
        for query in range(segment.first, segment.end):
            assert sealed_pages(spec, query) == seen
        position = segment.end
    assert position == start + count


@pytest.mark.parametrize("start", [0, 63, 64, 128])
def test_pages_that_are_there_already_are_not_new(start: int) -> None:
    segments = segments_of(KVSpec.parse("f16"), start, start + 200)
    assert segments[0].new_pages == ()
    assert all(len(segment.new_pages) == 1 for segment in segments[1:])
