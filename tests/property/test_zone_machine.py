"""A store of zones against a list of tokens: any sequence of calls leaves what it should.

The model keeps exact rows itself. What a prompt became it reads from the blocks once, bit by bit,
and from then on it must stay; that these are the right ones is for test_compress.
"""

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
from kvrt.errors import CodecError, ContextFullError, UnsupportedError
from kvrt.kvstore import Geometry, load_store, save_store
from kvrt.trizone.policies import POLICIES
from tests.helpers.compare import assert_close
from tests.helpers.refs import hadamard_matrix
from tests.helpers.stores import Tokens, append, attend, extend, queries
from tests.helpers.tolerances import tolerance
from tests.helpers.zone_reference import attention
from tests.helpers.zone_stores import (
    SPECS,
    Head,
    Prompt,
    compress_layer,
    decoded,
    kept_values,
    new_store,
    prefill,
    random_prompt,
    read_heads,
)

TINY = Geometry(num_layers=2, num_kv_heads=2, head_dim=16)
LIMIT = 700


class Interrupted(BaseException):
    pass


class ZoneMachine(RuleBasedStateMachine):
    ops: CpuOps  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0

    @initialize(spec=st.sampled_from(SPECS))
    def create(self, spec: str) -> None:
        self.store = new_store(self.ops, spec, TINY, LIMIT)
        self.forget()

    def forget(self) -> None:
        nothing = np.zeros((TINY.num_layers, 0, TINY.num_kv_heads, TINY.head_dim), np.float32)
        self.exact = Tokens(nothing, nothing)
        self.packed = [[Head(np.zeros((0, 16)), np.zeros((0, 16)))] * 2] * 2
        self.length, self.frozen, self.rotated = 0, 0, False

    def fresh(self, count: int) -> Prompt:
        self.seed += 1
        return random_prompt(count, TINY, seed=self.seed)

    def added(self, tokens: Tokens) -> None:
        """Values are as they are kept, of f16 numbers."""
        values = kept_values(self.store, tokens.values, self.rotated)
        tokens = Tokens(*(side.astype("f2").astype("f4") for side in (tokens.keys, values)))
        self.exact = Tokens(
            *(np.concatenate(pair, axis=1) for pair in zip(self.exact, tokens, strict=True))
        )
        self.length += len(tokens)

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        prompt = self.fresh(min(count, LIMIT - self.length))
        append(self.store, prompt.tokens)
        self.added(prompt.tokens)

    @rule(count=st.one_of(st.integers(1, 6), st.integers(30, 250)), packs=st.booleans())
    def add(self, count: int, packs: bool) -> None:
        prompt = self.fresh(count)
        if self.length + count > LIMIT:
            with pytest.raises(ContextFullError):
                prefill(self.store, prompt)
            return
        if not packs:
            extend(self.store, prompt.tokens)
            self.added(prompt.tokens)
            return
        prefill(self.store, prompt)
        total, spec = len(self.exact) + count, self.store.spec
        protected = spec.sink + spec.window
        budget = self.store.compression.budget_bytes(total, 16)
        packed = total > protected and budget < 64 * total
        if packed and not self.rotated:
            values = kept_values(self.store, self.exact.values).astype("f2").astype("f4")
            self.exact = Tokens(self.exact.keys, values)
            self.rotated = POLICIES[self.store.compression.name].rotates
        self.added(prompt.tokens)
        if packed:
            self.compressed(protected, budget)

    def compressed(self, protected: int, budget: int) -> None:
        sink, total = self.store.spec.sink, len(self.exact)
        keep = [*range(sink), *range(total - protected + sink, total)]
        self.exact = Tokens(*(side[:, keep] for side in self.exact))
        self.frozen = self.length
        for layer, zones in enumerate(self.store.parts().layers):
            segment = zones.segments[-1]
            assert segment.candidates == total - protected
            spent = segment.data.nbytes + 32 * len(segment.units)
            assert spent <= 2 * max(budget - 64 * protected, 0)
            more = [decoded(segment, head, 16) for head in range(2)]
            self.packed = [
                [Head(*map(np.concatenate, zip(*pair, strict=True))) for pair in zip(heads, more)]
                if at == layer
                else heads
                for at, heads in enumerate(self.packed)
            ]

    @rule(count=st.integers(1, 200), layers=st.integers(0, 2))
    def fail_to_add(self, count: int, layers: int) -> None:
        prompt = self.fresh(count)
        with pytest.raises((Interrupted, ContextFullError)):
            with self.store.extending(count):
                for layer in range(layers):
                    compress_layer(self.store, prompt, layer)
                raise Interrupted

    @precondition(lambda self: self.length < LIMIT)
    @rule()
    def append_without_advancing(self) -> None:
        """What an interrupted decode step leaves."""
        one = self.fresh(1)
        self.store.append(0, one.keys[0], one.values[0])

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        self.truncate_to(round(share * self.length))

    @rule(back=st.integers(1, 5))
    def truncate_a_little(self, back: int) -> None:
        self.truncate_to(max(self.length - back, 0))

    def truncate_to(self, count: int) -> None:
        assert self.store.cut(count) == (count if count >= self.frozen else 0)
        if 0 < count < self.frozen:
            with pytest.raises(UnsupportedError):
                self.store.truncate(count)
            return
        self.store.truncate(count)
        if count == 0:
            self.forget()
            return
        rows = len(self.exact) - (self.length - count)
        self.exact, self.length = self.exact.part(0, rows), count

    @rule()
    def truncate_too_far(self) -> None:
        with pytest.raises(CodecError):
            self.store.truncate(self.length + 1)

    @rule()
    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            save_store(self.store, Path(folder) / "x")
            self.store = load_store(Path(folder) / "x", self.store).store  # type: ignore[assignment]

    @rule()
    def fork(self) -> None:
        """The other one goes its own way."""
        other, self.store = self.store, self.store.fork()
        append(other, self.fresh(min(2, LIMIT - self.length)).tokens)
        prefill(other, self.fresh(min(100, LIMIT - len(other))))
        other.clear()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.forget()

    @invariant()
    def it_holds_the_list(self) -> None:
        if not hasattr(self, "store"):
            return  # before `create`
        state = self.store.parts()
        assert (len(self.store), state.frozen) == (self.length, self.frozen)
        rows = state.rows
        assert rows == len(self.exact) == self.store.view(0).extent.tail_tokens
        # A step that was given up may have made room for its token.
        sizes = [2 * 2 * 64 * 64 * max(-(-count // 64), 1) for count in (rows, rows + 1)]
        assert self.store.stats().tail_bytes in sizes
        for layer in range(2):
            held = []
            for head, packed in enumerate(self.packed[layer]):
                exact = (side[layer, :, head] for side in self.exact)
                keys, values = map(np.concatenate, zip(packed, exact, strict=True))
                if self.rotated:
                    values = values @ hadamard_matrix(16)
                held.append(Head(keys, values))
            for got, want in zip(read_heads(self.store, layer), held, strict=True):
                assert np.array_equal(
                    got.keys[len(got.keys) - rows :], want.keys[len(want.keys) - rows :]
                )
                assert_close(got.keys, want.keys, tolerance("unpack", "f32"), "keys")
                assert_close(got.values, want.values, tolerance("basis", "f32"), "values")
            if self.length:
                q = queries(1, 4, 16)[0]
                got = attend(self.store, q, layer, scale=0.25)
                assert_close(
                    got,
                    attention(q, held, 0.25),
                    tolerance("attend", "f32"),
                    "attention",
                )


def test_any_sequence_of_calls(ops: CpuOps) -> None:
    machine = type("Machine", (ZoneMachine,), {"ops": ops})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))
