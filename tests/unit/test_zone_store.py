"""ZoneStore: exact tokens, a prompt that is compressed once, and everything that may come after."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.backends.view import zone_settings
from kvrt.errors import CodecError, UnsupportedError
from kvrt.kvstore import KVSpec, estimate
from tests.helpers.compare import assert_close
from tests.helpers.refs import hadamard_matrix
from tests.helpers.stores import append, attend, extend, queries
from tests.helpers.tolerances import tolerance
from tests.helpers.zone_stores import (
    GEOMETRY,
    MORE,
    OTHERS,
    PROMPT,
    SPECS,
    Prompt,
    contents,
    filled,
    held_by,
    kept_values,
    new_store,
    prefill,
    random_prompt,
    read_heads,
    same,
)

# What is not compressed


@pytest.mark.parametrize("spec", [*SPECS, "rdkv:300", "h2o:100%", "snapkv:4096"])
@pytest.mark.parametrize("count", [1, 5, 31, 36])
def test_short_prompts_stay_exact(ops: CpuOps, spec: str, count: int) -> None:
    if KVSpec.parse(spec).window != 32:
        count = min(count, 3)
    store, plain = new_store(ops, spec), new_store(ops, spec)
    prefill(store, random_prompt(count))
    extend(plain, random_prompt(count).tokens)
    assert contents(store) == contents(plain) and store.stats() == plain.stats()
    assert store.stats().bytes == estimate(GEOMETRY, store.spec, count)
    assert store.stats().bits_per_element == 16 and store.held == count


@pytest.mark.parametrize("spec", ["rdkv:300", "snapkv:300", "h2o:100%", "rdkv:4096:shared"])
def test_a_budget_of_the_whole_prompt_keeps_it_whole(ops: CpuOps, spec: str) -> None:
    store = filled(ops, spec)
    assert store.stats().bytes == estimate(GEOMETRY, store.spec, 300)
    for layer in range(2):
        for head, (keys, values) in enumerate(read_heads(store, layer)):
            assert np.array_equal(keys, PROMPT.keys[layer, :, head].astype("f2"))
            assert np.array_equal(values, PROMPT.values[layer, :, head].astype("f2"))
    store.truncate(7)  # nothing was compressed, so any cut works
    assert store.cut(5) == 5 and len(store) == 7


@pytest.mark.parametrize("spec", ["rdkv:299", "snapkv:299", "rdkv:99.9%"])
def test_a_budget_of_one_token_less_compresses(ops: CpuOps, spec: str) -> None:
    store = filled(ops, spec)
    assert store.parts().rows == 36 and store.parts().frozen == 300
    assert store.stats().bytes <= estimate(GEOMETRY, store.spec, 300)


@pytest.mark.parametrize("spec", ["rdkv:0", "snapkv:0", "adakv:36", "rdkv:10%", "h2o:36:shared"])
def test_without_a_budget_only_protected_tokens_are_left(ops: CpuOps, spec: str) -> None:
    store = filled(ops, spec)
    assert store.held == 36 and len(store) == 300
    assert store.stats().page_bytes == 0 and store.stats().sealed_tokens == 264
    rows = [0, 1, 2, 3, *range(268, 300)]
    for head, (keys, _) in enumerate(read_heads(store, 1)):
        assert np.array_equal(keys, PROMPT.keys[1, rows, head].astype("f2"))
    widths = store.widths(0)
    assert widths.tokens == {16: 0, 8: 0, 4: 0, 2: 0, 0: 528} and widths.channels[0] == 32
    assert np.isfinite(attend(store, queries(1, 4, 16)[0])).all()


def test_a_head_that_keeps_no_token(ops: CpuOps) -> None:
    """adakv gives a head a fifth of its budget at least, a shared budget nothing."""
    prompt = random_prompt(300)
    prompt.values[:, :, 1] = 0  # no energy, no width
    store = new_store(ops, "rdkv:64:shared")
    prefill(store, prompt)
    for layer in range(2):
        segment = store.parts().layers[layer].segments[0]
        assert segment.kept(2)[1] == 0 < segment.kept(2)[0]
        assert segment.channels[1].sum() == 0
        held = [len(head.keys) for head in read_heads(store, layer)]
        assert held == [36 + segment.kept(2)[0], 36] and held[0] <= store.held


def test_one_channel_of_keys_kept(ops: CpuOps) -> None:
    """Queries look along one channel, so no other is worth a byte."""
    prompt = random_prompt(300)
    asked = np.zeros_like(prompt.queries)
    asked[..., 5] = prompt.queries[..., 5]
    store = new_store(ops, "rdkv:64")
    prefill(store, Prompt(*prompt.tokens, asked))
    for layer in range(2):
        segment = store.parts().layers[layer].segments[0]
        assert segment.channels.sum(1).tolist() == [1, 1] and segment.data[:2].tolist() == [5, 5]
        for keys, _ in read_heads(store, layer):
            packed = keys[: len(keys) - 36]
            assert packed[:, 5].any() and not np.delete(packed, 5, axis=1).any()


@pytest.mark.parametrize("spec", SPECS)
def test_statistics_are_sums_of_arrays(ops: CpuOps, spec: str) -> None:
    store = filled(ops, spec, steps=3)
    state, stats = store.parts(), store.stats()
    assert stats.page_bytes == sum(s.data.nbytes for z in state.layers for s in z.segments)
    assert stats.tail_bytes == 2 * 2 * 2 * 64 * 16 * 2 and stats.tokens == 303
    assert stats.sealed_tokens == 303 - state.rows
    numbers = 2 * 2 * 2 * 16 * stats.sealed_tokens
    directories = stats.table_bytes - 2 * zone_settings(2) * 8
    assert stats.bits_per_element == 8 * (stats.page_bytes + directories) / numbers < 16
    for layer, zones in enumerate(state.layers):
        widths = store.widths(layer)
        assert sum(widths.tokens.values()) == 2 * sum(s.candidates for s in zones.segments)
        assert sum(widths.channels.values()) == 2 * 16
        kept = sum(widths.tokens[width] for width in (16, 8, 4, 2))
        assert kept == sum(len(head.keys) - state.rows for head in held_by(store, layer))


# Steps, truncation, forks


@pytest.mark.parametrize("split", [[0] * 100, [1, 63, 36], [100], [30, *[0] * 70]])
def test_later_tokens_are_exact_however_they_come(ops: CpuOps, split: list[int]) -> None:
    store, whole, start = filled(ops), filled(ops), 0
    extend(whole, OTHERS.part(0, 100))
    for size in split:
        part = OTHERS.part(start, start + max(size, 1))
        (extend if size else append)(store, part)
        start += len(part)
    assert contents(store) == contents(whole) and store.stats() == whole.stats()
    for head, (keys, values) in enumerate(read_heads(store, 0)):
        assert np.array_equal(keys[-100:], OTHERS.keys[0, :100, head].astype("f2"))
        exact = kept_values(store, OTHERS.values[0, :100])[:, head].astype("f2").astype("f4")
        assert_close(values[-100:] @ hadamard_matrix(16), exact, tolerance("basis", "f32"))


@pytest.mark.parametrize("spec", ["rdkv:64", "snapkv:64", "rdkv:0"])
@pytest.mark.parametrize("cut", [300, 301, 327, 328, 329, 399])
def test_a_truncated_store_is_a_fresh_one(ops: CpuOps, spec: str, cut: int) -> None:
    store, fresh = filled(ops, spec, 100), filled(ops, spec, cut - 300)
    assert store.cut(cut) == cut
    store.truncate(cut)
    assert contents(store) == contents(fresh) and store.stats() == fresh.stats()
    for other in (store, fresh):
        append(other, MORE.tokens.part(0, 40))
        prefill(other, MORE)
    assert contents(store) == contents(fresh)


@pytest.mark.parametrize("cut", [1, 36, 299])
def test_a_cut_among_compressed_tokens_is_refused(ops: CpuOps, cut: int) -> None:
    store = filled(ops, steps=10)
    before = contents(store)
    assert store.cut(cut) == 0 and store.cut(300) == 300
    words = (
        rf"cache format rdkv:48: cannot truncate to {cut} tokens, the first 300 were compressed "
        "together; 300 to 310, or 0, work"
    )
    with pytest.raises(UnsupportedError, match=words):
        store.truncate(cut)
    for wrong in (-1, 311):
        with pytest.raises(CodecError, match=f"truncate to {wrong} tokens, the store holds 310"):
            store.truncate(wrong)
    with pytest.raises(CodecError, match="must be a whole number, got True"):
        store.truncate(True)
    with pytest.raises(UnsupportedError, match="keeps keys after RoPE, so they cannot move"):
        store.shift(64)
    assert contents(store) == before


def test_a_second_prompt_moves_where_cuts_begin(ops: CpuOps) -> None:
    store = filled(ops, "rdkv:64", 10)
    prefill(store, MORE)
    assert store.cut(709) == 0 and store.cut(710) == 710
    with pytest.raises(UnsupportedError, match="the first 710 were compressed together; 710 to"):
        store.truncate(300)
    store.clear()
    assert len(store) == 0 and store.held == 0
    assert contents(store) == contents(new_store(ops, "rdkv:64"))
    assert store.stats() == new_store(ops, "rdkv:64").stats()
    prefill(store, PROMPT)
    assert contents(store) == contents(filled(ops, "rdkv:64"))


def test_a_short_second_prompt_is_added_exactly(ops: CpuOps) -> None:
    store, plain = filled(ops, "rdkv:64"), filled(ops, "rdkv:64")
    short = random_prompt(28, seed=8)  # with the 36 exact ones just the budget
    prefill(store, short)
    extend(plain, short.tokens)
    assert contents(store) == contents(plain) and store.cut(300) == 300
    prefill(store, random_prompt(1, seed=9))
    assert store.parts().frozen == 329


@pytest.mark.parametrize("spec", SPECS)
def test_forks_go_their_own_ways_over_the_same_blocks(ops: CpuOps, spec: str) -> None:
    store = filled(ops, spec, 5)
    expected, fork = contents(store), store.fork()
    assert contents(fork) == expected and fork.stats() == store.stats()
    mine, its = store.parts().layers[0].segments, fork.parts().layers[0].segments
    assert len(mine) == 1 and mine[0].data is its[0].data
    append(fork, MORE.tokens.part(0, 30))
    prefill(fork, MORE)
    assert contents(store) == expected
    store.clear()
    other = filled(ops, spec, 5)
    append(other, MORE.tokens.part(0, 30))
    prefill(other, MORE)
    assert contents(fork) == contents(other)
    for layer in range(2):
        assert same(read_heads(fork, layer), read_heads(other, layer))
