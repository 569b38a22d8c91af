"""Streaming is decoding: for any ids of any kind of tokenizer, and never half a character."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from kvrt.token_stream import _BYTE_OF
from kvrt.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizers import CHATML, KINDS, load

IDS = st.lists(st.integers(0, 399), max_size=40)
BYTES = st.lists(
    st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 0xC3, 0xA9, 0xE2, 0xFF, 0x41]), max_size=12
)
TEXT = st.text(st.sampled_from("hello wé🙂語<|im_end|>_[] \n"), max_size=30) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
)


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), KINDS[request.param](), {"chat_template": CHATML})


def streamed(tokenizer: Tokenizer, ids: list[int], continued: bool = False) -> str:
    stream = tokenizer.stream(continued=continued)
    return "".join([*map(stream.push, ids), stream.flush()])


@settings(deadline=None)
@given(IDS, st.booleans())
def test_pushes_and_flush_are_decode(tokenizer: Tokenizer, ids: list[int], continued: bool) -> None:
    assert streamed(tokenizer, ids, continued) == tokenizer.decode(ids, continued=continued)


@settings(deadline=None)
@given(BYTES, st.booleans())
def test_any_bytes(data: list[int], fallback: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kind = "sentence_piece" if fallback else "byte_level"
        tokenizer = load(Path(folder), KINDS[kind]())
    library = tokenizer._library
    ids = [_byte_id(library, byte, fallback) for byte in data]
    assert streamed(tokenizer, ids) == bytes(data).decode("utf-8", "replace")


def _byte_id(library: Library, byte: int, fallback: bool) -> int:
    letter = next(letter for letter, value in _BYTE_OF.items() if value == byte)
    number = library.token_to_id(f"<0x{byte:02X}>" if fallback else letter)
    assert number is not None
    return number


@settings(deadline=None)
@given(IDS)
def test_decode_is_the_librarys_where_it_can_be(tokenizer: Tokenizer, ids: list[int]) -> None:
    """All but the documented difference: runs of byte tokens that are not valid UTF-8."""
    expected = tokenizer._library.decode(ids, skip_special_tokens=True)
    if "�" not in expected or tokenizer._detokenizer.byte_level:
        assert tokenizer.decode(ids) == expected


@settings(deadline=None)
@given(TEXT)
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer._control.keys().isdisjoint(
        set(ids) - {tokenizer._library.token_to_id("[UNK]")}
    )
    stream = tokenizer.stream()
    pushed = [stream.push(number) for number in ids]
    assert "".join(pushed) + stream.flush() == tokenizer.decode(ids)
    if tokenizer._detokenizer.byte_level:
        assert "".join(pushed) == text
    if "�" not in text:
        assert "�" not in "".join(pushed)


@settings(deadline=None)
@given(IDS, IDS)
def test_continued_text_joins_on(tokenizer: Tokenizer, before: list[int], after: list[int]) -> None:
    """Decoding a prompt and its continuation apart loses nothing, cut characters aside."""
    first = tokenizer.decode(before)
    if first and "�" not in first:
        rest = tokenizer.decode(after, continued=True)
        if not rest.startswith("�"):
            assert first + rest == tokenizer.decode([*before, *after])
