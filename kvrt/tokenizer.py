"""Text to token ids and back, for the tokenizer.json of a model folder.

Wraps the `tokenizers` library and holds one object of it: the vocabulary stays there and is never
copied into Python. What is added: control tokens are read from text only where the caller says so.

Control tokens are the added tokens that steer a model: those marked special in tokenizer.json or
tokenizer_config.json, the named bos, eos, ... tokens, and added tokens that look like chat markup
although they are not marked (DeepSeek's <｜User｜>). All are registered as special at load, so that
the library's own switch turns every one of them off.

A chat is rendered to one text, in which markup must be read as control tokens and what people wrote
must not. `encode_chat` therefore
1. replaces each control token's text inside messages by one private character that occurs nowhere;
2. renders the template: every control text now in it was written by the template;
3. if nothing was replaced, encodes the whole text as the library does, and checks that it found
   exactly those control tokens (a normalizer could make one out of look-alike characters);
4. otherwise splits the text at the control tokens, puts the private characters back, and encodes
   what is between them with control tokens switched off.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import Metaspace

from .chat_template import ChatTemplate, map_text
from .errors import TemplateError, TokenizerError, UnsupportedError, UsageError
from .token_stream import Detokenizer, TokenStream, strip_lead

if TYPE_CHECKING:
    from .config import ModelConfig

_MARKUP = re.compile(
    r"<[|｜].+[|｜]>|<(start|end)_of_\w+>|</?(s|bos|eos|unk|pad)>|\[/?[A-Z][A-Z_]*\]"
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# A chat model that goes on with plain text may end the document instead of its turn.
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
_PRIVATE = range(0xF0000, 0xFFFFE)  # Supplementary Private Use Area-A


class Tokenizer:
    """The tokenizer of one model; `from_dir` makes it of a folder. Safe to use from threads.

    vocab_size: number of tokens it knows. The model's own vocab_size is often larger; it may also
        be smaller by some added tokens (a [PAD] that no one ever feeds): text that would need one
        of those is refused.
    bos_id: the begin-of-sequence token, or None.
    adds_bos: whether the model expects bos_id before a text.
    template: the chat template, or None.
    """

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        settings: Mapping[str, Any],
        folder: Path | None = None,
        *,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        """`settings`: of tokenizer_config.json; `name_of`: the text of ids that have no token."""
        self._library = library
        self._config = config
        self._name_of = name_of
        self._lock = threading.Lock()  # guards the switches inside the library's object
        library.no_truncation()
        library.no_padding()
        names = _named_tokens(library, config, settings)
        _register_control_tokens(library, settings, names)
        added = library.get_added_tokens_decoder()
        self._unfit = {
            number: token.content for number, token in added.items() if number >= config.vocab_size
        }
        self.vocab_size: int = _check_vocabulary(library, config.vocab_size, self._unfit)
        self._added = frozenset(added)
        self._control = {number: token.content for number, token in added.items() if token.special}
        self._sides = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._eos_id = library.token_to_id(names["eos_token"]) if "eos_token" in names else None
        self.bos_id: int | None = config.bos_id
        if "bos_token" in names:
            self.bos_id = library.token_to_id(names["bos_token"])
        decoder = library.decoder
        self._detokenizer = Detokenizer.from_state(decoder and decoder.__getstate__())
        adds_bos = settings.get("add_bos_token")
        if not isinstance(adds_bos, bool):
            adds_bos = library.encode("").ids[:1] == [self.bos_id]
        self.adds_bos: bool = adds_bos and self.bos_id is not None
        self.template: ChatTemplate | None = ChatTemplate.from_dir(folder, settings, names)

    @classmethod
    def from_dir(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Load tokenizer.json and, where present, tokenizer_config.json and the chat template.

        TokenizerError if a file is missing, malformed or has ids that the model has not;
        TemplateError if chat_template is there but is not text.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"no tokenizer.json in {folder}; other tokenizer files do not work"
            )
        try:
            library = Library.from_file(str(path))
        except BaseException as error:  # the library can panic, which is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            reason = " ".join(str(error).split())[:200]
            raise TokenizerError(f"{path} is not a usable tokenizer: {reason}") from None
        settings = _read_settings(folder / "tokenizer_config.json")
        try:
            return cls(library, config, settings, folder)
        except UnicodeError as error:
            raise TokenizerError(f"a token of {folder} is not valid Unicode: {error}") from None

    # -- Text to ids

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text; nothing is added. Control tokens in it are read as such only with
        `control`, else as ordinary text. UsageError if text is not valid Unicode, TokenizerError if
        the tokenizer has nothing for it, or a token that the model has not."""
        ids = self._encode(text, control=control)
        if control or self._control.keys().isdisjoint(ids):
            return self._fit(ids)
        # The vocabulary itself spells a control token (whole-word models): cut each one in two.
        starts = [match.start() + 1 for match in re.finditer(f"(?={self._pattern.pattern})", text)]
        bounds = [0, *starts, len(text)]
        pieces = [text[start:end] for start, end in pairwise(bounds) if end > start]
        return self._fit(
            [number for piece in pieces for number in self._encode(piece, control=False)]
        )

    def encode_prompt(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text to continue, after bos_id if the model expects one."""
        return self._with_bos(self.encode(text, control=control))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a rendered conversation: control tokens come from the template alone, never
        from messages. TemplateError if it cannot be rendered, UnsupportedError without a template.
        """
        if self.template is None:
            raise UnsupportedError("this model has no chat template; it can only continue text")
        private = self._private_characters(messages)
        marked = [self._without_control(message, private) for message in messages]
        text = self.template.render(marked, add_generation_prompt=add_generation_prompt)
        if not private:
            ids = self._encode(text, control=True)
            written = [self._id_of(match[0]) for match in self._pattern.finditer(text)]
            if written == [number for number in ids if number in self._control]:
                return self._with_bos(ids)
        return self._with_bos(list(self._encode_parts(text, private)))

    def _encode(self, text: str, *, control: bool, inner: bool = False) -> list[int]:
        """Encode by the library; `inner` text follows a control token, so gets no leading space."""
        library = self._library
        with self._lock:
            splitter = library.pre_tokenizer if inner else None
            if not isinstance(splitter, Metaspace) or splitter.prepend_scheme != "first":
                splitter = None
            try:
                library.encode_special_tokens = not control
                if splitter is not None:
                    splitter.prepend_scheme = "never"
                ids: list[int] = library.encode(text, add_special_tokens=False).ids
                return ids
            except TypeError:
                raise UsageError(_not_text(text)) from None
            except Exception as error:  # the library raises nothing more exact
                reason = " ".join(str(error).split())[:200]
                raise TokenizerError(f"the tokenizer cannot encode this text: {reason}") from None
            finally:
                library.encode_special_tokens = False
                if splitter is not None:
                    splitter.prepend_scheme = "first"

    def _encode_parts(self, text: str, private: Mapping[str, str]) -> Iterator[int]:
        back = str.maketrans({character: control for control, character in private.items()})
        place, eats_left = 0, False
        for match in [*self._pattern.finditer(text), None]:
            part = text[place : match.start() if match else len(text)]
            eats_right, eats_next = self._sides[match[0]] if match else (False, False)
            part = part.lstrip() if eats_left else part
            part = part.rstrip() if eats_right else part
            if part:
                plain = part.translate(back)
                ids = self._encode(plain, control=False, inner=place > 0)
                # Rarely the vocabulary itself spells a control token; encode() knows what to do.
                yield from ids if self._control.keys().isdisjoint(ids) else self.encode(plain)
            if match:
                yield self._id_of(match[0])
                place, eats_left = match.end(), eats_next

    def _private_characters(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """A character of its own for each control text in the messages; used nowhere else."""
        found: dict[str, None] = {}
        used = set(self.template.source if self.template else "")

        def look(text: str) -> str:
            used.update(text)
            found.update((match[0], None) for match in self._pattern.finditer(text))
            return text

        map_text(list(messages), look)
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        return dict(zip(found, free))

    def _without_control(
        self, message: Mapping[str, Any], private: Mapping[str, str]
    ) -> dict[str, Any]:
        changed: dict[str, Any] = map_text(
            message, lambda text: self._pattern.sub(lambda match: private[match[0]], text)
        )
        return changed

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return self._fit(ids)

    def _fit(self, ids: list[int]) -> list[int]:
        """The ids, once it is sure that the model has all of them."""
        if not self._unfit.keys().isdisjoint(ids):
            number = next(number for number in ids if number in self._unfit)
            raise TokenizerError(
                f"the text needs the token {self._unfit[number]!r}, whose id {number} this model "
                f"has not: its vocabulary is 0 to {self._config.vocab_size - 1}"
            )
        return ids

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Finds control tokens in text, the longest first as the library does."""
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _id_of(self, control: str) -> int:
        number = self._library.token_to_id(control)
        assert number is not None, control
        return number

    # -- Ids to text

    def decode(
        self, ids: Sequence[int], *, skip_control: bool = True, continued: bool = False
    ) -> str:
        """Text of token ids; invalid bytes become U+FFFD. Equal to what `stream` gives.

        `continued`: the ids go on from others, so keep the space that may lead the first one.
        UsageError for an id outside the model's vocabulary.
        """
        pieces: list[bytes] = []
        for number in ids:
            data = self._piece(number, not pieces and not continued, skip_control)
            if data is not None:
                pieces.append(data)
        text = b"".join(pieces).decode("utf-8", "replace")
        return text if continued else strip_lead(text, *self._detokenizer.strip)[0]

    def stream(self, *, continued: bool = False) -> TokenStream:
        """A decoder for tokens as they come, control tokens hidden; `continued` as in `decode`."""
        return TokenStream(self._piece, self._detokenizer.strip, continued)

    def token_text(self, token_id: int) -> str:
        """One token as people read it, a leading space kept, a part of a character as U+FFFD."""
        return self.decode([token_id], skip_control=False, continued=True)

    def _piece(self, number: int, first: bool, skip_control: bool = True) -> bytes | None:
        if not 0 <= number < self._config.vocab_size:
            raise UsageError(
                f"token id {number} is outside the vocabulary, 0 to {self._config.vocab_size - 1}"
            )
        if skip_control and number in self._control:
            return None
        token = self._library.id_to_token(number)
        if token is None and self._name_of is not None:
            token = self._name_of(number)
        if token is None:  # a row that only pads the model's embedding
            return None
        return self._detokenizer.piece(token, first, number in self._added)

    # -- Where to stop

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the eos of the configuration and of the tokenizer, what the
        chat template writes after an answer, and the end of a document."""
        ends = [*self._config.eos_ids, self._eos_id, self._end_of_turn()]
        ends += [number for number, text in self._control.items() if text in _END_OF_DOCUMENT]
        size = self._config.vocab_size
        return frozenset(number for number in ends if number is not None and number < size)

    def _end_of_turn(self) -> int | None:
        """The control token that the template puts right after an assistant's message."""
        answer = "kvrt-probe-answer"
        probe = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        try:
            text = self.template.render(probe, add_generation_prompt=False) if self.template else ""
        except TemplateError:  # tells nothing about ends; a chat will report it
            return None
        match = self._pattern.match(text.rpartition(answer)[2].lstrip()) if answer in text else None
        return self._id_of(match[0]) if match else None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not readable JSON: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} holds a {type(settings).__name__}, expected an object")
    return settings


def _content(token: Any) -> str | None:
    """The text of a token given as text or as a serialised AddedToken."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _named_tokens(
    library: Library, config: ModelConfig, settings: Mapping[str, Any]
) -> dict[str, str]:
    """bos_token, eos_token, ... as texts that the vocabulary has."""
    named = {name: _content(settings.get(name)) for name in _NAMED}
    if named["bos_token"] is None and config.bos_id is not None:
        named["bos_token"] = library.id_to_token(config.bos_id)
    if named["eos_token"] is None and config.eos_ids:
        named["eos_token"] = library.id_to_token(config.eos_ids[0])
    return {
        name: text
        for name, text in named.items()
        if text is not None and library.token_to_id(text) is not None
    }


def _register_control_tokens(
    library: Library, settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Mark as special, in the library's object, every token that steers the model."""
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    control = {text for text in added if _MARKUP.fullmatch(text)}
    control |= {text for text in names.values() if text in added or _MARKUP.fullmatch(text)}
    listed = settings.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        text = _content(entry)
        if text is None or not isinstance(entry, dict) or not entry.get("special"):
            continue
        if str(library.token_to_id(text)) != number:
            raise TokenizerError(
                f"tokenizer_config.json says that token {number} is {text!r}; "
                f"tokenizer.json has id {library.token_to_id(text)} for it"
            )
        control.add(text)
    tokens = [
        added.get(text, AddedToken(text, normalized=False, special=True))
        for text in sorted(control)
        if text.strip() and not (text in added and added[text].special)
    ]
    for token in tokens:
        token.special = True
    library.add_special_tokens(tokens)


def _check_vocabulary(library: Library, limit: int, unfit: Mapping[int, str]) -> int:
    """The number of tokens. TokenizerError if one besides `unfit` has an id of `limit` or more."""
    count: int = library.get_vocab_size(with_added_tokens=True)
    below = sum(library.id_to_token(number) is not None for number in range(min(count, limit)))
    if below + len(unfit) == count:
        return count  # the usual case, ids without gaps, told without copying the vocabulary
    sizes = {text: number for text, number in library.get_vocab().items() if number not in unfit}
    text, largest = max(sizes.items(), key=lambda item: item[1], default=("", -1))
    if largest >= limit:
        raise TokenizerError(
            f"tokenizer.json has token {text!r} with id {largest}, "
            f"but the model's vocab_size is {limit}"
        )
    return count


def _not_text(text: object) -> str:
    if not isinstance(text, str):
        return f"text to encode must be str, got {type(text).__name__}"
    place = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), 0)
    return f"text is not valid Unicode: lone surrogate {text[place]!a} at character {place}"
