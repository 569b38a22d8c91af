"""Tiny GGUF files of every family, and the tensors a correct conversion gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN, NORMAL = 3, 4, 5, 6, 2, 1
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"


@dataclass(frozen=True)
class Vocab:
    """Tokens of a tiny tokenizer with their GGUF types, scores and merges."""

    model: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] | None = None
    scores: tuple[float, ...] | None = None
    pre: str | None = None
    named: Mapping[str, int] = field(default_factory=dict)


def byte_vocab(pre: str | None = "gpt-2") -> Vocab:
    """Byte-level: two control tokens, the 256 bytes, a few merges, then a user-defined token."""
    merges = ("h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "123 4", "' s", "a b")
    made = tuple(merge.replace(" ", "") for merge in merges)
    tokens = ("<s>", "</s>", *sorted(ByteLevel.alphabet()), *made, "<tool>", "<|end|>", "[PAD0]")
    types = (CONTROL, CONTROL, *(NORMAL,) * (256 + len(made)), USER_DEFINED, CONTROL, UNUSED)
    return Vocab("gpt2", tokens, types, merges, pre=pre, named={"bos": 0, "eos": 1})


def piece_vocab() -> Vocab:
    """SentencePiece: <unk> <s> </s>, the 256 bytes, and pieces whose scores fall with the id."""
    pieces = ("▁h", "el", "lo", "hel", "▁hel", "▁hello", "ab", "abc", "bc", "lol", "▁", "</")
    pieces += ("s>", *"helosabc<>/1")
    hexes = tuple(f"<0x{value:02X}>" for value in range(256))
    tokens = ("<unk>", "<s>", "</s>", *hexes, *pieces)
    types = (UNKNOWN, CONTROL, CONTROL, *(BYTE,) * 256, *(NORMAL,) * len(pieces))
    scores = (0.0,) * 259 + tuple(-float(rank) for rank in range(len(pieces)))
    named = {"bos": 1, "eos": 2, "unknown": 0}
    return Vocab("llama", tokens, types, scores=scores, named=named)


@dataclass(frozen=True)
class TinyGguf:
    """What goes into the file; `tensor_types` maps a GGUF tensor name's part to its type."""

    arch: str = "llama"
    vocab: Vocab = field(default_factory=byte_vocab)
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    tied: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tensor_types: Mapping[str, GGMLQuantizationType] = field(default_factory=dict)
    extra_keys: Mapping[str, Any] = field(default_factory=dict)
    drop_keys: frozenset[str] = frozenset()
    extra_tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    drop_tensors: frozenset[str] = frozenset()
    seed: int = 0

    def but(self, **changes: Any) -> TinyGguf:
        """A copy with changes."""
        return replace(self, **changes)

    def write(self, path: Path) -> dict[str, np.ndarray]:
        """Write the file; give Hugging Face name -> expected float16 tensor."""
        writer = GGUFWriter(path, self.arch)
        self._write_keys(writer)
        rng = np.random.default_rng(self.seed)
        expected = {}
        for name, (hf_name, shape) in self._shapes().items():
            values = rng.standard_normal(shape).astype(np.float32)  # shape f32
            kind = next(
                (kind for part, kind in self.tensor_types.items() if part in name),
                GGMLQuantizationType.F32,
            )
            stored = quants.quantize(self._permuted(name, values), kind)
            if name not in self.drop_tensors:
                writer.add_tensor(name, stored, raw_dtype=kind)
            rounded = quants.dequantize(quants.quantize(values.reshape(1, -1), kind), kind)
            expected[hf_name] = rounded.reshape(shape).astype(np.float16)
        for name, values in self.extra_tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def _permuted(self, name: str, values: np.ndarray) -> np.ndarray:
        """Rows as llama.cpp's converter orders them, written out row by row."""
        if self.arch != "llama" or not (".attn_q." in name or ".attn_k." in name):
            return values
        half, out = self.head_dim // 2, np.empty_like(values)
        for head in range(len(values) // self.head_dim):
            base = head * self.head_dim
            for i in range(half):
                out[base + 2 * i] = values[base + i]
                out[base + 2 * i + 1] = values[base + half + i]
        return out

    def _shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        hidden, inner, vocab = self.hidden, self.inner, len(self.vocab.tokens)
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
            "output_norm.weight": ("model.norm.weight", (hidden,)),
        }
        if not self.tied:
            shapes["output.weight"] = ("lm_head.weight", (vocab, hidden))
        for index in range(self.layers):
            old, new = f"blk.{index}", f"model.layers.{index}"
            for a, b, shape in (
                ("attn_norm", "input_layernorm", (hidden,)),
                ("ffn_norm", "post_attention_layernorm", (hidden,)),
                ("attn_q", "self_attn.q_proj", (q_width, hidden)),
                ("attn_k", "self_attn.k_proj", (kv_width, hidden)),
                ("attn_v", "self_attn.v_proj", (kv_width, hidden)),
                ("attn_output", "self_attn.o_proj", (hidden, q_width)),
                ("ffn_gate", "mlp.gate_proj", (inner, hidden)),
                ("ffn_up", "mlp.up_proj", (inner, hidden)),
                ("ffn_down", "mlp.down_proj", (hidden, inner)),
            ):
                shapes[f"{old}.{a}.weight"] = (f"{new}.{b}.weight", shape)
            for letter, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                if self.qkv_bias:
                    name = f"{new}.self_attn.{letter}_proj.bias"
                    shapes[f"{old}.attn_{letter}.bias"] = (name, (width,))
            if self.o_bias:
                shapes[f"{old}.attn_output.bias"] = (f"{new}.self_attn.o_proj.bias", (hidden,))
            for letter in "qk" if self.qk_norm else "":
                name = f"{new}.self_attn.{letter}_norm.weight"
                shapes[f"{old}.attn_{letter}_norm.weight"] = (name, (self.head_dim,))
        return shapes

    def _write_keys(self, writer: GGUFWriter) -> None:
        arch, vocab = self.arch, self.vocab
        keys: dict[str, Any] = {
            f"{arch}.block_count": self.layers,
            f"{arch}.context_length": 256,
            f"{arch}.embedding_length": self.hidden,
            f"{arch}.feed_forward_length": self.inner,
            f"{arch}.attention.head_count": self.heads,
            f"{arch}.attention.head_count_kv": self.kv_heads,
            f"{arch}.attention.key_length": self.head_dim,
            f"{arch}.attention.value_length": self.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.freq_base": 100000.0,
            "tokenizer.ggml.model": vocab.model,
            "tokenizer.ggml.tokens": list(vocab.tokens),
            "tokenizer.ggml.token_type": list(vocab.types),
            "tokenizer.chat_template": TEMPLATE,
            **{f"tokenizer.ggml.{name}_token_id": index for name, index in vocab.named.items()},
        }
        if vocab.merges is not None:
            keys["tokenizer.ggml.merges"] = list(vocab.merges)
        if vocab.scores is not None:
            keys["tokenizer.ggml.scores"] = list(vocab.scores)
        if vocab.pre is not None:
            keys["tokenizer.ggml.pre"] = vocab.pre
        keys.update(self.extra_keys)
        for key, value in keys.items():
            if key in self.drop_keys:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
