"""GGUF vocabularies: ids, splits, control tokens, SentencePiece merges."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrt.gguf_metadata import Metadata
from kvrt.gguf_tokenizer import build_tokenizer
from tests.helpers.tiny_gguf import (
    CONTROL,
    NORMAL,
    TEMPLATE,
    UNUSED,
    Vocab,
    byte_vocab,
    piece_vocab,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct.json"


def built(vocab: Vocab, **more: object) -> tuple[Tokenizer, dict]:
    values: dict[str, object] = {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "tokenizer.ggml.model": vocab.model,
        "tokenizer.ggml.tokens": list(vocab.tokens),
        "tokenizer.ggml.token_type": list(vocab.types),
        "tokenizer.chat_template": TEMPLATE,
        **{f"tokenizer.ggml.{name}_token_id": index for name, index in vocab.named.items()},
    }
    for name in ("merges", "scores", "pre"):
        value = getattr(vocab, name)
        if value is not None:
            values[f"tokenizer.ggml.{name}"] = list(value) if name != "pre" else value
    values.update({f"tokenizer.ggml.{name}": value for name, value in more.items()})
    text, config = build_tokenizer(Metadata("x.gguf", values), len(vocab.tokens))
    return Tokenizer.from_str(text), config


PIECES = built(piece_vocab())


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_every_token_keeps_its_id():
    vocab = byte_vocab()
    tokenizer, _ = built(vocab)
    for index, (token, kind) in enumerate(zip(vocab.tokens, vocab.types)):
        # The padding row at the end of the vocabulary names nothing.
        assert tokenizer.token_to_id(token) == (None if kind == UNUSED else index)


def test_unused_ids_between_added_tokens_keep_the_order():
    vocab = byte_vocab()
    tokens = (*vocab.tokens, "<late>")
    tokenizer, _ = built(Vocab("gpt2", tokens, (*vocab.types, CONTROL), vocab.merges, pre="gpt-2"))
    assert tokenizer.token_to_id("<late>") == len(tokens) - 1
    assert tokenizer.encode("a<late>").ids[-1] == len(tokens) - 1


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("default", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("llama-bpe", "x's", ["x", "'s"]),
        ("gpt-2", "!ab", ["!", "ab"]),
        ("llama-bpe", "hello hello", ["hello", "Ġhello"]),
        ("tekken", "aB", ["a", "B"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre, text, expected):
    tokenizer, _ = built(byte_vocab(pre))
    assert pieces(tokenizer, text) == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_splits_are_those_of_the_families(pre):
    """Cuts of one awkward text, worked out from the published patterns."""
    tokenizer, _ = built(byte_vocab(pre))
    text = "I'M 12345 (don't)\n\n  x\u00e9!"
    cuts = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    digits = list("12345")
    assert (
        cuts
        == {
            "gpt-2": ["I", "'", "M", " 12345", " (", "don", "'t", ")", "\n\n ", " xé", "!"],
            "smollm": ["I", "'", "M", " ", *digits, " (", "don", "'t", ")", "\n\n ", " xé", "!"],
            "llama-bpe": ["I", "'M", " ", "123", "45", " (", "don", "'t", ")\n\n", " ", " xé", "!"],
            "qwen2": ["I", "'M", " ", *digits, " (", "don", "'t", ")\n\n", " ", " xé", "!"],
            "tekken": ["I", "'M", " ", *digits, " (", "don", "'t", ")\n\n", " ", " xé", "!"],
        }[pre]
    )


def test_only_qwen2_normalises():
    decomposed, composed = "e\u0301", "\u00e9"
    qwen, _ = built(byte_vocab("qwen2"))
    other, _ = built(byte_vocab("llama-bpe"))
    assert qwen.encode(decomposed).ids == qwen.encode(composed).ids
    assert other.encode(decomposed).ids != other.encode(composed).ids


def test_control_and_user_defined_tokens():
    tokenizer, config = built(byte_vocab())
    ids = tokenizer.encode("<s>ab<tool>c<|end|>").ids
    names = [tokenizer.id_to_token(index) for index in ids]
    assert names == ["<s>", "ab", "<tool>", "c", "<|end|>"]
    assert tokenizer.decode(ids) == "ab<tool>c"  # control tokens are special, <tool> is not
    added = {
        entry["content"]: entry["special"] for entry in config["added_tokens_decoder"].values()
    }
    assert added == {"<s>": True, "</s>": True, "<tool>": False, "<|end|>": True}


def test_text_round_trips_by_bytes():
    tokenizer, _ = built(byte_vocab())
    text = "hello 12345 \u00e9\u4e2d\U0001f600\n\t "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("vocab", "more", "adds"),
    [
        (byte_vocab("gpt-2"), {}, False),
        (byte_vocab("llama-bpe"), {}, True),
        (byte_vocab("llama-bpe"), {"add_bos_token": False}, False),
        (byte_vocab("smollm"), {"add_bos_token": True}, True),
        (piece_vocab(), {}, True),
    ],
)
def test_beginning_token(vocab, more, adds):
    tokenizer, config = built(vocab, **more)
    bos = vocab.named["bos"]
    assert config["add_bos_token"] is adds
    assert (tokenizer.encode("abc").ids[0] == bos) is adds
    assert bos not in tokenizer.encode("abc", add_special_tokens=False).ids


def test_tokenizer_config():
    _, config = built(piece_vocab())
    assert config["chat_template"] == TEMPLATE
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    named = (config["bos_token"], config["eos_token"], config["unk_token"])
    assert named == ("<s>", "</s>", "<unk>")
    assert "pad_token" not in config


def sentence_piece(vocab: Vocab, text: str) -> list[str]:
    """SentencePiece's own procedure: merge the best-scored pair, the leftmost of equals."""
    scores = {
        token: vocab.scores[index]
        for index, token in enumerate(vocab.tokens)
        if vocab.types[index] == NORMAL
    }
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out: list[str] = []
    for symbol in symbols:
        hexes = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        out += [symbol] if symbol in scores else hexes
    return out


