"""A model without weights: bytes as tokens, a decoder that says what a script tells it.

It follows the real contracts (the store grows as tokens are computed, an interrupted prefill
leaves the store as it was), so that sessions and chats can be tested to the token.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvrt.generate import Model
from kvrt.sampler import SamplingParams

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 260
Script = Callable[[Sequence[int]], int]


def reply(text: str, *, marker: bytes = b">") -> Script:
    """A script that says `text` after the last `marker` of the prompt, then ends its turn."""
    wanted = [*text.encode(), IM_END]

    def script(ids: Sequence[int]) -> int:
        _, _, said = bytes(i if i < 256 else 0 for i in ids).rpartition(marker)
        return wanted[min(len(said), len(wanted) - 1)]

    return script


HELLO = reply("hello")


class FakeStore:
    """Token ids in place of keys and values."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, count: int) -> int:
        return count

    def truncate(self, count: int) -> None:
        assert 0 <= count <= len(self.ids)
        del self.ids[count:]

    def clear(self) -> None:
        self.ids.clear()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(bytes=10 * len(self.ids), bits_per_element=16.0)


@dataclass
class FakeDecoder:
    """Logits that peak at what the script says; counts its calls in `calls`."""

    script: Script
    calls: list[tuple[str, int]] = field(default_factory=list)
    layers: int = 4
    vocab_size: int = VOCAB_SIZE

    def prefill(
        self,
        token_ids: Sequence[int],
        store: FakeStore,
        *,
        all_logits: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        self.calls.append(("prefill", len(token_ids)))
        for layer in range(self.layers):
            if progress is not None:
                progress(layer + 1, self.layers)
        rows = []
        for token_id in token_ids:
            store.ids.append(token_id)
            rows.append(self._logits(store))
        return np.stack(rows) if all_logits else rows[-1]

    def decode(self, token_id: int, store: FakeStore) -> np.ndarray:
        assert len(store) < store.max_tokens
        self.calls.append(("decode", 1))
        store.ids.append(token_id)
        return self._logits(store)

    def decode_best(self, token_id: int, store: FakeStore) -> tuple[int, float]:
        logits = self.decode(token_id, store)
        return int(logits.argmax()), float(logits.max())

    def _logits(self, store: FakeStore) -> np.ndarray:
        logits = np.zeros(self.vocab_size, np.float32)  # (vocab_size,) f32
        logits[self.script(store.ids)] = 100.0
        return logits


class FakeStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeTokenizer:
    stop_ids = frozenset({ENDOFTEXT, IM_END})

    def __init__(self, *, template: bool = True) -> None:
        self.template = object() if template else None

    def stream(self, *, continued: bool = False) -> FakeStream:
        return FakeStream()

    def decode(self, ids: Sequence[int], *, continued: bool = False) -> str:
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Iterable[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [IM_START, *f"{message['role']}>{message['content']}".encode(), IM_END]
        return [*ids, IM_START, *b"assistant>"] if add_generation_prompt else ids


def fake_model(
    script: Script = HELLO,
    *,
    max_context: int = 200,
    template: bool = True,
    sampling: SamplingParams | None = None,
) -> Model:
    """A Model of fakes; `model.decoder.calls` tells what was computed."""
    fakes: dict[str, Any] = {
        "config": SimpleNamespace(vocab_size=VOCAB_SIZE, max_context=max_context),
        "tokenizer": FakeTokenizer(template=template),
        "decoder": FakeDecoder(script),
        "ops": SimpleNamespace(
            name="cpu", device_name="fake", threads=1, peak_bytes=lambda: 12_345
        ),
        "new_store": lambda spec: FakeStore(max_context),
        "sampling": sampling or SamplingParams(),
        "fingerprint": lambda: "fake",
    }
    return Model(name="fake", spec="f16", max_context=max_context, weight_bytes=0, **fakes)
