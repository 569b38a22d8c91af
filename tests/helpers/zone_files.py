"""Saved stores of zones, changed."""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from kvrt.kvstore.serialize import _checksum


class File:
    """A saved file, to be changed; written with checksums that agree, as by one who knows how."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        self.texts: dict[str, str] = header.pop("__metadata__")
        self.tensors = {
            name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }

    def numbers(self, name: str) -> np.ndarray:
        return np.frombuffer(self.tensors[name][2], np.int64).reshape(self.tensors[name][1]).copy()

    def put(self, name: str, array: np.ndarray) -> None:
        self.tensors[name] = (self.tensors[name][0], list(array.shape), array.tobytes())

    def write(self, path: Path) -> Path:
        data = b"".join(raw for _, _, raw in self.tensors.values())
        texts = {**self.texts, "crc32": str(crc32(data))}
        header: dict[str, Any] = {"__metadata__": {**texts, "header_crc32": _checksum(texts)}}
        at = 0
        for name, (dtype, shape, raw) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
            at += len(raw)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path