CHUNKS = ["hel", "lo", "lol", "ol", "ab", "bc", "c", " ", "1", "</", "s>", "\u00e9", "\u4e2d"]


@given(st.lists(st.sampled_from(CHUNKS), max_size=12).map("".join))
@example("helol")  # "el" beats "lo"
def test_pieces_are_sentencepieces_own(text):
    vocab = piece_vocab()
    tokenizer, _ = PIECES
    # "<s>" in the text is a control token to the tokenizer, which SentencePiece does not know.
    if "<s>" not in text and "</s>" not in text:
        assert pieces(tokenizer, text) == sentence_piece(vocab, text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_no_merge_makes_a_control_token():
    data = json.loads(PIECES[0].to_str())  # holds "</" and "s>", which join to "</s>"
    data["added_tokens"], data["post_processor"] = [], None  # user text: no token is special
    assert pieces(Tokenizer.from_str(json.dumps(data)), "</s>") == ["▁", "</", "s>"]


def test_no_space_prefix_when_the_file_says_so():
    tokenizer, _ = built(piece_vocab(), add_space_prefix=False)
    assert pieces(tokenizer, "hello") == ["hel", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


@pytest.mark.model
def test_real_model_gives_the_golden_ids(real_model_dir):
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    for prompt in json.loads(GOLDEN.read_text())["prompts"]:
        got = tokenizer.encode(prompt["text"], add_special_tokens=False).ids
        assert got == prompt["ids"], prompt["name"]


@pytest.mark.model
def test_real_weights_are_the_reference_bytes(real_model_dir):
    import hashlib

    digest = hashlib.sha256((real_model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert digest == json.loads(GOLDEN.read_text())["sha256"]["model.safetensors"]
