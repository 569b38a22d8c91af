"""From token ids back to text, one token at a time, in constant time a token.

Every token stands for bytes that do not depend on its neighbours (only on being the first). So text
is the concatenation of those bytes read as UTF-8, and an incremental UTF-8 decoder is all the state
a stream needs: an incomplete character waits, an invalid byte becomes U+FFFD. Decoding a whole list
is the same thing done at once, hence equal to the stream for any ids.

The rules come from the `decoder` of tokenizer.json. One deliberate difference from the `tokenizers`
library: in a run of byte-fallback tokens with an invalid byte it replaces every byte of the run,
which cannot be known before the run ends; here only the invalid bytes are replaced.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Detokenizer:
    """How a tokenizer's tokens become bytes; from the parsed `decoder` of tokenizer.json."""

    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    byte_level: bool = False
    metaspace: str | None = None  # this character is a space
    metaspace_leads: bool = False  # ... which the first token does not show
    separator: str = ""  # before every token but the first
    strip: tuple[str, int] = ("", 0)  # this character, up to so many times at the start of the text

    @classmethod
    def from_state(cls, state: bytes | None) -> Detokenizer:
        """Read the decoder's JSON. TokenizerError for a kind that no Llama-family model has."""
        if state is None:
            return cls(separator=" ")
        spec = json.loads(state)
        rules: dict[str, Any] = {}
        fused = False
        for step in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
            kind = step["type"]
            if kind == "ByteLevel":
                rules["byte_level"] = True
            elif kind == "ByteFallback":
                rules["byte_fallback"] = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Replace" and "String" in step["pattern"] and not fused:
                old = step["pattern"]["String"]
                rules["replace"] = (*rules.get("replace", ()), (old, step["content"]))
            elif kind == "Metaspace":
                rules["metaspace"] = step["replacement"]
                rules["metaspace_leads"] = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and fused and step["stop"] == 0:
                rules["strip"] = (step["content"], step["start"])
            else:
                raise TokenizerError(
                    f"tokenizer.json: decoder step {json.dumps(step)[:120]} is not supported; "
                    f"supported are ByteLevel, Metaspace, ByteFallback, Fuse, Replace of a text, "
                    f"and Strip of leading characters after Fuse"
                )
        return cls(**rules)

    def piece(self, token: str, first: bool, added: bool) -> bytes:
        """The bytes of one token; `added` tokens are spelled plainly, not in byte-level letters."""
        if self.byte_level:
            return token.encode() if added else _byte_level(token)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(byte[1], 16),))
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.metaspace is not None:
            token = token.replace(self.metaspace, "" if first and self.metaspace_leads else " ")
        return (token if first else self.separator + token).encode()


class TokenStream:
    """Text of a growing token sequence: `push` each id, `flush` at the end.

    No push returns part of a character. The pushes and the flush together are what
    `Tokenizer.decode` gives for all the ids. With `continued`, the text goes on from tokens before
    it, so that a leading space is kept.
    """

    def __init__(
        self,
        piece: Callable[[int, bool], bytes | None],  # (token id, first?) -> None if not shown
        strip: tuple[str, int],
        continued: bool = False,
    ) -> None:
        self._piece = piece
        self._first = not continued
        self._strip = ("", 0) if continued else strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often none. UsageError for an id that the
        model cannot produce."""
        data = self._piece(token_id, self._first)
        if data is None:
            return ""
        self._first = False
        return self._without_lead(self._utf8.decode(data))

    def flush(self) -> str:
        """What is left: U+FFFD for a character that never became complete. The stream can go on."""
        return self._without_lead(self._utf8.decode(b"", final=True))

    def _without_lead(self, text: str) -> str:
        character, most = self._strip
        if most and text:
            text, most = strip_lead(text, character, most)
            self._strip = (character, most)
        return text


def strip_lead(text: str, character: str, most: int) -> tuple[str, int]:
    """Text without up to `most` leading `character`s, and how many may still be taken after it."""
    kept = text.lstrip(character)
    taken = len(text) - len(kept)
    if taken >= most:
        return text[most:], 0
    return kept, 0 if kept else most - taken


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(rest)
    }


_BYTE_OF = _byte_letters()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[letter] for letter in token])
    except KeyError:  # not a spelling of bytes, so plain text
        return token.encode()
