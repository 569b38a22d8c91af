"""Which pages each of many tokens sees when they see the past as `decode` would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..backends.ops import PAGE_TOKENS
from ..kvstore.stats import sealed_pages

if TYPE_CHECKING:
    from ..kvstore import KVSpec


@dataclass(frozen=True)
class Segment:
    """Positions first .. end - 1, whose queries see the same pages.

    `new_pages` are the pages that the queries before them did not see yet: index, and positions.
    """

    first: int
    end: int
    new_pages: tuple[tuple[int, slice], ...]


def segments_of(spec: KVSpec, start: int, end: int) -> list[Segment]:
    """Positions start .. end - 1, cut where a page is sealed.

    The query at position t sees what is sealed once t tokens are cached; the page that its own
    token completes is sealed after it.
    """
    segments, seen, first = [], sealed_pages(spec, start), start
    while first < end:
        sealed = sealed_pages(spec, first)
        due = spec.sink + spec.window + (sealed + 1) * PAGE_TOKENS  # tokens at the next sealing
        pages = tuple((page, _positions(spec, page)) for page in range(seen, sealed))
        segments.append(Segment(first, min(due, end), pages))
        seen, first = sealed, due
    return segments


def _positions(spec: KVSpec, page: int) -> slice:
    first = spec.sink + page * PAGE_TOKENS
    return slice(first, first + PAGE_TOKENS)
