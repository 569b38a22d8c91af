"""Compressing a prompt: widths and bytes against a float64 oracle, and budgets to the byte."""

import numpy as np
import pytest

from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry, estimate
from kvrt.trizone.compress import _for_whole_tokens
from kvrt.trizone.layout import block_bytes
from kvrt.trizone.segment import Segment, lay_out
from kvrt.trizone.store import ZoneStore
from tests.helpers.compare import assert_close
from tests.helpers.stores import attend, extend, queries
from tests.helpers.tolerances import tolerance
from tests.helpers.zone_oracle import compressed, runs, whole_bytes
from tests.helpers.zone_reference import attention
from tests.helpers.zone_stores import (
    GEOMETRY,
    SPECS,
    held_by,
    kept_values,
    new_store,
    prefill,
    random_prompt,
    read_heads,
)
from tests.helpers.zones import channels_of


def assert_packed(store: ZoneStore, layer: int, number: int, *rows: np.ndarray) -> None:
    """A segment holds just what the oracle makes of keys, values and queries."""
    keys, values, asked = rows
    segment = store.parts().layers[layer].segments[number]
    expected = compressed(store.spec, keys, values, asked)
    data, at = segment.data, 0
    for head, widths in enumerate(expected.channels):
        order = channels_of(widths)
        assert np.array_equal(data[at : at + len(order)], order), f"channels of head {head}"
        at += len(order)
    found = list(zip(segment.heads.tolist(), segment.units[:, 0].tolist(), strict=True))
    blocks = runs(expected, keys, values)
    assert [head for head, _ in found] == [head for head, _ in blocks]
    at = -(-at // 16) * 16
    for (_, start), (_, run) in zip(found, blocks, strict=True):
        assert start == at and data[at : at + len(run)].tobytes() == run
        at += len(run)
    assert at == data.nbytes


FEW_QUERIES = [(f"{policy}:10,sink=1,window=3", 20) for policy in ("rdkv", "adakv", "h2o")]


@pytest.mark.parametrize(
    ("spec", "count"), [*((spec, n) for spec in SPECS for n in (300, 61)), *FEW_QUERIES]
)
def test_a_prompt_becomes_the_bytes_of_the_oracle(ops: CpuOps, spec: str, count: int) -> None:
    prompt, store = random_prompt(count), new_store(ops, spec)
    prefill(store, prompt)
    for layer in range(2):
        zones = store.parts().layers[layer]
        if not zones.segments:
            assert store.compression.budget_bytes(count, 16) == 4 * 16 * count
            continue
        keys, values, asked = (side[layer] for side in prompt)
        assert_packed(store, layer, 0, keys, kept_values(store, values), asked)
        sink, window = store.spec.sink, store.spec.window
        exact = [*range(sink), *range(count - window, count)]
        values = kept_values(store, prompt.values)
        for array, side in ((zones.keys, prompt.keys), (zones.values, values)):
            rows = side[layer, exact].astype(np.float16).transpose(1, 0, 2)
            assert np.array_equal(array[:, : len(exact)], rows)


@pytest.mark.parametrize("spec", ["rdkv:48", "rdkv:paper:50:shared", "adakv:52", "h2o:45"])
@pytest.mark.parametrize("dim", [80, 96, 256])
@pytest.mark.parametrize("group", [1, 3])
def test_heads_of_other_sizes_and_groups(ops: CpuOps, spec: str, dim: int, group: int) -> None:
    geometry = Geometry(num_layers=1, num_kv_heads=2, head_dim=dim)
    prompt, store = random_prompt(90, geometry, 2 * group, seed=dim), new_store(ops, spec, geometry)
    prefill(store, prompt)
    values = kept_values(store, prompt.values[0])
    assert_packed(store, 0, 0, prompt.keys[0], values, prompt.queries[0])
    assert_reads(store, 2 * group)


@pytest.mark.parametrize("spec", ["rdkv:64", "adakv:64", "h2o:64", "rdkv:20%"])
@pytest.mark.parametrize("more", [40, 5])
def test_a_later_prompt_is_packed_with_the_exact_tokens_before_it(
    ops: CpuOps, spec: str, more: int
) -> None:
    """Sinks, what was the window, tokens by themselves; few queries; the first segment stays."""
    first, answer, second = (random_prompt(n, seed=n) for n in (200, 30, more))
    store = new_store(ops, spec)
    prefill(store, first)
    extend(store, answer.tokens)
    old = store.parts()
    prefill(store, second)
    new = store.parts()
    assert len(store) == new.frozen == 230 + more and new.rows == 36
    for layer in range(2):
        sides = [
            np.concatenate([
                *(part[side][layer, rows] for part, rows in (
                    (first, slice(4)), (first, slice(168, 200)),
                    (answer, slice(None)), (second, slice(None)),
                ))
            ])
            for side in (0, 1)
        ]  # fmt: skip
        sides[1] = kept_values(store, sides[1])
        for side in sides:  # those that were there already come out of zone C
            side[:66] = side[:66].astype(np.float16)
        assert new.layers[layer].segments[0] is old.layers[layer].segments[0]
        assert_packed(store, layer, 1, *sides, second.queries[layer])
    assert_reads(store, 4)


def assert_reads(store: ZoneStore, heads: int) -> None:
    """`read` and attention see what the bytes mean."""
    for layer in range(store.geometry.num_layers):
        expected = held_by(store, layer)
        for got, want in zip(read_heads(store, layer), expected, strict=True):
            assert_close(got.keys, want.keys, tolerance("unpack", "f32"), "keys")
            assert_close(got.values, want.values, tolerance("basis", "f32"), "values")
        dim = store.geometry.head_dim
        for q in queries(3, heads, dim):
            got = attend(store, q, layer, scale=dim**-0.5)
            assert_close(
                got, attention(q, expected, dim**-0.5), tolerance("attend", "f32"), "attention"
            )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [37, 64, 101, 300, 700])
