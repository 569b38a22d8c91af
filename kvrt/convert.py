"""GGUF files to model folders: float16 safetensors, config and tokenizer, a few rows at a time."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import KvrtError, StorageError, UnsupportedError, UsageError, WeightError
from .gguf_config import check_architecture, generation_config, model_config
from .gguf_file import GgufFile, GgufTensor
from .gguf_metadata import Metadata
from .gguf_rope import llama3_scaling
from .gguf_tokenizer import build_tokenizer
from .paths import atomic_folder
from .progress import Progress, silent

_CHUNK_ELEMENTS = 1 << 21  # numbers dequantised at a time: 8 MiB as float32
_SPARE_BYTES = 32 << 20  # tokenizer, config and some air, for the free-space check

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)\Z")
_ROPE_TABLE = "rope_freqs.weight"


@dataclass(frozen=True)
class _Entry:
    """One tensor of the new file: where it comes from and how many heads to un-permute (or 0)."""

    name: str
    source: GgufTensor
    heads: int

    @property
    def nbytes(self) -> int:
        return 2 * prod(self.source.shape)


def convert_gguf(
    source: Path,
    target: Path,
    progress: Progress | None = None,
    name: str | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Convert a GGUF to the model folder `target`, replacing an older one only when complete.

    Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json (with the
    chat template) and model.safetensors in float16. `name` is kept as `_name_or_path`;
    `generation` is added to generation_config.json. Raises UsageError, UnsupportedError,
    ConfigError, WeightError or StorageError; `target` is untouched then.
    """
    source, target = Path(source), Path(target)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a folder to write")
    if source.resolve().is_relative_to(target.resolve()):
        raise UsageError(f"{target}: holds the GGUF itself; choose another folder")
    with GgufFile(source) as gguf:
        meta = Metadata(str(source), gguf.metadata)
        config = _config(gguf, meta)
        if name is not None:
            config = {"_name_or_path": name, **config}
        entries = _plan(gguf, config)
        _check_against_config(source, config, entries)
        tokenizer, tokenizer_config = build_tokenizer(meta, config["vocab_size"])
        with atomic_folder(target) as folder:
            _check_space(folder, target, entries)
            _write_json(folder / "config.json", config)
            _write_json(folder / "generation_config.json", generation_config(meta, generation))
            _write_json(folder / "tokenizer_config.json", tokenizer_config)
            (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8", newline="\n")
            _write_tensors(folder / "model.safetensors", gguf, entries, progress or silent)


def _config(gguf: GgufFile, meta: Metadata) -> dict[str, Any]:
    if "split.count" in gguf.metadata and gguf.metadata["split.count"] not in (0, 1):
        raise UnsupportedError(
            f"{gguf.path}: one part of a split GGUF; merge the parts with llama-gguf-split first"
        )
    check_architecture(meta)
    config = model_config(
        meta,
        vocab_size=_vocab_size(gguf),
        tied="output.weight" not in gguf.tensors,
        biases={
            "attn": "blk.0.attn_output.bias" in gguf.tensors,
            "mlp": "blk.0.ffn_down.bias" in gguf.tensors,
        },
    )
    table = gguf.tensors.get(_ROPE_TABLE)
    if table is not None:
        factors = gguf.read_rows(table, 0, table.rows).reshape(-1)  # (head_dim // 2,) f32
        scaling = llama3_scaling(meta, factors, config)
        if scaling is not None:
            config["rope_scaling"] = scaling
    return config


def _vocab_size(gguf: GgufFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightError(f"{gguf.path}: the tensor token_embd.weight is missing")
    return embedding.shape[0]


def _plan(gguf: GgufFile, config: Mapping[str, Any]) -> list[_Entry]:
    """The tensors to write, in safetensors' own order (by name, all float16)."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    # llama.cpp rotates neighbouring pairs in llama-type files, so their q and k rows are reordered.
    permuted = config["model_type"] in ("llama", "mistral")
    entries = []
    for tensor in gguf.tensors.values():
        if tensor.name == _ROPE_TABLE or tensor.name.endswith("attn_rot_embd.weight"):
            continue
        match = _LAYER_NAME.match(tensor.name)
        if tensor.name in _TOP_NAMES:
            entries.append(_Entry(_TOP_NAMES[tensor.name], tensor, 0))
        elif match and match[2] in _LAYER_NAMES:
            new = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
            entries.append(_Entry(new, tensor, heads.get(match[2], 0) if permuted else 0))
        else:
            raise UnsupportedError(
                f"{gguf.path}: tensor {tensor.name} has no place in a {config['model_type']} model"
            )
    return sorted(entries, key=lambda entry: entry.name)


def _check_against_config(source: Path, config: Mapping[str, Any], entries: list[_Entry]) -> None:
    """Refuse before writing what kvrt could not load: the same test as loading the folder."""
    from .config import ModelConfig
    from .models.families import expected_tensors

    try:
        expected = expected_tensors(ModelConfig.from_dict(config))
    except KvrtError as error:
        raise type(error)(f"{source}: {error}") from error
    found = {entry.name: entry.source for entry in entries}
    for name, shape in expected.items():
        if name not in found:
            raise WeightError(f"{source}: the tensor for {name} is missing")
        if found[name].shape != shape:
            raise WeightError(
                f"{source}: tensor {found[name].name} has shape {found[name].shape}, "
                f"expected {shape}"
            )
    extra = sorted(set(found) - set(expected))
    if extra:
        raise UnsupportedError(
            f"{source}: tensor {found[extra[0]].name} has no place in this "
            f"{config['model_type']} model"
        )


def _check_space(folder: Path, target: Path, entries: list[_Entry]) -> None:
    needed = sum(entry.nbytes for entry in entries) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{target}: no space left on the device: {needed >> 20} MiB needed, {free >> 20} free"
        )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def _write_tensors(path: Path, gguf: GgufFile, entries: list[_Entry], report: Progress) -> None:
    total = sum(entry.nbytes for entry in entries)
    done = 0
    with open(path, "wb") as file:
        file.write(_header(entries))
        for entry in entries:
            for chunk in _chunks(gguf, entry):
                file.write(chunk.tobytes())
                done += chunk.nbytes
                report("convert", done, total)
        file.flush()
        os.fsync(file.fileno())


def _header(entries: list[_Entry]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        shape = list(entry.source.shape)
        table[entry.name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _chunks(gguf: GgufFile, entry: _Entry) -> Iterator[np.ndarray]:
    """The tensor's numbers in order: (rows, last axis) f16, whole heads if they are reordered."""
    tensor = entry.source
    if len(tensor.shape) == 1:
        rows = gguf.read_rows(tensor, 0, 1).reshape(-1, 1)  # (length, 1) f32
        yield _to_half(gguf, tensor, _unpermute(rows, entry.heads))
        return
    head_rows = tensor.rows // entry.heads if entry.heads else 1
    step = max(1, _CHUNK_ELEMENTS // (tensor.shape[-1] * head_rows)) * head_rows
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        rows = gguf.read_rows(tensor, start, stop)  # (rows, last axis) f32
        heads = (stop - start) // head_rows if entry.heads else 0
        yield _to_half(gguf, tensor, _unpermute(rows, heads))


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i + h of each head goes to h * half + i, rotary pairs (i, i + half): same shape, f32."""
    if not heads:
        return rows
    num_rows, width = rows.shape
    pairs = rows.reshape(heads, num_rows // heads // 2, 2, width)  # (heads, half, 2, width) f32
    return pairs.swapaxes(1, 2).reshape(num_rows, width)  # (rows, width) f32


def _to_half(gguf: GgufFile, tensor: GgufTensor, rows: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)  # (rows, width) f16
    if not np.isfinite(half).all():
        worst = float(np.abs(rows).max())
        raise WeightError(
            f"{gguf.path}: tensor {tensor.name} holds {worst:g}, beyond float16's largest 65504"
        )
    return half
