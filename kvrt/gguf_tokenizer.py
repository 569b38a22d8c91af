"""GGUF vocabularies to tokenizer.json and tokenizer_config.json."""

from collections.abc import Iterable
from typing import Any

from .errors import ConfigError, UnsupportedError
from .gguf_metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how the text is cut before merging: a regular expression, "gpt2" (the
# split built into the byte-level step) or "digits" (single digits first, then "gpt2").
_SPLITS = {
    "gpt-2": "gpt2",
    "default": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "codeshell": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# A piece that is a token as a whole is taken without merging.
_WHOLE_PIECES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NORMALISED = frozenset({"qwen2"})  # Unicode NFC


class Vocabulary:
    """The tokens of a GGUF: `tokens` (id -> text), `types` (id -> kind), checked for sanity."""

    def __init__(self, meta: Metadata, vocab_size: int) -> None:
        self.meta = meta
        self.tokens = meta.strings("tokenizer.ggml.tokens")
        if not self.tokens or len(self.tokens) > vocab_size:
            raise ConfigError(
                f"{meta.source}: {len(self.tokens)} tokens, but the embedding has {vocab_size} rows"
            )
        if "tokenizer.ggml.token_type" in meta.values:
            self.types = meta.array("tokenizer.ggml.token_type", int, len(self.tokens))
        else:
            self.types = [NORMAL] * len(self.tokens)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            duplicate = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise ConfigError(f"{meta.source}: token {duplicate!r:.60} is listed twice")
        mergeable = (NORMAL, BYTE, UNKNOWN)
        # Added tokens after the last mergeable one stay out of the merge model.
        self.model_size = 1 + max(
            (i for i, kind in enumerate(self.types) if kind in mergeable), default=-1
        )

    @property
    def model_vocab(self) -> dict[str, int]:
        """Text -> id of what the merge model holds."""
        return {token: self.ids[token] for token in self.tokens[: self.model_size]}

    def added(self) -> Iterable[tuple[str, bool]]:
        """(text, is control) of the tokens matched as a whole in text, in id order.

        Unused ids between them are kept as control tokens, since the ids follow the order.
        """
        kinds = (CONTROL, USER_DEFINED)
        last = max((i for i, kind in enumerate(self.types) if kind in kinds), default=-1)
        for index, (token, kind) in enumerate(zip(self.tokens, self.types)):
            gap = index >= self.model_size and index < last and kind not in kinds
            unknown = kind == UNKNOWN
            if kind in kinds or gap or unknown:
                yield token, kind != USER_DEFINED

    def text(self, name: str) -> str | None:
        """The text of a named token such as `eos`; None when the file names none."""
        index = self.meta.token_id(name)
        if index is None:
            return None
        if index >= len(self.tokens):
            raise ConfigError(
                f"{self.meta.source}: the {name} token is {index}, but there are "
                f"{len(self.tokens)} tokens"
            )
        return self.tokens[index]


def build_tokenizer(meta: Metadata, vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json and the dictionary of tokenizer_config.json.

    Raises UnsupportedError for another tokenizer kind, ConfigError for a malformed vocabulary.
    """
    kind = meta.text("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise UnsupportedError(
            f"{meta.source}: tokenizer {kind!r} is not supported; {' and '.join(builders)} work"
        )
    vocabulary = Vocabulary(meta, vocab_size)
    try:
        tokenizer = builders[kind](vocabulary)
        _add_tokens(tokenizer, vocabulary)
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(f"{meta.source}: the vocabulary is inconsistent: {error}") from error
    add_bos = _adds_bos(meta, kind)
    bos = vocabulary.text("bos")
    if add_bos and bos is None:
        raise ConfigError(f"{meta.source}: a beginning token is asked for, but none is named")
    if add_bos and bos is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary.ids[bos])],
        )
    return tokenizer.to_str(pretty=True), _tokenizer_config(vocabulary, add_bos)


def _byte_level(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    meta = vocabulary.meta
    pre = _pre_name(meta)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.model_vocab,
            merges=_split_merges(meta),
            ignore_merges=pre in _WHOLE_PIECES,
        )
    )
    split = _SPLITS[pre]
    builtin = split in ("gpt2", "digits")
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=builtin)]
    if split == "digits":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif not builtin:
        steps.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if pre in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    meta = vocabulary.meta
    merges = _split_merges(meta) if "tokenizer.ggml.merges" in meta.values else _derive(vocabulary)
    unknown = vocabulary.text("unknown")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.model_vocab,
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ending: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ending.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ending)
    return tokenizer


def _derive(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Merges of a SentencePiece vocabulary without any: every split of every piece, best score
    first; among splits of one score the longer left part first, then the longer right part."""
    meta = vocabulary.meta
    scores = meta.array("tokenizer.ggml.scores", (int, float), len(vocabulary.tokens))
    mergeable = {
        token: index
        for index, token in enumerate(vocabulary.tokens)
        if vocabulary.types[index] in (NORMAL, UNUSED)
    }
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for piece, index in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                key = (-scores[index], -len(left), -len(right), mergeable[left], mergeable[right])
                ranked.append((*key, left, right))
    ranked.sort()
    return [(entry[5], entry[6]) for entry in ranked]


def _split_merges(meta: Metadata) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in meta.strings("tokenizer.ggml.merges"):
        left, blank, right = line.partition(" ")
        if not (left and blank and right) or " " in right:
            raise ConfigError(f"{meta.source}: merge {line!r:.60} is not two pieces and a space")
        merges.append((left, right))
    return merges


def _pre_name(meta: Metadata) -> str:
    # Old Qwen files name no split; the family has had only one.
    default = "qwen2" if meta.arch in ("qwen2", "qwen3") else ""
    pre = meta.text("tokenizer.ggml.pre", default)
    if pre not in _SPLITS:
        got = repr(pre) if pre else "missing"
        raise UnsupportedError(
            f"{meta.source}: tokenizer.ggml.pre is {got}; {', '.join(_SPLITS)} work"
        )
    return pre


def _adds_bos(meta: Metadata, kind: str) -> bool:
    implied = kind == "llama" or meta.text("tokenizer.ggml.pre", "") in _ADDS_BOS
    return meta.flag("tokenizer.ggml.add_bos_token", implied)


def _add_tokens(tokenizer: Any, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens(
        [
            AddedToken(text, special=control, normalized=False)
            for text, control in vocabulary.added()
        ]
    )
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types)):
        got = tokenizer.token_to_id(token)
        if got != index and not (got is None and kind == UNUSED):
            raise ConfigError(
                f"{vocabulary.meta.source}: token {token!r:.60} got id {got}, expected {index}"
            )


def _tokenizer_config(vocabulary: Vocabulary, add_bos: bool) -> dict[str, Any]:
    meta = vocabulary.meta
    config: dict[str, Any] = {
        "add_bos_token": add_bos,
        "add_eos_token": meta.flag("tokenizer.ggml.add_eos_token", False),
        "added_tokens_decoder": {
            str(vocabulary.ids[text]): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": control,
            }
            for text, control in vocabulary.added()
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.integer(meta.key("context_length")),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name in ("bos", "eos", "unknown", "padding"):
        text = vocabulary.text(name)
        if text is not None:
            config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = text
    template = meta.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    return config
