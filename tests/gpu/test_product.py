"""The product on a GPU: load, generate, chat, doctor, and memory that ends."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvrt
from kvrt.backends import available_memory, default_device, get_ops
from kvrt.backends.cuda import CudaOps
from kvrt.cli.main import run
from kvrt.errors import OutOfMemoryError, UsageError
from kvrt.generate import Model, cache_geometry
from kvrt.kvstore import estimate
from kvrt.sampler import SamplingParams
from tests.helpers.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0)
SYNTHETIC = "synthetic:smollm2-135m"
MIB = 1 << 20

# Of a logit, whose standard deviation is about 1: queries, keys and weights of attention in prefill
# are halves. What differs by so little may round to another code, a third of a group's range away
# with 2 bits.
TOLERANCE = 0.03
TWO_BITS = 0.05


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("product") / "tiny"
    write_tiny_model(folder, tokenizer=True, num_layers=3, head_dim=64, max_context=2048)
    return str(folder)


@pytest.fixture(scope="module")
def model() -> Model:
    return kvrt.load(SYNTHETIC, device="cuda", kv="kvrt4", max_context=8192)


@pytest.fixture
def pool() -> Iterator[Any]:
    """CuPy's allocator, without a limit afterwards."""
    import cupy

    found = cupy.get_default_memory_pool()
    gc.collect()
    found.free_all_blocks()
    yield found
    found.set_limit(size=0)


def ids_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


# --- what it says ---