def test_attention_is_over_the_decoded_tokens(ops: CpuOps, spec: str, count: int) -> None:
    store = new_store(ops, spec)
    prefill(store, random_prompt(count, seed=count))
    assert_reads(store, 4)
    extend(store, random_prompt(70, seed=1).tokens)
    assert_reads(store, 4)


# Budgets


def spent_by_head(store: ZoneStore, layer: int) -> np.ndarray:
    """Bytes (kv_heads,) of a layer's only segment: runs, rows of the directory, orders."""
    (segment,) = store.parts().layers[layer].segments
    tokens = segment.token_counts
    units, nbytes = lay_out(tokens, segment.heads, segment.channels, store.geometry.head_dim)
    assert np.array_equal(units, segment.units) and nbytes == segment.data.nbytes
    runs = block_bytes(tokens, segment.channels[segment.heads], store.geometry.head_dim)
    of_blocks = np.bincount(segment.heads, runs + 32, len(segment.channels)).astype(np.int64)
    return of_blocks + segment.channels.sum(1)


@pytest.mark.parametrize("policy", ["rdkv:{}", "rdkv:paper:{}", "snapkv:{}", "h2o:{}"])
@pytest.mark.parametrize("budget", [0, 36, 37, 38, 40, 60, 101, 129, 250, 299, "20%", "99%"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_budget_is_kept_and_used_up(
    ops: CpuOps, policy: str, budget: int | str, seed: int
) -> None:
    """What is left of it is less than a head's next step, and what rounding may take."""
    store, prompt = new_store(ops, policy.format(budget)), random_prompt(300, seed=seed)
    prefill(store, prompt)
    allowed, largest = max(store.compression.budget_bytes(300, 16) - 36 * 64, 0), 0
    for layer in range(2):
        segment = store.parts().layers[layer].segments[0]
        left = allowed - spent_by_head(store, layer)
        steps = [next_step(segment, head, not policy.startswith("rdkv")) for head in range(2)]
        assert np.all(left >= 0) and np.all(left < steps)
        largest = max(largest, *steps)
    stats, most = store.stats(), estimate(GEOMETRY, store.spec, 300)
    assert most - 4 * largest - 2 * 24 <= stats.bytes <= most


def next_step(segment: Segment, head: int, evicts: bool) -> int:
    """The bytes at which a head (16 channels) surely takes more, rounding included."""
    units, tokens = int((segment.heads == head).sum()), int(segment.kept(2)[head])
    if not units:  # a whole token, or one whose values, at 2 bits, are half of it
        return whole_bytes(1, 16) if evicts else 2 * (4 + 4) + 63
    rows = 4 * -(-tokens // 4) + 4 * (units - 1)  # at most
    c16, c8, c4, c2 = segment.channels[head].tolist()
    steps = [
        (16 - c16 - c8 - c4 - c2, rows // 4 + 4 * units + 1), (c2, rows // 4), (c4, rows // 2),
        (c8, rows - 4 * units),
    ]  # fmt: skip
    if c16 == 16:
        return whole_bytes(tokens + 1, 16) - whole_bytes(tokens, 16)
    return min(cost for count, cost in steps if count) + 15 * (units + 1)


SHARING = (
    "rdkv:{}:shared",
    "rdkv:paper:{}:shared",
    "snapkv:{}:shared",
    "h2o:{}:shared",
    "adakv:{}",
)


@pytest.mark.parametrize("policy", SHARING)
@pytest.mark.parametrize("budget", [36, 37, 40, 48, 100, 101, 128])
def test_heads_that_share_a_budget_keep_it_together(ops: CpuOps, policy: str, budget: int) -> None:
    """Also where one head takes nearly all, so that others have blocks of a few tokens."""
    geometry = Geometry(num_layers=1, num_kv_heads=8, head_dim=16)
    for seed in range(6):
        prompt = random_prompt(300, geometry, 8, seed=seed)
        prompt.queries[:, :, : 1 + seed] *= 4
        if seed > 2:  # a token without any value takes no width: others have two to choose from
            prompt.values[:, 4 + seed : 268, 1:] = 0
        store = new_store(ops, policy.format(budget), geometry)
        prefill(store, prompt)
        left = 8 * 64 * (budget - 36) - spent_by_head(store, 0).sum()
        assert left >= 0
        if not policy.startswith("rdkv"):  # a token, and what each head may have to round up
            assert left < 8 * (64 + 7 * 16 + 32)
        assert store.stats().bytes <= estimate(geometry, store.spec, 300)
        assert_reads(store, 8)


def test_evictions_keep_the_most_whole_tokens(ops: CpuOps) -> None:
    """65 tokens are a second block, 61 leave room for three keys: neither may cost too many."""
    for dim in (16, 128, 256):
        budgets = np.arange(-50, 90 * 4 * dim, 37)
        got = _for_whole_tokens(budgets, dim, False) // (4 * dim)
        for budget, count in zip(budgets.tolist(), got.tolist(), strict=True):
            assert whole_bytes(count, dim) <= max(budget, 0)
            assert whole_bytes(count + 1, dim) > budget
