"""Tiny tokenizers of every kind that Llama-family models have, made by the `tokenizers` library."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from kvrt.config import ModelConfig
from kvrt.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content"
    " + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|/_.,![]AINST"


def byte_level(*, add_bos: bool = False) -> Library:
    """GPT-2's kind (Llama 3, Qwen, SmolLM): ids 0..255 are the byte letters, sorted."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł"), ("<", "|"), ("|", ">")]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    library = Library(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # As in DeepSeek's files: markup that is not marked special.
    library.add_tokens([AddedToken("<｜User｜>", normalized=False), AddedToken("<think>")])
    if add_bos:
        number = library.token_to_id("<|endoftext|>")
        library.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", number)]
        )
    return library


def sentence_piece(*, prefix: str = "normalizer") -> Library:
    """Llama 2's and Mistral's kind: "▁" for a space, unknown characters as byte tokens.

    prefix: how text gets its leading space: "normalizer" (before every part) or "first" (before
    the text only, by a Metaspace pre-tokenizer).
    """
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁", "▁"), ("▁", "[")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *dict.fromkeys(LETTERS), *(a + b for a, b in merges)]
    library = Library(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prefix == "normalizer":
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def metaspace() -> Library:
    """The same vocabulary with a Metaspace decoder (and so without byte fallback)."""
    library = sentence_piece(prefix="first")
    library.decoder = decoders.Metaspace()
    return library


def whole_words() -> Library:
    """No decoder at all, and a control token that is an ordinary word of the vocabulary."""
    words = ["[UNK]", "[END]", "hello", "world", "[", "END]", "[END"]
    library = Library(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", "[END]"])
    return library


KINDS: dict[str, Callable[[], Library]] = {
    "byte_level": byte_level,
    "sentence_piece": sentence_piece,
    "metaspace": metaspace,
    "whole_words": whole_words,
}


def config(
    vocab_size: int = 400, *, bos_id: int | None = None, eos_ids: tuple[int, ...] = ()
) -> ModelConfig:
    """A model configuration of which only the vocabulary matters."""
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "vocab_size": vocab_size,
            "bos_token_id": bos_id,
            "eos_token_id": list(eos_ids) or None,
        }
    )


def load(
    folder: Path,
    library: Library,
    settings: Mapping[str, Any] | None = None,
    model: ModelConfig | None = None,
) -> Tokenizer:
    """Write the files of a tokenizer, and load them as kvrt does."""
    library.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Tokenizer.from_dir(folder, model or config())
