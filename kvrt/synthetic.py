"""Models of a published shape with random weights: honest for bytes and time, never for quality.

Weights are recipes that the device follows itself, so a model of any size is made in seconds and is
the same everywhere. Its tokens are bytes, so that any text can be fed to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .backends.ops import RandomMatrix
from .config import ModelConfig
from .models.families import expected_tensors
from .sampler import SamplingParams
from .shapes import UNTRAINED_CONTEXT

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_BIAS_SCALE = 0.1

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class SyntheticWeights(Mapping[str, Any]):
    """Tensor name -> RandomMatrix, or a small array (n,) in the model's type: ones for the gain of
    a norm, random numbers for a bias.

    Projections keep the size of what passes through them (standard deviation 1 / sqrt(columns)), so
    that logits spread by about 1.
    """

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], seed: int) -> None:
        self._shapes = expected_tensors(config)
        self._dtype = dtype
        self._seed = seed
        # A tied embedding is the head as well, which decides.
        self._unit_rows = set() if config.tie_embeddings else {"model.embed_tokens.weight"}
        self.nbytes = config.parameters() * dtype.itemsize

    def __getitem__(self, name: str) -> RandomMatrix | np.ndarray:
        shape = self._shapes[name]
        if len(shape) == 2:
            variance = 1.0 if name in self._unit_rows else 1.0 / shape[1]
            scale = (3.0 * variance) ** 0.5  # of a uniform distribution
            return RandomMatrix((shape[0], shape[1]), self._dtype, self._seed_of(name), scale)
        if name.endswith(".bias"):
            return self._bias(shape[0], self._seed_of(name))
        return np.ones(shape, self._dtype)  # (n,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _bias(self, size: int, seed: int) -> np.ndarray:
        # NumPy promises the raw numbers of a generator for ever, its distributions not.
        raw = np.random.PCG64(seed).random_raw(size)  # (size,) u64
        unit = (raw >> np.uint64(11)) * 2.0**-53  # (size,) f64 in 0 .. 1
        return ((2.0 * unit - 1.0) * _BIAS_SCALE).astype(self._dtype)

    def _seed_of(self, name: str) -> int:
        digest = hashlib.sha256(f"{name}\n{self._seed}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True)
class SyntheticSource:
    """A model that is made when it is loaded; the same for the same shape, type and seed.

    See `kvrt.source.ModelSource` for the members.
    """

    name: str
    config: ModelConfig
    dtype: np.dtype[Any]
    seed: int = 0

    @property
    def synthetic(self) -> bool:
        return True

    @property
    def context_limit(self) -> int:
        return UNTRAINED_CONTEXT

    @property
    def folder(self) -> Path | None:
        return None

    def weights(self) -> SyntheticWeights:
        return SyntheticWeights(self.config, self.dtype, self.seed)

    def tokenizer(self) -> Tokenizer:
        return byte_tokenizer(self.config)

    def sampling(self) -> SamplingParams:
        return SamplingParams()

    def fingerprint(self, weights: Mapping[str, Any]) -> str:
        """The sha256 of the config, the recipes and the small arrays, in hex."""
        digest = hashlib.sha256(repr(self.config).encode())
        for name in sorted(weights):
            tensor = weights[name]
            digest.update(f"\n{name} {tensor.dtype.name} {tensor.shape}\n".encode())
            if isinstance(tensor, RandomMatrix):
                digest.update(f"{tensor.seed} {tensor.scale!r}".encode())
            else:
                digest.update(tensor.tobytes())
        return digest.hexdigest()


def byte_tokenizer(config: ModelConfig) -> Tokenizer:
    """A tokenizer of bytes: ids 0 to 255 are the bytes of a text, id 1234 reads "<1234>".

    Text is never turned into another id than a byte's. It has a plain chat template.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    from .token_stream import Detokenizer
    from .tokenizer import Tokenizer

    byte_of = Detokenizer(byte_level=True)
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: byte_of.piece(letter, False, False)[0] for letter in letters}
    library = Library(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    settings = {"chat_template": _CHAT_TEMPLATE}
    # The others have no entry: to list 150,000 of them would take longer than to make the weights.
    return Tokenizer(library, config, settings, name_of="<{}>".format)
