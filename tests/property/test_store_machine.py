"""KVStore against a plain list of tokens, under any sequence of calls."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrt.backends.cpu import CpuOps
from kvrt.errors import CodecError, ContextFullError
from kvrt.kvstore import Geometry, KVSpec, estimate, load_store, save_store
from tests.helpers.stores import (
    Tokens,
    append,
    exact_dtypes,
    extend,
    new_store,
    read,
    stored,
)

TINY = Geometry(num_layers=2, num_kv_heads=1, head_dim=2)
SPECS = [
    "f32",
    "f16",
    "k=f16,v=bf16,sink=3,window=5",
    "k=f32,v=f16,sink=70",
    "k=f16,v=f16,window=70",
]
LIMIT = 400


class Interrupted(Exception):
    """Raised in the middle of an extension."""


def numbered(ids: list[int]) -> Tokens:
    """Tokens whose keys and values say which token, layer and channel they are."""
    base = np.array(ids, np.float32)[None, :, None, None]
    layer = np.arange(TINY.num_layers, dtype=np.float32)[:, None, None, None]
    channel = np.arange(TINY.head_dim, dtype=np.float32)
    keys = base + layer * 0.25 + channel * 0.125  # (num_layers, n, 1, head_dim) f32
    return Tokens(keys, -keys)


class StoreMachine(RuleBasedStateMachine):
    ops: CpuOps  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.next_id = 0

    @initialize(spec=st.sampled_from(SPECS))
    def create(self, spec: str) -> None:
        self.store = new_store(self.ops, spec, TINY, LIMIT)
        self.spec = KVSpec.parse(spec)

    def fresh(self, count: int) -> list[int]:
        # Small enough that float16 tells neighbours apart, and no token is like another.
        ids = [(self.next_id + i) % 500 for i in range(count)]
        self.next_id += count
        return ids

    @rule(count=st.integers(1, 9))
    def append(self, count: int) -> None:
        ids = self.fresh(min(count, LIMIT - len(self.ids)))
        append(self.store, numbered(ids))
        self.ids += ids

    @rule(count=st.one_of(st.integers(1, 6), st.integers(50, 200)))
    def extend(self, count: int) -> None:
        ids = self.fresh(count)
        if len(self.ids) + count > LIMIT:
            with pytest.raises(ContextFullError):
                extend(self.store, numbered(ids))
        else:
            extend(self.store, numbered(ids))
            self.ids += ids

    @rule(count=st.one_of(st.integers(1, 6), st.integers(50, 200)), layers=st.integers(0, 2))
    def fail_to_extend(self, count: int, layers: int) -> None:
        tokens = numbered(self.fresh(count))
        with suppress(ContextFullError), pytest.raises(Interrupted):
            with self.store.extending(count):
                for layer in range(layers):
                    keys, values = tokens.keys[layer], tokens.values[layer]
                    self.store.extend(layer, self.ops.to_device(keys), self.ops.to_device(values))
                raise Interrupted

    @rule()
    def append_without_advancing(self) -> None:
        """What an interrupted decode step leaves."""
        if len(self.ids) < LIMIT:
            tokens = numbered(self.fresh(1))
            keys, values = tokens.keys[0], tokens.values[0]
            self.store.append(0, self.ops.to_device(keys), self.ops.to_device(values))

    @precondition(lambda self: self.ids)
    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        count = round(share * len(self.ids))
        self.store.truncate(count)
        del self.ids[count:]

    @precondition(lambda self: self.ids)
    @rule(back=st.integers(1, 5))
    def truncate_a_little(self, back: int) -> None:
        count = max(len(self.ids) - back, 0)
        self.store.truncate(count)
        del self.ids[count:]

    @rule()
    def truncate_too_far(self) -> None:
        with pytest.raises(CodecError):
            self.store.truncate(len(self.ids) + 1)

    @rule()
    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            save_store(self.store, Path(folder) / "x")
            self.store = load_store(Path(folder) / "x", self.store).store

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.ids.clear()

    @invariant()
    def it_holds_the_list(self) -> None:
        if not hasattr(self, "store"):
            return  # before `create`
        assert len(self.store) == len(self.ids)
        stats = self.store.stats()
        assert stats.bytes == estimate(TINY, self.spec, len(self.ids))
        assert stats.tokens == len(self.ids)
        got, want = read(self.store), numbered(self.ids)
        k, v = exact_dtypes(self.spec)
        assert np.array_equal(got.keys, stored(want.keys, k))
        assert np.array_equal(got.values, stored(want.values, v))


def test_any_sequence_of_calls(ops: CpuOps) -> None:
    machine = type("Machine", (StoreMachine,), {"ops": ops})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))