def test_cuda_is_the_default(tiny: str, capsys: Any) -> None:
    assert default_device() == "cuda"
    loaded = kvrt.load(tiny)
    assert loaded.ops.name == "cuda" and loaded.ops.device_name.startswith("cuda:0, ")
    assert run(["generate", "-m", tiny, "-p", "abc", "-n", "3", "--temp", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == loaded.ops.device_name and len(data["token_ids"]) == 3
    assert data["peak_bytes"] >= loaded.weight_bytes
    words = ["-m", tiny, "-p", "abc", "-n", "3", "--temp", "0", "--json"]
    assert run(["generate", "--device", "cpu", *words]) == 0
    assert json.loads(capsys.readouterr().out)["device"].startswith("CPU, ")


def test_doctor(capsys: Any) -> None:
    assert run(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["cuda:0"]["ok"] and "GiB free" in checks["cuda:0"]["detail"]
    assert checks["CUDA compiler"]["ok"] and checks["default device"]["detail"] == "cuda"


def test_what_is_no_device(tiny: str, capsys: Any) -> None:
    words = ["generate", "-m", tiny, "-p", "a", "--device"]
    for device in ("cuda:99", "tpu", "cuda:x"):
        assert run([*words, device]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "what works: cpu" in err
    assert run([*words, "cuda", "-t", "2"]) == 2
    assert "threads" in capsys.readouterr().err


def test_chat_through_a_pipe(tiny: str) -> None:
    command = [sys.executable, "-m", "kvrt", "chat", "-m", tiny, "--temp", "0", "-n", "4"]
    command += ["-l", "65+1000", "-v"]
    done = subprocess.run(
        command, input="hello", cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "AAAA\n"), done.stderr
    assert " on cuda:0, " in done.stderr and "peak" in done.stderr


@pytest.mark.parametrize("words", [["ppl"], ["kld"]])
def test_quality_is_measured(tiny: str, tmp_path: Path, words: list[str], capsys: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A fox is quick. " * 40)
    command = ["eval", *words, "-m", tiny, "--device", "cuda", "--text", str(text), "--json"]
    command += ["--context", "128", "--max-tokens", "256", "--kv", "f16,kvrt2"]
    assert run(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kv"] for row in rows] == ["f16", "kvrt2"]


# --- what it computes ---


@pytest.mark.parametrize(
    "kv, tolerance", [("f16", TOLERANCE), ("kvrt4", TOLERANCE), ("kivi2", TWO_BITS)]
)
def test_greedy_tokens_are_the_cpus(kv: str, tolerance: float) -> None:
    """Wherever the two likeliest are not too close to tell, on the CPU's own text."""
    prompt, count = ids_of(300), 40
    cpu = kvrt.load(SYNTHETIC, device="cpu", kv=kv)
    gpu = kvrt.load(SYNTHETIC, device="cuda", kv=kv)
    expected = cpu.generate(prompt, count, GREEDY).token_ids
    found = gpu.generate(prompt, count, GREEDY).token_ids
    store, other = cpu.new_store(), gpu.new_store()
    mine, theirs = gpu.decoder.prefill(prompt, other), cpu.decoder.prefill(prompt, store)
    clear = []
    for at, token in enumerate(expected):
        assert np.abs(mine - theirs).max() < tolerance
        second, first = np.partition(theirs, -2)[-2:]
        if first - second > 2 * tolerance:
            clear.append(at)
            assert mine.argmax() == token
        mine, theirs = gpu.decoder.decode(token, other), cpu.decoder.decode(token, store)
    assert len(clear) > 10
    same = next((at for at in range(count) if at not in clear), count)
    assert found[:same] == expected[:same]
    # And by itself it takes what its own logits say.
    assert found == gpu.generate(prompt, count, GREEDY).token_ids


def test_a_model_of_files_gives_the_cpus_logits(tiny: str) -> None:
    found = [kvrt.load(tiny, device=device).logits(ids_of(400)) for device in ("cuda", "cpu")]
    mine, other = (logits.astype(np.float64) for logits in found)
    assert np.linalg.norm(mine - other) < 5e-3 * np.linalg.norm(other)


def test_the_second_gpu(tiny: str) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    models = [kvrt.load(tiny, device=device, kv="kvrt4") for device in ("cuda:0", "cuda:1")]
    cupy.cuda.Device(1).use()
    assert models[1].ops.device_name.startswith("cuda:1, ")
    second = models[1].generate(ids_of(200), 20, GREEDY).token_ids
    cupy.cuda.Device(0).use()
    assert models[0].generate(ids_of(200), 20, GREEDY).token_ids == second


# --- memory ---


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_uploads_arrive(dtype: Any) -> None:
    import cupy

    ops = get_ops("cuda")
    assert isinstance(ops, CudaOps)
    bits = np.random.default_rng(0).integers(0, 256, 300 * MIB + 12, np.uint8)
    source = bits.view(dtype)
    held = ops.device.upload(source)
    again = ops.device.upload(source[: 70 * MIB])  # the buffers are in use
    with cupy.cuda.Stream(non_blocking=True) as stream:
        third = ops.device.upload(source[: 2 * MIB])
        stream.synchronize()
    ops.trim()
    for array, whole in ((held, source), (again, source[: 70 * MIB]), (third, source[: 2 * MIB])):
        back = ops.to_host(array)
        assert back.dtype == whole.dtype
        assert np.array_equal(back.view(np.uint8), whole.view(np.uint8))


def test_the_peak_is_weights_cache_and_little_else(pool: Any) -> None:
    model = kvrt.load(SYNTHETIC, device="cuda", kv="kvrt4")
    model.ops.reset_peak()
    others = pool.total_bytes() - model.weight_bytes  # of models that other tests hold
    made = model.generate(ids_of(2000), 20, GREEDY)
    cache = estimate(cache_geometry(model.config), model.spec, 2019)
    assert abs(made.cache_bytes - cache) <= cache // 20
    assert model.weight_bytes + made.cache_bytes < made.peak_bytes
    assert made.peak_bytes < max(others, 0) + model.weight_bytes + made.cache_bytes + 256 * MIB
    assert model.chat().stats().peak_bytes >= made.peak_bytes


def test_what_cannot_fit_is_refused_with_the_numbers(pool: Any) -> None:
    pool.set_limit(size=pool.total_bytes() + 400 * MIB)
    assert available_memory("cuda") <= 400 * MIB + pool.free_bytes()
    with pytest.raises(UsageError, match=r"takes .* weights, .* cache, .*; [0-9,]+ tokens would"):
        kvrt.load(SYNTHETIC, device="cuda", max_context=1 << 20)
    loaded = kvrt.load(SYNTHETIC, device="cuda", kv="kvrt2")  # its own limit is no request
    assert loaded.generate(ids_of(20), 3, GREEDY).token_ids
    with pytest.raises(UsageError, match=r"^the weights of synthetic:llama-3\.1-8b take"):
        kvrt.load("synthetic:llama-3.1-8b", device="cuda")


def grow(session: Any, ids: list[int]) -> str:
    """Feed pieces of 100 tokens until memory ends; the message."""
    for end in range(100, len(ids), 100):
        try:
            session.feed(ids[:end])
        except OutOfMemoryError as error:
            return str(error)
    raise AssertionError("memory did not end")


def test_memory_that_ends_while_a_cache_grows(model: Model, pool: Any) -> None:
    ids = ids_of(8000)
    session, before = model.new_session(), pool.used_bytes()
    pool.set_limit(size=pool.used_bytes() + 12 * MIB)
    message = grow(session, ids)
    held = len(session.store)
    assert message.startswith(f"context limit on this device: {held:,} tokens are cached and")
    assert 100 <= held < 8000 and session.tokens == ids[:held]
    # It goes on as if nothing had been: a token more, on what is cached.
    logits = session.feed([*ids[: held - 10], 7])
    pool.set_limit(size=0)
    other = model.new_session()
    for end in range(100, held + 1, 100):
        other.feed(ids[:end])
    np.testing.assert_allclose(other.feed([*ids[: held - 10], 7]), logits, atol=1e-4)
    session.clear()
    other.clear()
    gc.collect()
    assert pool.used_bytes() < before + 12 * MIB


def test_a_chat_goes_on_after_memory_ended(model: Model, pool: Any) -> None:
    chat = model.chat(sampling=GREEDY)
    chat.max_tokens = 4
    answer = "".join(chat.send("hello"))
    pool.set_limit(size=pool.used_bytes() + 2 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"context limit on this device: [0-9,]+ "):
        "".join(chat.send("x" * 6000))
    assert [message["content"] for message in chat.messages] == ["hello", answer]
    pool.set_limit(size=0)
    assert "".join(chat.send("and now?")) is not None
    assert len(chat.messages) == 4


def test_a_command_that_has_no_memory_ends_with_1(
    tiny: str, pool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from kvrt import backends

    run_within: Callable[[int], int] = lambda size: (  # noqa: E731
        pool.set_limit(size=pool.total_bytes() + size),
        run(["generate", "-m", tiny, "-p", "a" * 1500, "-n", "2"]),
    )[1]
    monkeypatch.setattr(backends, "available_memory", lambda device: 0)  # unknown
    assert run_within(2048) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "no memory" in err, err
